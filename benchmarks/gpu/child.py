"""The process of a case: asks it, and adds one line to what is known."""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from pathlib import Path

from .book import Book
from .case import Bench
from .parts import NAMES, part


def main() -> int:
    """How many cases failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=NAMES)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what a case has started ends with it
    bench, book = Bench(folder=asked.out, device=asked.device, is_small=asked.small), Book(asked.out)
    own, failed = part(asked.part), 0
    for case in own.cases:
        if case.name not in asked.cases:
            continue
        try:
            figures = case.ask(bench)
        except Exception as error:  # whatever it is, the next one is asked all the same
            traceback.print_exc()
            message = (str(error).strip() or "no message").splitlines()[0]
            book.add(own.name, case.name, error=f"{type(error).__name__}: {message}")
            failed += 1
        else:
            book.add(own.name, case.name, figures=figures)
    return failed


if __name__ == "__main__":
    sys.exit(main())
