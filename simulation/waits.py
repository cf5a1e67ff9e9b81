"""Waits that nothing ends: whether a swarm stands still, and who waits for whom when it does.

Rule 1: after the faults a run moves when a module gets a version, in a head or in the archive, or when a program comes
to its end. Receipts, claims and calls are no movement: a swarm can exchange them for ever.
Rule 2: the longest that the protocol lets a swarm rest is a sum of its own waits; beyond that, nothing will end it.
"""

from __future__ import annotations

from collections.abc import Iterator

from dipaco_p2p.config import RunConfig
from dipaco_p2p.protocol.rounds import PATIENCE
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId, PathId

from .actors import Environment
from .history import Look
from .observe import claims, heads

TTLS = 8.0
"""Lives of a heartbeat until the dead are replaced, their claims and their terms have lapsed."""
QUIET_S = 30.0
"""How long a coordinator that was away waits for the last groups before it grants a module to others."""
OWN_S = 15.0
"""Inner steps and calls, a few of which may take their whole time."""


def longest_rest_s(config: RunConfig) -> float:
    """Seconds that a swarm without faults may rest: a claim that does no work is waited for by those who stand by, by
    those who join it, and by a leader without a quorum, for each wave of paths."""
    paths = config.model.path_count
    deadlines = 2 + max(PATIENCE, paths)
    return deadlines * config.rounds.deadline_s + TTLS * config.liveness.heartbeat_ttl_s + QUIET_S + OWN_S


class Movement:
    """When a swarm last moved."""

    def __init__(self, now_s: float) -> None:
        self._seen: object = None
        self._since_s = now_s

    def rested_s(self, look: Look, done: frozenset[str]) -> float:
        """For how long nothing has moved, now that `look` was seen and the programs of `done` have ended."""
        seen = dict(look.versions), dict(look.archived), done
        if seen != self._seen:
            self._seen, self._since_s = seen, look.t_s
        return look.t_s - self._since_s


def told_waits(world: Environment) -> Iterator[str]:
    """Both sides of every wait of a swarm that stands still: the modules that lack versions, with their leaders and who
    claims their paths; and what each program says that it waits for, and waits in."""
    names = {machine.peer: machine.name for machine in world.machines}
    for module in world.run.topology.modules():
        yield from _of_module(world, module, names)
    for machine in world.volunteers:
        if machine.is_up and not machine.is_done:
            said = [event for event in world.events if event.who == machine.name and event.ev == "doing"]
            doing = said[-1].facts if said else {"doing": "joining", "waits_for": ""}
            yield f"{machine.name} is {doing['doing']}, waits for {doing['waits_for'] or '-'} in {machine.where()}"


def _of_module(world: Environment, module: ModuleId, names: dict[PeerId, str]) -> Iterator[str]:
    found = heads(world, module)
    leading = {names.get(peer, "a stranger"): head for peer, head in found.items() if not head.resigned}
    version = max((head.version for head in leading.values()), default=0)
    if version < world.plan.config.rounds.rounds:
        leaders = ", ".join(f"{name} at version {head.version}" for name, head in leading.items()) or "nobody"
        paths = "; ".join(_of_path(world, path, names) for path in world.run.topology.paths_through(module))
        yield f"{module}, led by {leaders}, waits for work of {paths}"


def _of_path(world: Environment, path: PathId, names: dict[PeerId, str]) -> str:
    found = claims(world, path)
    claimants = [names.get(peer, "a stranger") for peer, claim in found.items() if not claim.released]
    return f"{path}, claimed by {', '.join(claimants) or 'nobody'}"
