"""A run on the coordinator's disk: what belongs to the whole run, and a folder for each of its stages.

    <dir>/identity.key  address.json  tokenizer.json  sequences.safetensors
    <dir>/text-DIGEST.safetensors      the sequences that came with a growth
    <dir>/restored.json      the folder came out of a backup: until the coordinator knows what it signed after that
    <dir>/decrees/           what the coordinator decreed, a store
    <dir>/warmup/  <dir>/grid/  <dir>/grid-2/ and so on      a store each: manifest, chains, blobs; and what it tells

A stage is there when its manifest is: that is written last, so an interrupted preparation is simply done again.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import ConfigError, IntegrityError
from ..node.authority import Decrees
from ..node.ledger import DAMAGED_HINT
from ..node.run import Run, open_run
from ..node.store import Store
from ..protocol.documents import Sharding, unseal
from ..protocol.manifest import GRID as GRID
from ..protocol.manifest import STAGES
from ..protocol.manifest import WARMUP as WARMUP

MANIFEST = "manifest"
DECREES = "decrees"
"""The store of what the coordinator decreed, beside those of the stages."""


class RunFolder:
    """The folder that `start --dir` names."""

    def __init__(self, root: Path, *, is_read_only: bool = False) -> None:
        """Whoever only reads changes nothing there, and needs no lock: the coordinator may be at work."""
        self.root = root
        self._is_read_only = is_read_only
        self._stores: dict[str, Store] = {}

    def stage(self, name: str) -> Path:
        return self.root / name

    def has(self, name: str) -> bool:
        """Whether this stage is prepared."""
        return manifest_path(self.root, name).exists()

    def store(self, name: str) -> Store:
        """The store of a stage; one only, since opening a second would sweep away what the first is writing."""
        if name not in self._stores:
            self._stores[name] = Store(self.stage(name), is_read_only=self._is_read_only)
        return self._stores[name]

    def open(self, name: str) -> Run | None:
        """One stage with its shardings, and its growth if that is decreed; None if it is not prepared. Raises
        IntegrityError for damaged files."""
        run = open_stage(self.store(name)) if self.has(name) else None
        if run is not None:
            Decrees(run, self.store(name))  # of a second seed node, which keeps them with each stage
            if self.stage(DECREES).is_dir():
                Decrees(run, self.store(DECREES))
        return run

    @property
    def names(self) -> list[str]:
        """The stages that are prepared, the first one first."""
        return [name for name in STAGES if self.has(name)]

    def stages(self) -> list[Run]:
        """All of these; raises as `open`."""
        return [run for name in self.names if (run := self.open(name)) is not None]

    def newest(self) -> tuple[Run, Store] | None:
        """The stage that is open, and where it lies."""
        for name in reversed(self.names):
            run = self.open(name)
            if run is not None:
                return run, self.store(name)
        return None

    def require(self) -> tuple[Run, Store]:
        """As `newest`; raises ConfigError if no stage is prepared."""
        if not self.root.is_dir():
            raise ConfigError(f"`{self.root}` holds no run", hint="give the folder that `start --dir` was given")
        found = self.newest()
        if found is None:
            raise ConfigError(f"`{self.root}` holds no prepared run", hint="run `dipaco-bootstrap start` first")
        return found


def open_stage(store: Store) -> Run | None:
    """The stage that a store holds, with all its shardings."""
    data = store.read_document(MANIFEST)
    if data is None:
        return None
    try:
        run = open_run(json.loads(data))
        for name in store.documents("sharding-"):
            run.learn(unseal(Sharding, json.loads(store.read_document(name) or b"")))
    except (ValueError, IntegrityError) as error:
        message = f"{store.folder}: its manifest or a sharding was damaged on disk: {error}"
        raise IntegrityError(message, hint=DAMAGED_HINT) from None
    return run


def manifest_path(root: Path, stage: str) -> Path:
    """Where the manifest of a stage is, or would be."""
    return root / stage / "documents" / f"{MANIFEST}.json"
