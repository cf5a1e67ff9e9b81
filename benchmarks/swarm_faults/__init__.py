"""Faults on real processes from one seed: what kills cost a swarm (`churn`), and whether anything grows in it (`soak`).

schedule    which faults come when, a pure function of a seed
swarm       the processes, and what is done to them
observer    a client that only looks at heartbeats, claims and heads
evidence    what the swarm left on disk, and questions about moments of the run
check       the promises of the design, checked offline on the evidence
figures     what the faults cost, and the bars
growth      what processes hold, and whether it rises
churn, soak the two benchmarks
"""
