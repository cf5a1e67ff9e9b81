"""What lets a seed repeat its run: no order that memory decides."""

from __future__ import annotations

from simulation.faults import ROOT

SIMULATED = ("owner", "node", "swarm/memory.py", "swarm/stage_scope.py", "swarm/blobs")


def test_no_tasks_are_in_sets() -> None:
    """The order of a set of tasks is where they lie in memory: who is ended first would differ from play to play."""
    places = [ROOT / "dipaco_p2p" / place for place in SIMULATED]
    paths = [path for place in places for path in ([place] if place.is_file() else sorted(place.rglob("*.py")))]
    assert len(paths) > 40
    assert [path.name for path in paths if "set[asyncio.Task" in path.read_text()] == []
