"""`--help` and a wrong flag answer without the heavy imports, which would cost seconds; no time is measured here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
HEAVY = ("torch", "hivemind", "numpy", "datasets", "tokenizers", "bitsandbytes")
# The last line of stderr lists what was imported, whichever way the command line ended.
PROBE = f"""
import atexit, importlib, sys
atexit.register(lambda: print("heavy:", *(name for name in {HEAVY} if name in sys.modules), file=sys.stderr))
sys.argv[0] = "program"
sys.exit(importlib.import_module(sys.argv.pop(1)).main())
"""


def probe(module: str, *arguments: str, path: Path = REPO) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run `main` of a module found at `path` with `arguments`; the outcome, and which heavy libraries it imported."""
    environment = {**os.environ, "PYTHONPATH": str(path), "COLUMNS": "120", "NO_COLOR": "1"}
    command = [sys.executable, "-c", PROBE, module, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    last_line = result.stderr.splitlines()[-1]
    assert last_line.startswith("heavy:"), result.stderr
    return result, last_line.split()[1:]


@pytest.mark.parametrize("arguments", [("peers.cli", "--help"), ("peers.cli", "join", "--help")], ids=" ".join)
def test_help_of_the_peer_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    answers_lightly(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("bootstrap.cli", "--help"),
        *(("bootstrap.cli", name, "--help") for name in ("start", "demo", "generate", "export")),
    ],
    ids=" ".join,
)
def test_help_of_the_bootstrap_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    answers_lightly(*arguments)


@pytest.mark.parametrize("program", ["peers.cli", "bootstrap.cli"])
def test_a_wrong_flag_is_refused_without_heavy_imports(program: str) -> None:
    result, heavy = probe(program, "--no-such-flag")
    assert (result.returncode, heavy) == (2, []), result.stderr


def test_the_probe_sees_a_heavy_import(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "slow_cli.py").write_text("import torch\ndef main(): print('Usage')")
    assert probe("slow_cli", "--help", path=tmp_path)[1] == ["torch"]


def answers_lightly(module: str, *arguments: str) -> None:
    result, heavy = probe(module, *arguments)
    assert (result.returncode, heavy) == (0, []), result.stderr
    assert "usage" in result.stdout.lower()
