"""Writes the generated parts of the documentation from the code, or with `--check` says which are stale.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a key of `BLOCKS`. Everything
else is written by hand and never touched. parts.py makes them from the code itself, so they cannot say otherwise.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from commands import command_line
from keys import ready_runs, run_keys
from parts import CODE, REPO, exit_codes, fields, limits, machine, refusals

from bootstrap.cli import app as bootstrap_app
from bootstrap.runfile import template
from dipaco_p2p.protocol import checks, decrees, documents, judgement, liveness, records
from dipaco_p2p.protocol.claims import CLAIM_TRANSITIONS
from dipaco_p2p.protocol.rounds import ROUND_TRANSITIONS
from peers.cli import app as peer_app
from peers.preferences.text import template as preferences

BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
LINE_CHARS_MAX = 118
NAME_CHARS = 24
TOP_FILES = ("Makefile", "pyproject.toml", "constraints.txt", "mkdocs.yml", "CONTRIBUTING.md", "deploy/", ".ci/run")

NOTES = {
    "Makefile": "demo, test, lint, types, docs; every target makes its environment",
    "pyproject.toml": "packages, dependencies with their reasons, tools",
    "constraints.txt": "the exact versions that the tests ran with, and how to choose a build of torch",
    "CONTRIBUTING.md": "set-up, where a change goes, tests, style, what we refuse",
    ".ci/run": "all checks, as CI runs them",
    "bootstrap/runs": "run files to start from",
    "leaderboard/web/static": "the style, the one script, the icon",
    "leaderboard/web/templates": "the pages",
    "deploy/": "for whoever runs a coordinator: a dashboard for Grafana, alerts for Prometheus",
    "docs/coordinator.md": "a coordinator's day: commands to look, metrics, alerts, logs",
    "docs/design.md": "what is built and why",
    "docs/experiment.md": "DiPaCo against its controls, and the paper's claims one by one",
    "docs/experiment/": "the plots of that page",
    "docs/volunteer.md": "preferences, schedule, limits and the service of a volunteer",
    "docs/simulation.md": "swarms under faults from seeds: what is simulated, checked, planted",
    "docs/churn.md": "swarms of processes that are killed: what is measured, how, and what came out",
    "docs/performance.md": "how fast, and how light on the line: what was measured, and how",
    "docs/leaderboard.md": "the public page: what its figures mean, how to serve, check and rebuild it; its API",
    "docs/lost_work.md": "what lost, late and missing contributions cost",
    "docs/log.md": "what was measured: figure, command, machine, date",
    "docs/protocol.md": "the wire, precisely enough for a second implementation",
    "docs/security.md": "what a hostile peer can try, what is checked where, what is not defended",
    "docs/reference.md": "commands, exit codes, the run file",
    "docs": "written by hand, with generated parts that are checked",
    "docs/site": "how the site is built: its order of pages, diagrams, style",
    "mkdocs.yml": "the site, `make site`",
    "tests": "a folder per layer; names state properties",
    "tests/core": "the method, against independent implementations",
    "tests/ground": "canonical bytes, topology, errors, strict reading",
    "tests/programs": "the two programs and their input",
    "tests/protocol": "the rules between peers",
    "tests/repo": "imports, style, help, docs, nothing left behind",
    "tests/runtime": "owners, archive, transfers, on the memory swarm",
    "tests/hostile": "attacks on real programs: each lives on, stays small, says why, and works on",
    "tests/leaderboard": "the public page: its tables, its pages, its API",
    "tests/e2e": "the programs as processes, as users start them",
    "tests/simulation": "many peers on the memory swarm",
    "tests/swarm": "one contract for both swarms",
    "benchmarks": "each one command that prints a table and writes JSON",
}
"""One line for what has no docstring of its own."""


def file_tree(root: Path = REPO) -> str:
    """The repository, with the first sentence of each file."""
    lines = [_entry(0, name, NOTES[name]) for name in TOP_FILES]
    for folder in (*CODE, "leaderboard", "benchmarks", "docs", "tests"):
        lines += ["", *_folder(root, root / folder, 0)]
    return "\n".join(["```text", *lines, "```"])


def _folder(root: Path, folder: Path, depth: int) -> Iterator[str]:
    own = folder / "__init__.py"
    relative = folder.relative_to(root).as_posix()
    yield _entry(depth, f"{folder.name}/", _docstring(own) if own.exists() else NOTES.get(relative, ""))
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        name = path.relative_to(root).as_posix()
        if path.is_dir() and any(path.rglob("*.py")) and name not in NOTES:
            yield from _folder(root, path, depth + 1)
        elif name in NOTES and (path.is_file() or any(path.iterdir())):
            yield _entry(depth + 1, path.name + ("/" if path.is_dir() else ""), NOTES[name])
        elif path.suffix == ".py" and path.name != "__init__.py":
            yield _entry(depth + 1, path.name, _docstring(path))
        elif path.suffix == ".md":
            yield _entry(depth + 1, path.name, _opening(path))


def _entry(depth: int, name: str, text: str) -> str:
    start = ("  " * depth + name).ljust(NAME_CHARS)
    return f"{start} {sentence(text, chars_max=LINE_CHARS_MAX - len(start))}".rstrip()


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _opening(path: Path) -> str:
    """What a page says first, below its heading."""
    text = re.sub(r"^# .*\n+", "", path.read_text(encoding="utf-8"))
    return re.sub(r"[*`]|\[|\]\([^)]*\)", "", text)


def sentence(text: str, *, chars_max: int) -> str:
    """The first sentence of a docstring, without its full stop; one that is too long is cut at a comma, or a word."""
    words = " ".join(text.split("\n\n")[0].split())
    first = re.split(r"(?<=[^.])\.(?:\s|$)|:$|;\s|: see ", words)[0]
    first = first[:1].upper() + first[1:]
    if len(first) <= chars_max:
        return first
    part = re.match(r".{30,}[,:](?=\s)", first[:chars_max])
    return part[0][:-1] if part else first[: chars_max - 1].rsplit(" ", 1)[0] + " …"


RECORDS = (records.Record, liveness.Heartbeat, liveness.Claim, liveness.Head)
DOCUMENTS = (
    documents.BlobRef,
    documents.Contribution,
    documents.Receipt,
    documents.ModuleVersion,
    documents.Share,
    judgement.Judgement,
    judgement.ModuleLoss,
    judgement.PathLoss,
    checks.Check,
    documents.Rejection,
    decrees.Decree,
    decrees.Rollback,
    documents.Manifest,
    documents.ShardRef,
    documents.GenesisRef,
)

BLOCKS: Mapping[str, Callable[[], str]] = {
    "claims-machine": lambda: machine(CLAIM_TRANSITIONS),
    "rounds-machine": lambda: machine(ROUND_TRANSITIONS),
    "refusals": refusals,
    "limits": limits,
    "records": lambda: fields(RECORDS),
    "documents": lambda: fields(DOCUMENTS),
    "grant": lambda: fields([documents.Grant]),
    "exit-codes": exit_codes,
    "peer-commands": lambda: command_line("dipaco-peer", peer_app),
    "bootstrap-commands": lambda: command_line("dipaco-bootstrap", bootstrap_app),
    "run-file": lambda: f"```toml\n{template('my-run').strip()}\n```",
    "run-keys": run_keys,
    "ready-runs": ready_runs,
    "preferences": lambda: f"```toml\n{preferences().strip()}\n```",
    "file-tree": file_tree,
}


# -- putting them in place


def fill(text: str, blocks: Mapping[str, Callable[[], str]] = BLOCKS) -> str:
    """`text` with every generated part made anew; raises KeyError for a part that nobody makes."""
    return BLOCK.sub(lambda found: f"{found[1]}{blocks[found[2]]()}\n{found[3]}", text)


def stale(text: str, blocks: Mapping[str, Callable[[], str]] = BLOCKS) -> list[str]:
    """The names of the generated parts that are not what they would be now."""
    return [found[2] for found in BLOCK.finditer(text) if found[0] != fill(found[0], blocks)]


def pages(root: Path = REPO) -> list[Path]:
    """The files that may have generated parts."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("usage: python docs/build.py [--check]", file=sys.stderr)
        return 2
    found = [(page, name) for page in pages() for name in stale(page.read_text(encoding="utf-8"))]
    for page, name in found:
        print(f"{page.relative_to(REPO)}: `{name}` is {'stale' if arguments else 'renewed'}")
    if arguments and found:
        print("run `python docs/build.py`", file=sys.stderr)
        return 1
    for page in dict.fromkeys(page for page, _ in found):
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
