"""From an entry to an open swarm of the right run: whoever opens first, and whether others can reach this machine.

A machine that nobody can dial goes on as a client by itself: it trains, and leads no module. So nothing is announced
that others would try in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dipaco_p2p.clock import SystemClock
from dipaco_p2p.errors import EnvironmentUnfit
from dipaco_p2p.node.dial import Enter, Opened, doors, knock
from dipaco_p2p.node.entry import Entry
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.addresses import read_address, read_place
from dipaco_p2p.swarm.blobs.bandwidth import Line
from dipaco_p2p.swarm.dialback import Reach, ask_reach
from dipaco_p2p.swarm.hivemind.libp2p import Libp2pSwarm, open_libp2p

from .acquaintances import Acquaintances
from .config import PeerConfig

TTL_MAX_S = 3600.0
"""Longest life of a record that this node keeps for others, before it knows the run's own."""
WITNESSES_MAX = 3
"""Peers that are asked to dial us back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Where joining has led to."""

    swarm: Libp2pSwarm
    opened: Opened
    reach: Reach
    is_unreachable: bool
    """Whether it listened, was found to be out of reach, and goes on as a client."""


async def arrive(entry: Entry, config: PeerConfig, friends: Acquaintances, *, tell: Callable[[str], None]) -> Arrival:
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
            is_unreachable = config.is_listening and not is_listening
            return Arrival(swarm=swarm, opened=opened, reach=reach, is_unreachable=is_unreachable)
        is_listening = _say_client(tell, swarm)
        await swarm.close()


async def open_swarm(config: PeerConfig, *, is_listening: bool) -> Libp2pSwarm:
    """This volunteer's place in the network, in nobody's DHT yet; raises as `open_libp2p`."""
    return await open_libp2p(
        config.home / "identity.key",
        listen=config.listen,
        client_mode=not is_listening,
        ttl_max_s=TTL_MAX_S,
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
        f"nobody can reach this machine from outside (port {port}): it goes on as a client, trains and leads no module;"
        " to lead, open a TCP port and name it with --listen /ip4/0.0.0.0/tcp/PORT"
    )


def _say_client(tell: Callable[[str], None], swarm: Libp2pSwarm) -> bool:
    tell(unreachable_line(swarm.addresses))
    return False
