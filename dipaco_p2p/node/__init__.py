"""One peer of one run: what it knows of the run, what it sees, what it keeps, and what it asks of others."""
