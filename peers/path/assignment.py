"""A volunteer's time with one path: its trainer, its modules, and which of its work is already in their open rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from dipaco_p2p.core.model.inner import InnerResult
from dipaco_p2p.owner.follower import Follower
from dipaco_p2p.protocol.documents import ModuleVersion, Recipe, Share
from dipaco_p2p.protocol.rounds import OpenRound, Standing, standing
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId, PathId

from .trainer import Flat, PathTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The version of a module that a contribution is based on."""

    module: ModuleId
    version: int
    digest: str

    @classmethod
    def of(cls, version: ModuleVersion) -> Self:
        return cls(module=version.module, version=version.version, digest=version.digest)

    @classmethod
    def parent_of(cls, version: ModuleVersion) -> Self:
        return cls(module=version.module, version=version.version - 1, digest=version.parent)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """The inner steps of one round of a path."""

    round_number: int
    before: Sequence[Flat]
    """What they began from, one flat vector per level: the modules as the path goes on from them, or an estimate."""
    bases: Sequence[Base]
    """The versions that this stands for, in the same order; empty while they are not there yet."""
    result: InnerResult
    sharding: int
    """The number of the sharding whose shard was trained on."""
    is_cut: bool
    """Whether they ended early, for the push to be in time."""
    recipe: Recipe | None
    """What an auditor needs to take them again; None where there are no audits."""
    began_s: float
    """When, by the node's clock."""
    training_s: float
    """How long they took."""


class Assignment:
    """One path in our hands, from its claim to its release."""

    def __init__(self, trainer: PathTrainer, readers: Sequence[Follower], *, rounds: Callable[[], int]) -> None:
        """`rounds` says how many the stage has, as far as that is known by now. The readers hold parameters."""
        self.trainer = trainer
        self._readers = list(readers)
        self._rounds = rounds
        self._done: dict[ModuleId, int] = {}
        """The newest version of each module from which the path has contributed, as far as that concerns us."""
        self._others: dict[ModuleId, int] = {}
        """Rounds that others' work is in, so that we did nothing for them: if it is refused, they are ours."""
        self._left: dict[ModuleId, int] = {}
        """Rounds that are left to others on the path, with whom we begin the next one."""
        self._left_until_s = 0.0
        self.inherited: frozenset[ModuleId] = frozenset()
        """Modules that have the very work that we are about to do: who began it was lost in the middle of its push."""
        self.is_restored = False
        """Whether the trainer has the path's newest state: first when it is needed, since others may be at work."""
        self.is_foreign_state = False
        """Whether that state is another volunteer's word, with which nothing was contributed yet."""

    @property
    def path(self) -> PathId:
        return self.trainer.path

    @property
    def params(self) -> list[Flat]:
        return [reader.params for reader in self._readers if reader.params is not None]

    @property
    def versions(self) -> list[ModuleVersion]:
        return [reader.version for reader in self._readers]

    @property
    def bases(self) -> list[Base]:
        """What steps that begin now are based on."""
        return [Base.of(version) for version in self.versions]

    def bases_of(self, round_number: int, *, staleness: int) -> list[Base] | None:
        """What steps that began before this round opened are based on, now that it has; None if leaders would not take
        them any more. Of a module that has moved on the parent is known, and no earlier version."""
        if not all(0 <= version.version - round_number <= min(staleness, 1) for version in self.versions):
            return None
        return [
            Base.of(version) if version.version == round_number else Base.parent_of(version)
            for version in self.versions
        ]

    @property
    def shares(self) -> list[Share]:
        """What the newest versions that count the path count of it."""
        return [share for reader in self._readers for share in reader.shares.get(self.path, ())]

    @property
    def is_named(self) -> bool:
        """Whether the newest versions name the state that the trainer would go on from."""
        ref = self.trainer.state_ref
        return ref is None or any(share.state == ref for share in self.shares)

    @property
    def is_ready(self) -> bool:
        """Whether it can be trained at this moment: a module whose branch was given up has to be fetched first."""
        return self.standing.is_due and all(reader.params is not None for reader in self._readers)

    @property
    def missing(self) -> frozenset[ModuleId]:
        """The modules whose open rounds lack us."""
        return frozenset(
            reader.module for reader in self._readers if not reader.is_complete and not self._is_done(reader)
        )

    @property
    def is_complete(self) -> bool:
        return all(reader.is_complete for reader in self._readers)

    @property
    def standing(self) -> Standing:
        """How far the path is, in our hands."""
        versions = [reader.version.version for reader in self._readers]
        return standing(versions, [self._is_done(reader) for reader in self._readers], rounds=self._rounds())

    def begin(
        self,
        rounds: dict[ModuleId, OpenRound],
        *,
        me: PeerId,
        is_alone: bool,
        from_round: int,
        left_until_s: float,
    ) -> None:
        """Learn from the open `rounds` what is not for us to do: what we have done ourselves, what others have if we
        are alone with the path, and until `left_until_s` all of a round before the one that our claim begins with."""
        self._left_until_s = left_until_s
        for reader in self._readers:
            found = rounds.get(reader.module)
            if found is None:
                continue
            is_ours = any(entry.path == self.path and entry.peer == me for entry in found.entries)
            is_others = found.has(self.path) and is_alone
            is_left = from_round > found.version
            if is_ours or is_others or is_left:
                self._done[reader.module] = found.version
            if found.has(self.path) and (is_others or is_left) and not is_ours:
                self._others[reader.module] = found.version
            elif is_left and not found.has(self.path):
                self._left[reader.module] = found.version
        if self.standing.is_due:
            done = {reader.module for reader in self._readers if self._is_done(reader)}
            self.inherited = frozenset(done)

    def leave_round(self, *, until_s: float) -> None:
        """Leave the round that is due to the others on the path, until then: we were not drawn for it."""
        self._left_until_s = until_s
        for reader in self._readers:
            if not self._is_done(reader):
                self._done[reader.module] = self._left[reader.module] = reader.version.version

    def take_up(self, *, is_alone: bool, now_s: float) -> None:
        """Those to whom we left the open round are gone, or a claim was all they did: it is ours after all."""
        if is_alone or now_s >= self._left_until_s:
            for module, version in self._left.items():
                if self._done.get(module) == version:
                    del self._done[module]
            self._left = {}

    def contributed(self, bases: Sequence[Base]) -> None:
        """The path was trained from these versions, and what the leaders wanted of it they have."""
        self._done.update({base.module: base.version for base in bases if base.version < self._rounds()})
        self.inherited = frozenset()

    def covered(self, module: ModuleId, version: int) -> None:
        """The module's leader refused our work from this version since that of others is in."""
        self._others[module] = version

    def doubt(self, rounds: dict[ModuleId, OpenRound]) -> None:
        """Learn from the open `rounds` of modules that stand still which of them lack the path: it is to be trained
        again there, whatever we believed to have contributed."""
        for reader in self._readers:
            found = rounds.get(reader.module)
            if found is not None and found.version == reader.version.version and not found.has(self.path):
                self._done.pop(reader.module, None)

    def heard(self, rounds: Mapping[ModuleId, OpenRound]) -> None:
        """Learn from the open `rounds` where others' work, for which ours was left out, is not in any more since it was
        refused: the path is to be trained for these modules, or they wait a deadline for nobody."""
        for reader in self._readers:
            found, left_out = rounds.get(reader.module), self._others.get(reader.module)
            if found is None or not found.version == reader.version.version == left_out or found.has(self.path):
                continue
            if any(entry.path == self.path for entry in found.refused):
                del self._others[reader.module]
                self._done.pop(reader.module, None)

    async def wait_due(self, on_change: Callable[[list[ModuleId]], None]) -> None:
        """Follow the modules until the path can be trained, or is complete; tells which versions are waited for."""
        while not self.is_complete and not self.standing.is_due:
            behind = self._behind()
            late = [reader.module for reader in behind]
            on_change(late)
            await asyncio.gather(*(self._follow(reader, late, on_change) for reader in behind))

    async def _follow(
        self, reader: Follower, late: list[ModuleId], on_change: Callable[[list[ModuleId]], None]
    ) -> None:
        await reader.sync(after=reader.version.version)
        late.remove(reader.module)
        if late:
            on_change(late)

    def _behind(self) -> list[Follower]:
        """The modules that the path waits for."""
        waiting = [reader for reader in self._readers if self._is_done(reader)]
        least = min(reader.version.version for reader in waiting)
        return [reader for reader in waiting if reader.version.version == least]

    def _is_done(self, reader: Follower) -> bool:
        return self._done.get(reader.module) == reader.version.version
