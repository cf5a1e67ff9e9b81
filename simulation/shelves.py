"""What lies on the disks of all machines at one moment: what promises rest on, whoever runs and whoever is dead."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .actors import Machine
    from .world import World

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


class Shelves:
    """Reads names again and again, and a mandate only when its file is another."""

    def __init__(self, world: World) -> None:
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
