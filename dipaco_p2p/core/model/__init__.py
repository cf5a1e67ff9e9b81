"""The model of a path and how it is trained."""
