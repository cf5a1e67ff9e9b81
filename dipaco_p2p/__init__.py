"""What all participants of a run must agree on, and what both programs need."""

__version__ = "0.1.0"
