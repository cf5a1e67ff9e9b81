"""What a coordinator's owner asks of the running program."""
