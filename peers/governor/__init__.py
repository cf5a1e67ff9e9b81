"""Keeps the volunteer within what its owner wishes: when it trains, and what it takes of the machine."""
