"""What lost work costs, and which rule for it is better. Read cases.py first."""
