"""A stage's own calls on a shared network: they are closed while a peer takes no part, and open again after."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dipaco_p2p.clock import SystemClock
from dipaco_p2p.errors import Refused
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.memory import MemoryNetwork, MemorySwarm
from dipaco_p2p.swarm.stage_scope import ScopedSwarm

STAGE = "0123456789abcdef" * 4


async def hello(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
    return Reply({"said": "hello"})


@pytest.fixture
def ends() -> tuple[ScopedSwarm, MemorySwarm]:
    """A scope of one peer, and another peer's whole swarm."""
    network = MemoryNetwork(1, SystemClock())
    ours, theirs = (network.join(Signer(bytes([number]) * 32)) for number in (1, 2))
    return ScopedSwarm(ours, STAGE), theirs


async def call(theirs: MemorySwarm, ours: ScopedSwarm, method: str = "say") -> dict[str, Any]:
    return (await theirs.call(ours.peer, f"{STAGE[:16]}/{method}", {}, timeout_s=10)).header


async def test_a_closed_scope_refuses_what_passes_and_serves_anew(ends: tuple[ScopedSwarm, MemorySwarm]) -> None:
    ours, theirs = ends
    ours.serve("say", hello)
    assert await call(theirs, ours) == {"said": "hello"}
    await ours.close()
    with pytest.raises(Refused, match="takes no part") as refused:
        await call(theirs, ours)
    assert refused.value.reason == "busy"
    ours.serve("say", hello)
    assert await call(theirs, ours) == {"said": "hello"}


async def test_a_scope_says_where_an_open_call_comes_from(ends: tuple[ScopedSwarm, MemorySwarm]) -> None:
    ours, theirs = ends

    async def where(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        return Reply({"said": ours.host(sender)})

    ours.serve("say", where)
    theirs._network.hosts[theirs.peer] = "192.0.2.1"
    assert await call(theirs, ours) == {"said": "192.0.2.1"}
    assert ours.host(theirs.peer) == ""


async def test_what_is_being_answered_ends_in_a_refusal_before_the_scope_is_closed(
    ends: tuple[ScopedSwarm, MemorySwarm],
) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def slow(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return Reply()

    ours, theirs = ends
    ours.serve("say", slow)
    calling = asyncio.create_task(call(theirs, ours))
    await began.wait()
    await ours.close()
    assert ended.is_set()
    with pytest.raises(Refused, match="takes no part"):
        await calling


async def test_one_method_is_not_served_twice(ends: tuple[ScopedSwarm, MemorySwarm]) -> None:
    ours, theirs = ends
    ours.serve("say", hello)
    with pytest.raises(AssertionError):
        ours.serve("say", hello)
