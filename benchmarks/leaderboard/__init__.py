"""How fast and how heavy the public site is, with far more versions than a run has."""
