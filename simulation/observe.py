"""What can be seen of a run while it goes on: the records and disks of all machines at once, every event of the
programs' histories, and what they log."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from dipaco_p2p.errors import DipacoError
from dipaco_p2p.owner.chain import ModuleChain
from dipaco_p2p.program.history import History
from dipaco_p2p.protocol.documents import Contribution, Sealed
from dipaco_p2p.protocol.liveness import Claim, Head, read_all
from dipaco_p2p.protocol.records import Record, claims_key, heads_key, newest
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId, PathId

from .actors import Environment, Machine
from .history import Look
from .virtual_time import WHO

OPEN, MANDATE, VERSION, SUFFIX = "open-", "mandate-", "version-", ".json"


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at all disks."""

    kept: dict[str, frozenset[str]] = field(default_factory=dict)
    """Ids of contributions, by machine."""
    terms: dict[tuple[str, str], int] = field(default_factory=dict)
    """The newest term, by machine and module."""
    archived: dict[str, int] = field(default_factory=dict)
    """The newest version of each module on the coordinator's disk."""


class DiskView:
    """Reads names again and again, and a mandate only when its file is another."""

    def __init__(self, world: Environment) -> None:
        self._world = world
        self._terms: dict[str, tuple[int, int]] = {}

    def sight(self) -> Sight:
        """How it is now."""
        sight = Sight()
        for machine in self._world.machines:
            names = self._documents(machine)
            sight.kept[machine.name] = frozenset(name.rpartition("-")[2] for name in names[OPEN])
            for module, entry in names[MANDATE].items():
                sight.terms[machine.name, module] = self._term(entry)
            if machine is self._world.seed:
                for name in names[VERSION]:
                    module, _, number = name.rpartition("-")
                    sight.archived[module] = max(sight.archived.get(module, 0), int(number))
        return sight

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
    sight = disks.sight()
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


def heads(world: Environment, module: ModuleId) -> dict[PeerId, Head]:
    """The newest head that each peer has announced of `module`, on any node."""
    return read_all(Head, _bodies(world, heads_key(world.run.id, module)))


def claims(world: Environment, path: PathId) -> dict[PeerId, Claim]:
    """The newest claim of each peer to `path`, on any node."""
    return read_all(Claim, _bodies(world, claims_key(world.run.id, path)))


def _bodies(world: Environment, key: str) -> dict[PeerId, dict[str, Any]]:
    records: list[Record] = []
    for node in world.network.nodes:
        records += node.records.live(key).values()
    return {peer: record.body for peer, record in newest(records).items()}


# -- what the programs say


@contextlib.contextmanager
def observed(world: Environment) -> Iterator[None]:
    add = History.add

    def noted(self: History, ev: str, **values: Any) -> None:
        world.observe(ev, values)
        add(self, ev, **values)

    with mock.patch.object(History, "add", noted), _confirmations(world):
        yield


@contextlib.contextmanager
def _confirmations(world: Environment) -> Iterator[None]:
    """Notes for whom a mirror keeps something, and who leads as far as it knows."""
    keep = ModuleChain.keep_contribution

    def noted(self: ModuleChain, sender: PeerId, sealed: Sealed[Contribution]) -> None:
        module = sealed.document.module
        grant = self.node.mandates.grant(module)
        keep(self, sender, sealed)
        world.observe(
            "confirmed", {"module": str(module), "id": sealed.id, "to": sender, "leader": grant and grant.leader}
        )

    with mock.patch.object(ModuleChain, "keep_contribution", noted):
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
