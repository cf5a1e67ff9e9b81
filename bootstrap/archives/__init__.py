"""What is kept of a run: every version and what it was made of, judgements, checks; verified and evaluated."""
