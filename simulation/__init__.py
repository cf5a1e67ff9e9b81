"""The programs of this project on a swarm in memory, in virtual time and under faults: `python -m simulation`."""
