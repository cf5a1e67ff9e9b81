"""A volunteer's terminal, recorded: `python -m benchmarks.recording` writes a cast, and a picture of one moment of it.

A coordinator and one volunteer of a small run are started on this machine, the volunteer on a terminal of its own. It
joins, compiles, has receipts, is paused and goes on, and ends with its run. The cast has the lines of the screen that
changed, twice a second; waiting is cut. It plays with `asciinema play docs/pictures/volunteer.cast`.
Format: https://docs.asciinema.org/manual/asciicast/v2/
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import pyte
import typer
from rich.console import Console
from rich.text import Text

from benchmarks.processes import REPO, end_with_parent
from benchmarks.report import run_benchmark
from bootstrap.demo import DemoConfig, run_text
from bootstrap.processes import command_of
from dipaco_p2p.errors import DipacoError

COLUMNS, LINES = 100, 30
FRAME_S, SETTLED_S = 0.5, 0.03
WAIT_MAX_S = 2.0
"""Longer pauses of the screen are cut to this."""
LIMIT_S = 400.0
START_S = 120.0
PAUSED_S = 4.0
NAME = "volunteer"
Frame = tuple[str, ...]
"""The lines of the screen, with their colours as escape sequences."""
COLOURS = {name: 30 + number for number, name in enumerate(
    ("black", "red", "green", "brown", "blue", "magenta", "cyan", "white"))}  # fmt: skip


def main(
    out: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="The folder for volunteer.cast and volunteer.svg.")
    ] = Path("docs/pictures"),
) -> None:
    """Record a volunteer from `join` to the end of its run; takes two to five minutes."""
    with tempfile.TemporaryDirectory(prefix="dipaco-recording-") as name:
        folder = Path(name)
        with coordinator(folder) as ticket:
            frames = list(recorded(ticket, folder / "home"))
    said = "\n".join(plain(line) for _, frame in frames for line in frame)
    for word in ("compiling", "receipt for", "paused", "goes on", "the run is complete"):
        if word not in said:
            raise DipacoError(f"the recording has no `{word}`", hint="is the machine too busy, or the run too short?")
    (out / f"{NAME}.cast").write_text("\n".join(cast(frames)) + "\n", encoding="utf-8")
    shown = [frame for _, frame in frames if any("receipt for" in plain(line) for line in frame)]
    training = [frame for frame in shown if any("training" in plain(line) and "doing" in plain(line) for line in frame)]
    picture((training or shown)[-1], out / f"{NAME}.svg")
    print(f"{len(frames)} frames; {out / f'{NAME}.cast'} and {out / f'{NAME}.svg'} are written")


@contextmanager
def coordinator(folder: Path) -> Iterator[str]:
    """A small run that is open; what to join it with."""
    config = DemoConfig(peers=1, grid="1x2", rounds=3, steps=30, kills=0, corpus="found", seed=0, bytes_max=2_000_000)
    (folder / "run.toml").write_text(run_text(config), encoding="utf-8")
    command = command_of("bootstrap.cli", "start", str(folder / "run.toml"), "--dir", str(folder / "run"))
    with (folder / "coordinator.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=REPO, start_new_session=True, preexec_fn=end_with_parent
        )
    try:
        until_s, address = time.monotonic() + START_S, folder / "run" / "address.json"
        while not address.exists():
            if process.poll() is not None or time.monotonic() > until_s:
                raise DipacoError("the coordinator did not start", hint=(folder / "coordinator.log").read_text()[-300:])
            time.sleep(FRAME_S)
        yield str(json.loads(address.read_text())["ticket"])
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def recorded(ticket: str, home: Path) -> Iterator[tuple[float, Frame]]:
    """What a volunteer's screen shows, and when: each frame that differs from the one before it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "DIPACO_ENGINE": "fast", "DIPACO_HOME": str(home)}
    command = command_of("peers.cli", "join", ticket, "--listen", "/ip4/127.0.0.1/tcp/0")
    process = subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env=environment, cwd=REPO, preexec_fn=end_with_parent
    )
    os.close(theirs)
    screen = pyte.Screen(COLUMNS, LINES)
    stream, began_s, was_paused = pyte.ByteStream(screen), time.monotonic(), False
    last: Frame = ()
    resume_s: float | None = None
    try:
        while _read(ours, stream):
            now_s = time.monotonic()
            if now_s - began_s > LIMIT_S:
                raise DipacoError(f"the run took over {LIMIT_S:.0f} s")
            frame = tuple(_line(screen, number) for number in range(LINES))
            if frame != last:
                yield now_s - began_s, frame
                last = frame
            if not was_paused and sum("receipt for" in plain(line) for line in frame) >= 2:
                was_paused, resume_s = True, now_s + PAUSED_S
                _control("pause", environment)
            elif resume_s is not None and now_s > resume_s:
                resume_s = None
                _control("resume", environment)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(60)
        os.close(ours)


def _control(word: str, environment: dict[str, str]) -> None:
    subprocess.Popen(command_of("peers.cli", word), env=environment, cwd=REPO, stdout=subprocess.DEVNULL)


def _read(ours: int, stream: Any) -> bool:
    """Take in what comes within a frame's time; whether there can be more."""
    until_s = time.monotonic() + FRAME_S
    while select.select([ours], [], [], max(until_s - time.monotonic(), SETTLED_S))[0]:  # no frame half drawn
        try:
            stream.feed(os.read(ours, 65_536))
        except OSError:  # EIO: nobody has the other end open
            return False
        if time.monotonic() > until_s + FRAME_S:
            break
    return True


def _line(screen: Any, number: int) -> str:
    """One line, its colours as they are asked for."""
    parts, style = [], ""
    for column in range(COLUMNS):
        char = screen.buffer[number][column]
        wanted = ";".join(filter(None, ["1" * char.bold, "7" * char.reverse, str(COLOURS.get(char.fg, ""))]))
        if wanted != style:
            parts.append(f"\x1b[0;{wanted}m" if wanted else "\x1b[0m")
            style = wanted
        parts.append(char.data)
    return "".join(parts).rstrip() + ("\x1b[0m" if style else "")


def plain(line: str) -> str:
    """Without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


def cast(frames: Sequence[tuple[float, Frame]]) -> Iterator[str]:
    """The lines of an asciicast, version 2."""
    yield json.dumps({"version": 2, "width": COLUMNS, "height": LINES, "title": "dipaco-peer join"})
    at_s, before_s, before = 0.0, 0.0, ("",) * LINES
    for time_s, frame in frames:
        at_s += min(time_s - before_s, WAIT_MAX_S)
        changed = [f"\x1b[{n};1H\x1b[2K{line}" for n, line in enumerate(frame, 1) if line != before[n - 1]]
        yield json.dumps([round(at_s, 2), "o", "".join(changed)], ensure_ascii=False)
        before_s, before = time_s, frame


def picture(frame: Frame, path: Path) -> None:
    """One frame as SVG."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    lines = list(frame)
    while lines and not plain(lines[-1]):
        lines.pop()
    for line in lines:
        console.print(Text.from_ansi(line), no_wrap=True, crop=True)
    console.save_svg(str(path), title="dipaco-peer join", unique_id=NAME)


if __name__ == "__main__":
    run_benchmark(main)
