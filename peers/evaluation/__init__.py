"""What a volunteer measures: for the next router, for everybody, and for itself."""
