"""What a volunteer's screen says: events in words, and how it ends."""

from __future__ import annotations

import asyncio
import io
import re

import pytest
from rich.console import Console

from dipaco_p2p.clock import ManualClock
from dipaco_p2p.program.history import History
from peers.display import closing, panel, show, words_for
from peers.status import Status


@pytest.mark.parametrize(
    ("stage", "words"),
    [("warmup", "left: the warm-up is complete"), ("grid", "left: the run is complete")],
)
def test_the_end_of_the_warm_up_is_not_told_as_that_of_the_run(stage: str, words: str) -> None:
    assert words_for({"ev": "left", "complete": True, "stage": stage, "receipts": 2}) == words
    assert words_for({"ev": "left", "complete": False, "stage": stage, "receipts": 2}) == "left"
    told = closing(Status(receipts=2, is_complete=True, is_last_stage=stage == "grid"))
    assert told == ("Thank you: 2 receipts in this run. The run is complete." if stage == "grid" else "")


def test_of_a_program_that_did_not_say_which_stage_ended_no_more_is_told_than_that() -> None:
    assert words_for({"ev": "left", "complete": True}) == "left: the stage is complete"


def test_who_leaves_before_the_end_is_told_how_to_go_on() -> None:
    for is_last_stage in (True, False):
        said = closing(Status(receipts=2, is_last_stage=is_last_stage))
        assert "Thank you: 2 receipts in this run." in said and "goes on where this one stopped" in said


RECEIPT = {"module": "L0.M0", "base": 7, "id": "abcdef0123"}
ROUND = {"round": 3, "path": "P0-1", "loss": 2.5, "seconds": 4.0, "is_cut": False}
LASTING = [
    ("round", ROUND | {"captured": 0.31}, "round 3 of P0-1 done: loss 2.500, 4.0 s, sent 31% of its work"),
    ("round", ROUND | {"captured": 0.99}, "round 3 of P0-1 done: loss 2.500, 4.0 s\n"),
    ("receipt", RECEIPT, "receipt for L0.M0 from version 7: abcdef01"),
    ("refused", {"module": "L0.M0", "reason": "norm", "detail": "too long"}, "refused: L0.M0: norm: too long"),
    ("stalled", {"path": "P0-1", "silent_s": 60.0}, "no progress for 60 s: P0-1 is given up until training resumes"),
    ("engine", {"detail": "float32, not compiled: as was asked for"}, "training in float32, not compiled"),
    ("claimed", {"path": "P1-0", "before": ""}, "claimed P1-0"),
    ("claimed", {"path": "P1-0", "before": "P0-1"}, "moved from P0-1 to P1-0"),
    ("joined", {"stage": "warmup"}, "takes part in the warm-up"),
    ("joined", {"stage": "grid"}, "takes part in the grid"),
]


def terminal(columns: int = 100) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=columns, color_system=None, legacy_windows=False), out


def written(out: io.StringIO) -> str:
    """In lines: what is written after a cursor movement begins one."""
    return re.sub(r"\r?(\x1b\[[0-9;?]*[a-zA-Z])+", "\n", out.getvalue())


async def shown(*events: tuple[str, dict[str, object]], columns: int = 100) -> str:
    """What a terminal was sent while these happened, with the panel there before the first of them."""
    console, out = terminal(columns)
    history = History(None, ManualClock())
    async with show(Status(run="run:0123abcd", peer="12D3KooWAbCdEf"), history, console=console):
        while "╯" not in out.getvalue():
            await asyncio.sleep(0)
        for ev, values in events:
            history.add(ev, **values)
    return written(out)


@pytest.mark.parametrize(("ev", "values", "words"), LASTING)
def test_what_happens_stands_above_the_panel_once(ev: str, values: dict[str, object], words: str) -> None:
    text = asyncio.run(shown((ev, values)))
    assert len(re.findall(rf"^\d\d:\d\d:\d\d {re.escape(words)}", text, flags=re.M)) == 1, text
    assert text.count("╭") > 1 and text.index(words) < text.rindex("╭"), "the panel is drawn again below it"


def test_what_the_panel_shows_anyhow_is_no_line() -> None:
    text = asyncio.run(shown(("doing", {"doing": "training", "waits_for": ""}), ("limited", {"detail": "one thread"})))
    assert "one thread" not in text and re.search(r"^\d\d:\d\d", text, flags=re.M) is None


def test_words_of_other_peers_move_no_cursor_and_are_no_markup() -> None:
    detail = "\x1b[2J[red]evil[/red]\nnext"
    text = asyncio.run(shown(("refused", {"module": "L0.M0", "reason": "norm", "detail": detail})))
    assert "refused: L0.M0: norm: ?[2J[red]evil[/red]?next" in text


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_panel_is_as_wide_as_the_terminal(columns: int) -> None:
    text = asyncio.run(shown(columns=columns))
    frames = [line for line in text.splitlines() if line.startswith(("╭", "│", "╰"))]
    assert frames and {len(line) for line in frames} == {columns - 2}, "but for the room that an echoed ^C needs"


def test_what_fits_beside_its_name_on_a_wide_terminal_is_one_line() -> None:
    status, (console, out) = Status(doing="waiting", waits_for="the next version of L0.M0, " * 5), terminal(200)
    console.print(panel(status, columns=console.width))
    assert any(status.waits_for.strip() in line for line in out.getvalue().splitlines())
