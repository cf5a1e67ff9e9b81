"""Commands that only read a run's folder: a coordinator may hold its lock and write there, and finds it as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from serving_harness import COORDINATOR, PROMPT, make_served, run_cli

from dipaco_p2p.errors import EnvironmentUnfit
from dipaco_p2p.node.doorplate import DOORPLATE, Doorplate, make_ticket
from dipaco_p2p.program.files import folder_lock
from dipaco_p2p.swarm.identity import KEY_NAME, write


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    served = make_served(tmp_path_factory.mktemp("beside") / "run")
    write(served.root / KEY_NAME, bytes([200]) * 32)
    ticket = make_ticket(served.run, [f"/ip4/127.0.0.1/tcp/31337/p2p/{COORDINATOR.peer}"])
    plate = Doorplate(run=served.run.origin, address="", peer=COORDINATOR.peer, ticket=ticket)
    (served.root / DOORPLATE).write_text(json.dumps(asdict(plate)))
    return served.root


@pytest.fixture
def locked(prepared: Path) -> Iterator[Path]:
    """The folder while its coordinator is at work, and in the middle of a write; nothing in it may change."""
    half = prepared / "grid" / "documents" / "open-L0.M0.json.1-1.tmp"
    with folder_lock(prepared, hint=""):
        half.write_bytes(b"the half of a document")
        before = contents(prepared)
        yield prepared
        assert contents(prepared) == before
        with pytest.raises(EnvironmentUnfit, match="in use"), folder_lock(prepared, hint=""):
            pass
    half.unlink()


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Every file and folder, when it was changed, and what is in it."""
    paths = sorted(folder.rglob("*"))
    return {path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in paths}


COMMANDS = {
    "generate": (0, "", ("generate", "DIR", PROMPT, "--max-tokens", "4")),
    "export": (0, "wrote P0-0-1 to ", ("export", "DIR", "--path", "P0-0-1", "--to", "OUT")),
    # The versions of this run were never made of contributions: that is said, and so all of them were read.
    "verify": (8, "5 of 5 chains do not verify", ("verify", "DIR")),
    "ticket": (0, "dipaco1", ("ticket", "DIR")),
    "decrees": (0, "nobody is banned, nothing is frozen", ("decrees", "DIR")),
    "decrees --json": (0, '"decrees": []', ("decrees", "DIR", "--json")),
    "backup": (0, "the coordinator's key is inside", ("backup", "DIR", "--to", "OUT")),
    "leaderboard export": (0, " versions to ", ("leaderboard", "export", "DIR", "OUT")),
    "leaderboard rebuild": (0, " versions to ", ("leaderboard", "rebuild", "DIR", "OUT")),
    # These ask the program itself, and none answers here.
    **{name: (3, "no coordinator runs", (name, "DIR")) for name in ("status", "peers", "paths", "modules")},
}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_only_reads_works_beside_a_coordinator_and_changes_nothing(
    locked: Path, tmp_path: Path, name: str
) -> None:
    code, words, command = COMMANDS[name]
    places = {"DIR": str(locked), "OUT": str(tmp_path / "out")}
    ended, out, err = run_cli(*(places.get(word, word) for word in command))
    assert ended == code, out + err
    assert words in out + err and "Traceback" not in err


def test_what_writes_is_still_kept_out(locked: Path) -> None:
    code, _, err = run_cli("freeze", str(locked), "--reason", "x")
    assert code == EnvironmentUnfit.exit_code and "in use" in err
