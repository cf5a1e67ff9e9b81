"""Worker processes that do tasks, and a bar that shows how far they are.

Two workers with one thread each do a fifth more than one with two threads (two steps in 43 ms, against 27 ms each).
A worker has no state that matters: whatever is killed, the next start does the unfinished tasks again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.processes import end_with_parent
from dipaco_p2p.errors import DipacoError

from .store import Folder
from .work import Bench, Task, score, train, warm_up

SCORE_STEPS = 400
"""What scoring a path counts for in a bar, in inner steps."""

_bench: Bench | None = None
"""Of this worker process."""


class Pool:
    """Some worker processes; `run` gives them tasks until all are done."""

    def __init__(self, folder: Folder, *, processes: int, fast: bool) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else the compiler starts processes of its own
        self._workers = ProcessPoolExecutor(
            processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(folder, fast),
        )
        console = Console(stderr=True)
        columns = (TextColumn("{task.description:<48}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Workers live inside this block; one that is left with an error ends them at once."""
        try:
            with self._progress:
                yield
        except BaseException:
            for process in list(self._workers._processes.values()):
                process.terminate()
            raise
        finally:
            self._workers.shutdown(cancel_futures=True)

    def run(self, title: str, tasks: Sequence[Task], on_done: Callable[[Task, dict[str, Any]], None]) -> None:
        """Do all tasks, the longest first; `on_done` hears each result. Raises DipacoError if one fails."""
        bar = self._progress.add_task(f"[bold]{title}", total=max(1, sum(map(_cost, tasks))))
        waiting = {self._workers.submit(_do, task): task for task in sorted(tasks, key=_cost, reverse=True)}
        for future in as_completed(waiting):
            task = waiting[future]
            try:
                result, notices = future.result()
            except BrokenProcessPool:
                hint = "is there enough memory? the same command goes on"
                raise DipacoError("a worker process died", hint=hint) from None
            except Exception as error:
                what = f"{task.kind} of `{task.job.method}`, seed {task.job.seed}"
                raise DipacoError(f"{what}, failed: {type(error).__name__}: {error}") from None
            on_done(task, result)
            for notice in notices:
                self._progress.console.print(f"notice: {notice}")
            self._progress.update(bar, advance=_cost(task))
            if self._progress.disable:
                _tell(task, result)


def _cost(task: Task) -> int:
    return task.steps or SCORE_STEPS * task.job.model.path_count


def _tell(task: Task, result: dict[str, Any]) -> None:
    """One line for a finished task, where there is no bar."""
    loss = f"{result['report']['loss']:.4f} nats, " if "report" in result else ""
    rates = f"inner lr x{task.job.inner_lr:g}, outer lr {task.job.lr:g}"
    name = f"{task.kind} {task.job.method}, seed {task.job.seed}, {rates}"
    print(f"{name}: {loss}{result['wall_s']:.0f} s", file=sys.stderr, flush=True)


def _begin(folder: Folder, fast: bool) -> None:
    """In a worker, before its first task."""
    global _bench
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    end_with_parent()
    import torch

    torch.set_num_threads(1)
    _bench = Bench(folder, fast=fast)


def _do(task: Task) -> tuple[dict[str, Any], list[str]]:
    """In a worker: the result of a task, and what it warned of."""
    assert _bench is not None
    kinds = {"warmup": warm_up, "train": train, "score": score}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("once")
            result = kinds[task.kind](_bench, task.job)
    except Exception:
        traceback.print_exc()
        raise
    return result, [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
