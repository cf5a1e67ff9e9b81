"""From an entry to an open swarm of the right run: whoever opens first, and whether others can reach this machine.

A machine that nobody can dial asks for slots at relays, and is dialled through these. Without any it goes on as a
client: it trains, and leads no module until a relay has a slot. So it announces nothing that others would try in vain.
The peers met last time are a way back into a run whose seed nodes are all away:

    acquaintances.json     {run of the ticket, or typed address: {"run": id of its first stage, "addresses": [...]}}

The run is remembered with them, and only that run is joined through them: trust begins at what was typed once. A ticket
also finds the peers that were met when the same run was joined by an address, or by an older ticket.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dipaco_p2p.clock import SystemClock
from dipaco_p2p.errors import EnvironmentUnfit
from dipaco_p2p.node.dial import Enter, Opened, doors, knock
from dipaco_p2p.node.doorplate import REMEMBERED_MAX
from dipaco_p2p.node.entry import Entry
from dipaco_p2p.program.files import write_atomically
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.addresses import is_address, read_address, read_place
from dipaco_p2p.swarm.blobs.bandwidth import Line
from dipaco_p2p.swarm.dialback import Reach, ask_reach
from dipaco_p2p.swarm.hivemind.libp2p import Libp2pSwarm, open_libp2p
from dipaco_p2p.swarm.identity import KEY_NAME
from dipaco_p2p.swarm.relay_slots import RelayLimits

from ..config import PeerConfig

log = logging.getLogger(__name__)

RUNS_MAX = 8


class KnownPeers:
    """What one home remembers; a damaged file is forgotten."""

    def __init__(self, home: Path) -> None:
        self._path = home / "acquaintances.json"

    def of(self, key: str) -> tuple[str | None, list[str]]:
        """The run that was joined by `key`, an address or a run, and who else was there; None and nobody at first."""
        known = self._read()
        entry = known.get(key) or next((one for one in known.values() if _run_of(one) == key), None)
        if not isinstance(entry, dict) or not isinstance(entry.get("run"), str):
            return None, []
        found = entry.get("addresses")
        others = [text for text in found if is_address(text)] if isinstance(found, list) else []
        return entry["run"], others[:REMEMBERED_MAX]

    def remember(self, key: str, *, run: str, addresses: Sequence[str]) -> None:
        """Who is there now; the runs that were joined longest ago make room."""
        before = self._read()
        known = dict([item for item in before.items() if item[0] != key][-(RUNS_MAX - 1) :])
        entry = {"run": run, "addresses": list(addresses[:REMEMBERED_MAX])}
        if before.get(key) == entry:
            return
        try:
            write_atomically(self._path, json.dumps({**known, key: entry}).encode())
        except EnvironmentUnfit as error:
            log.warning("who is in the run was not noted: %s", error)

    def _read(self) -> dict[str, object]:
        try:
            value = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}


def _run_of(entry: object) -> object:
    return entry.get("run") if isinstance(entry, dict) else None


WITNESSES_MAX = 3
"""Peers that are asked to dial us back."""
SLOT_S = 8.0
"""How long a start waits for a slot at a relay; it is looked for on and on afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Where joining has led to."""

    swarm: Libp2pSwarm
    opened: Opened
    reach: Reach


async def arrive(entry: Entry, config: PeerConfig, friends: KnownPeers, *, tell: Callable[[str], None]) -> Arrival:
    """Open the swarm and knock; `tell` is told in one line if nobody can dial us. Raises as `open_libp2p`, `knock`."""
    behind_nat, port = False, 0
    while True:
        swarm = await open_swarm(config, behind_nat=behind_nat)
        port = port or port_of(swarm)
        try:
            run, others = friends.of(entry.key)
            opened = await knock(
                swarm, doors(entry, friends=others, known_run=run), SystemClock(), enter=entering(swarm)
            )
            reach = await (find_relay if behind_nat else find_reach)(swarm, witnesses(opened, entry))
        except BaseException as error:
            await swarm.close()
            is_known = config.is_listening and not behind_nat and isinstance(error, EnvironmentUnfit)
            if is_known and "dial this machine back" in str(error):
                behind_nat = True
                continue
            raise
        if behind_nat:
            tell(nat_line(reach, port))
        elif config.is_listening and reach is Reach.NO:
            behind_nat = True
            await swarm.close()
            continue
        if config.relay and reach is Reach.YES:
            swarm.offer_relay(RelayLimits(mbit=config.relay_mbit))
        return Arrival(swarm=swarm, opened=opened, reach=reach)


async def open_swarm(config: PeerConfig, *, behind_nat: bool = False) -> Libp2pSwarm:
    """This volunteer's place in the network, in nobody's DHT yet; raises as `open_libp2p`."""
    return await open_libp2p(
        config.home / KEY_NAME,
        listen=config.listen,
        announce=[config.announce] if config.announce else (),
        client_mode=not config.is_listening,
        behind_nat=behind_nat,
        clock=SystemClock(),
        line=Line(up_mbit=config.up_mbit, down_mbit=config.down_mbit),
    )


def entering(swarm: Libp2pSwarm) -> Enter:
    """How `knock` joins the DHT through one address."""

    async def enter(address: str) -> None:
        await swarm.join({address: read_address(address)})

    return enter


def witnesses(opened: Opened, entry: Entry) -> list[tuple[PeerId, Sequence[str]]]:
    """Who is asked to dial us back: who opened, and other seeds."""
    found: dict[PeerId, Sequence[str]] = {opened.host: [opened.address]}
    for address in entry.addresses:
        found.setdefault(read_address(address).peer, [address])
    return list(found.items())[:WITNESSES_MAX]


async def find_reach(swarm: Libp2pSwarm, seen_by: Sequence[tuple[PeerId, Sequence[str]]]) -> Reach:
    """Whether these can dial us, and if so tell others of the place where they did."""
    reach, place = await ask_reach(swarm, seen_by)
    swarm.announce([place] if place else [])
    return reach


async def find_relay(swarm: Libp2pSwarm, relays: Sequence[tuple[PeerId, Sequence[str]]]) -> Reach:
    """Look for slots at these relays and others from now on: RELAYED if there is one soon, else NO."""
    assert swarm.reservations is not None
    swarm.reservations.begin(dict(relays))
    return Reach.RELAYED if await swarm.reservations.wait_reachable(SLOT_S) else Reach.NO


def port_of(swarm: Libp2pSwarm) -> int:
    """Where it listens; 0 if it does not."""
    return read_place(read_address(swarm.addresses[0]).place)[1] if swarm.addresses else 0


def nat_line(reach: Reach, port: int) -> str:
    """What a volunteer reads that nobody can dial directly."""
    better = "open a TCP port and name it with --listen /ip4/0.0.0.0/tcp/PORT"
    if reach is Reach.RELAYED:
        return (
            f"nobody can reach this machine from outside (port {port}): others dial it through a relay, or a hole that"
            f" both routers let through, and it may lead modules; to spare the relay, {better}"
        )
    return (
        f"nobody can reach this machine from outside (port {port}), and no relay has a slot for it: it goes on as a"
        f" client, and trains without leading a module until one has; to lead, {better}"
    )
