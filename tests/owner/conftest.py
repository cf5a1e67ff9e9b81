"""What tests of audits play in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from audit_scene import AuditScene, audited_world
from judging_scene import MODULE
from virtual_time import play

from dipaco_p2p.protocol.standing import Standing


@pytest.fixture
def audit_scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[AuditScene], Any]], None]:
    """Play with a leader, three auditors, and audits of everything; the first work of each author is on probation."""
    monkeypatch.setattr(Standing, "audit_chance", lambda self, audited: 1.0)

    def played(act: Callable[[AuditScene], Any]) -> None:
        async def scenario() -> None:
            async with audited_world(tmp_path) as (world, auditors):
                leader = world.leader(50)
                on = AuditScene(world, leader, await leader.lead(MODULE))
                peers = {world.leader(number).peer for number in (51, 52, 53)}
                for each in world.leaders:
                    each.chains.is_proven = lambda peer: peer in peers  # type: ignore[method-assign]
                await leader.node.watch.refresh()
                on.auditors = auditors
                await act(on)

        play(scenario)

    return played
