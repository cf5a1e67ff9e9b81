"""The real network: everything that imports hivemind, subclasses it or patches it."""
