"""What a volunteer's owner asks of the running program, and of what it left on the disk."""
