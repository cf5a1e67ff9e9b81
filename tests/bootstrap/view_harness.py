"""A coordinator's view of a swarm that was made by hand, and the commands that ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from control_harness import answered, printed
from tiny_run import SEED_NUMBER, make_run, signer, tiny_config
from virtual_time import VirtualClock, play

from bootstrap.cli import app
from bootstrap.control.requests import Control, Request
from bootstrap.control.view import Seen, View
from dipaco_p2p.clock import ManualClock
from dipaco_p2p.node.authority import Decrees, Mandates
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.neighbourhood import Neighbourhood
from dipaco_p2p.node.store import Store
from dipaco_p2p.node.watch import Watch
from dipaco_p2p.owner.retention import Thinned
from dipaco_p2p.protocol.liveness import Claim, Head, Heartbeat
from dipaco_p2p.protocol.records import claims_key, heads_key, peers_key
from dipaco_p2p.strict import plain
from dipaco_p2p.swarm.api import SwarmStatistics
from dipaco_p2p.swarm.memory import MemoryNetwork
from dipaco_p2p.topology import ModuleId, PathId

WORKER, SILENT = signer(1), signer(2)
SEED = signer(SEED_NUMBER)
ROW = {
    "version": 1,
    "loss": 4.5,
    "perplexity": 90.017,
    "paths": {"P0-0-1": {"loss": 4.25, "tokens": 10}, "P0-1-1": {"loss": None, "tokens": 0}},
}
P001 = PathId.parse("P0-0-1")
LED = ModuleId.parse("L1.M0")


def beat(**changes: Any) -> Heartbeat:
    return replace(
        Heartbeat(addresses=("/ip4/203.0.113.7/tcp/4001",), doing="training", tokens_per_s=1234.56), **changes
    )


async def look(folder: Path, heartbeat: Heartbeat) -> Seen:
    """A run of four paths: a seed node, a volunteer that trains one path and leads a module, a claim of a dead one."""
    clock = VirtualClock()
    network = MemoryNetwork(1, clock)
    store = Store(folder / "grid")
    run = make_run(store, tiny_config())
    seed, worker, silent = (network.join(each) for each in (SEED, WORKER, SILENT))
    await worker.put(peers_key(run.id), plain(heartbeat), ttl_s=6.0)
    await worker.put(claims_key(run.id, P001), plain(Claim(path=P001, since_s=5.0, round=1)), ttl_s=6.0)
    await silent.put(claims_key(run.id, P001), plain(Claim(path=P001, since_s=6.0)), ttl_s=6.0)
    await seed.put(peers_key(run.id), plain(Heartbeat(role="seed", owns=True, doing="serving")), ttl_s=6.0)
    mandates = Mandates(run, store)
    mandates.grant_next(SEED, LED, leader=WORKER.peer, mirrors=(SILENT.peer,))
    sealed = mandates.newest(LED)[-1]
    head = Head(
        version=2,
        digest="a" * 64,
        final=1,
        term=1,
        mirrors=(SILENT.peer,),
        granted_by=SEED.peer,
        grant=sealed.signature,
    )
    await worker.put(heads_key(run.id, LED), plain(head), ttl_s=6.0)
    decrees = Decrees(run, store)
    watch = Watch(run, seed, clock, mandates, decrees, Neighbourhood(run, seed, clock))
    await watch.refresh()
    await clock.sleep(2.0)
    await watch.refresh()
    return Seen(
        run=run,
        watch=watch,
        mandates=mandates,
        decrees=decrees,
        ledgers={module: Ledger(run, store, module) for module in run.topology.modules()},
        thinned=lambda module: Thinned(),
        judged=ROW,
        round=1,
        round_age_s=61.04,
        line=SwarmStatistics(bytes_sent=1_234_567, bytes_received=89),
        now_s=clock.now_s(),
    )


def seen_with(folder: Path, heartbeat: Heartbeat) -> Seen:
    found: list[Seen] = []

    async def main() -> None:
        found.append(await look(folder, heartbeat))

    play(main)
    return found[0]


@contextmanager
def answering(folder: Path, seen: Seen) -> Iterator[None]:
    """A coordinator of `folder` that answers, in a thread."""
    control, shown = Control(), View(folder, ManualClock())
    shown.stage = lambda: seen
    shown.add_verbs(control)
    with answered(folder, Request, control.answer):
        yield


run = partial(printed, app)
