"""What closing a round takes: time and memory by the number of contributions, and what a trainer beside it notices."""
