"""The control socket of a running program, and the screens of the commands that ask it."""
