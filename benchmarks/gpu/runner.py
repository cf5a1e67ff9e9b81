"""Asks what is not known yet, each question in a process with a time limit, and writes what is known after each.

Rule 1: a case that fails, hangs or takes its process down costs itself only; the next command asks it again.
Rule 2: what compilers make stays in the folder, so that the next command need not compile it again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from .book import Book
from .case import Bench, Case, Part

END_S = 10.0
"""What a case that is over its time has for leaving, before it is killed."""
MARGIN_S = 5.0
"""Left of the command's time for writing."""
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "cache/inductor", "TRITON_CACHE_DIR": "cache/triton"}


def run(
    bench: Bench, parts: Sequence[Part], *, every: Sequence[Part], minutes: float, say: Callable[[str], None]
) -> bool:
    """Ask what is not known of `parts`, as far as the time goes; whether all of it is known now."""
    ends_s = time.monotonic() + 60 * minutes - MARGIN_S
    book = Book(bench.folder)
    book.open(is_small=bench.is_small)
    book.write(every, is_small=bench.is_small)
    for part, cases in _open(book, parts, bench):
        left_s = ends_s - time.monotonic()
        wanted_s = sum(case.limit_s for case in cases)
        if left_s < min(wanted_s / 2, 60.0):
            say(f"{part.name}: {', '.join(case.name for case in cases)}: left for the next command")
            continue
        began_s = time.monotonic()
        ended = _ask(bench, part, cases, limit_s=min(wanted_s, left_s))
        book.read()
        for case in cases:
            if not book.has(part, case):
                if case.name not in book.failed.get(part.name, {}):
                    book.add(part.name, case.name, error=ended or "its process ended without a word")
                    book.read()
                say(f"{part.name}: {case.name}: FAILED: {book.failed[part.name][case.name]}")
        done = [case.name for case in cases if book.has(part, case)]
        if done:
            say(f"{part.name}: {', '.join(done)}: done in {time.monotonic() - began_s:.0f} s")
        book.write(every, is_small=bench.is_small)
    return not list(_open(book, parts, bench))


def _open(book: Book, parts: Sequence[Part], bench: Bench) -> Iterator[tuple[Part, list[Case]]]:
    """What is to be asked in one process each: a case; at small size, where starting one takes longest, a part."""
    for part in parts:
        cases = [case for case in part.cases if (case.is_small_too or not bench.is_small) and not book.has(part, case)]
        if bench.is_small and cases:
            yield part, cases
        elif not bench.is_small:
            yield from ((part, [case]) for case in cases)


def _ask(bench: Bench, part: Part, cases: Sequence[Case], *, limit_s: float) -> str:
    """Run these cases in one process; why it ended before its time, if it did."""
    log = bench.folder / "log" / f"{part.name}.log"
    log.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.child", part.name, "--out", str(bench.folder)]
    command += ["--device", bench.device, *(["--small"] if bench.is_small else []), *(case.name for case in cases)]
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=_environment(bench), start_new_session=True
        )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"it was not done after {limit_s:.0f} s"
    finally:
        _end(process)
    return f"its process ended with {code}; see {log}" if code else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it and all that it has started, if it has not ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment(bench: Bench) -> Mapping[str, str]:
    caches = {name: str((bench.folder / path).resolve()) for name, path in CACHES.items()}
    # One thread at small size: the machine of a test has others to serve.
    return os.environ | caches | ({"OMP_NUM_THREADS": "1"} if bench.is_small else {})
