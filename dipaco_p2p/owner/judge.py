"""A judge: measures for leaders whether others' work makes its path better (protocol/gate.py says what follows).
Asked for an audit, it also has the work repeated.

It composes the path from the versions that the inner steps began with, and again with the outer gradients taken off, as
an outer step of full length would; both read the same sequences of the path's shard. Which ones, the judge's own
signature says: it comes after the work, so nobody can train for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from .. import strict
from ..canonical import digest
from ..core.arrays import Floats
from ..core.model.engine import on_device
from ..core.model.layout import decode_module
from ..core.model.shards import Shard, decode_shard
from ..core.model.transformer import PathModel, load_modules
from ..core.outer.codec import Compressed
from ..core.outer.outer_step import apply_update
from ..core.routing.evaluate import Doubles, counted_tokens, losses
from ..errors import BlobMissing, EnvironmentUnfit, IntegrityError, Refused, SwarmError
from ..node.calls import Appraise, Appraised
from ..node.node import Given, Member, fetch_given, fetch_in_time
from ..node.reading import chain_tellers, versions_after
from ..node.run import Run
from ..node.shardings import learn_attached
from ..program.tasks import SingleFlight, done_or_later
from ..protocol.documents import BlobRef, Contribution, Sealed, seal
from ..protocol.gate import DRAW, GAIN_MAX, Appraisal, Repetition
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId
from ..protocol.versions import genesis_version
from ..topology import ModuleId
from .module_calls import learn_mandate, module_of_run

NEAR_VERSIONS = 16
"""How many versions the modules of a path may be apart."""
WAITING_MAX = 32
"""Works that wait to be measured here: any leader may ask."""
REMEMBERED = 256
"""Appraisals that are given again to whoever asks again; leaders of all modules of a path do."""
SHARDS_KEPT = 2
"""In memory, decoded: a judge mostly sees the same few paths."""
FETCHED_AT_ONCE = 4
"""Works, each of another author: what they name is in memory until they are measured."""
LEADERS_MIN = 2
"""Leaders among whom the places for both are: one may ask for works without an end, of authors that it made up and who
give nothing."""

TURN_S = 5.0
"""How long a leader that was refused an audit keeps its turn: it asks again every second unless another auditor is
free."""
AUDIT_WAIT_S = 5.0
"""An auditor that needs longer says so; else its caller could not tell it from one whose line is cut."""
Repeat = Callable[[Contribution, Sequence[Floats], Sequence[Compressed], Shard], Awaitable[Repetition]]
"""Takes the steps of a contribution's work again, from these modules on this shard, and compares what they come to with
these outer gradients. Raises DipacoError if that cannot be done here."""
Gains = Doubles
Measure = Callable[[Run, Sequence[Floats], Sequence[Floats], NDArray[np.int32]], Gains]
"""By how much the loss of each sequence falls from the first modules to the second, in nats per token."""


def measured_gains(
    run: Run, before: Sequence[Floats], after: Sequence[Floats], sequences: NDArray[np.int32], *, device: str
) -> Gains:
    """As `Measure`: with the model itself, on the processor if the device refuses."""

    def nats(device: str) -> list[Doubles]:
        model, found = PathModel(run.config.model).to(device), []
        for flats in (before, after):
            load_modules(model, flats)
            found.append(losses(model, sequences))
        return found

    at_first, then = on_device(device, nats)
    gains: Gains = (at_first - then) / counted_tokens(run.config.model.context)
    return gains


class Judge:
    """What one peer measures for others."""

    def __init__(
        self, node: Member, *, device: str = "cpu", measure: Measure | None = None, repeat: Repeat | None = None
    ) -> None:
        """Without `repeat` it audits nothing."""
        self._node = node
        self._repeat = repeat
        self._audits: dict[str, asyncio.Task[Sealed[Appraisal]]] = {}
        self._measure = partial(measured_gains, device=device) if measure is None else measure
        self._turns: dict[PeerId, int] = {}
        """By leader, the number of its last audit here."""
        self._sent_away: dict[PeerId, float] = {}
        """When leaders came for an audit and had to go."""
        self._lock = asyncio.Lock()
        self._fetching = asyncio.Semaphore(FETCHED_AT_ONCE)
        self._fetching_of: WeakValueDictionary[PeerId, asyncio.Lock] = WeakValueDictionary()
        """By author."""
        self._fetching_for: WeakValueDictionary[PeerId, asyncio.Semaphore] = WeakValueDictionary()
        """By leader."""
        self._given: dict[str, Given] = {}
        """By author and payload, what came of it: a leader asks again and again."""
        self._waiting: dict[str, PeerId] = {}
        """By work, the leader that asked first."""
        self._found: dict[str, Sealed[Appraisal]] = {}
        self._judging: SingleFlight[Sealed[Appraisal]] = SingleFlight()
        self._shards: dict[str, Shard] = {}

    def serve(self) -> None:
        """Answer from now on."""
        Appraise.serve(self._node.swarm, self._on_appraise)

    async def appraise(self, contribution: Contribution, *, is_audit: bool = False) -> Sealed[Appraisal]:
        """What we measure of the work that it is a part of, and for an audit what comes of repeating it; raises Refused
        if that is not to be had, as `busy` while it is being repeated, and as `full` while another work is."""
        if is_audit:
            return await self._audited(contribution)
        work = contribution.work
        if work not in self._found:
            leader = self._node.mandates.leader(contribution.module)
            with self._place(work, leader):
                self._found[work] = await self._judging.do(work, partial(self._appraise_next, contribution, leader))
            for old in list(self._found)[:-REMEMBERED]:
                del self._found[old]
        return self._found[work]

    @contextlib.contextmanager
    def _place(self, work: str, leader: PeerId) -> Iterator[None]:
        """Keep a place for `work` while it waits; whoever asks for the same work shares that place. Raises Refused when
        this leader may have no more of them."""
        if work in self._waiting:
            yield
            return
        taken = list(self._waiting.values())
        if max(len(taken), self._leaders(leader) * taken.count(leader)) >= WAITING_MAX:
            raise Refused(f"{len(taken)} works wait to be measured here", reason=Reason.BUSY)
        self._waiting[work] = leader
        try:
            yield
        finally:
            del self._waiting[work]

    def _leaders(self, leader: PeerId) -> int:
        """Among how many there are places when this one asks: for us there are all."""
        return 1 if leader == self._node.peer else LEADERS_MIN

    async def _audited(self, contribution: Contribution) -> Sealed[Appraisal]:
        work = contribution.work
        if self._repeat is None:
            raise Refused("nothing is repeated here", reason=Reason.OTHER)
        if work not in self._audits:
            self._take_turn(self._node.mandates.leader(contribution.module))
            self._audits[work] = asyncio.create_task(self._audit(contribution, self._repeat))
            for old in list(self._audits)[:-REMEMBERED]:
                self._audits.pop(old).cancel()
        task = self._audits[work]
        await done_or_later(task, self._node.clock, AUDIT_WAIT_S)
        if not task.done():
            raise Refused("the work is being repeated", reason=Reason.BUSY)
        if task.cancelled() or task.exception() is not None:
            self._audits.pop(work, None)
        return await task

    def _take_turn(self, leader: PeerId) -> None:
        """Raise Refused while another work is being repeated, or if another leader waits that had its last turn before
        this one: else a leader that always has one more work would keep us from all others' audits."""
        now_s, turn = self._node.clock.now_s(), self._turns.get(leader, -1)
        self._sent_away = {peer: at_s for peer, at_s in self._sent_away.items() if now_s < at_s + TURN_S}
        is_before = any(self._turns.get(peer, -1) < turn for peer in self._sent_away if peer != leader)
        if is_before or not all(task.done() for task in self._audits.values()):
            self._sent_away[leader] = now_s
            raise Refused("another work is being repeated here, or comes first", reason=Reason.FULL)
        self._sent_away.pop(leader, None)
        turn = max(self._turns.values(), default=-1) + 1
        self._turns = dict([*self._turns.items()][-REMEMBERED:]) | {leader: turn}

    def close(self) -> None:
        """Repeat nothing any more."""
        for task in self._audits.values():
            task.cancel()

    async def _audit(self, contribution: Contribution, repeat: Repeat) -> Sealed[Appraisal]:
        """Beside what is measured: it takes as long as a round's steps. Never `busy`, which says that it goes on."""
        try:
            appraised = (await self.appraise(contribution)).document
            before, gradients = await self._read(contribution, await self._fetch(contribution))
            began_s = self._node.clock.now_s()
            repetition = await repeat(contribution, before, gradients, await self._shard(contribution))
        except (SwarmError, IntegrityError, EnvironmentUnfit) as error:
            raise Refused(f"it cannot be repeated here: {error}", reason=Reason.OTHER) from None
        except Refused as refused:
            reason = Reason.OTHER if refused.reason == Reason.BUSY else refused.reason
            raise Refused(str(refused), reason=reason) from None
        facts = {"of": contribution.author, "path": str(contribution.path), **strict.plain(repetition)}
        seconds = self._node.clock.now_s() - began_s
        self._node.history.add("audited", work=contribution.work, seconds=seconds, **facts)
        return seal(self._node.swarm.signer, replace(appraised, repeated=repetition))

    async def _on_appraise(self, sender: PeerId, request: Appraise) -> Appraised:
        node, document = self._node, request.contribution.document
        learn_attached(node, request.sharding)
        module = module_of_run(node, document.module)
        if (grant := node.mandates.grant(module)) is None or grant.leader != sender:
            await learn_mandate(node, module, sender)
            if (grant := node.mandates.grant(module)) is None or grant.leader != sender:
                raise Refused(f"{module} is not led by you, as far as is known here", reason=Reason.NOT_LEADER)
        if document.author == node.peer or document.run != node.run.id:
            raise Refused("nobody judges work of its own, or of another run", reason=Reason.OTHER)
        return Appraised(appraisal=await self.appraise(document, is_audit=request.is_audit))

    async def _appraise_next(self, contribution: Contribution, leader: PeerId) -> Sealed[Appraisal]:
        """One at a time: what it takes in memory does not grow with how many are asked for. A few are fetched
        meanwhile, one of each author: it may be slow on purpose, and nobody else's work waits for it. Nor does it for
        all that one leader asks for."""
        for_leader = self._fetching_for.setdefault(leader, asyncio.Semaphore(FETCHED_AT_ONCE // self._leaders(leader)))
        of_author = self._fetching_of.setdefault(contribution.author, asyncio.Lock())
        try:
            async with of_author, for_leader, self._fetching:
                fetched = await self._fetch(contribution)
                async with self._lock:
                    return await self._appraise(contribution, fetched)
        except (SwarmError, IntegrityError) as error:
            raise Refused(f"it cannot be measured here: {error}", reason=Reason.PAYLOAD_MISSING) from None

    async def _appraise(self, contribution: Contribution, fetched: Mapping[str, bytes]) -> Sealed[Appraisal]:
        node, signer, began_s = self._node, self._node.swarm.signer, self._node.clock.now_s()
        before, gradients = await self._read(contribution, fetched)
        after = [await asyncio.to_thread(apply_update, *pair) for pair in zip(before, gradients, strict=True)]
        draw = signer.sign(DRAW, contribution.work.encode())
        sequences = drawn((await self._shard(contribution)).tokens, draw, node.run.config.judging.sequences)
        gains = await asyncio.to_thread(self._measure, node.run, before, after, sequences)
        gain, error = mean_and_error(gains)
        facts = {"gain": gain, "error": error, "seconds": node.clock.now_s() - began_s}
        node.history.add("appraised", work=contribution.work, path=str(contribution.path), **facts)
        appraisal = Appraisal(
            run=node.run.id,
            work=contribution.work,
            of=contribution.author,
            tokens=contribution.tokens,
            lr_percent=node.run.lr_percent(contribution),
            gain=gain,
            error=error,
            draw=draw,
            author=node.peer,
        )
        return seal(signer, appraisal)

    async def _fetch(self, contribution: Contribution) -> dict[str, bytes]:
        """What the work names and this disk lacks, by digest; the shard of its path is on this disk then. Only what its
        author gives may be said to be missing: where others lack the rest it is `busy`."""
        node, fetched = self._node, dict[str, bytes]()

        async def have(ref: BlobRef, holders: list[PeerId]) -> None:
            if node.store.size(ref.digest) is None:
                fetched[ref.digest] = await fetch_in_time(node, ref, holders=holders)

        for module, base, payload in self._parts(contribution):
            holders = self._holders(module)
            try:
                await have(base, holders)
            except (SwarmError, IntegrityError) as error:
                if not await self._may_be_version(module, base, number=contribution.base_version):
                    raise
                raise Refused(f"it cannot be measured here now: {error}", reason=Reason.BUSY) from None
            if node.store.size(payload.digest) is None:
                fetched[payload.digest] = await self._payload(payload, holders, contribution.author)
        shard = self._shard_ref(contribution)
        if shard.digest not in self._shards and node.store.size(shard.digest) is None:
            training = sorted(node.watch.claims[contribution.path])
            try:
                await fetch_in_time(node, shard, holders=[*node.watch.seeds(), *training], keep=True)
            except (SwarmError, IntegrityError) as error:
                raise Refused(f"it cannot be measured here now: {error}", reason=Reason.BUSY) from None
        return fetched

    async def _payload(self, payload: BlobRef, holders: list[PeerId], author: PeerId) -> bytes:
        """One of its work. An author that gave next to nothing of it is not waited for again: others have it soon."""
        given = self._given.setdefault(f"{author} {payload.digest}", Given())
        for old in list(self._given)[:-REMEMBERED]:
            del self._given[old]
        if given.is_next_to_nothing(self._node.run.config.rounds):
            return await fetch_in_time(self._node, payload, holders=holders)
        return await fetch_given(self._node, payload, given, holders=[*holders, author])

    async def _may_be_version(self, module: ModuleId, base: BlobRef, *, number: int) -> bool:
        """Whether `base` may be the parameters of one of a module's last versions, which its owners still have: a chain
        that is told has it there, or nobody tells one. Else its author chose what nobody has, and is to blame."""
        run, is_told = self._node.run, False
        for teller in chain_tellers(self._node, module):
            after = max(0, number - NEAR_VERSIONS)
            try:
                told = await versions_after(self._node, teller, module, after=after, up_to=run.rounds)
            except (SwarmError, Refused, IntegrityError):
                continue
            is_told, kept = True, run.config.rounds.versions_kept
            last = [sealed.document.digest for sealed in told[-kept:]]
            if after + len(told) < kept:
                last.append(genesis_version(run.manifest, module).digest)
            if base.digest in last:
                return True
        return not is_told

    async def _read(
        self, contribution: Contribution, fetched: Mapping[str, bytes]
    ) -> tuple[list[Floats], list[Compressed]]:
        """Where its steps began, and the outer gradients that they came to, of all modules of its path."""
        run, before, gradients = self._node.run, list[Floats](), list[Compressed]()
        for module, base, payload in self._parts(contribution):
            before.append(decode_module(await self._blob(base, fetched), run.layout(module)))
            gradients.append(run.read_contribution(await self._blob(payload, fetched), module))
        return before, gradients

    def _parts(self, contribution: Contribution) -> Iterator[tuple[ModuleId, BlobRef, BlobRef]]:
        """The modules of its path, each with the parameters that its steps began with, and its payload. Raises
        IntegrityError."""
        run, modules, parts = self._node.run, contribution.path.modules(), contribution.parts
        if len(parts) != len(modules):
            raise IntegrityError(f"{len(parts)} parts for the {len(modules)} modules of {contribution.path}")
        for module, part in zip(modules, parts, strict=True):
            if part.payload.size > run.payload_bytes_max(module):
                raise IntegrityError(f"an outer gradient of {part.payload.size} bytes")
            size = genesis_version(run.manifest, module).snapshot.size
            yield module, BlobRef(digest=part.base_digest, size=size), part.payload

    def _holders(self, module: ModuleId) -> list[PeerId]:
        """Its leader has the module's versions and what is contributed to it, and so have mirrors and archives."""
        watch, grant = self._node.watch, self._node.mandates.grant(module)
        known = [watch.leader(module), *(grant.group if grant else ()), *watch.seeds()]
        return [peer for peer in dict.fromkeys(known) if peer is not None and peer in watch.heartbeats]

    async def _blob(self, ref: BlobRef, fetched: Mapping[str, bytes]) -> bytes:
        """One that was fetched, or is on this disk."""
        data = fetched.get(ref.digest) or await asyncio.to_thread(self._node.store.get, ref.digest)
        if data is None:
            raise BlobMissing(f"blob {ref.digest[:8]} has left this disk")
        return data

    def _shard_ref(self, contribution: Contribution) -> BlobRef:
        try:
            return self._node.run.shard(contribution.path, contribution.sharding).blob
        except KeyError:
            raise IntegrityError(f"sharding {contribution.sharding} is not known here") from None

    async def _shard(self, contribution: Contribution) -> Shard:
        ref, model = self._shard_ref(contribution), self._node.run.config.model
        if ref.digest not in self._shards:
            data = await self._blob(ref, {})
            shard = await asyncio.to_thread(decode_shard, data, vocab_size=model.vocab_size, context=model.context)
            for old in list(self._shards)[: 1 - SHARDS_KEPT]:
                del self._shards[old]
            self._shards[ref.digest] = shard
        return self._shards[ref.digest]


def drawn(tokens: NDArray[np.int32], draw: str, count: int) -> NDArray[np.int32]:
    """The sequences (count, context) of a shard (n, context) that this signature stands for; all if there are fewer."""
    generator = np.random.default_rng(int(digest(draw.encode())[:16], 16))
    places = generator.choice(len(tokens), size=min(count, len(tokens)), replace=False)
    return tokens[np.sort(places)]


def mean_and_error(gains: Gains) -> tuple[float, float]:
    """The mean of `gains` (n,) and its standard error, both within what an appraisal can say; a loss that is no number
    is the worst there is, and certain."""
    if not np.isfinite(gains).all():
        return -GAIN_MAX, 0.0
    error = float(np.std(gains, ddof=1)) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return max(-GAIN_MAX, min(GAIN_MAX, float(np.mean(gains)))), min(GAIN_MAX, error)
