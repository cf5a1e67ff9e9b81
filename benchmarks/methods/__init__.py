"""The experiment: the method against its controls, in one process group, with the project's own core.

python -m benchmarks.methods --help

data      text -> sequences, split by document: train, router, tune, report
jobs      what one training run is, and its one line in results.jsonl
plan      which jobs answer which question
grid      rounds of a grid of paths, the same arithmetic as the swarm's
routing   which sequences each path trains on
tiny      routing by unigram models that read ahead, a bound
work      what a worker process does with a job
pool      worker processes and progress bars
summary   results.jsonl -> summary.json; claims, report, plots read that only
"""
