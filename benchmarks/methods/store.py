"""The files of an experiment's folder. Every one appears whole or not at all, so that a killed run goes on.

settings.json     what the experiment is of; another one needs another folder
data.npz          all sequences
results.jsonl     one line per finished task
warm/             the model that everything starts from, per seed and width, and features of all sequences
models/           the modules of each finished job
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dipaco_p2p.core.arrays import Array, Floats
from dipaco_p2p.core.routing.router import Router, decode_router, encode_router
from dipaco_p2p.errors import ConfigError

from .data import PARTS, save_arrays
from .grid import WarmStart
from .jobs import Job

Results = dict[tuple[str, str], dict[str, Any]]
"""By task kind and job key."""


@dataclass(frozen=True, slots=True)
class Folder:
    """Where an experiment lives."""

    root: Path

    def open(self, settings: Mapping[str, object]) -> None:
        """Make the folder, or go on with one of the same settings; raises ConfigError for another's."""
        path = self.root / "settings.json"
        if path.exists():
            if json.loads(path.read_text("utf-8")) != settings:
                raise ConfigError(f"`{self.root}` holds an experiment with other settings", hint="choose another --out")
            return
        for name in ("warm", "models"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=1) + "\n", "utf-8")

    @property
    def data(self) -> Path:
        return self.root / "data.npz"

    @property
    def results(self) -> Path:
        return self.root / "results.jsonl"

    def warm(self, seed: int, width: int) -> Path:
        return self.root / "warm" / f"seed{seed}-width{width}.npz"

    def model(self, job: Job) -> Path:
        return self.root / "models" / f"{job.key}.npz"

    def read_results(self) -> Results:
        """What is finished; a last line that was cut off by a kill counts as not written, and is removed."""
        if not self.results.exists():
            return {}
        text = self.results.read_text("utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.results.write_text(whole, "utf-8")
        lines = [json.loads(line) for line in whole.splitlines()]
        return {(line["kind"], line["key"]): line for line in lines}

    def append(self, line: Mapping[str, object]) -> None:
        """Add a finished task."""
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def save_warm(path: Path, start: WarmStart, features: Mapping[str, Floats]) -> None:
    """The warm-up's result, and the features (n, D) of each part's sequences."""
    tensors = {f"tensor.{name}": value for name, value in start.tensors.items()}
    routed = {f"features.{part}": value for part, value in features.items()}
    save_arrays(path, optimizer=np.frombuffer(start.optimizer, dtype=np.uint8), **tensors, **routed)


def load_warm(path: Path) -> tuple[WarmStart, dict[str, Floats]]:
    """The inverse of `save_warm`."""
    with np.load(path) as arrays:
        tensors = {name.removeprefix("tensor."): arrays[name] for name in arrays if name.startswith("tensor.")}
        features = {part: arrays[f"features.{part}"] for part in PARTS}
        return WarmStart(tensors=tensors, optimizer=arrays["optimizer"].tobytes()), features


def save_model(path: Path, paths: Sequence[Sequence[Floats]], choices: Array, router: Router | None) -> None:
    """The flat vectors of every path, its route for each sequence of the report split (n,), and the router."""
    flats = {f"path{number}.{level}": flat for number, path in enumerate(paths) for level, flat in enumerate(path)}
    data = b"" if router is None else encode_router(router)
    save_arrays(path, report=choices, router=np.frombuffer(data, dtype=np.uint8), **flats)


def load_model(path: Path, job: Job) -> tuple[list[list[Floats]], Array, Router | None]:
    """The inverse of `save_model`."""
    levels = range(len(job.model.levels))
    with np.load(path) as arrays:
        paths = [[arrays[f"path{number}.{level}"] for level in levels] for number in range(job.model.path_count)]
        data = arrays["router"].tobytes()
        return paths, arrays["report"], decode_router(data) if data else None
