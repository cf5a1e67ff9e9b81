"""The volunteer program: `dipaco-peer`. Read volunteer.py first."""
