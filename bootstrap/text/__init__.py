"""A run's text: from files, installed packages or the hub to sequences of tokens."""
