"""From an entry to a run that this volunteer takes part in."""
