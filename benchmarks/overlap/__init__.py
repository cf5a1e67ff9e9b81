"""What it costs and what it saves to take the next inner steps while outer gradients and versions are on their way."""
