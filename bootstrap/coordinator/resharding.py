"""Re-sharding by the paths themselves, on the seed node: take scores in, fit routers, publish the next sharding.

Volunteers ask for a path to score between their rounds, and send what it makes of the router split; what does not come
in time the seed node scores itself, from the archive. Scores are taken from the peer that was asked, while they are
wanted, and of the very versions that it was given: a sample is computed again from whatever the scores name, and so
proves nothing of made-up modules.

A path that was given out waits for whoever took it. So only peers whose work counts are asked, which keys alone are
not; each for one path at a time; and who brings nothing in time, or something wrong, is left out for a while.
Source: DiPaCo (arXiv 2403.10616) section 2.4.2.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.core.model.layout import decode_module
from dipaco_p2p.core.model.shards import HeldOut
from dipaco_p2p.core.model.transformer import path_model
from dipaco_p2p.core.routing.evaluate import counted_tokens, decode_scores, window_nats
from dipaco_p2p.core.routing.features import document_features
from dipaco_p2p.core.routing.router import Router
from dipaco_p2p.errors import CorpusError, DipacoError, Refused
from dipaco_p2p.node.calls import GetWork, GiveScores, Scoring
from dipaco_p2p.node.node import Member
from dipaco_p2p.node.shardings import serve_shardings
from dipaco_p2p.protocol.documents import BlobRef, Scores, Sealed, Sharding, ShardRef, seal, unseal
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.calls import Done
from dipaco_p2p.topology import PathId

from ..archives.evaluator import Evaluator
from ..folder import write_sharding
from ..genesis.routing import Routers, cut_shards, fit_routers, router_blob
from ..text.sequences import Sequences

log = logging.getLogger(__name__)

POLL_S = 0.5
SAMPLE = 8
"""Sequences of which the scores are computed again."""
TOLERANCE_NATS = 5e-3
"""By how much the scores of a sequence may differ, in nats per token: the sum over its windows, so that what one window
lacks another cannot make up for. The order of float32 sums moves them by less than 1e-5, TF32 by some 1e-4."""

REST_SHARDINGS = 2
"""Further ones for which nobody is asked who was asked in vain."""

Table = NDArray[np.float32]


class Resharding:
    """All re-shardings of one stage."""

    def __init__(
        self,
        node: Member,
        evaluator: Evaluator,
        sequences: Callable[[], Sequences],
        *,
        workers: Callable[[], Collection[PeerId]],
    ) -> None:
        """`workers` are the peers whose work versions count and that forged none."""
        self._workers = workers
        self._node = node
        self._run = node.run
        self._evaluator = evaluator
        self._sequences = sequences
        self._wanted: tuple[int, int] | None = None
        """Number and round of the sharding that scores are wanted for."""
        self._leases: dict[PathId, tuple[PeerId, float]] = {}
        """Who was given a path last, and until when it has time to score it."""
        self._rests: dict[PeerId, int] = {}
        """Who was asked in vain, and up to which sharding it is not asked."""
        self._checking = asyncio.Lock()
        """A sample takes a whole path in memory: there is one at a time, whoever sends tables."""
        self.done = asyncio.Event()
        """All shardings that the run asks for are published."""

    def serve(self) -> None:
        """Tell of shardings, and take scores."""
        serve_shardings(self._node)
        GetWork.serve(self._node.swarm, self._on_work)
        GiveScores.serve(self._node.swarm, self._on_scores)

    async def run(self) -> None:
        """Make one sharding after the other, each when its round has come."""
        for number, round_number in enumerate(self._run.config.routing.reshard_rounds, start=1):
            if self._run.sharding(number) is None:
                await self._wait_scores(number, round_number)
                await self._publish(number, round_number)
                self._wanted = None
        self.done.set()

    async def _wait_scores(self, number: int, round_number: int) -> None:
        """Until all modules have the round's version, and all paths their scores, or somebody had time for them."""
        clock, patience_s = self._node.clock, self._run.config.rounds.deadline_s
        while self._evaluator.complete_version() < round_number:
            await clock.sleep(POLL_S)
        self._drop_other_scores(number, round_number)
        self._wanted, self._leases = (number, round_number), {}
        until_s = clock.now_s() + patience_s
        while clock.now_s() < until_s and self._missing(number) and self._has_scorers():
            await clock.sleep(POLL_S)
        self._note_late(number, self._missing(number), clock.now_s() + patience_s / 4)  # they had as long, at least

    def _has_scorers(self) -> bool:
        """Whether anybody lives that may bring scores; in a large swarm, where most are not seen, any may."""
        watch, workers = self._node.watch, self._workers()
        asked = {peer for peer, _ in self._leases.values()}
        alive = watch.volunteers()
        return any(
            not watch.neighbourhood.is_all or peer in asked or self._may_be_asked(peer, workers) for peer in alive
        )

    def _may_be_asked(self, peer: PeerId, workers: Collection[PeerId]) -> bool:
        return self._wanted is not None and peer in workers and self._rests.get(peer, 0) < self._wanted[0]

    def _note_late(self, number: int, missing: Collection[PathId], now_s: float) -> None:
        for path in missing:
            if path in self._leases and self._leases[path][1] <= now_s:
                self._rests[self._leases[path][0]] = number + REST_SHARDINGS

    async def _publish(self, number: int, round_number: int) -> None:
        sealed = await asyncio.to_thread(self._make, number, round_number)
        write_sharding(self._node.store, sealed)
        self._run.learn(sealed)
        sizes = [ref.sequences for ref in sealed.document.shards]
        self._node.history.add("sharded", number=number, from_round=round_number, sequences=sizes)
        print(f"sharding {number} from round {round_number} on: {sizes} sequences by path", flush=True)

    def _make(self, number: int, round_number: int) -> Sealed[Sharding]:
        config, store = self._run.config, self._node.store
        sequences = self._sequences()
        tables = [self._table(path, number, round_number, sequences.router) for path in self._run.topology.paths()]
        vectors = self._features(sequences.router.tokens)
        table = np.stack(tables, axis=2).astype(np.float64)
        frozen, first = self._evaluator.frozen(), self._evaluator.router(0)
        routers = fit_routers(config, frozen, sequences.router.tokens, vectors, table, first=first)
        router, shards = self._shards(number, round_number, sequences, routers)
        sharding = Sharding(
            run=self._run.id,
            number=number,
            from_round=round_number,
            router=router_blob(store, router),
            token_router=router_blob(store, routers.token_router),
            shards=shards,
            author=self._node.peer,
        )
        return seal(self._node.swarm.signer, sharding)

    def _shards(
        self, number: int, round_number: int, sequences: Sequences, routers: Routers
    ) -> tuple[Router, tuple[ShardRef, ...]]:
        """Cut anew, unless nobody will train on them; as they were, if a path would get nothing."""
        before = tuple(self._run.shard(path, number - 1) for path in self._run.topology.paths())
        if round_number >= self._run.rounds:
            return routers.router, before
        vectors, tokens = self._features(sequences.train.tokens), sequences.train.tokens
        try:
            shards = cut_shards(self._run.config, self._node.store, routers.router, tokens, vectors)
        except CorpusError as error:
            log.warning("sharding %d leaves the shards as they are: %s", number, error)
            return self._evaluator.router(number - 1), before
        return routers.router, shards

    def _features(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        has_counts = self._run.config.routing.has_counts
        return document_features(self._evaluator.frozen(), tokens, has_counts=has_counts)

    def _table(self, path: PathId, number: int, round_number: int, part: HeldOut) -> Table:
        """A path's scores: a volunteer's, else our own."""
        sealed = self._scores(number, path)
        if sealed is not None:
            data = self._node.store.get(sealed.document.table.digest)
            if data is not None:
                return decode_scores(data, count=len(part), context=part.tokens.shape[1])
        log.info("nobody scored %s for sharding %d: done here", path, number)
        return self._evaluator.score(path, round_number, part.tokens).astype(np.float32)

    def _drop_other_scores(self, number: int, round_number: int) -> None:
        """A former program took scores of any versions, from anybody."""
        self._drop_scores(number, lambda scores: scores.modules != self._digests(scores.path, round_number))

    def _drop_scores(self, number: int, is_bad: Callable[[Scores], bool]) -> None:
        for path in self._run.topology.paths():
            sealed = self._scores(number, path)
            if sealed is not None and is_bad(sealed.document):
                log.warning("scores of %s for sharding %d were dropped", path, number)
                self._node.store.drop_document(_name(number, path))

    def _digests(self, path: PathId, round_number: int) -> tuple[str, ...]:
        return tuple(ref.digest for ref in self._snapshots(path, round_number))

    def _snapshots(self, path: PathId, round_number: int) -> tuple[BlobRef, ...]:
        return tuple(self._evaluator.version(module, round_number).snapshot for module in path.modules())

    def _missing(self, number: int) -> list[PathId]:
        # Each by its name: strangers ask for this too, and to list a folder with 20,000 documents takes 0.2 s.
        store = self._node.store
        return [path for path in self._run.topology.paths() if not store.written_ns(_name(number, path))]

    def _scores(self, number: int, path: PathId) -> Sealed[Scores] | None:
        data = self._node.store.read_document(_name(number, path))
        return None if data is None else unseal(Scores, json.loads(data))

    # -- over the swarm

    async def _on_work(self, sender: PeerId, request: GetWork) -> Scoring:
        """A path to score and its snapshots, the asker's own if that is missing; `wait` while others are at it. Asked
        again meanwhile, the same one: the answer may have been lost."""
        if self._wanted is None:
            is_to_come = not self.done.is_set() and self._evaluator.complete_version() >= self._run.rounds
            return Scoring(wait=True if is_to_come else None)
        number, round_number = self._wanted
        path = self._given(sender, number, request.path)
        if path is None:
            return Scoring(wait=True)
        return Scoring(sharding=number, path=path, snapshots=self._snapshots(path, round_number))

    def _given(self, sender: PeerId, number: int, own: str) -> PathId | None:
        """The path that `sender` is at, or is given now."""
        missing, now_s = self._missing(number), self._node.clock.now_s()
        self._note_late(number, missing, now_s)
        busy = {path: peer for path, (peer, until_s) in self._leases.items() if path in missing and until_s > now_s}
        free = [path for path in missing if path not in busy]
        if sender in busy.values():
            return next(path for path, peer in busy.items() if peer == sender)
        if not free or not self._may_be_asked(sender, self._workers()):
            return None
        path = next((path for path in free if str(path) == own), free[0])
        self._leases[path] = sender, now_s + self._run.config.rounds.deadline_s / 2
        return path

    async def _on_scores(self, sender: PeerId, request: GiveScores) -> Done:
        sealed, document = request.scores, request.scores.document
        self._judge(sender, document)
        async with self._checking:
            if self._scores(document.sharding, document.path) is None:
                self._require_asked(sender, document)
                await self._take(sealed)
        return Done()

    async def _take(self, sealed: Sealed[Scores]) -> None:
        document = sealed.document
        data = self._node.store.get(document.table.digest)
        if data is None:
            raise Refused("upload the table first", reason=Reason.PAYLOAD_MISSING)
        try:
            await asyncio.to_thread(self._check_sample, document, data)
        except Refused:
            self._forget(document.author, document.sharding)
            raise
        self._rests.pop(document.author, None)  # late, but here
        self._node.uploads.claim(document.table.digest)
        self._node.store.write_document(_name(document.sharding, document.path), canonical_bytes(sealed.to_dict()))
        self._node.history.add("scored", path=str(document.path), sharding=document.sharding, peer=document.author)

    def _forget(self, liar: PeerId, number: int) -> None:
        """A sample shows few lies: what was taken of whoever is caught is scored again, by others, and at once."""
        self._rests[liar] = number + REST_SHARDINGS
        self._leases = {path: lease for path, lease in self._leases.items() if lease[0] != liar}
        self._drop_scores(number, lambda scores: scores.author == liar)

    def _judge(self, sender: PeerId, scores: Scores) -> None:
        if scores.run != self._run.id or scores.author != sender:
            raise Refused("scores of another run or another author", reason=Reason.WRONG_RUN)
        if scores.path not in self._run.topology or scores.sharding > len(self._run.config.routing.reshard_rounds):
            raise Refused(
                f"no scores of {scores.path} for sharding {scores.sharding} are wanted", reason=Reason.MALFORMED
            )

    def _require_asked(self, sender: PeerId, scores: Scores) -> None:
        """Raise Refused unless these are the scores that `sender` was asked for."""
        path, number = scores.path, scores.sharding
        if self._wanted is None or self._wanted[0] != number or self._run.sharding(number) is not None:
            raise Refused(f"no scores for sharding {number} are wanted now", reason=Reason.OTHER)
        if scores.modules != self._digests(path, self._wanted[1]):
            raise Refused(
                f"scores of {path} at other versions than those of round {self._wanted[1]}", reason=Reason.OTHER
            )
        # After a restart nobody knows who was asked before it: whoever has worked may have been.
        is_asked = self._leases[path][0] == sender if path in self._leases else sender in self._workers()
        if not is_asked:
            raise Refused(f"another peer is asked for the scores of {path}", reason=Reason.UNKNOWN_PEER)

    def _check_sample(self, scores: Scores, data: bytes) -> None:
        """Compute a few of the scores again, from the very versions that they name. Raises Refused."""
        part = self._evaluator.router_split()
        try:
            table = decode_scores(data, count=len(part), context=part.tokens.shape[1])
            flats = [
                decode_module(self._evaluator.blob(digest), self._run.layout(module))
                for module, digest in zip(scores.path.modules(), scores.modules, strict=True)
            ]
        except (DipacoError, ValueError) as error:
            raise Refused(f"scores that cannot be checked: {error}", reason=Reason.MALFORMED) from None
        model = path_model(self._run.config.model, flats)
        chosen = np.random.default_rng().permutation(len(part))[:SAMPLE]
        off = np.abs(window_nats(model, part.tokens[chosen]) - table[chosen]).sum(axis=1)
        if off.max(initial=0.0) > TOLERANCE_NATS * counted_tokens(part.tokens.shape[1]):
            raise Refused(f"the scores of {scores.path} are not what its modules give", reason=Reason.MALFORMED)


def _name(number: int, path: PathId) -> str:
    """Of the document with a path's scores for this sharding."""
    return f"scores-{number}-{path}"
