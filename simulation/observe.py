"""What can be seen of a run while it goes on: the records and disks of all machines at once, whether it stands still,
every event of the programs' histories, and what they log."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import traceback
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest import mock

from dipaco_p2p.config import RunConfig
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.owner.chain import ModuleChain
from dipaco_p2p.owner.follower import Follower
from dipaco_p2p.program.history import History
from dipaco_p2p.protocol.documents import Contribution, ModuleVersion, Sealed
from dipaco_p2p.protocol.liveness import Claim, Head, read_all
from dipaco_p2p.protocol.neighbours import DEPTH_MAX, bits, place
from dipaco_p2p.protocol.records import Record, claims_key, heads_key, newest, peer_key, peers_key
from dipaco_p2p.protocol.rounds import PATIENCE
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId, PathId

from .actors import Environment, Machine
from .history import Look
from .virtual_time import WHO, VirtualClock

TTLS = 8.0
"""Lives of a heartbeat until the dead are replaced, their claims and their terms have lapsed."""
QUIET_S = 30.0
"""How long a coordinator that was away waits for the last groups before it grants a module to others."""
OWN_S = 15.0
"""Inner steps and calls, a few of which may take their whole time."""
SKEW_MAX_S = 25.0
"""More than the clocks of two machines ever differ."""
OPEN, MANDATE, VERSION, SUFFIX = "open-", "mandate-", "version-", ".json"


class DiskView:
    """Reads names again and again, and a mandate only when its file is another."""

    def __init__(self, world: Environment) -> None:
        self._world = world
        self._terms: dict[str, tuple[int, int]] = {}

    def sight(self) -> dict[str, Any]:
        """What a `Look` says of the disks."""
        kept, terms, archived = dict[str, frozenset[str]](), dict[tuple[str, str], int](), dict[str, int]()
        for machine in self._world.machines:
            names = self._documents(machine)
            kept[machine.name] = frozenset(name.rpartition("-")[2] for name in names[OPEN])
            for module, entry in names[MANDATE].items():
                terms[machine.name, module] = self._term(entry)
            if machine is self._world.seed:
                for name in names[VERSION]:
                    module, _, number = name.rpartition("-")
                    archived[module] = max(archived.get(module, 0), int(number))
        return {"kept": kept, "terms": terms, "archived": archived}

    def _term(self, entry: os.DirEntry[str]) -> int:
        known = self._terms.get(entry.path)
        if known is None or known[0] != entry.inode():
            known = self._terms[entry.path] = entry.inode(), _newest_term(entry.path)
        return known[1]

    def _documents(self, machine: Machine) -> dict[str, dict[str, os.DirEntry[str]]]:
        """By what they begin with, and how they go on."""
        found: dict[str, dict[str, os.DirEntry[str]]] = defaultdict(dict)
        folder = machine.folder if machine is self._world.seed else machine.folder / "runs" / self._world.run.id[:16]
        if (folder / "documents").is_dir():
            for entry in os.scandir(folder / "documents"):
                begin, _, rest = entry.name.removesuffix(SUFFIX).partition("-")
                if entry.name.endswith(SUFFIX):
                    found[f"{begin}-"][rest] = entry
        return found


def _newest_term(path: str) -> int:
    """0 if the file was damaged: its owner will not believe it either."""
    try:
        with open(path, "rb") as file:
            return int(json.loads(file.read())[-1]["document"]["term"])
    except (ValueError, LookupError, TypeError):
        return 0


def look(world: Environment, disks: DiskView) -> Look:
    """What can be seen now."""
    run = world.run
    present = {machine.peer: machine.name for machine in world.machines if machine.is_running}
    led, versions = set(), {}
    for module in run.topology.modules():
        live = {peer: head for peer, head in heads(world, module).items() if peer in present and not head.resigned}
        versions[str(module)] = max((head.version for head in live.values()), default=0)
        if live:
            led.add(str(module))
    claimed = set()
    for path in run.topology.paths():
        if any(peer in present and not claim.released for peer, claim in claims(world, path).items()):
            claimed.add(str(path))
    return Look(
        t_s=world.now_s,
        alive=frozenset(name for name in present.values() if name != world.seed.name),
        led=frozenset(led),
        claimed=frozenset(claimed),
        versions=versions,
        outlived=_outlived(world),
        hidden=_hidden(world) if world.plan.is_narrow else frozenset(),
        **disks.sight(),
    )


def heads(world: Environment, module: ModuleId) -> dict[PeerId, Head]:
    """The newest head that each peer has announced of `module`, on any node."""
    return read_all(Head, _bodies(world, heads_key(world.run.id, module)))


def claims(world: Environment, path: PathId) -> dict[PeerId, Claim]:
    """The newest claim of each peer to `path`, on any node."""
    return read_all(Claim, _bodies(world, claims_key(world.run.id, path)))


def _bodies(world: Environment, key: str) -> dict[PeerId, dict[str, Any]]:
    return {peer: record.body for peer, record in newest(_records(world, key)).items()}


def _records(world: Environment, key: str) -> list[Record]:
    return [record for node in world.network.nodes for record in node.records.live(key).values()]


def _outlived(world: Environment) -> frozenset[str]:
    """The keys under which somebody shows a record that has long expired, by the true time."""
    topology, run = world.run.topology, world.run.id
    keys = [peers_key(run), *(claims_key(run, path) for path in topology.paths())]
    keys += [heads_key(run, module) for module in topology.modules()]
    over_s = VirtualClock().now_s() - SKEW_MAX_S
    return frozenset(key for key in keys if any(record.expires_s < over_s for record in _records(world, key)))


def _hidden(world: Environment) -> frozenset[str]:
    """Who cannot be found: under none of the keys where it would be looked for has another machine its heartbeat."""
    run, known = world.run.id, set[PeerId]()
    for node in world.network.nodes:
        for depth in range(DEPTH_MAX + 1):
            known |= {
                peer for peer in node.records.live(peers_key(run, bits(place(node.peer), depth))) if peer != node.peer
            }
    hidden = set()
    for machine in world.volunteers:
        if machine.is_running and machine.peer not in known:
            key = peer_key(run, machine.peer)
            others = [node for node in world.network.nodes if node.peer != machine.peer]
            if not any(machine.peer in node.records.live(key) for node in others):
                hidden.add(machine.name)
    return frozenset(hidden)


# -- waits that nothing ends: whether a swarm stands still, and who waits for whom when it does.
#
# Rule 1: after the faults a run moves when a module gets a version, in a head or in the archive, or when a program
# comes to its end. Receipts, claims and calls are no movement: a swarm can exchange them for ever.
# Rule 2: the longest that the protocol lets a swarm rest is a sum of its own waits; beyond that, nothing will end it.


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


# -- what the programs say


@contextlib.contextmanager
def observed(world: Environment) -> Iterator[None]:
    """Notes all events of the programs' histories; for whom a mirror keeps something, and who leads as far as it knows;
    and where whoever comes late begins."""
    add, keep, begin_at = History.add, ModuleChain.keep_contribution, Follower._begin_at

    def added(self: History, ev: str, **values: Any) -> None:
        world.observe(ev, values)
        add(self, ev, **values)

    def kept(self: ModuleChain, sender: PeerId, sealed: Sealed[Contribution]) -> None:
        module = sealed.document.module
        grant = self.node.mandates.grant(module)
        keep(self, sender, sealed)
        facts = {"module": str(module), "id": sealed.id, "to": sender, "leader": grant and grant.leader}
        world.observe("confirmed", facts)

    def begun(self: Follower, checkpoint: ModuleVersion) -> None:
        facts = {"module": str(self.module), "version": checkpoint.version, "digest": checkpoint.digest}
        world.observe("begins late", facts)
        begin_at(self, checkpoint)

    with (
        mock.patch.object(History, "add", added),
        mock.patch.object(ModuleChain, "keep_contribution", kept),
        mock.patch.object(Follower, "_begin_at", begun),
    ):
        yield


class _Log(logging.Handler):
    """Finds exceptions that a program caught and logged, and that are no errors of the world around it."""

    def __init__(self, world: Environment, level: int) -> None:
        super().__init__(level)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        process = WHO.get()
        if self.level < logging.ERROR and process is not None and not process.is_dead:
            self._world.note(process.name, "log", text=record.getMessage())
        if error is not None and not isinstance(error, DipacoError) and process is not None and not process.is_dead:
            self._world.bugs.append(f"{process.name}: {record.getMessage()}: {error!r}")
            self._world.tracebacks.append("".join(traceback.format_exception(error)))


@contextlib.contextmanager
def logged(world: Environment, level: int) -> Iterator[None]:
    handler = _Log(world, level)
    loggers = [logging.getLogger(name) for name in ("dipaco_p2p", "peers", "bootstrap")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True
            logger.setLevel(logging.NOTSET)
