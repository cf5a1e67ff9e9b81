"""What tests of audits play in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from audit_scene import AuditScene, audited_world
from judging_scene import MODULE

from dipaco_p2p.protocol.standing import Standing


@pytest.fixture
def audit_scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AbstractAsyncContextManager[AuditScene]:
    """A leader, three auditors, and audits of everything; the first work of each author is on probation."""
    monkeypatch.setattr(Standing, "audit_chance", lambda self, audited: 1.0)
    return _audited(tmp_path)


@asynccontextmanager
async def _audited(folder: Path) -> AsyncIterator[AuditScene]:
    async with audited_world(folder) as (world, auditors):
        leader = world.leader(50)
        on = AuditScene(world, leader, await leader.lead(MODULE))
        peers = {world.leader(number).peer for number in (51, 52, 53)}
        for each in world.leaders:
            each.chains.is_proven = lambda peer: peer in peers  # type: ignore[method-assign]
        await leader.node.watch.refresh()
        on.auditors = auditors
        yield on
