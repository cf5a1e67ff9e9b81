"""Progress on the terminal: a bar where there is one, a line at the end of a stage elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

Advance = Callable[[int], None]
"""Called with how much is done so far."""


@contextmanager
def stage(title: str, *, total: int | None = None) -> Iterator[Advance]:
    """Show that `title` is under way; the block gets a function to tell how far it is."""
    console = Console(stderr=True)
    if not console.is_terminal:
        began_s = time.monotonic()
        yield lambda done: None
        print(f"{title}: done in {time.monotonic() - began_s:.1f} s", file=sys.stderr, flush=True)
        return
    with Progress(*_columns(total is not None), console=console) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)
        progress.update(task, total=total or 1, completed=total or 1)


def _columns(has_total: bool) -> list[ProgressColumn]:
    """Time left while it can be told, time taken at the end."""
    time_column = TimeRemainingColumn(elapsed_when_finished=True)
    share: list[ProgressColumn] = [TaskProgressColumn()] if has_total else []
    return [TextColumn("{task.description:<30}"), BarColumn(), *share, time_column]
