"""What one round of a path of 150M parameters takes on a home line, in network namespaces."""
