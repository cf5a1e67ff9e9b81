"""The experiment: the method against its controls, in one process group, with the project's own core.

data          text -> sequences, split by document: train, router, tune, report
jobs          what one training run is, and its one line in results.jsonl
plan          which jobs answer which question
comparisons   short runs beside a reference: lost work, codecs, overlap
grid          rounds of a grid of paths, the same arithmetic as the swarm's; every_step is the control to rounds
routing       which sequences each path trains on
work, pool    what a worker process does with a job, and the worker processes
summary       results.jsonl -> summary.json; claims and report read that only
"""
