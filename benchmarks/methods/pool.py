"""Worker processes that do tasks, and bars that show how far they are.

Two workers with one thread each do a fifth more than one with two threads (two steps in 43 ms, against 27 ms each).
A worker has no state that matters: whatever is killed, the next start does the unfinished tasks again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from dipaco_p2p.errors import DipacoError

from .store import Folder
from .work import Task

STOP_S = 5.0
SCORE_STEPS = 400
"""What scoring counts for in a bar, in inner steps."""


@dataclass(slots=True)
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection
    bar: TaskID
    task: Task | None = None


class Pool:
    """Some worker processes; `run` gives them tasks until all are done."""

    def __init__(self, folder: Folder, *, processes: int, threads: int, fast: bool) -> None:
        self._folder = folder
        self._count = processes
        self._options = (threads, fast)
        self._workers: list[_Worker] = []
        self._progress = _bars()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Workers live inside this block."""
        try:
            with self._progress:
                self._workers = [self._start(number) for number in range(self._count)]
                yield
        finally:
            for worker in self._workers:
                worker.connection.close()  # an idle worker leaves by itself
            for worker in self._workers:
                worker.process.join(0 if worker.task else STOP_S)
                worker.process.terminate()
                worker.process.join()

    def run(self, title: str, tasks: Sequence[Task], on_done: Callable[[Task, dict[str, Any]], None]) -> None:
        """Do all tasks, the longest first; `on_done` hears each result. Raises DipacoError if one fails."""
        waiting = sorted(tasks, key=_cost)
        total = sum(map(_cost, tasks))
        bar, done = self._progress.add_task(f"[bold]{title}", total=max(total, 1), unit=""), 0
        idle = list(self._workers)
        while waiting or len(idle) < len(self._workers):
            while waiting and idle:
                self._give(idle.pop(), waiting.pop())
            for worker in self._ready():
                kind, value = self._receive(worker)
                assert worker.task is not None
                if kind == "progress":
                    self._progress.update(worker.bar, completed=value)
                    self._progress.update(bar, completed=done + sum(self._under_way()))
                elif kind == "notice":
                    self._progress.console.print(f"notice: {value}")
                else:
                    done += _cost(worker.task)
                    on_done(worker.task, value)
                    self._progress.update(bar, completed=done + sum(self._under_way()))
                    _say(self._progress, worker.task, value)
                    worker.task = None
                    idle.append(worker)
        self._progress.update(bar, completed=max(total, 1))

    def _start(self, number: int) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._folder, *self._options), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours, self._progress.add_task(f"worker {number + 1}: starting", total=None))

    def _give(self, worker: _Worker, task: Task) -> None:
        worker.task = task
        worker.connection.send(task)
        label = f"worker {worker.bar + 1}: {task.kind} {task.job.method}, seed {task.job.seed}"
        self._progress.reset(worker.bar, description=label, total=task.steps or None)

    def _ready(self) -> list[_Worker]:
        found = wait([worker.connection for worker in self._workers])
        return [worker for worker in self._workers if worker.connection in found]

    def _receive(self, worker: _Worker) -> tuple[str, Any]:
        try:
            kind, value = worker.connection.recv()
        except EOFError:
            raise DipacoError(
                "a worker process died", hint="is there enough memory? the same command goes on"
            ) from None
        if kind == "failed":
            assert worker.task is not None
            job = worker.task.job
            raise DipacoError(f"{worker.task.kind} of `{job.method}`, seed {job.seed}, failed: {value}")
        return kind, value

    def _under_way(self) -> Iterator[float]:
        tasks = {task.id: task.completed for task in self._progress.tasks}
        return (tasks[worker.bar] for worker in self._workers if worker.task and worker.task.kind != "score")


def _cost(task: Task) -> int:
    return task.steps or SCORE_STEPS * task.job.model.path_count


def _bars() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<48}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _say(progress: Progress, task: Task, result: dict[str, Any]) -> None:
    """One line for a finished task, where there are no bars."""
    if progress.disable:
        loss = f"{result['report']['loss']:.4f} nats, " if "report" in result else ""
        name = f"{task.kind} {task.job.method}, seed {task.job.seed}, outer lr {task.job.lr}"
        print(f"{name}: {loss}{result['wall_s']:.0f} s", file=sys.stderr, flush=True)


def _serve(connection: Connection, folder: Folder, threads: int, fast: bool) -> None:
    """The life of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else the compiler starts processes of its own
    import torch

    from .scoring import score
    from .work import Bench, kill, rotate, train, warm_up

    torch.set_num_threads(threads)
    bench = Bench(folder, fast=fast)
    kinds = {"warmup": warm_up, "train": train, "score": score, "rotation": rotate, "restart": kill}
    last_s = 0.0

    def on_progress(done: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > 0.2:
            last_s = time.monotonic()
            connection.send(("progress", done))

    # When the parent is gone, so is the work.
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            task: Task = connection.recv()
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("once")
                    result = kinds[task.kind](bench, task.job, on_progress)
                for warning in caught:
                    if warning.category is RuntimeWarning:
                        connection.send(("notice", str(warning.message)))
                connection.send(("done", result))
            except BrokenPipeError:
                raise
            except Exception as error:
                traceback.print_exc()
                connection.send(("failed", f"{type(error).__name__}: {error}"))
