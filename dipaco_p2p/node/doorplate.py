"""The doorplate: how others join a run through this peer, and through whom while it is away.

A ticket names the seeds first. Behind them it names volunteers that can be dialled directly, so that it works while no
seed is alive. An address is only its peer's word, and keys are free, so only who has worked is named: whoever hands in
false addresses has to train for each, and takes no more than one place with it. A volunteer that is named stays so
while it lives, for who has been there long is likely to stay; one that is gone makes room when another one can take
its place, and not before, so a ticket that was written while few were there is no shorter than an older one.

Whom a peer itself remembers, to come back through them while no seed answers, is chosen here too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import ConfigError, DipacoError
from ..program.files import write_atomically
from ..protocol.signing import PeerId, public_key_of
from ..swarm.addresses import best_address, is_circuit, peer_at, places_of, read_address, worth_giving
from ..swarm.api import Swarm
from ..ticket import SEEDS_MAX, SeedPlace, Ticket, write_ticket
from .entry import read_entry
from .run import Run
from .watch import Watch

DOORPLATE = "address.json"
VOLUNTEERS_MAX = 6
"""Named in one ticket beside the seeds. Each takes about 60 characters, and one that lives is enough."""
REMEMBERED_MAX = 16
"""Peers to come back through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doorplate:
    """What `address.json` says: how a run is joined through this peer."""

    run: str
    address: str
    peer: PeerId
    ticket: str
    """Empty for a peer at an address that no ticket can hold."""

    @property
    def line(self) -> str:
        """What a volunteer types."""
        return f"dipaco-peer join {self.ticket or self.address}"


def tell_address(
    folder: Path, swarm: Swarm, run: Run, *, seeds: Sequence[str] = (), volunteers: Sequence[str] = ()
) -> Doorplate:
    """Write `folder`/address.json, for people and scripts that join a run through this peer.

    Its ticket names this peer first, then `seeds`, then up to VOLUNTEERS_MAX of `volunteers`, as far as they fit."""
    address, before = best_address(swarm.addresses), told_address(folder)
    given = [address for address in worth_giving(swarm.addresses) if places_of(swarm.peer, [address])]
    known = read_entry(before.ticket).addresses if before is not None and before.run == run.origin else ()
    others = {swarm.peer, *(peer_at(seed) for seed in seeds)}
    steady = _steady(volunteers, [one for one in known if peer_at(one) not in others])
    ticket = make_ticket(run, given, more=[*seeds, *steady]) if given else ""
    plate = Doorplate(run=run.origin, address=address, peer=swarm.peer, ticket=ticket)
    if plate != before:
        write_atomically(folder / DOORPLATE, json.dumps(asdict(plate)).encode())
    return plate


def told_address(folder: Path) -> Doorplate | None:
    """What `folder`/address.json says with a ticket that can be read; else None."""
    try:
        plate = Doorplate(**json.loads((folder / DOORPLATE).read_bytes()))
        read_entry(plate.ticket)
    except (OSError, ValueError, TypeError, AttributeError, DipacoError):
        return None
    return plate


def whom_to_name(watch: Watch, *, workers: Collection[PeerId]) -> tuple[list[str], list[str]]:
    """Where the seeds are, and those of `workers` that live: an address of each that is dialled without a relay."""
    seeds = watch.seeds()
    return _direct(watch, seeds), _direct(watch, sorted(set(workers).difference(seeds)))


def whom_to_remember(watch: Watch, before: Sequence[str], *, workers: Collection[PeerId], me: PeerId) -> list[str]:
    """Through whom `me` comes back: seeds, then those of `workers` that live, then others that live, then those of
    `before` that are gone. Among equals those of `before` stay, and chance decides about the rest: keys and what their
    heartbeats say cost nothing."""
    known = {address: number for number, address in enumerate(before)}

    def steady(living: Iterable[str]) -> list[str]:
        return sorted(living, key=lambda address: (known.get(address, len(known)), random.random()))

    seeds, volunteers = whom_to_name(watch, workers=workers)
    living = _direct(watch, watch.heartbeats)
    peers = set(map(peer_at, living))
    gone = [address for address in before if peer_at(address) not in peers]
    found = dict.fromkeys([*seeds, *steady(volunteers), *steady(living), *gone])
    return [address for address in found if peer_at(address) != me][:REMEMBERED_MAX]


def _direct(watch: Watch, peers: Iterable[PeerId]) -> list[str]:
    found = []
    for peer in peers:
        beat = watch.heartbeats.get(peer)
        places = [] if beat is None else places_of(peer, beat.addresses)
        if direct := [f"{place}/p2p/{peer}" for place in places if not is_circuit(place)]:
            found.append(best_address(direct))
    return found


def make_ticket(run: Run, addresses: Iterable[str], *, more: Iterable[str] = ()) -> str:
    """The ticket of `run`, whose seeds are at `addresses`; of `more`, as many of the first as fit. Raises ConfigError
    for an address that is malformed."""
    names = list(dict.fromkeys(addresses))
    further = [address for address in dict.fromkeys(more) if address not in names][: max(0, SEEDS_MAX - len(names))]
    while further:
        try:
            return _written(run, [*names, *further])
        except ConfigError:
            further.pop()
    return _written(run, names)


def _written(run: Run, addresses: Sequence[str]) -> str:
    found = map(read_address, addresses)
    seeds = tuple(SeedPlace(place=address.place, key=public_key_of(address.peer)) for address in found)
    manifest = run.manifest
    return write_ticket(
        Ticket(
            run=run.origin,
            coordinator=public_key_of(manifest.author),
            seeds=seeds,
            protocol=manifest.protocol,
            name=manifest.config.name,
        )
    )


def _steady(living: Sequence[str], before: Sequence[str]) -> list[str]:
    """Whom to name: who lives and was named before, then others that live, then who was named and is gone."""
    stay = [address for address in before if address in living]
    peers = set(map(peer_at, living))  # of one that moved, the new address alone
    gone = [address for address in before if peer_at(address) not in peers]
    return list(dict.fromkeys([*stay, *living, *gone]))[:VOLUNTEERS_MAX]
