"""Faults on real processes from one seed: a schedule, a swarm of the command lines, an offline checker."""
