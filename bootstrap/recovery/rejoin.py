"""How a coordinator finds the swarm of its run from an address that nobody knows, and what the run is by now.

It joins the DHT through peers that are named, or that it met before; others then find it there by its peer id. A folder
out of a backup of the warm-up may be behind: if the grid was opened since, its manifest and all that this names are
fetched before anything is served. To fork once more could make another grid, with the same signature.

    <dir>/met.json     ["/ip4/203.0.113.7/tcp/4001/p2p/12D3...", ...], the peers that this seed node has met
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from dipaco_p2p.clock import Clock, SystemClock
from dipaco_p2p.errors import DipacoError, EnvironmentUnfit, Unreachable
from dipaco_p2p.node.doorplate import REMEMBERED_MAX, whom_to_remember
from dipaco_p2p.node.entry import read_entry
from dipaco_p2p.node.node import Member, fetch_in_time, open_member
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.stages import fetch_stages, stages_after
from dipaco_p2p.node.store import Store
from dipaco_p2p.node.watch import Watch
from dipaco_p2p.owner.archive import ArchiveChains, SeedArchive
from dipaco_p2p.program.files import write_atomically
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.addresses import is_address, read_address
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.hivemind.libp2p import Libp2pSwarm
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.use.folder import RunFolder

from ..folder import read_marker, write_stage
from .catching_up import CatchingUp, refs_of

log = logging.getLogger(__name__)

GRID_HINT = "name a peer that has all of it, best a second seed node: --through ADDRESS; or restore a newer backup"


async def find_swarm(swarm: Libp2pSwarm, folder: RunFolder, through: Sequence[str]) -> None:
    """Join through those named, who must answer, else those met before, who need not; raises DipacoError."""
    named = {address: read_address(address) for text in through for address in read_entry(text).addresses}
    met = {address: read_address(address) for address in read_met(folder.root)}
    known = {text: address for text, address in (named or met).items() if address.peer != swarm.peer}
    if not known:
        return
    try:
        await swarm.join(known)
    except DipacoError:
        if named:
            raise
        log.info("none of those met before answers: others have to find this seed node")
        return
    marker = read_marker(folder.root)
    if marker is not None and not marker.is_caught_up:
        await learn_stages(swarm, folder, list(known), SystemClock())


async def learn_stages(swarm: Swarm, folder: RunFolder, addresses: Sequence[str], clock: Clock) -> None:
    """Take over a stage that was opened after the backup, if one of the peers at `addresses` shows it.

    Raises Unreachable if not all that it needs is to be had: then nothing of it is taken.
    """
    known = folder.newest()
    if known is None:
        return
    run, is_taken = known[0], False
    for text in addresses:
        try:
            peer = read_address(text).peer
            stages = await fetch_stages(swarm, peer, expected=run.id, author=run.manifest.author, addresses=[text])
        except DipacoError as error:
            log.info("%s does not list the stages of %s: %s", text, run.name, error)
            continue
        for after in stages_after(run, stages):
            await _take_over(swarm, folder, run, after, text, clock)
            run = after
            is_taken = True
        if is_taken:
            return


async def _take_over(swarm: Swarm, folder: RunFolder, before: Run, run: Run, address: str, clock: Clock) -> None:
    store = folder.store(run.manifest.stage)
    node = await _reader(swarm, run, store, address, clock)
    missing = 0
    for ref in set(refs_of(run)):
        try:
            holders = dict.fromkeys([read_address(address).peer, *node.watch.seeds(), *sorted(node.watch.heartbeats)])
            await fetch_in_time(node, ref, holders=list(holders), keep=True)
        except DipacoError as error:
            log.info("blob %s of the %s: %s", ref.digest[:8], run.manifest.stage, error)
            missing += 1
    if missing:
        name = run.manifest.stage
        message = f"{run.name} has gone on to its {name} since the backup, and {missing} of its files cannot be found"
        raise Unreachable(message, hint=GRID_HINT)
    await _end_stage(await _reader(swarm, before, folder.store(before.manifest.stage), address, clock), folder)
    write_stage(store, run.sealed)


async def _end_stage(node: Member, folder: RunFolder) -> None:
    """The chains of the stage before from whoever still serves it; without it the grid goes on all the same."""
    archive = SeedArchive(node.run, node.store)
    catching_up = CatchingUp(ArchiveChains(node, archive), folder.root, tell=log.info)
    await catching_up.learn_once()


async def _reader(swarm: Swarm, run: Run, store: Store, address: str, clock: Clock) -> Member:
    """A node that only asks; it knows where the peer at `address` is."""
    node = open_member(run, ScopedSwarm(swarm, run.id), clock, store)
    node.watch.typed[read_address(address).peer] = (address,)
    await asyncio.wait_for(node.watch.read_peers(), timeout=60.0)
    return node


NAME = "met.json"


class Met:
    """Of one folder; written when somebody new is there, and never emptied."""

    def __init__(self, root: Path, me: PeerId) -> None:
        self._path, self._me = root / NAME, me
        self._known: list[str] = read_met(root)

    def note(self, watch: Watch, *, workers: Collection[PeerId]) -> None:
        """Remember who is there; `workers` have worked for the run."""
        found = whom_to_remember(watch, self._known, workers=workers, me=self._me)
        if found and found != self._known:
            try:
                write_atomically(self._path, json.dumps(found).encode())
                self._known = found
            except EnvironmentUnfit as error:
                log.warning("who is in the run was not noted: %s", error)


def read_met(root: Path) -> list[str]:
    """Nobody, if the file is missing or damaged."""
    try:
        value = json.loads((root / NAME).read_bytes())
    except (OSError, ValueError):
        return []
    return [text for text in value if is_address(text)][:REMEMBERED_MAX] if isinstance(value, list) else []
