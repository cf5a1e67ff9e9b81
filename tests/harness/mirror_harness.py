"""A mirror, or the archive, and leaders that hand in to it by word of mouth."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import World
from tiny_run import contribution_of, gradient_bytes, granted, signer, tiny_config, version_of

from dipaco_p2p.errors import IntegrityError, Refused
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.node import Member
from dipaco_p2p.owner.chain import ModuleChain
from dipaco_p2p.owner.version import Made
from dipaco_p2p.protocol.documents import Contribution, ModuleVersion, Sealed, seal
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.topology import ModuleId

MODULE = ModuleId(1, 0)
ONE, OTHER = signer(1), signer(2)
AUTHOR = 30


class Shelf:
    """What takes from leaders: `keeps_everything` for the archive, else a mirror."""

    def __init__(self, world: World, *, keeps_everything: bool) -> None:
        self.world, self.run = world, world.run
        self.made: dict[int, Made] = {}
        if keeps_everything:
            self.node: Member = world.seed.node
            self.chain: ModuleChain = world.seed.chains[MODULE]
        else:
            member = world.leader(52)
            self.node, self.chain = member.node, member.chain

    @property
    def ledger(self) -> Ledger:
        return self.chain.ledger

    def adopt(self, leader: Signer, *, term: int) -> None:
        """The coordinator grants `term` to `leader`, with us as its mirror if that are not we."""
        mirrors = () if leader.peer == self.node.peer else (self.node.peer,)
        sealed = granted(self.run, MODULE, term=term, leader=leader.peer, mirrors=mirrors)
        assert self.node.mandates.believes(MODULE, sealed)

    def contribution(
        self,
        number: int,
        *,
        base: int | None = None,
        path: int = 0,
        variant: int = 0,
        size: float = 1e-3,
        author: Signer | None = None,
    ) -> tuple[Sealed[Contribution], bytes]:
        """From the version before `number`, by `author`, or one that depends on the path; its payload was uploaded."""
        payload = gradient_bytes(self.run, MODULE, seed=1000 * variant + 10 * number + path, size=size)
        self.node.store.put(payload)
        author = author or signer(AUTHOR + path)
        chosen = self.run.topology.paths_through(MODULE)[path]
        base = number - 1 if base is None else base
        values: dict[str, Any] = {"base_version": base}
        if base:
            values["base_digest"] = self.made[base].version.digest
        return seal(author, contribution_of(self.run, author, payload, module=MODULE, path=chosen, **values)), payload

    def version(
        self,
        number: int,
        *,
        leader: Signer = ONE,
        term: int = 1,
        is_handed_in: bool = True,
        variant: int = 0,
        size: float = 1e-3,
        authors: tuple[Signer | None, Signer | None] = (None, None),
    ) -> tuple[Sealed[ModuleVersion], Made]:
        """An honest version of two contributions, which are here unless they are not `is_handed_in`."""
        named = enumerate(authors)
        items = [self.contribution(number, path=p, variant=variant, size=size, author=who) for p, who in named]
        if is_handed_in:
            for contribution, _ in items:
                self.chain.add(contribution)
        history = [self.made[before].version for before in range(1, number)]
        sealed, made = version_of(self.run, leader, items, term=term, after=self.made.get(number - 1), history=history)
        self.made[number] = made
        return sealed, made

    async def keep(self, sealed: Sealed[ModuleVersion], *, sender: Signer = ONE) -> str:
        return await self.chain.keep_version(sender.peer, sealed)


@asynccontextmanager
async def on_shelf(folder: Path, *, keeps_everything: bool, rounds: int = 5) -> AsyncIterator[Shelf]:
    """In a world whose seed node leads nothing."""
    async with World(folder, config=tiny_config(rounds=rounds)) as world:
        world.seed.ownership._may_take = lambda: False
        assert world.seed.term(MODULE) == 0
        shelf = Shelf(world, keeps_everything=keeps_everything)
        await shelf.node.watch.refresh()
        yield shelf


async def refusal(work: Awaitable[object]) -> str:
    """The reason why it was refused."""
    with pytest.raises(Refused) as caught:
        await work
    return caught.value.reason


async def require_no(work: Awaitable[object]) -> None:
    """It is refused, whatever it is called."""
    with pytest.raises((Refused, IntegrityError)):
        await work
