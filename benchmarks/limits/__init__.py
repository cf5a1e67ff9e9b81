"""Whether a volunteer keeps its owner's limits: real processes, measured from outside."""
