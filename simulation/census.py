"""Who lives, leads and trains, as an observer sees it that could look at all nodes at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dipaco_p2p.protocol.keys import claims_key, heads_key
from dipaco_p2p.protocol.liveness import Claim, Head, read_all
from dipaco_p2p.protocol.records import Record, newest
from dipaco_p2p.protocol.signing import PeerId

from .history import Look

if TYPE_CHECKING:
    from .world import World


def look(world: World) -> Look:
    """What can be seen now."""
    run = world.run
    present = {machine.peer: machine.name for machine in world.machines if machine.is_running}
    led, versions = set(), {}
    for module in run.topology.modules():
        heads = read_all(Head, bodies(world, heads_key(run.id, module)))
        live = {peer: head for peer, head in heads.items() if peer in present and not head.resigned}
        versions[str(module)] = max((head.version for head in live.values()), default=0)
        if live:
            led.add(str(module))
    claimed = set()
    for path in run.topology.paths():
        claims = read_all(Claim, bodies(world, claims_key(run.id, path)))
        if any(peer in present and not claim.released for peer, claim in claims.items()):
            claimed.add(str(path))
    sight = world.shelves.sight()
    return Look(
        t_s=world.now_s,
        alive=frozenset(name for name in present.values() if name != world.seed.name),
        led=frozenset(led),
        claimed=frozenset(claimed),
        versions=versions,
        archived=sight.archived,
        kept=sight.kept,
        terms=sight.terms,
    )


def bodies(world: World, key: str) -> Mapping[PeerId, dict[str, Any]]:
    """The newest record of each owner under `key` on any node, by its owner."""
    records: list[Record] = []
    for node in world.network.nodes:
        records += node.shelf.live(key).values()
    return {peer: record.body for peer, record in newest(records).items()}
