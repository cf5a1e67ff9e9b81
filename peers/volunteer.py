"""A volunteer's life: claim a path, then round after round: modules, inner steps, outer gradients, next versions.

Read this file from top to bottom; everything it calls is told by its name. What it leads for others runs beside it
(runtime/ownership.py), and so do its heartbeat and its view of the swarm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from dipaco_p2p.core.inner import InnerResult, StepReport
from dipaco_p2p.core.shards import Shard, decode_shard
from dipaco_p2p.errors import Refused, SwarmError
from dipaco_p2p.protocol.claims import ClaimEvent
from dipaco_p2p.protocol.documents import BlobRef, Contribution, ModuleVersion
from dipaco_p2p.protocol.liveness import heartbeat_interval_s
from dipaco_p2p.protocol.signing import short
from dipaco_p2p.runtime.modules import ModuleReader
from dipaco_p2p.runtime.node import Node
from dipaco_p2p.runtime.ownership import Ownership
from dipaco_p2p.runtime.tasks import keep_going
from dipaco_p2p.runtime.transfer import fetch
from dipaco_p2p.topology import ModuleId, PathId

from .claiming import Claiming
from .push import push
from .status import Status
from .trainer import Flat, OuterGradient, PathTrainer

log = logging.getLogger(__name__)

STAND_BY_S = 0.5
STEPS_SHARE_MIN = 0.1
"""On leaving, less than this share of a round's steps is not worth a push."""


class Volunteer:
    """One volunteer in one run; `run` returns when the run is complete or after `stop`."""

    def __init__(self, node: Node, ownership: Ownership, status: Status, *, device: str, folder: Path) -> None:
        self._node = node
        self._ownership = ownership
        self._status = status
        self._device = device
        self._paths_folder = folder / "paths"
        self._claiming = Claiming(node, self._paths_folder)
        self._is_stopping = False
        self._is_working = False
        """While training or pushing: a stop then finishes what was begun; otherwise it interrupts at once."""
        self._work: asyncio.Task[None] | None = None
        self._readers: dict[ModuleId, ModuleReader] = {}
        self._round_seconds: list[float] = []

    async def run(self, *, grace_s: float) -> None:
        """Take part until the run is complete or `stop`; then leave in good order."""
        self._grace_s = grace_s
        background = [asyncio.create_task(part) for part in self._background()]
        self._work = asyncio.create_task(self._take_part())
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await self._work
        finally:
            await self._leave(background)

    def stop(self) -> None:
        """Finish soon: push what was trained if that takes no longer than the grace time."""
        if self._is_stopping or self._work is None:
            return
        self._is_stopping = True
        self._say("finishing")
        if self._is_working:
            asyncio.get_running_loop().call_later(self._grace_s, self._work.cancel)
        else:
            self._work.cancel()

    # -- the story

    async def _take_part(self) -> None:
        while not self._is_stopping and not self._is_run_complete():
            if self._has_work():
                self._say("claiming a path")
                path = self._status.path = await self._claiming.claim()
                if path is not None:
                    await self._wait_start()
                    await self._train_path(path)
            else:
                self._say("standing by", waits_for="the last rounds of other paths")
                await self._node.clock.sleep(STAND_BY_S)
        while not self._is_stopping and not self._ownership.is_complete:
            await self._node.clock.sleep(STAND_BY_S)
        self._status.is_complete = not self._is_stopping

    async def _wait_start(self) -> None:
        """Before the first round: until enough paths are claimed that the shared modules get their share."""
        watch, needed = self._node.watch, self._node.run.config.rounds.min_paths
        while not self.is_run_open():
            covered = sum(bool(claims) for claims in watch.claims.values())
            self._say("waiting", waits_for=f"{needed} paths to be claimed; {covered} are")
            await self._node.clock.sleep(STAND_BY_S)
            await watch.refresh()

    async def _train_path(self, path: PathId) -> None:
        """Round after round, until the path is complete or somebody else should have it."""
        shard = await self._fetch_shard(path)
        trainer = PathTrainer(
            self._node.run,
            path,
            shard,
            optimizer=await self._fetch_from_seed(self._node.run.manifest.optimizer),
            device=self._device,
            replica=self._claiming.replica(path),
            folder=self._paths_folder,
        )
        readers = [self._reader(module) for module in path.modules()]
        self._say("fetching modules")
        await asyncio.gather(*(reader.sync() for reader in readers))
        while not self._is_stopping and not all(reader.is_complete for reader in readers):
            await self._round(trainer, readers)
            if await self._claiming.is_needed_elsewhere(path):
                break
        await self._release(ClaimEvent.YIELDED)

    async def _round(self, trainer: PathTrainer, readers: list[ModuleReader]) -> None:
        """Inner steps, outer gradients, pushes, and the wait for the next versions."""
        began_s, before = time.monotonic(), self._node.swarm.statistics()
        self._is_working = True
        flats = [reader.params for reader in readers if reader.params is not None]
        bases = [reader.version for reader in readers]
        result = await self._inner_steps(trainer, flats, round_number=min(base.version for base in bases))
        if result.steps_done >= STEPS_SHARE_MIN * self._node.run.config.inner.steps:
            gradients = await asyncio.to_thread(trainer.outer_gradients, flats, result.flats)
            await asyncio.gather(*map(self._push, [trainer] * len(bases), gradients, bases, [result] * len(bases)))
            await asyncio.to_thread(trainer.save)
        self._is_working = False
        if not self._is_stopping:
            await self._wait_next(readers, [base.version for base in bases])
        after = self._node.swarm.statistics()
        self._round_seconds.append(time.monotonic() - began_s)
        self._node.history.add(
            "round",
            path=str(trainer.path),
            round=min(base.version for base in bases),
            steps=result.steps_done,
            tokens=result.tokens,
            loss=result.loss,
            seconds=self._round_seconds[-1],
            bytes_pushed=after.bytes_sent - before.bytes_sent,
            bytes_pulled=after.bytes_received - before.bytes_received,
        )

    # -- its parts

    async def _inner_steps(self, trainer: PathTrainer, flats: list[Flat], *, round_number: int) -> InnerResult:
        status, began_s = self._status, time.monotonic()
        status.round, status.step = round_number, 0
        self._estimate_end(round_number)
        self._say("training")
        tokens = 0

        def on_step(report: StepReport) -> bool:
            nonlocal tokens
            tokens += report.tokens
            status.step, status.loss = status.step + 1, report.loss
            status.tokens_per_s = tokens / max(time.monotonic() - began_s, 1e-9)
            return not self._is_stopping

        result = await trainer.train(flats, round_number=round_number, on_step=on_step)
        self._node.presence.note(round=round_number, tokens_per_s=round(status.tokens_per_s, 1))
        return result

    async def _push(
        self, trainer: PathTrainer, gradient: OuterGradient, base: ModuleVersion, result: InnerResult
    ) -> None:
        """One module's outer gradient to its leader; a refusal is noted, and the round goes on."""
        if base.version >= self._node.run.config.rounds.rounds:
            return
        self._say("pushing", waits_for=f"receipts from the leaders of {trainer.path}")
        contribution = Contribution(
            run=self._node.run.id,
            module=gradient.module,
            path=trainer.path,
            base_version=base.version,
            base_digest=base.digest,
            payload=BlobRef.of(gradient.payload),
            steps=result.steps_done,
            tokens=result.tokens,
            loss=result.loss,
            author=self._node.peer,
        )
        facts = {"module": str(gradient.module), "path": str(trainer.path), "base": base.version}
        try:
            receipt = await push(self._node, contribution, gradient.payload)
        except Refused as refused:
            log.warning("%s refused our contribution: %s", gradient.module, refused)
            self._node.history.add("refused", reason=refused.reason, detail=str(refused), **facts)
            return
        trainer.keep(gradient)
        self._status.receipts += 1
        leader = short(receipt.document.author)
        self._status.last_receipt = f"{gradient.module} round {receipt.document.round} from ...{leader}"
        holders = [str(peer) for peer in receipt.document.holders]
        self._node.history.add("receipt", id=receipt.document.contribution, holders=holders, **facts)

    async def _wait_next(self, readers: list[ModuleReader], bases: list[int]) -> None:
        late = {reader.module for reader in readers}

        async def wait(reader: ModuleReader, base: int) -> None:
            await reader.sync(after=base)
            late.discard(reader.module)
            if late:
                self._say("waiting", waits_for="the next version of " + ", ".join(map(str, sorted(late))))

        self._say("waiting", waits_for="the next version of " + ", ".join(map(str, sorted(late))))
        await asyncio.gather(*map(wait, readers, bases))

    async def _fetch_shard(self, path: PathId) -> Shard:
        ref = self._node.run.shard(path)
        self._say("fetching its shard")
        data = await self._fetch_from_seed(ref.blob)
        model = self._node.run.config.model
        return decode_shard(data, vocab_size=model.vocab_size, context=model.context)

    async def _fetch_from_seed(self, ref: BlobRef) -> bytes:
        """A blob that only the seed node has; kept here. Waits while no seed node gives it; raises IntegrityError when
        all that answer give other bytes, for which waiting is no cure."""
        while True:
            try:
                return await fetch(self._node, ref, holders=self._node.watch.seeds(), keep=True)
            except SwarmError as error:
                log.info("no seed node gave %s: %s", ref.digest[:8], error)
                self._say("waiting", waits_for="the seed node")
            await self._node.clock.sleep(STAND_BY_S)
            await self._node.watch.read_peers()

    async def _release(self, event: ClaimEvent) -> None:
        await self._claiming.release(event)
        self._status.path = None

    async def _leave(self, background: list[asyncio.Task[Any]]) -> None:
        self._say("leaving")
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._ownership.leave(), self._grace_s)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        self._status.leads = []
        await self._release(ClaimEvent.RELEASED)
        await self._node.presence.leave()
        self._node.history.add("left", complete=self._status.is_complete, receipts=self._status.receipts)

    # -- small questions and notes

    def is_run_open(self) -> bool:
        """Whether the first round may start, or has."""
        watch, needed = self._node.watch, self._node.run.config.rounds.min_paths
        covered = sum(bool(claims) for claims in watch.claims.values())
        return covered >= needed or any(head.version for heads in watch.heads.values() for head in heads.values())

    def _has_work(self) -> bool:
        """At first any unfinished path; once we have finished one, only a path that nobody trains."""
        unfinished = self._claiming.unfinished()
        return bool(unfinished) and (not self._round_seconds or any(not claims for claims in unfinished.values()))

    def _is_run_complete(self) -> bool:
        last = self._node.run.config.rounds.rounds
        return all(any(head.version >= last for head in heads.values()) for heads in self._node.watch.heads.values())

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        loops = (self._node.presence.run, self._watch_swarm, self._ownership.run)
        return [keep_going(loop, self._node.clock) for loop in loops]

    async def _watch_swarm(self) -> None:
        while True:
            await self._node.watch.refresh()
            watch, status = self._node.watch, self._status
            status.peers_alive = len(watch.heartbeats)
            status.paths_covered = sum(bool(claims) for claims in watch.claims.values())
            status.leads = self._ownership.modules
            await self._node.clock.sleep(heartbeat_interval_s(self._node.run.config.liveness) / 2)

    def _reader(self, module: ModuleId) -> ModuleReader:
        return self._readers.setdefault(module, ModuleReader(self._node, module))

    def _estimate_end(self, round_number: int) -> None:
        if self._round_seconds:
            recent = self._round_seconds[-3:]
            self._status.eta_s = (self._status.rounds - round_number) * sum(recent) / len(recent)

    def _say(self, doing: str, *, waits_for: str = "") -> None:
        if self._is_stopping and doing not in ("finishing", "leaving", "pushing"):
            return
        if (self._status.doing, self._status.waits_for) != (doing, waits_for):
            self._status.doing, self._status.waits_for = doing, waits_for
            self._node.presence.note(doing=doing)
            self._node.history.add("doing", doing=doing, waits_for=waits_for)
