"""What can be said of a run before it is started: whether it can, and what it takes."""
