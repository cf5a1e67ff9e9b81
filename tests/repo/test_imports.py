"""The direction of imports, and what each layer may know of the world.

    cli -> peers | bootstrap -> owner | use -> node -> program -> swarm -> core | protocol -> ground

Read from the sources alone, so that an import in a function or under TYPE_CHECKING counts like any other.
`LAYERS` is the rule: widening it is a decision about the design (docs/design.md), not a way to make this pass.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PACKAGES = ("dipaco_p2p", "peers", "bootstrap", "leaderboard", "simulation")
EVERYWHERE = (*PACKAGES, "benchmarks", "tests", "docs")

IO = frozenset(
    {"asyncio", "http", "multiprocessing", "selectors", "socket", "ssl", "subprocess", "threading", "urllib"}
)
CHANCE_AND_TIME = frozenset({"secrets", "time", "uuid"})
PROGRAM = frozenset(
    {
        "bitsandbytes",
        "cryptography",
        "datasets",
        "numpy",
        "platformdirs",
        "rich",
        "safetensors",
        "tokenizers",
        "torch",
        "typer",
    }
)
# Formats that run code when they are read. A peer's bytes must never reach one, so they are nowhere.
RUNS_CODE = frozenset({"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What the modules of one layer may import besides the standard library and each other."""

    below: frozenset[str] = frozenset()
    libraries: frozenset[str] = frozenset()
    not_stdlib: frozenset[str] = frozenset()
    has_clock: bool = True


LAYERS = {
    "ground": Layer(),
    "core": Layer(
        below=frozenset({"ground"}),
        libraries=frozenset({"bitsandbytes", "numpy", "torch"}),
        not_stdlib=IO,
        has_clock=False,
    ),
    "protocol": Layer(
        below=frozenset({"ground"}),
        libraries=frozenset({"cryptography"}),
        not_stdlib=IO | CHANCE_AND_TIME,
        has_clock=False,
    ),
    "swarm": Layer(below=frozenset({"ground", "core", "protocol"}), libraries=frozenset({"cryptography", "numpy"})),
    # One process of ours: it knows files, tasks and the console, and nothing of a run.
    "program": Layer(below=frozenset({"ground", "protocol"}), libraries=frozenset({"cryptography"})),
    "node": Layer(
        below=frozenset({"ground", "core", "protocol", "swarm", "program"}),
        libraries=frozenset({"cryptography", "numpy", "torch"}),
    ),
    "owner": Layer(
        below=frozenset({"ground", "core", "protocol", "swarm", "program", "node"}), libraries=frozenset({"numpy"})
    ),
    # A run as it is read for use, by both programs.
    "use": Layer(
        below=frozenset({"ground", "core", "protocol", "swarm", "program", "node"}),
        libraries=frozenset({"numpy", "tokenizers", "torch"}),
    ),
    "peers": Layer(
        below=frozenset({"ground", "core", "protocol", "swarm", "program", "node", "owner", "use"}), libraries=PROGRAM
    ),
    # It reads what peers say and shows it: nothing that trains, and no key.
    "leaderboard": Layer(
        below=frozenset({"ground", "protocol", "swarm", "program", "node", "owner"}),
        libraries=frozenset({"jinja2", "markupsafe", "segno", "starlette", "typer", "uvicorn"}),
    ),
    "bootstrap": Layer(
        below=frozenset({"ground", "core", "protocol", "swarm", "program", "node", "owner", "use", "leaderboard"}),
        libraries=PROGRAM,
    ),
    # It plays both programs at once, which do not know each other; nothing imports it but tests and benchmarks.
    "simulation": Layer(
        below=frozenset(
            {"ground", "core", "protocol", "swarm", "program", "node", "owner", "use", "peers", "bootstrap"}
        ),
        libraries=frozenset({"numpy"}),
    ),
}
# Files and folders that may use a library which their layer may not.
ALSO = {
    "bootstrap/use/gguf_file.py": frozenset({"gguf"}),
    "bootstrap/use/hub.py": frozenset({"huggingface_hub"}),
    "dipaco_p2p/swarm/hivemind/": frozenset({"hivemind"}),
    "dipaco_p2p/swarm/hivemind/circuits.py": frozenset({"google"}),
    "dipaco_p2p/swarm/hivemind/libp2p.py": frozenset({"torch"}),
    "dipaco_p2p/program/control/show.py": frozenset({"rich"}),
    "dipaco_p2p/program/control/options.py": frozenset({"typer"}),
    "dipaco_p2p/program/curves.py": frozenset({"tensorboardX", "wandb"}),
    "dipaco_p2p/program/metrics.py": frozenset({"prometheus_client"}),
    "dipaco_p2p/program/web.py": frozenset({"starlette", "uvicorn"}),
    "peers/governor/nvml.py": frozenset({"pynvml"}),
    "peers/serving/api.py": frozenset({"starlette"}),
}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Violation:
    file: str
    line: int
    what: str
    rule: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}: {self.rule}"


def violations(root: Path) -> list[Violation]:
    """Everything under `root` that breaks a rule of imports, in the order of files and lines."""
    found: set[Violation] = set()
    for folder in EVERYWHERE:
        for path in sorted((root / folder).rglob("*.py")):
            file, tree = path.relative_to(root).as_posix(), ast.parse(path.read_text(encoding="utf-8"))
            for line, what, rule in problems(file, tree):
                found.add(Violation(file=file, line=line, what=what, rule=rule))
    return sorted(found)


def problems(file: str, tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    for line, target in imports(file, tree):
        for rule in broken_by_anyone(target):
            yield line, f"imports {target}", rule
        if file.startswith(tuple(f"{package}/" for package in PACKAGES)):
            for rule in broken_by_layer(file, target):
                yield line, f"imports {target}", rule
    yield from bad_uses(file, tree)


def imports(file: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of each import; `from a import b` is `a.b`, whatever b is."""
    package = list(Path(file).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in {"importlib.import_module", "import_module", "__import__"}:
            # A name made at run time cannot be checked here; nothing in this project needs one.
            named = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else "?"
            yield node.lineno, str(named)


def broken_by_anyone(target: str) -> Iterator[str]:
    if top(target) in RUNS_CODE or target in {"torch.load", "torch.save"}:
        yield "no format that can run code when it is read; tensors travel as safetensors, values as canonical JSON"


def broken_by_layer(file: str, target: str) -> Iterator[str]:
    name = layer_of(file.removesuffix(".py").replace("/", "."))
    layer, library = LAYERS.get(name), top(target)
    if layer is None:
        yield f"`{name}` is no layer; the layers are {', '.join(LAYERS)}"
    elif library in PACKAGES:
        yield from broken_direction(name, layer, target)
    elif library in sys.stdlib_module_names:
        if library in layer.not_stdlib:
            yield f"{name} is pure: {library} belongs to a layer above, and comes in as an argument"
    elif library not in layer.libraries.union(*(also for place, also in ALSO.items() if file.startswith(place))):
        yield library_rule(name, layer, library)


def broken_direction(name: str, layer: Layer, target: str) -> Iterator[str]:
    other = layer_of(target)
    if any(is_within(target, f"{program}.cli") for program in ("peers", "bootstrap")):
        yield "nothing imports a command line; what others need belongs into the program beside it"
    elif {name, other} == {"peers", "bootstrap"}:
        yield "peers and bootstrap never import each other; what both need belongs into dipaco_p2p/"
    elif {name, other} == {"core", "protocol"}:
        yield "core and protocol do not know each other"
    elif other != name and other not in layer.below:
        below = ", ".join(sorted(layer.below)) or "nothing else of the project"
        yield f"imports point down only; {name} may import {below}"
    elif not layer.has_clock and is_within(target, "dipaco_p2p.clock"):
        yield f"{name} has no clock; time is an argument, in seconds"


def library_rule(name: str, layer: Layer, library: str) -> str:
    if library == "hivemind":
        return f"only {', '.join(place for place, also in ALSO.items() if library in also)} may import hivemind"
    if library in {"rich", "typer"}:
        return "only the programs talk to people: no typer and no rich in dipaco_p2p/, but in program/control/"
    return (
        f"{name} may import the standard library" + "".join(f", {each}" for each in sorted(layer.libraries)) + " only"
    )


def bad_uses(file: str, tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """What a plain import statement does not show."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node) in {"torch.load", "torch.save"}:
            yield node.lineno, f"uses {dotted(node)}", "it pickles; tensors travel as safetensors"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and dotted(node.value) != "False":
            yield node.value.lineno, "uses allow_pickle", "no format that can run code when it is read"
        if file.startswith("dipaco_p2p/protocol/") and (use := global_random(node)):
            yield node.lineno, f"uses {use}", "protocol takes randomness as an argument: a random.Random"


def global_random(node: ast.AST) -> str:
    """The use of the module's hidden generator that `node` is, or nothing."""
    if isinstance(node, ast.Attribute) and dotted(node).startswith("random.") and dotted(node) != "random.Random":
        return dotted(node)
    if isinstance(node, ast.ImportFrom) and node.module == "random":
        return "".join(f"random.{alias.name}" for alias in node.names if alias.name != "Random")
    return ""


def layer_of(dotted_name: str) -> str:
    """The layer of a module of the project: a file directly in dipaco_p2p/ is ground."""
    parts = dotted_name.split(".")
    if parts[0] != "dipaco_p2p":
        return parts[0]
    if len(parts) > 1 and parts[1] in LAYERS:
        return parts[1]
    # `dipaco_p2p.errors.ConfigError` is in a file of the ground, `dipaco_p2p.new.thing` in a folder that no rule knows.
    return parts[1] if len(parts) > 2 and not (REPO / "dipaco_p2p" / f"{parts[1]}.py").exists() else "ground"


def top(name: str) -> str:
    return name.partition(".")[0]


def is_within(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")


def called(node: ast.Call) -> str:
    return dotted(node.func)


def dotted(node: ast.AST) -> str:
    """`a.b.c` as it is written, or nothing for an expression of another form."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Constant):
        return repr(node.value)
    return node.id if isinstance(node, ast.Name) else ""


def test_imports_point_down_only() -> None:
    assert not (found := violations(REPO)), "\n" + "\n".join(map(str, found))


def test_there_is_something_to_check() -> None:
    assert list((REPO / "dipaco_p2p").rglob("*.py"))


@pytest.mark.parametrize(
    ("file", "source", "rule"),
    [
        ("dipaco_p2p/topology.py", "import numpy", "ground may import the standard library only"),
        ("dipaco_p2p/config.py", "from .core import model", "imports point down only"),
        ("dipaco_p2p/core/outer/outer_step.py", "import asyncio", "core is pure"),
        (
            "dipaco_p2p/core/outer/outer_step.py",
            "from ...protocol import messages",
            "core and protocol do not know each other",
        ),
        ("dipaco_p2p/core/outer/outer_step.py", "from safetensors import safe_open", "core may import"),
        ("dipaco_p2p/protocol/rounds.py", "def f():\n    import torch", "protocol may import"),
        ("dipaco_p2p/protocol/rounds.py", "from time import time", "protocol is pure"),
        ("dipaco_p2p/protocol/rounds.py", "from ..clock import Clock", "protocol has no clock"),
        ("dipaco_p2p/protocol/rounds.py", "import random\nrandom.choice([1])", "randomness as an argument"),
        ("dipaco_p2p/protocol/rounds.py", "from random import choice", "randomness as an argument"),
        ("dipaco_p2p/protocol/rounds.py", "from dipaco_p2p import core", "core and protocol do not know each other"),
        ("dipaco_p2p/swarm/memory.py", "import hivemind", "only dipaco_p2p/swarm/hivemind/ may import hivemind"),
        ("dipaco_p2p/swarm/api.py", "from ..node import store", "imports point down only"),
        ("dipaco_p2p/node/watch.py", "import rich.table", "only the programs talk to people"),
        ("dipaco_p2p/node/watch.py", "from peers.owner import Owner", "imports point down only"),
        ("peers/path/trainer.py", "from hivemind.p2p import P2P", "may import hivemind"),
        ("peers/path/trainer.py", "import bootstrap.text.corpus", "peers and bootstrap never import each other"),
        (
            "peers/path/trainer.py",
            "import importlib\nimportlib.import_module('bootstrap.text.corpus')",
            "never import each other",
        ),
        ("peers/volunteer.py", "from .cli import main", "nothing imports a command line"),
        ("bootstrap/demo.py", "from peers import cli", "nothing imports a command line"),
        ("bootstrap/text/corpus.py", "import requests", "bootstrap may import"),
        ("peers/data.py", "import torch\ntorch.load('x')", "tensors travel as safetensors"),
        ("benchmarks/push.py", "import pickle", "no format that can run code"),
        ("tests/core/test_x.py", "import numpy as np\nnp.load('x', allow_pickle=True)", "no format that can run code"),
        ("dipaco_p2p/extra/thing.py", "import json", "`extra` is no layer"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, source: str, rule: str) -> None:
    plant(tmp_path, file, source)
    [found] = violations(tmp_path)
    assert (found.file, found.line) == (file, len(source.splitlines()))
    assert rule in str(found)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("dipaco_p2p/clock.py", "import asyncio, time\nfrom .errors import ConfigError"),
        (
            "dipaco_p2p/core/model/transformer.py",
            "import torch.nn.functional as F\nfrom ...config import RunConfig\nfrom .layout import Layout",
        ),
        (
            "dipaco_p2p/protocol/rounds.py",
            "import random\ndef draw(chance: random.Random) -> float:\n    return chance.random()",
        ),
        ("dipaco_p2p/swarm/hivemind/libp2p.py", "from hivemind.p2p import P2P\nfrom ..protocol.records import Record"),
        ("peers/cli.py", "import typer\nfrom . import volunteer\nfrom dipaco_p2p.node.store import Store"),
    ],
)
def test_what_the_rules_allow_is_not_reported(tmp_path: Path, file: str, source: str) -> None:
    plant(tmp_path, file, source)
    assert violations(tmp_path) == []


def plant(root: Path, file: str, source: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True)
    path.write_text(source)


def test_no_files_import_each_other_in_a_circle() -> None:
    assert not (found := list(circles(REPO))), "\n" + "\n".join(" <-> ".join(circle) for circle in found)


def test_a_planted_circle_is_found(tmp_path: Path) -> None:
    for file, source in {
        "peers/__init__.py": "",
        "peers/a.py": "from . import b",
        "peers/b.py": "from .c import name",
        "peers/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from peers.a import thing",
        "peers/d.py": "from . import a",
    }.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert list(circles(tmp_path)) == [["peers.a", "peers.b", "peers.c"]]


def circles(root: Path) -> Iterator[list[str]]:
    """The files of each package that import each other, directly or by way of others, by their dotted names."""
    targets: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            file = path.relative_to(root).as_posix()
            found = {target for _, target in imports(file, ast.parse(path.read_text(encoding="utf-8")))}
            targets[file.removesuffix(".py").replace("/", ".")] = found
    known = {
        name: {module for target in found for module in (target, target.rpartition(".")[0]) if module in targets}
        - {name}
        for name, found in targets.items()
    }
    while gone := [name for name, needed in known.items() if not needed]:
        known = {name: needed - set(gone) for name, needed in known.items() if name not in gone}
    reached = {name: reachable(name, known) for name in known}
    groups = {tuple(sorted(each for each in reached[name] if name in reached[each])) for name in known}
    yield from sorted(list(group) for group in groups if group)


def reachable(name: str, known: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for each in known[waiting.pop()] - found:
            found.add(each)
            waiting.append(each)
    return found
