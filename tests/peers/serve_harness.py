"""`dipaco-peer serve` as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from heavy_imports import REPO

SAID = "serving at "


@contextmanager
def serving(*arguments: str, key: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The program, and where it listens."""
    command = [sys.executable, "-c", "from peers.cli import main; main()", "serve", *arguments, "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(REPO), "DIPACO_KEY": key}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(SAID), line
            yield process, line.removeprefix(SAID).split(",")[0]
        finally:
            process.kill()
