"""How long a module takes from the first push until all have its next version."""
