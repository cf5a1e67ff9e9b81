"""A Snapshot with the registers that pages look things up in; each is made once, when it is first needed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import NamedTuple, TypeVar

from dipaco_p2p.protocol.decrees import BAN, FREEZE, GROW

from ..model import (
    AuditRow,
    CheckRow,
    ContributorRow,
    DecreeRow,
    LossRow,
    ModuleRow,
    PathRow,
    PathState,
    RoundRow,
    ShareRow,
    Snapshot,
    StageInfo,
    VersionRow,
)
from .text import is_id

GRID = "grid"
"""The stage that nobody needs to name."""
_ROUNDS_MAX = 10**9
PACE_ROUNDS = 8
"""The run's pace is that of so many rounds, the newest ones."""
ACTIVE_S = 86_400.0

K = TypeVar("K")
V = TypeVar("V")

Credited = tuple[VersionRow, ShareRow]
"""One contribution, and the version that counts it."""


class Pace(NamedTuple):
    """How fast the run is, by what the coordinator signed of its last rounds."""

    round_s: float
    """Seconds for a round; the open one counts once it takes longer than the others did."""
    tokens_per_s: float
    """Tokens that came into versions."""


class Book:
    """Everything of one moment, by what a reader asks for."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.stages: Mapping[str, StageInfo] = {stage.id: stage for stage in snapshot.run.stages}

    @property
    def shown_s(self) -> float:
        """The moment that ages are counted to: whole minutes, so that pages stay the same between them."""
        return self.snapshot.taken_s // 60 * 60

    def address(self, row: VersionRow) -> str:
        """What the page of a version is called: `L1.M0/35`, of the warm-up `warmup/L1.M0/35`."""
        return self._address(row.stage, row.module, row.version)

    def at(self, stage: str, module: object, version: int) -> VersionRow | None:
        """One version, if it is known."""
        return self.by_address.get(self._address(stage, module, version))

    @cached_property
    def by_address(self) -> Mapping[str, VersionRow]:
        return {self.address(row): row for row in self.snapshot.versions}

    def child(self, row: VersionRow) -> VersionRow | None:
        """The version after it, in its stage."""
        return self.at(row.stage, row.module, row.version + 1)

    def parent(self, row: VersionRow) -> VersionRow | None:
        """The version before; of the first one of a stage, the one with the same parameters that ended the stage
        before."""
        if row.version:
            return self.at(row.stage, row.module, row.version - 1)
        stages = list(self.stages)
        earlier = stages[: stages.index(row.stage)] if row.stage in stages else ()
        return next((each for each in reversed(self.same(row)) if each.stage in earlier), None)

    def same(self, row: VersionRow) -> tuple[VersionRow, ...]:
        """Other versions with the parameters of `row`."""
        return tuple(each for each in self.by_digest[row.digest] if each is not row)

    @cached_property
    def by_digest(self) -> Mapping[str, tuple[VersionRow, ...]]:
        """The versions with these parameters: several after a rollback, and where stages begin."""
        return _grouped((row.digest, row) for row in self.snapshot.versions)

    @cached_property
    def by_module(self) -> Mapping[str, tuple[VersionRow, ...]]:
        """By the module's name; of all stages, in order."""
        return _grouped((str(row.module), row) for row in self.snapshot.versions)

    @cached_property
    def modules(self) -> Mapping[str, ModuleRow]:
        return {str(row.module): row for row in self.snapshot.modules}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All modules of all stages."""
        found = {row.module for row in self.snapshot.versions} | {row.module for row in self.snapshot.modules}
        return tuple(map(str, sorted(found)))

    @cached_property
    def contributors(self) -> Mapping[str, ContributorRow]:
        """Those that have a page."""
        return {row.peer: row for row in self.snapshot.contributors if is_id(row.peer)}

    @cached_property
    def losses_of_peers(self) -> Mapping[str, tuple[LossRow, ...]]:
        return _grouped((row.peer, row) for row in self.snapshot.losses)

    @cached_property
    def losses_of_modules(self) -> Mapping[str, tuple[LossRow, ...]]:
        return _grouped((str(row.module), row) for row in self.snapshot.losses)

    @cached_property
    def checks_by_round(self) -> Mapping[tuple[str, int], tuple[CheckRow, ...]]:
        """By stage and round."""
        return _grouped(((row.stage, row.version), row) for row in self.snapshot.checks)

    def checks_of(self, row: VersionRow) -> tuple[CheckRow, ...]:
        """Who measured the paths through a version again."""
        found = self.checks_by_round.get((row.stage, row.version), ())
        return tuple(check for check in found if row.module in check.path.modules())

    def losses_of(self, row: VersionRow) -> tuple[LossRow, ...]:
        """What could have been in a version, and is in none: of the round that made it."""
        found = self.losses_of_modules.get(str(row.module), ())
        return tuple(loss for loss in found if (loss.stage, loss.round + 1) == (row.stage, row.version))

    @cached_property
    def newest(self) -> tuple[VersionRow, ...]:
        """All versions in the order that people ask for: the newest stage first, and its newest round."""
        # By round, not by time: rounds are judged later than they are made, and not always in their order. One number
        # as a key, since ten thousand pairs would call for a collection of garbage.
        stages = {stage: place * _ROUNDS_MAX for place, stage in enumerate(self.stages, start=1)}
        by_round = sorted(self.snapshot.versions, key=lambda row: stages.get(row.stage, 0) + row.version, reverse=True)
        return tuple(by_round)

    @cached_property
    def freeze(self) -> DecreeRow | None:
        """The decree that has frozen the run; None while it goes on."""
        return next((row for row in self.snapshot.decrees if row.act == FREEZE and row.ended_by is None), None)

    @cached_property
    def growth(self) -> DecreeRow | None:
        """What ends the open stage early; None while nothing does."""
        stage = self.snapshot.run.stage.id
        return next((row for row in self.snapshot.decrees if row.act == GROW and row.stage == stage), None)

    @cached_property
    def banned(self) -> Mapping[str, DecreeRow]:
        """Whose work nobody takes any more, by peer."""
        found = (row for row in self.snapshot.decrees if row.act == BAN and row.ended_by is None)
        return {row.peer: row for row in found if row.peer is not None}

    @cached_property
    def rolled_back(self) -> tuple[VersionRow, ...]:
        """The versions that brought an earlier one back."""
        return tuple(row for row in self.snapshot.versions if row.rollback is not None)

    @cached_property
    def workers(self) -> int:
        """Peers with a share in a version."""
        return sum(row.contributions > 0 for row in self.snapshot.contributors)

    @cached_property
    def made(self) -> int:
        """Versions that contributions made: a stage begins with others, and a rollback brings one back."""
        return sum(row.version > 0 and row.rollback is None for row in self.snapshot.versions)

    @cached_property
    def best(self) -> RoundRow | None:
        """The round of the smallest routed loss."""
        return min(self.snapshot.rounds, key=lambda row: row.loss, default=None)

    @cached_property
    def pace(self) -> Pace | None:
        """None before two rounds of the open stage are judged, and while nothing goes on."""
        stage = self.snapshot.run.stage.id
        judged = [row for row in self.snapshot.rounds if row.stage == stage][-PACE_ROUNDS - 1 :]
        if len(judged) < 2 or self.snapshot.state != "training":
            return None
        taken_s = judged[-1].at_s - judged[0].at_s
        rounds, open_s = len(judged) - 1, self.shown_s - judged[-1].at_s
        if taken_s <= 0:  # of a clock that was set back
            return None
        if open_s > taken_s / rounds:
            rounds, taken_s = rounds + 1, taken_s + open_s
        counted = range(judged[0].version + 1, judged[-1].version + 1)
        made = (row for row in self.snapshot.versions if row.stage == stage and row.version in counted)
        tokens = math.fsum(share.credit for row in made for share in row.shares)
        return Pace(round_s=taken_s / rounds, tokens_per_s=tokens / taken_s)

    @property
    def time_left_s(self) -> float | None:
        """Until the whole run ends, at its pace; during the warm-up the grid's rounds are taken to be as long."""
        run = self.snapshot.run
        left = run.stage.rounds - self.round + run.rounds_after
        return None if self.pace is None else left * self.pace.round_s

    @cached_property
    def active(self) -> int:
        """Contributors that were heard of in the last 24 hours."""
        since_s = self.snapshot.taken_s - ACTIVE_S
        return sum(row.last_s is not None and row.last_s >= since_s for row in self.snapshot.contributors)

    @cached_property
    def paths_by_state(self) -> Mapping[PathState, tuple[PathRow, ...]]:
        return _grouped((row.state, row) for row in self.snapshot.paths)

    @property
    def round(self) -> int:
        """The version that every module of the open stage has."""
        return min((row.version for row in self.snapshot.modules), default=0)

    def stage_name(self, stage: str) -> str:
        """`warmup`, `grid` and so on; the start of the id for a stage that the run does not list."""
        return self.stages[stage].name if stage in self.stages else stage[:8]

    def credited(self, peer: str) -> tuple[Credited, ...]:
        """Every share that makes the figures of `peer` up, the newest first."""
        return tuple((row, share) for row in self.newest for share in row.shares if share.peer == peer)

    def audits(self, peer: str) -> tuple[tuple[VersionRow, AuditRow], ...]:
        """Those by `peer` that earn credit, the newest first."""
        return tuple((row, one) for row in self.newest for one in row.audits if one.peer == peer and one.credit)

    def _address(self, stage: str, module: object, version: int) -> str:
        name = self.stage_name(stage)
        return f"{module}/{version}" if name == GRID else f"{name}/{module}/{version}"


def _grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, tuple[V, ...]]:
    found: defaultdict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return {key: tuple(values) for key, values in found.items()}
