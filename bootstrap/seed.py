"""The seed node: where newcomers knock, the archive, the owner of last resort, and the evaluator of versions.

Training goes on without it; joining, handing over and the archive wait until it is back. Its identity, terms and
chains are on disk, so a restart goes on where it stopped, at the same address.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from dipaco_p2p.clock import SystemClock
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.protocol.documents import ModuleVersion
from dipaco_p2p.protocol.liveness import Heartbeat, heartbeat_interval_s
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.runtime.console import log_to, on_signals
from dipaco_p2p.runtime.history import History
from dipaco_p2p.runtime.join import serve_manifest
from dipaco_p2p.runtime.node import Node
from dipaco_p2p.runtime.ownership import Ownership
from dipaco_p2p.runtime.presence import Presence
from dipaco_p2p.runtime.run import Run
from dipaco_p2p.runtime.store import Store, folder_lock, write_atomically
from dipaco_p2p.runtime.tasks import keep_going
from dipaco_p2p.runtime.transfer import Uploads, serve_store
from dipaco_p2p.runtime.watch import Watch
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.libp2p import open_libp2p
from dipaco_p2p.topology import ModuleId

from .archive import OwnArchive, SeedArchive
from .evaluator import Evaluator, append_evaluation, read_evaluations
from .prepare import prepare
from .runfile import RunFile

log = logging.getLogger(__name__)

TTL_MAX_S = 3600.0
QUIET_HEARTBEATS = 2.0
"""Lives of a heartbeat that a restarted seed waits before it leads anything: volunteers may have gone on without it,
and need that long to find it again; a term granted meanwhile would throw away what they did."""


async def start(file: RunFile, folder: Path, *, verbose: bool) -> None:
    """Prepare the run if need be, then serve it until a signal says stop. Raises DipacoError."""
    with folder_lock(folder, hint="end it, or choose another --dir"):
        log_to(folder / "seed.log", verbose=verbose)
        await _serve(file, folder)


async def _serve(file: RunFile, folder: Path) -> None:
    store = Store(folder)
    # The port comes first: to learn after minutes of preparation that it is taken would be a pity.
    swarm = await open_libp2p(
        folder / "identity.key",
        listen=f"/ip4/{file.node.host}/tcp/{file.node.port}",
        ttl_max_s=TTL_MAX_S,
        clock=SystemClock(),
    )
    try:
        run = await asyncio.to_thread(prepare, file, folder, store, swarm.signer)
        await Seed(run, swarm, store, folder).run()
    finally:
        await swarm.close()


class Seed:
    """One running seed node."""

    def __init__(self, run: Run, swarm: Swarm, store: Store, folder: Path) -> None:
        clock = SystemClock()
        self._folder = folder
        size_max = 2 * max(map(run.snapshot_bytes_max, run.topology.modules()))
        self._uploads = Uploads(swarm, store, size_max=size_max)
        self._node = Node(
            run=run,
            swarm=swarm,
            store=store,
            clock=clock,
            watch=Watch(run, swarm, clock),
            presence=Presence(run, swarm, clock, Heartbeat(role="seed", owns=True, doing="serving")),
            history=History(folder / "history.jsonl", clock),
            keep_upload=self._uploads.claim,
            keeps_everything=True,
        )
        self._archive = SeedArchive(run, store, swarm.signer)
        was_open = any(self._archive.granted(module)[0] for module in run.topology.modules())
        quiet_s = QUIET_HEARTBEATS * run.config.liveness.heartbeat_ttl_s if was_open else 0.0
        leads_from_s = clock.now_s() + quiet_s
        own_archive = OwnArchive(self._archive, swarm.peer)
        self._ownership = Ownership(self._node, own_archive, may_take=lambda: clock.now_s() >= leads_from_s)
        self._stopped = asyncio.Event()
        self._new_version = asyncio.Event()

    async def run(self) -> None:
        """Serve until stopped; then hand over what is led here."""
        self._serve()
        on_signals(self._stopped.set)
        loops = (self._node.presence.run, self._watch_swarm, self._ownership.run, self._evaluate)
        tasks = [asyncio.create_task(keep_going(loop, self._node.clock)) for loop in loops]
        self._print_address()
        await self._stopped.wait()
        await self._ownership.leave()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._node.presence.leave()

    def _serve(self) -> None:
        run, swarm = self._node.run, self._node.swarm
        serve_manifest(swarm, run.sealed)
        serve_store(swarm, self._node.store)
        self._archive.serve(
            swarm,
            self._uploads,
            on_deposed=self._on_deposed,
            is_leading=self._is_leading,
        )
        self._archive.listen(self._on_version)

    async def _is_leading(self, module: ModuleId, holder: PeerId, term: int) -> bool:
        """Whether another peer's head for this term is still alive; we ourselves give way to any volunteer."""
        await self._node.watch.read_heads(module)
        head = self._node.watch.heads[module].get(holder)
        return holder != self._node.peer and head is not None and head.term == term

    async def _on_deposed(self, module: ModuleId, holder: PeerId) -> None:
        if holder == self._node.peer:
            await self._ownership.drop(module)
            await self._node.presence.resign(module)

    def _on_version(self, version: ModuleVersion) -> None:
        self._node.history.add(
            "archived", module=str(version.module), version=version.version, digest=version.digest, term=version.term
        )
        self._new_version.set()

    def _print_address(self) -> None:
        run = self._node.run
        address = best_address(self._node.swarm.addresses)
        details = {"run": run.id, "address": address, "peer": self._node.peer}
        write_atomically(self._folder / "address.json", json.dumps(details).encode())
        print(f"{run.name} is open: {run.topology} modules, {run.topology.path_count} paths", flush=True)
        print(f"dipaco-peer join {address} --run {run.id[:16]}", flush=True)
        print("Ctrl-C hands over and stops; the same command goes on later.", flush=True)

    def _print_judged(self, version: int, perplexity: float) -> None:
        node, rounds = self._node, self._node.run.config.rounds.rounds
        alive = sum(beat.role != "seed" for beat in node.watch.heartbeats.values())
        covered = sum(bool(claims) for claims in node.watch.claims.values())
        when = f"round {version} of {rounds}" if version else "after the warm-up"
        swarm = f"{alive} volunteers alive, {covered} of {len(node.watch.claims)} paths covered"
        print(f"{when}: validation perplexity {perplexity:.1f}, {swarm}", flush=True)
        if version == rounds:
            end = f"{rounds} rounds, perplexity {perplexity:.1f}"
            print(f"the run is complete: {end}; still serving, Ctrl-C stops", flush=True)

    async def _watch_swarm(self) -> None:
        while True:
            await self._node.watch.refresh()
            await self._node.clock.sleep(heartbeat_interval_s(self._node.run.config.liveness) / 2)

    async def _evaluate(self) -> None:
        """Judge every round that is complete and not judged yet, the oldest first."""
        path = self._folder / "evaluations.jsonl"
        evaluator = await asyncio.to_thread(Evaluator, self._node.run, self._node.store, self._archive)
        rows = read_evaluations(path)
        judged = {row["version"] for row in rows}
        if rows:
            self._print_judged(rows[-1]["version"], rows[-1]["perplexity"])
        while True:
            self._new_version.clear()
            for version in sorted(set(range(evaluator.complete_version() + 1)) - judged):
                try:
                    evaluation = await asyncio.to_thread(evaluator.evaluate, version)
                    append_evaluation(path, evaluation)
                    self._print_judged(version, evaluation.routed.perplexity)
                except IntegrityError as error:
                    log.warning("round %d was not evaluated: %s", version, error)
                judged.add(version)
            await self._new_version.wait()


def best_address(addresses: Sequence[str]) -> str:
    """The address to give to others: one that leaves this machine, if there is any."""
    return next((address for address in addresses if "/ip4/127." not in address), addresses[0])
