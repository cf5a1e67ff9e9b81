"""The demo as a newcomer meets it: through the command line, with small figures, to its end or stopped on the way."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
from e2e_harness import Program, Programs, children_of, eventually, is_running, refused

pytestmark = [pytest.mark.libp2p, pytest.mark.slow]
ROUNDS = 2
"""So few that the warm-up is one round, too: at its end there is still much to learn from these few words."""
TABLE_COLUMNS_MAX = 100


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Paragraphs of four made-up languages, always the same; about 300 kB, enough for a vocabulary of 2048."""
    chance = random.Random(7)

    def word() -> str:
        return "".join(chance.choice("bcdfghklmnprstvw") + chance.choice("aeiou") for _ in range(chance.randint(1, 4)))

    languages = [[word() for _ in range(400)] for _ in range(4)]
    paragraphs = (" ".join(chance.choices(languages[number % 4], k=120)) for number in range(400))
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(paragraphs))
    return path


def demo(programs: Programs, text: Path, *more: str | Path) -> Program:
    """A demo of two paths, whose folder is `home`."""
    flags = {"--peers": "2", "--grid": "1x2", "--rounds": str(ROUNDS), "--steps": "4", "--corpus": str(text)}
    words = [word for flag in flags.items() for word in flag]
    home = programs.folder / "demo"
    return programs.start("dipaco-bootstrap", "demo", *words, "--dir", home, *more, home=home)


def family(pid: int) -> list[int]:
    """All descendants of `pid`."""
    return [found for child in children_of(pid) for found in (child, *family(child))]


def test_a_demo_kills_a_volunteer_keeps_its_promises_and_writes_them_down(programs: Programs, text: Path) -> None:
    result_file = programs.folder / "result.json"
    running = demo(programs, text, "--steps", "20", "--kills", "1", "--json", result_file)
    assert running.wait(200) == 0, running.said + running.complaint
    result = json.loads(result_file.read_text())
    assert result["chains_verified"] is True and result["receipts_lost"] == 0 and result["receipts"] > 0
    assert 1 < result["routed_perplexity"] < result["pretrained_perplexity"] < 2048
    assert 1 < result["dense_perplexity"] < result["pretrained_perplexity"]
    assert 0 < result["reassigned_after_s"] < 3 * result["heartbeat_ttl_s"]
    [kill] = result["kills"]
    assert kill["claimant"] != kill["victim"]
    for number in range(1, ROUNDS + 1):
        assert f"round {number} of {ROUNDS}: validation perplexity" in running.said
    tables = running.said[running.said.index("Module versions") :]
    assert max(map(len, tables.splitlines())) <= TABLE_COLUMNS_MAX
    assert "BROKEN" not in running.said and "Ctrl-C" not in running.said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_demo_that_is_stopped_ends_all_its_programs(programs: Programs, text: Path, number: signal.Signals) -> None:
    running = demo(programs, text)
    eventually(lambda: list(running.home.glob("volunteer-*/runs/*/history.jsonl")), within_s=90)
    members = family(running.process.pid)
    assert len(members) >= 4, "a coordinator and a volunteer at least, and their daemons"
    running.send(number)
    refused(running, 130, "the demo was stopped")
    eventually(lambda: not any(map(is_running, members)), within_s=40, what=lambda: f"{members}")


def test_a_demo_that_is_stopped_at_its_start_leaves_nothing(programs: Programs, text: Path) -> None:
    running = demo(programs, text)
    eventually(lambda: (running.home / "coordinator" / "lock").exists(), within_s=60)
    members = family(running.process.pid)
    running.send(signal.SIGTERM)
    assert running.wait() == 130 and "error: the demo was stopped" in running.complaint, running.complaint
    assert "Traceback" not in running.complaint
    eventually(lambda: not any(map(is_running, members)), within_s=40, what=lambda: f"{members}")


def test_a_demo_of_one_volunteer_trains_path_after_path(programs: Programs, text: Path) -> None:
    running = demo(programs, text, "--peers", "1", "--rounds", "1", "--kills", "0")
    assert running.wait(200) == 0, running.said + running.complaint


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kills", "3"), ("3 kills", f"{ROUNDS} rounds", "--rounds 4")),
        (("--grid", "9x9"), ("81 paths", "64")),
        (("--grid", "1x9999"), ("`1x9999`",)),
        (("--json", "nowhere/result.json"), ("`nowhere`", "--json")),
    ],
    ids=["kills", "paths", "modules", "json"],
)
def test_flags_that_do_not_go_together_are_refused(
    programs: Programs, text: Path, flags: tuple[str, str], words: tuple[str, ...]
) -> None:
    running = demo(programs, text, *flags)
    refused(running, 2, *words)
    assert not running.home.exists()
