"""One path in our hands: claimed, trained, contributed."""
