"""`dipaco-peer doctor`: is this machine fit for a run, and if not, what helps."""
