"""How a command asks the program that runs on the same machine: over a socket that its user alone may open."""
