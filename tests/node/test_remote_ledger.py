"""The ledger of another peer, when that peer pages without an end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mirror_harness import MODULE, Shelf, on_shelf
from tiny_run import contribution_of, signer

from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node import ledger
from dipaco_p2p.node.items import items_reply
from dipaco_p2p.node.ledger import RemoteLedger
from dipaco_p2p.protocol.documents import BlobRef, Contribution, ModuleVersion, Sealed, seal
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.topology import ModuleId

LIAR = signer(70)
CALLS_MAX = 50


def liar(shelf: Shelf, method: str, page: Callable[[Any], Sequence[Sealed[Any]]]) -> tuple[RemoteLedger, list[Any]]:
    """A peer that answers `method` with what `page` makes of the last thing that was had; and what it was asked."""
    swarm, asked = shelf.world.network.join(LIAR), []

    async def answer(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        asked.append(header["after"])
        assert len(asked) < CALLS_MAX, "for ever"
        return items_reply(page(header["after"]))

    swarm.serve(method, answer)
    return RemoteLedger(shelf.node, LIAR.peer, MODULE), asked


def contribution(shelf: Shelf, number: int, module: ModuleId = MODULE) -> Sealed[Contribution]:
    path = shelf.run.topology.paths_through(module)[0]
    return seal(LIAR, contribution_of(shelf.run, LIAR, b"x", module=module, path=path, tokens=number + 1))


def versions(shelf: Shelf, numbers: Sequence[int]) -> list[Sealed[ModuleVersion]]:
    honest = shelf.version(1)[0].document
    return [seal(LIAR, replace(honest, version=number, author=LIAR.peer)) for number in numbers]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (lambda after: [1], "gave"),
        (lambda after: [after + 2], "gave"),
        (lambda after: [after + 1, after + 1], "gave"),
        (lambda after: [after + 1], "more versions"),
    ],
    ids=["the same", "a gap", "twice", "no end"],
)
async def test_a_chain_without_an_end_is_an_error(tmp_path: Path, numbers: Any, words: str) -> None:
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        remote, asked = liar(shelf, "mirror.chain", lambda after: versions(shelf, numbers(after)))
        with pytest.raises(IntegrityError, match=words):
            await remote.chain(after=0)
        assert len(asked) <= shelf.run.config.rounds.rounds + 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"appraisals": BlobRef(digest="ab" * 32, size=2**40)}, "limit"),
        ({"snapshot": BlobRef(digest="ab" * 32, size=2**40)}, "limit"),
        ({"module": ModuleId(7, 0)}, "another run or module"),
        ({"run": "cd" * 32}, "another run or module"),
    ],
    ids=["huge appraisals", "huge parameters", "another module", "another run"],
)
async def test_a_chain_of_which_nothing_can_be_fetched_is_an_error(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        [honest] = versions(shelf, [1])
        odd = seal(LIAR, replace(honest.document, **changes))
        remote, _ = liar(shelf, "mirror.chain", lambda after: [odd])
        with pytest.raises(IntegrityError, match=words):
            await remote.chain(after=0, until=1)


async def test_open_contributions_that_repeat_are_an_error(tmp_path: Path) -> None:
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        items = sorted((contribution(shelf, number) for number in range(3)), key=lambda sealed: sealed.id)
        remote, asked = liar(shelf, "mirror.open", lambda after: items)
        with pytest.raises(IntegrityError, match="out of order"):
            await remote.kept()
        assert len(asked) == 2


async def test_open_contributions_of_another_module_are_an_error(tmp_path: Path) -> None:
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        other = contribution(shelf, 1, ModuleId(MODULE.level, MODULE.index + 1))
        remote, _ = liar(shelf, "mirror.open", lambda after: [other])
        with pytest.raises(IntegrityError, match="another module"):
            await remote.kept()


async def test_open_contributions_without_an_end_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "KEPT_MAX", 20)
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        items = sorted((contribution(shelf, number) for number in range(40)), key=lambda sealed: sealed.id)
        remote, asked = liar(shelf, "mirror.open", lambda after: [sealed for sealed in items if sealed.id > after][:1])
        with pytest.raises(IntegrityError, match="more than 20"):
            await remote.kept()
        assert len(asked) == 21
