"""The loss of every path at a round, measured by volunteers for a coordinator that has no parameters.

A volunteer asks for a path, and gets one at random of those that are wanted most: never one that it has trained, and
none unless a version counts its work. So nobody chooses what it measures, and a new key measures nothing. A loss is
known once two volunteers agree in it (`agrees`). Where two differ, where nobody came in time, and of a share of paths
that a lot draws, the coordinator fetches the path's parameters and measures itself: its own figure counts then, and who
said another one is asked for nothing any more. The lot is the coordinator's own signature, which nobody can foresee.

Only the loss on the validation part is measured, so paths are served with the newest round: early stopping would need
the parameters of earlier ones as well.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from dipaco_p2p.canonical import digest
from dipaco_p2p.core.routing.evaluate import Evaluation, counted_tokens
from dipaco_p2p.errors import IntegrityError, Refused, SwarmError
from dipaco_p2p.node.calls import GetMeasure, Wanted
from dipaco_p2p.node.node import Member, fetch
from dipaco_p2p.node.reading import holders_of
from dipaco_p2p.protocol.documents import Sealed
from dipaco_p2p.protocol.judgement import Check, agrees
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import PathId

from ..archives.evaluator import Evaluator

log = logging.getLogger(__name__)

AGREEING = 2
"""Volunteers whose figures make a path's loss known."""
POLL_S = 0.5
ROUNDS_MAX = 2
"""Volunteers measure between rounds: after so many the coordinator itself does, while owners have the parameters."""
LOT_DIGITS = 13


@dataclass(slots=True)
class _Path:
    """One path at the round that is being measured."""

    sequences: int
    given: dict[PeerId, float] = field(default_factory=dict)
    """Who was asked for it, and until when it has time."""
    found: dict[PeerId, Sealed[Check]] = field(default_factory=dict)

    @property
    def agreed(self) -> Evaluation | None:
        """The mean of the first two figures that agree."""
        for one, other in itertools.combinations([sealed.document for sealed in self.found.values()], 2):
            if agrees(one.loss, other.loss):
                return Evaluation(nats_total=(one.nats + other.nats) / 2, tokens=one.tokens)
        return None

    @property
    def is_disputed(self) -> bool:
        return len(self.found) >= AGREEING and self.agreed is None

    def under_way(self, now_s: float) -> int:
        """How many have measured it, or may still be at it."""
        return len(self.found) + sum(until_s > now_s and peer not in self.found for peer, until_s in self.given.items())


class Measurements:
    """Of one stage, one round after the other."""

    def __init__(
        self, node: Member, evaluator: Evaluator, *, share: float, workers: Callable[[], Collection[PeerId]]
    ) -> None:
        """`share` of the paths of a round are measured here, whoever else measures them. `workers` are the peers whose
        work versions count and that forged none."""
        self._node = node
        self._evaluator = evaluator
        self._share = share
        self._workers = workers
        self._version = self._sharding = 0
        self._paths: dict[PathId, _Path] = {}
        """What is wanted now."""
        self._untrained: tuple[PathId, ...] = ()
        self._asked: frozenset[PeerId] = frozenset()
        """Who is asked for these."""
        self._trainers: Mapping[PathId, Collection[PeerId]] = {}
        self._wrong: set[PeerId] = set()
        """Who said something else than the coordinator measured."""
        self._is_over = False
        self.checks: list[Sealed[Check]] = []
        """What volunteers gave for the last round that was measured."""

    def serve(self) -> None:
        """Tell volunteers what to measure."""
        GetMeasure.serve(self._node.swarm, self._on_measure)

    @property
    def is_on(self) -> bool:
        """Whether volunteers measure at all."""
        return self._share < 1

    async def of(self, version: int, sharding: int) -> dict[PathId, Evaluation]:
        """The loss of every path to which the router of `sharding` gives anything, at a round that all modules have.
        Raises IntegrityError if the owners have dropped its parameters."""
        config, newest = self._node.run.config.rounds, self._evaluator.complete_version()
        if version < newest - config.staleness - 1:
            raise IntegrityError(f"it was not measured in time: round {newest} is complete")
        counts = await asyncio.to_thread(self._evaluator.counts, sharding, version)
        clock = self._node.clock
        self._version, self._sharding = version, sharding
        self._asked, self._trainers = frozenset(self._workers()), self._evaluator.trainers()
        self._untrained = await asyncio.to_thread(self._evaluator.untrained, version)
        self._paths = {path: _Path(count) for path, count in counts.items() if count}
        until_s = clock.now_s() + config.deadline_s
        late = version + min(ROUNDS_MAX, config.staleness + 1)
        while clock.now_s() < until_s and self._evaluator.complete_version() < late and self._is_open():
            await clock.sleep(POLL_S)
        paths, self._paths = self._paths, {}
        self.checks = [sealed for wanted in paths.values() for sealed in wanted.found.values()]
        self._is_over = version >= self._node.run.rounds
        return {path: await self._result(path, wanted) for path, wanted in paths.items()}

    def take(self, sender: PeerId, sealed: Sealed[Check]) -> bool:
        """Keep what was asked for; False for what was not. Raises Refused for what is not about that."""
        check = sealed.document
        wanted = self._paths.get(check.path)
        if wanted is None or check.version != self._version or sender not in wanted.given:
            return False
        run, modules = self._node.run, check.path.modules()
        digests = tuple(self._evaluator.version(module, self._version).digest for module in modules)
        tokens = wanted.sequences * counted_tokens(run.config.model.context)
        said = check.author, check.run, check.sharding, check.modules, check.validation, check.tokens
        due = sender, run.id, self._sharding, digests, run.manifest.validation.digest, tokens
        if said != due:
            raise Refused(
                f"it is about something other than {check.path} at round {check.version}", reason=Reason.OTHER
            )
        wanted.found.setdefault(sender, sealed)
        return True

    async def _on_measure(self, sender: PeerId, request: GetMeasure) -> Wanted:
        now_s = self._node.clock.now_s()
        path = self._chosen(sender, now_s)
        if path is None:
            return Wanted(wait=True) if self.is_on and not self._is_over else Wanted()
        self._paths[path].given[sender] = now_s + self._node.run.config.rounds.deadline_s / 2
        snapshots = tuple(self._evaluator.version(module, self._version).snapshot for module in path.modules())
        return Wanted(
            path=path,
            version=self._version,
            sharding=self._sharding,
            snapshots=snapshots,
            untrained=self._untrained,
        )

    def _chosen(self, sender: PeerId, now_s: float) -> PathId | None:
        """One of the paths that fewest have measured, at random."""
        if sender in self._wrong or sender not in self._asked or self._node.decrees.reason(sender) is not None:
            return None
        counts = {
            path: wanted.under_way(now_s)
            for path, wanted in self._paths.items()
            if sender not in wanted.given and sender not in self._trainers.get(path, ())
        }
        least = min(counts.values(), default=AGREEING)
        return secrets.choice([path for path, count in counts.items() if count == least]) if least < AGREEING else None

    def _is_open(self) -> bool:
        return any(map(self._may_be_agreed, self._paths))

    def _may_be_agreed(self, path: PathId) -> bool:
        """Whether there are still enough who may measure it, and it is worth while to wait for them."""
        wanted, now_s = self._paths[path], self._node.clock.now_s()
        if wanted.agreed is not None or wanted.is_disputed:
            return False
        alive = self._asked & self._node.watch.heartbeats.keys()
        late = {peer for peer, until_s in wanted.given.items() if until_s <= now_s}
        others = alive - self._wrong - late - wanted.found.keys() - set(self._trainers.get(path, ()))
        return len(wanted.found) + len(others) >= AGREEING

    def _draws(self, path: PathId) -> bool:
        signed = self._node.swarm.signer.sign("measure", f"{self._node.run.id}|{path}|{self._version}".encode())
        return int(digest(signed.encode())[:LOT_DIGITS], 16) / 16.0**LOT_DIGITS < self._share

    async def _result(self, path: PathId, wanted: _Path) -> Evaluation:
        agreed = wanted.agreed
        if agreed is not None and not self._draws(path):
            return agreed
        found = await self._measured_here(path)
        for peer, sealed in wanted.found.items():
            loss = sealed.document.loss
            if not agrees(loss, found.loss) and peer not in self._wrong:
                self._wrong.add(peer)
                where = {"path": str(path), "version": self._version}
                self._node.history.add("measured_wrong", peer=peer, loss=loss, ours=found.loss, **where)
        return found

    async def _measured_here(self, path: PathId) -> Evaluation:
        node, version = self._node, self._version
        made = [self._evaluator.version(module, version) for module in path.modules()]
        try:
            blobs = [await fetch(node, one.snapshot, holders=holders_of(node, one.module, version)) for one in made]
        except SwarmError as error:
            raise IntegrityError(
                f"{path} is measured by nobody, and its parameters are not to be had: {error}"
            ) from None
        return await asyncio.to_thread(self._evaluator.measure, path, version, self._sharding, blobs)
