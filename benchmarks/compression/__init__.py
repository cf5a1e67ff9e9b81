"""What the codecs of outer gradients and updates cost: bytes, time, and loss."""
