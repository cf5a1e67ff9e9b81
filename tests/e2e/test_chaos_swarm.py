"""A schedule of faults from one seed, played on real processes, and a soak of some seconds."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from e2e_harness import REPO, free_port, write_run
from forged_children import ForgedChildren

from benchmarks.swarm_faults.check import check
from benchmarks.swarm_faults.evidence import gather
from benchmarks.swarm_faults.schedule import Kind, Plan, Verb, actions, draw, volunteers
from benchmarks.swarm_faults.swarm import LocalSwarm

pytestmark = [pytest.mark.libp2p, pytest.mark.slow]
PEERS, SEED = 3, 9
PLAN = Plan(duration_s=24, faults_per_minute=10, kinds=tuple(Kind), away_s=(4, 7))
CALM_S = 8.0
"""Everybody is back by then, and has settled what it held."""


async def live_through(swarm: LocalSwarm) -> float:
    """Play the schedule, and end everything in good order; when."""
    try:
        await swarm.open()
        await swarm.begin(volunteers(PEERS))
        await swarm.play(actions(draw(SEED, PLAN, peers=PEERS)), duration_s=PLAN.duration_s + CALM_S)
        return time.time()
    finally:
        await swarm.end()


def test_a_schedule_of_all_kinds_of_faults_breaks_no_promise(tmp_path: Path, corpus: Path) -> None:
    kinds = {fault.kind for fault in draw(SEED, PLAN, peers=PEERS)}
    assert kinds == {Kind.KILL, Kind.FREEZE, Kind.TERM, Kind.SEED}, "a seed whose schedule has the faults that matter"
    file = tmp_path / "chaos.toml"
    run_file = write_run(file, corpus, rounds=100_000, min_paths=2, port=free_port(), heartbeat_ttl_s=4.0)
    swarm = LocalSwarm(tmp_path / "swarm", run_file, _children=ForgedChildren(threads=1))
    ended_s = asyncio.run(live_through(swarm))
    homes = {name: swarm.home(name) for name in swarm.volunteers}
    evidence = gather(swarm.folder, homes, done=swarm.done, ended_s=ended_s)
    assert [done.verb for done in swarm.done if done.verb is Verb.KILL] and evidence.counted
    assert list(map(str, check(evidence))) == []


def test_a_short_soak_finds_nothing_that_grows(tmp_path: Path, corpus: Path) -> None:
    flags = ["--minutes", "0.3", "--peers", "2", "--faults-per-minute", "4", "--warm-up", "0.5", "--shared"]
    command = [
        sys.executable,
        "-m",
        "benchmarks.swarm_faults",
        "soak",
        *flags,
        "--corpus",
        str(corpus),
        "--out",
        str(tmp_path / "soak"),
    ]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=200)
    result = json.loads((tmp_path / "soak" / "soak.json").read_text())
    # So early, programs still take the memory and open the connections that they will have: a soak tells after hours.
    growing = {row["measure"] for row in result["trends"] if row["grows"]}
    early = ("memory_bytes", "open_files", "sockets")
    assert all(measure.startswith(early) for measure in growing), done.stdout + done.stderr
    assert done.returncode == bool(growing), done.stdout + done.stderr
    assert result["restarts"] == 1 and len(result["samples"]) > 10
    assert {"memory_bytes seed", "open_files volunteer-2", "heads"} <= {row["measure"] for row in result["trends"]}
