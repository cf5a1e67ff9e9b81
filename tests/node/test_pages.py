"""Pages of documents that others send: what reading them costs, and whose they are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tiny_run import signer

from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node import items
from dipaco_p2p.node.items import PAGE_BYTES_MAX, items_reply, read_items
from dipaco_p2p.protocol.documents import Grant, seal, unseal
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.topology import ModuleId

COORDINATOR, LEADER = signer(1), signer(2)
GRANT = seal(
    COORDINATOR,
    Grant(run="a" * 64, module=ModuleId(1, 0), term=1, leader=LEADER.peer, mirrors=(), author=COORDINATOR.peer),
)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many documents were checked in each pass of the loop; a pass is added by whoever runs beside it."""
    found = [0]

    def count(kind: Any, item: object) -> Any:
        found[-1] += 1
        return unseal(kind, item)

    monkeypatch.setattr(items, "unseal", count)
    return found


async def test_others_run_while_a_page_is_read(checked: list[int]) -> None:
    """Attack: whoever writes a head is asked for its mandate, and answers with thousands of grants, all signed: nobody
    else ran for seconds, and in the next moment another key was asked."""
    reading = asyncio.create_task(read_items(Grant, items_reply([GRANT] * 100)))
    while not reading.done():
        await asyncio.sleep(0)
        checked.append(0)
    assert await reading == [GRANT] * 100
    assert sum(checked) == 100 and max(checked) == 1


async def test_of_a_page_that_nobody_honest_sends_no_signature_is_checked(checked: list[int]) -> None:
    with pytest.raises(IntegrityError, match="3 grants, limit 2"):
        await read_items(Grant, items_reply([GRANT] * 3), most=2)
    with pytest.raises(IntegrityError, match="a grant that is not of"):
        await read_items(Grant, items_reply([GRANT]), author=LEADER.peer)
    for odd in (b"[1]", b'[{"document": 1}]'):
        with pytest.raises(IntegrityError, match="a grant that is not of"):
            await read_items(Grant, Reply({}, odd), author=LEADER.peer)
    with pytest.raises(IntegrityError, match="bytes, limit"):
        await read_items(Grant, Reply({}, bytes(PAGE_BYTES_MAX + 1)))
    assert checked == [0]
    assert await read_items(Grant, items_reply([GRANT]), author=COORDINATOR.peer, most=1) == [GRANT]


async def test_the_longest_page_that_is_sent_is_read() -> None:
    reply = items_reply([GRANT] * (2 * PAGE_BYTES_MAX // len(GRANT.to_bytes())))
    assert PAGE_BYTES_MAX - 2 * len(GRANT.to_bytes()) < len(reply.body) <= PAGE_BYTES_MAX
