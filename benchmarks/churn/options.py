"""What a churn benchmark is asked for, and the run file that both of its swarms train."""

from __future__ import annotations

import json
from dataclasses import dataclass

from benchmarks.chaos.schedule import Plan

ROUNDS_MAX = 100_000
"""Neither run ends by itself: both are stopped after the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the flags say."""

    peers: int = 8
    minutes: float = 10.0
    kills_per_minute: float = 1.0
    away_s: tuple[float, float] = (15.0, 25.0)
    never_back: float = 0.0
    seed: int = 0
    heartbeat_ttl_s: float = 10.0
    steps: int = 100
    """So many that a round takes about as long as a heartbeat lives: in real runs it takes many times as long."""
    corpus: str = "found"
    at_once: bool = False
    """Both swarms at the same time."""
    calm_s: float = 45.0
    """After the last fault both go on this long: an interrupted failover is not a lost contribution."""

    @property
    def plan(self) -> Plan:
        """The schedule of the run under faults."""
        return Plan(
            duration_s=60 * self.minutes,
            faults_per_minute=self.kills_per_minute,
            away_s=self.away_s,
            never_back=self.never_back,
        )


def run_text(options: Options) -> str:
    """The run file: a grid of 2x2 paths so small that a dozen processes fit on two cores.

    Re-sharding and warm-up are left out, since neither run ends: what is compared is the rounds.
    """
    return f"""\
[run]
name = "churn"
seed = {options.seed}

[model]
vocab_size = 512
width = 32
ffn_width = 64
context = 72
[[model.levels]]
modules = 1
embedding = true
head = true
[[model.levels]]
modules = 2
blocks = 1
[[model.levels]]
modules = 2
blocks = 1

[warmup]
rounds = 0

[inner]
steps = {options.steps}
batch = 4
warmup_steps = 4

[rounds]
rounds = {ROUNDS_MAX}
min_paths = {min(options.peers, 4)}
deadline_s = 20.0
grace_s = 1.0

[liveness]
heartbeat_ttl_s = {options.heartbeat_ttl_s}
settle_s = 0.5

[corpus]
source = {json.dumps(options.corpus)}
bytes_max = 4000000

[leaderboard]
serve = false
[node]
port = 0
"""
