"""The loss of every path at a round, measured by volunteers for a coordinator that has no parameters.

A volunteer asks for a path, and gets one at random of those that are wanted most: one at a time, few in a round, and
none unless a version counts its work. So nobody chooses what it measures, and a new key measures nothing. Who has
trained a path measures it only where there are not enough others. A loss is known once two volunteers agree in it
(`agrees`). Where two differ, and of a share of paths that a lot draws, the coordinator fetches the path's parameters
and measures itself: its own figure counts then, and who said another one is asked for nothing any more, and counts for
nothing in this round. The lot is the coordinator's own signature, which nobody can foresee. Of what was not measured in
time the coordinator does little itself (`ALONE_SHARE`).

Paths whose parameters are all in the archive are measured here, too. Only the loss on the validation part is measured,
so paths are served with the newest round: early stopping would need the parameters of earlier ones as well.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from dipaco_p2p.core.routing.evaluate import Evaluation, counted_tokens
from dipaco_p2p.errors import IntegrityError, Refused, SwarmError
from dipaco_p2p.node.calls import GetMeasure, Wanted
from dipaco_p2p.node.measuring import measuring_s
from dipaco_p2p.node.node import Member, fetch
from dipaco_p2p.node.reading import holders_of
from dipaco_p2p.protocol.documents import Sealed
from dipaco_p2p.protocol.judgement import Check, agrees
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import PathId

from ..archives.evaluator import Evaluator

AGREEING = 2
"""Volunteers whose figures make a path's loss known."""
POLL_S = 0.5
ROUNDS_MAX = 2
"""Volunteers measure between rounds: after so many the coordinator itself does, while owners have the parameters."""
ALONE_SHARE, ALONE_EVERY = 64, 16
"""What few volunteers have measured: the coordinator fetches one path and one of 64, or all every 16 rounds; of other
rounds no loss is known. So a swarm that does not measure costs its line little."""
REST_ROUNDS = 8
"""For which nobody is asked that was asked in vain."""


@dataclass(slots=True)
class _Path:
    """One path at the round that is being measured."""

    sequences: int
    may: frozenset[PeerId]
    """Who may measure it."""
    given: dict[PeerId, float] = field(default_factory=dict)
    """Who was asked for it, and until when it has time."""
    found: dict[PeerId, Sealed[Check]] = field(default_factory=dict)

    def agreed(self, *, without: Collection[PeerId] = ()) -> Evaluation | None:
        """The mean of the first two figures that agree."""
        found = [sealed.document for peer, sealed in self.found.items() if peer not in without]
        for one, other in itertools.combinations(found, 2):
            if agrees(one.loss, other.loss):
                return Evaluation(nats_total=(one.nats + other.nats) / 2, tokens=one.tokens)
        return None

    @property
    def is_disputed(self) -> bool:
        return len(self.found) >= AGREEING and self.agreed() is None

    def is_busy(self, peer: PeerId, now_s: float) -> bool:
        """Whether this peer may still be at it."""
        return peer not in self.found and self.given.get(peer, 0.0) > now_s

    def is_late(self, peer: PeerId, now_s: float) -> bool:
        return peer not in self.found and peer in self.given and not self.is_busy(peer, now_s)

    def under_way(self, now_s: float) -> int:
        """How many have measured it, or may still be at it."""
        return len(self.found) + sum(self.is_busy(peer, now_s) for peer in self.given)


class Measurements:
    """Of one stage, one round after the other."""

    def __init__(
        self,
        node: Member,
        evaluator: Evaluator,
        *,
        share: float,
        workers: Callable[[], frozenset[PeerId]],
        trainers: Callable[[], Mapping[PathId, Collection[PeerId]]],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """`share` of the paths of a round are measured here, whoever else measures them. `workers` are the peers whose
        work versions count and that forged none, `trainers` those whose work of a path any version counts; `is_over`
        says whether the last round is judged."""
        self._node = node
        self._evaluator = evaluator
        self._share = share
        self._workers = workers
        self._trainers = trainers
        self._is_over = is_over
        self._version = self._sharding = 0
        self._assigned = np.zeros(0, dtype=np.int64)
        """The number of the path that each validation sequence is routed to."""
        self._paths: dict[PathId, _Path] = {}
        """What is wanted now."""
        self._untrained: tuple[PathId, ...] = ()
        self._wrong: set[PeerId] = set()
        """Who said something else than the coordinator measured."""
        self._rests: dict[PeerId, int] = {}
        """Who was asked and said nothing, and up to which round it is not asked."""
        self._most = 1
        """Paths that one volunteer may measure in this round."""
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
        self._assigned = await asyncio.to_thread(self._evaluator.assign, "validation", sharding, version=version)
        clock = self._node.clock
        self._version, self._sharding = version, sharding
        self._untrained = await asyncio.to_thread(self._evaluator.untrained, version)
        self._paths = self._wanted(version)
        until_s = clock.now_s() + config.deadline_s
        is_ours = version % ALONE_EVERY == 0
        late = version + min(ROUNDS_MAX, config.staleness + 1)
        while clock.now_s() < until_s and (newest := self._evaluator.complete_version()) < late and self._is_open():
            if newest > version and is_ours and not any(one.given for one in self._paths.values()):
                break  # while owners have the parameters
            await clock.sleep(POLL_S)
        paths, self._paths = self._paths, {}
        self.checks = [sealed for one in paths.values() for sealed in one.found.values()]
        for one in paths.values():
            self._rests |= {peer: version + REST_ROUNDS for peer in one.given if one.is_late(peer, clock.now_s())}
        try:
            return await self._results(paths)
        finally:
            self._evaluator.forget(version)

    def _wanted(self, version: int) -> dict[PathId, _Path]:
        """Every path to which anything is assigned, and who may measure it: nobody, if its parameters are here."""
        topology, trainers = self._node.run.topology, self._trainers()
        counts = np.bincount(self._assigned, minlength=topology.path_count).tolist()
        asked, paths = frozenset(filter(self._may_be_asked, self._workers())), topology.paths()
        wanted = {path: count for path in paths if (count := counts[topology.number(path)])}
        self._most = 1 + math.ceil(AGREEING * len(wanted) / max(1, len(asked)))

        def may(path: PathId) -> frozenset[PeerId]:
            is_here = self._evaluator.has(path, version)
            return frozenset() if is_here else self._fit(asked, trainers.get(path, ()))

        return {path: _Path(count, may(path)) for path, count in wanted.items()}

    async def _results(self, paths: dict[PathId, _Path]) -> dict[PathId, Evaluation]:
        """First what must be measured here: it shows whose figures count for nothing."""
        here = [path for path in paths if self._evaluator.has(path, self._version)]
        ours = [path for path, one in paths.items() if path in here or one.is_disputed or self._draws(path)]
        found = {path: await self._measured_here(path, paths[path]) for path in ours}
        agreed = {path: one.agreed(without=self._wrong) for path, one in paths.items() if path not in ours}
        left = [path for path, loss in agreed.items() if loss is None]
        if len(left) > len(paths) // ALONE_SHARE + 1 and self._version % ALONE_EVERY:
            raise IntegrityError(f"volunteers have measured {len(paths) - len(left)} of {len(paths)} paths in time")
        found |= {path: await self._measured_here(path, paths[path]) for path in left}
        return found | {path: loss for path, loss in agreed.items() if loss is not None}

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
            return Wanted(wait=True) if self.is_on and not self._is_over() else Wanted()
        self._paths[path].given[sender] = now_s + measuring_s(self._node.run.config.rounds)
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
        given = [wanted for wanted in self._paths.values() if sender in wanted.given]
        if len(given) >= self._most or any(wanted.is_busy(sender, now_s) for wanted in given):
            return None
        counts = {
            path: wanted.under_way(now_s)
            for path, wanted in self._paths.items()
            if sender in wanted.may and sender not in wanted.given
        }
        least = min(counts.values(), default=AGREEING)
        return secrets.choice([path for path, count in counts.items() if count == least]) if least < AGREEING else None

    def _is_open(self) -> bool:
        return any(map(self._may_be_agreed, self._paths))

    def _may_be_agreed(self, path: PathId) -> bool:
        """Whether there are still enough who may measure it, and it is worth while to wait for them."""
        wanted, now_s = self._paths[path], self._node.clock.now_s()
        if wanted.agreed() is not None or wanted.is_disputed:
            return False
        late = {peer for peer in wanted.given if wanted.is_late(peer, now_s)}
        return len(wanted.found) + len(self._alive(wanted.may - late - wanted.found.keys())) >= AGREEING

    def _may_be_asked(self, peer: PeerId) -> bool:
        is_resting = self._rests.get(peer, 0) >= self._version
        return peer not in self._wrong and not is_resting and self._node.decrees.reason(peer) is None

    def _fit(self, asked: frozenset[PeerId], trainers: Collection[PeerId]) -> frozenset[PeerId]:
        """Those who did not train the path, if there are enough of them."""
        others = asked.difference(trainers)
        return others if len(self._alive(others)) >= AGREEING else asked

    def _alive(self, peers: frozenset[PeerId]) -> frozenset[PeerId]:
        """In a large swarm, where most are not seen to live, all of them may."""
        watch = self._node.watch
        return peers & watch.heartbeats.keys() if watch.neighbourhood.is_all else peers

    def _draws(self, path: PathId) -> bool:
        lot = self._node.swarm.signer.lot("measure", f"{self._node.run.id}|{path}|{self._version}".encode())
        return lot < self._share

    async def _measured_here(self, path: PathId, wanted: _Path) -> Evaluation:
        """Of parameters that are fetched for it; they stay for the next path, until the round is measured."""
        node, version = self._node, self._version
        made = [self._evaluator.version(module, version) for module in path.modules()]
        try:
            blobs = [
                await fetch(node, one.snapshot, holders=holders_of(node, one.module, version), keep=True)
                for one in made
            ]
        except SwarmError as error:
            raise IntegrityError(f"{path}, which must be measured here: {error}") from None
        found = await asyncio.to_thread(self._evaluator.measure, path, self._assigned, blobs)
        for peer, sealed in wanted.found.items():
            loss = sealed.document.loss
            if not agrees(loss, found.loss) and peer not in self._wrong:
                self._wrong.add(peer)
                where = {"path": str(path), "version": version}
                node.history.add("measured_wrong", peer=peer, loss=loss, ours=found.loss, **where)
        return found
