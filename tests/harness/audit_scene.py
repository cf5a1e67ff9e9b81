"""A leader whose work is judged and audited, by auditors that come to what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from judging_scene import MODULE, Scene, judged_config
from runtime_harness import World
from tiny_run import appraisal_of, signer
from virtual_time import eventually

from bootstrap.archives.verify import verify_run
from dipaco_p2p.node.node import Member
from dipaco_p2p.protocol.documents import BlobRef, Contribution, Recipe, Sealed, seal
from dipaco_p2p.protocol.gate import NOTHING_GIVEN, Appraisal, Repetition
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.protocol.standing import Findings
from simulation.training import toy_gains

SAME, OFF = Repetition(cosine=1.0, ratio=1.0, moments=1.0), Repetition(cosine=0.5, ratio=1.0, moments=1.0)


@asynccontextmanager
async def audited_world(folder: Path) -> AsyncIterator[tuple[World, Auditors]]:
    """A world whose works are all repeated, by these auditors; the first work of each author is on probation. Its
    leaders have worked in a stage before, so that each chain takes their word."""
    config, auditors = judged_config(rounds=20), Auditors()
    config = replace(config, judging=replace(config.judging, audited=1))
    workers = [signer(number).peer for number in range(50, 58)]
    async with World(folder, config=config, workers=workers, measure=toy_gains, repeat=auditors) as world:
        yield world, auditors


@dataclass
class Auditors:
    """What all of them come to, once they may."""

    found: dict[PeerId, Repetition] = field(default_factory=dict)
    """By author; the same as its own for others."""
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[Contribution] = field(default_factory=list)
    lazy_calls: int = 0
    """So many of them say "the same" without a look,"""
    lying_calls: int = 0
    """and so many that they were given nothing, or"""
    lie: Repetition = NOTHING_GIVEN
    """something else that nobody can contradict."""

    async def __call__(self, work: Contribution, *parts: Any) -> Repetition:
        self.asked.append(work)
        await self.may_end.wait()
        if self.lazy_calls > 0:
            self.lazy_calls -= 1
            return SAME
        if self.lying_calls > 0:
            self.lying_calls -= 1
            return self.lie
        return self.found.get(work.author, SAME)


class AuditScene(Scene):
    auditors: Auditors

    async def work(self, author: Member, size: float, **how: Any) -> Sealed[Contribution]:
        document = (await super().work(author, size, **how)).document
        recipe = Recipe(round=document.base_version, place=0, replicas=1)
        state = BlobRef.of(b"a state")
        return seal(author.swarm.signer, replace(document, recipe=recipe, state=state))

    async def forger(self, number: int = 60) -> Member:
        """An author to whose work all auditors come to something else, at once."""
        author = await self.author(number)
        self.auditors.found[author.swarm.peer] = OFF
        self.auditors.may_end.set()
        return author

    def findings(self, version: int) -> Findings | None:
        """Without the works that they are about."""
        found = self.leader.chain.ledger.versions[version - 1].document.findings
        return found and replace(found, works=())

    def authors_of(self, version: int) -> set[str]:
        return {share.peer for share in self.leader.chain.ledger.versions[version - 1].document.shares}

    async def audited(self) -> None:
        """An audit of a work that counts is over."""
        await eventually(lambda: any(audit.found for audit in self.owner.trials._audits.values()))

    async def verified(self) -> None:
        """The archive has made every version again, and anybody can."""
        world, head = self.world, self.owner.head.version
        await eventually(lambda: world.seed.archive.ledgers[MODULE].head.version == head)
        reports = verify_run(self.run, world.seed.node.store, world.seed.archive)
        problems = [one.problem for one in reports if one.problem]
        assert not problems, problems


def accusation(document: Contribution, friend: Signer) -> Appraisal:
    """What an auditor says of forged work."""
    told = {"run": document.run, "work": document.work, "of": document.author, "tokens": document.tokens}
    return appraisal_of(friend, **told, repeated=OFF)
