"""What a swarm is worth while its volunteers are killed: a run under faults beside its fault-free twin."""
