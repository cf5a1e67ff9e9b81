"""`--help` and a wrong flag answer without the heavy imports, which would cost seconds; no time is measured here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from heavy_imports import HEAVY, REPO, probe

# In one process: a command that imports something heavy is the first after which it is there.
EVERY_HELP = f"""
import importlib, sys, typer
def main():
    root = typer.main.get_command(importlib.import_module(sys.argv[1]).app)
    def walk(words, node):
        print("help of", *words)
        root.main([*words, "--help"], prog_name="program", standalone_mode=False)
        heavy = [name for name in {HEAVY} if name in sys.modules]
        assert not heavy, f"{{words}}: {{heavy}}"
        for name, inner in getattr(node, "commands", {{}}).items():
            walk([*words, name], inner)
    walk([], root)
"""

NETWORK = """
import sys
def main():
    import dipaco_p2p.swarm.hivemind.libp2p
    rest = [name for name in ("hivemind.averaging", "hivemind.moe", "hivemind.optim", "scipy") if name in sys.modules]
    assert not rest, rest
"""


@pytest.mark.parametrize("program", ["peers.cli", "bootstrap.cli"])
def test_the_help_of_every_command_imports_nothing_heavy(program: str, tmp_path: Path) -> None:
    (tmp_path / "every_help.py").write_text(EVERY_HELP)
    result, heavy = probe("every_help", program, path=f"{tmp_path}{os.pathsep}{REPO}")
    assert (result.returncode, heavy) == (0, []), result.stdout + result.stderr
    assert result.stdout.count("Usage:") == result.stdout.count("help of") > 2


def test_asking_a_volunteer_imports_nothing_heavy(tmp_path: Path) -> None:
    result, heavy = probe("peers.cli", "status", "--home", str(tmp_path))
    assert (result.returncode, heavy) == (3, []), result.stderr


@pytest.mark.parametrize("program", ["peers.cli", "bootstrap.cli"])
def test_a_wrong_flag_is_refused_without_heavy_imports(program: str) -> None:
    result, heavy = probe(program, "--no-such-flag")
    assert (result.returncode, heavy) == (2, []), result.stderr


def test_the_network_imports_no_more_of_hivemind_than_it_needs(tmp_path: Path) -> None:
    (tmp_path / "network.py").write_text(NETWORK)
    result, _ = probe("network", path=f"{tmp_path}{os.pathsep}{REPO}")
    assert result.returncode == 0, result.stderr


def test_the_probe_sees_a_heavy_import(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "slow_cli.py").write_text("import torch\ndef main(): print('Usage')")
    assert probe("slow_cli", "--help", path=tmp_path)[1] == ["torch"]
