"""From an entry to an open swarm of the right run: whoever opens first, and whether others can reach this machine.

A machine that nobody can dial goes on as a client by itself: it trains, and leads no module. So it announces nothing
that others would try in vain. The peers met last time are a way back into a run whose seed nodes are all away:

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
from dipaco_p2p.node.entry import Entry
from dipaco_p2p.program.files import write_atomically
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.addresses import is_address, read_address, read_place
from dipaco_p2p.swarm.blobs.bandwidth import Line
from dipaco_p2p.swarm.dialback import Reach, ask_reach
from dipaco_p2p.swarm.hivemind.libp2p import Libp2pSwarm, open_libp2p
from dipaco_p2p.swarm.identity import KEY_NAME

from ..config import PeerConfig

log = logging.getLogger(__name__)

RUNS_MAX = 8
ADDRESSES_MAX = 16


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
        return entry["run"], others[:ADDRESSES_MAX]

    def remember(self, key: str, *, run: str, addresses: Sequence[str]) -> None:
        """Who is there now; the runs that were joined longest ago make room."""
        before = self._read()
        known = dict([item for item in before.items() if item[0] != key][-(RUNS_MAX - 1) :])
        entry = {"run": run, "addresses": list(addresses[:ADDRESSES_MAX])}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Where joining has led to."""

    swarm: Libp2pSwarm
    opened: Opened
    reach: Reach


async def arrive(entry: Entry, config: PeerConfig, friends: KnownPeers, *, tell: Callable[[str], None]) -> Arrival:
    """Open the swarm and knock; `tell` is told in one line if nobody can reach us. Raises as `open_libp2p`, `knock`."""
    is_listening = config.is_listening
    while True:
        swarm = await open_swarm(config, is_listening=is_listening)
        try:
            run, others = friends.of(entry.key)
            opened = await knock(
                swarm, doors(entry, friends=others, known_run=run), SystemClock(), enter=entering(swarm)
            )
            reach = await ask_reach(swarm, witnesses(opened, entry))
        except BaseException as error:
            await swarm.close()
            if is_listening and isinstance(error, EnvironmentUnfit) and "dial this machine back" in str(error):
                is_listening = _say_client(tell, swarm)
                continue
            raise
        if not is_listening or reach is not Reach.NO:
            return Arrival(swarm=swarm, opened=opened, reach=reach)
        is_listening = _say_client(tell, swarm)
        await swarm.close()


async def open_swarm(config: PeerConfig, *, is_listening: bool) -> Libp2pSwarm:
    """This volunteer's place in the network, in nobody's DHT yet; raises as `open_libp2p`."""
    return await open_libp2p(
        config.home / KEY_NAME,
        listen=config.listen,
        client_mode=not is_listening,
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


def unreachable_line(addresses: Sequence[str]) -> str:
    """What a volunteer reads that nobody can dial."""
    _, port = read_place(read_address(addresses[0]).place)
    return (
        f"nobody can reach this machine from outside (port {port}): it goes on as a client, and trains without leading"
        " a module; to lead, open a TCP port and name it with --listen /ip4/0.0.0.0/tcp/PORT"
    )


def _say_client(tell: Callable[[str], None], swarm: Libp2pSwarm) -> bool:
    tell(unreachable_line(swarm.addresses))
    return False
