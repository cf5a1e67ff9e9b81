"""Curves where people look: the figures of a history, round by round, for TensorBoard, Weights & Biases or a CSV file.

    tensorboard:DIR   scalars in one more event file of DIR per start
    wandb[:PROJECT]   one run for each peer of a run; a restart resumes it
    csv:FILE          rows of time, stage, round, name and value, appended

Rule 1: nothing of these libraries is imported unless its place was asked for.
Rule 2: no writer holds training up or ends it. Each has a thread and a bounded queue of its own; at its first failure
it stops for good, and says so once.
Rule 3: the step is the number of the round, and names begin with the stage, so a restart goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import logging
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from ..errors import ConfigError, EnvironmentUnfit
from .history import History

log = logging.getLogger(__name__)

LOGS_MAX = 8
"""Places of one program."""
POINTS_MAX = 1024
"""Rounds that wait for a writer; one that is so far behind has stopped."""
CLOSE_S = 10.0
"""For what all writers still have to write when the program ends."""
DEFAULT_PROJECT = "dipaco-p2p"
PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
FORM_HINT = "use tensorboard:DIR, wandb, wandb:PROJECT or csv:FILE"
COLUMNS = ("time", "stage", "round", "name", "value")
HEADER = ",".join(COLUMNS)
DETAIL_CHARS_MAX = 300
"""Of what a library says of its failure."""
TAIL_BYTES = 4096
"""More than a row has: a row that a crash cut short begins within so much of the end."""


def open_curves(texts: Sequence[str], *, folder: Path) -> Curves:
    """Writers for the places that `texts` name; nothing is written before the first round. `folder` is where a library
    may keep files of its own.

    Raises ConfigError for a place that cannot be meant, EnvironmentUnfit for a library or a file that is not there.
    """
    targets = read_targets(texts)
    for target in targets:
        target.check()
    return Curves([_Writer(target, folder) for target in targets])


def read_targets(texts: Sequence[str]) -> list[Target]:
    """The places, each once; raises ConfigError for a text of another form. Looks at no disk."""
    if len(texts) > LOGS_MAX:
        raise ConfigError(f"curves go to {len(texts)} places, limit {LOGS_MAX}")
    return [_target(text) for text in dict.fromkeys(texts)]


def _target(text: str) -> Target:
    kind, colon, place = text.strip().partition(":")
    known = kind in SINKS and (bool(place) if colon else kind == "wandb")
    if not known or not place.isprintable():
        raise ConfigError(f"`{text[:80]}` is not a place for curves", hint=FORM_HINT)
    if kind == "wandb" and place and not PROJECT.fullmatch(place):
        raise ConfigError(f"`{place[:80]}` is not the name of a project", hint="use letters, digits, `-`, `_` and `.`")
    return Target(kind=kind, place=place)


LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""By the extra of pyproject.toml that brings them, which is also the kind of the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One place to write curves to."""

    kind: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}" if self.place else self.kind

    @property
    def path(self) -> Path:
        """The file or folder that it names."""
        return Path(self.place).expanduser()

    def check(self) -> None:
        """Whether it can be written to, as far as that shows beforehand; raises ConfigError or EnvironmentUnfit."""
        if (library := LIBRARIES.get(self.kind)) and importlib.util.find_spec(library) is None:
            hint = f"pip install 'dipaco-p2p[{self.kind}]'"
            raise EnvironmentUnfit(f"curves for `{self}` need the extra `{self.kind}`, which is not here", hint=hint)
        if self.kind == "tensorboard" and self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"`{self.path}` is not a folder", hint="name one that is new, or that curves may go into")
        if self.kind == "csv":
            self._check_csv()

    def _check_csv(self) -> None:
        if self.path.is_dir():
            raise ConfigError(f"`{self.path}` is a folder", hint="name a file in it, as csv:curves.csv")
        try:
            with self.path.open("rb") as file:
                start = file.read(len(HEADER) + 2).decode(errors="replace")
        except FileNotFoundError:
            return
        except OSError as error:
            raise EnvironmentUnfit(f"`{self.path}` cannot be read: {error.strerror}", hint="name another") from None
        first, newline, _ = start.partition("\n")
        if first.rstrip("\r") != HEADER if newline else not HEADER.startswith(start):
            raise ConfigError(f"`{self.path}` is another file than one of curves", hint="name one that is new")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Whose curves these are."""

    run: str
    """The run's name."""
    run_id: str
    stage: str
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The figures of one round, by name."""

    subject: Subject
    round: int
    at_s: float
    values: Mapping[str, float]

    def named(self) -> Iterator[tuple[str, float]]:
        """As `grid/loss`."""
        return ((f"{self.subject.stage}/{name}", value) for name, value in self.values.items())


class Curves:
    """Writers that follow the histories of one program, one history for each stage; without any it does nothing."""

    def __init__(self, writers: Sequence[_Writer] = ()) -> None:
        self._writers = writers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def follow(self, history: History, subject: Subject) -> None:
        """Write the rounds that `history` tells of from now on. A writer that has stopped becomes an event of it,
        `curves_stopped`, once."""
        if self._writers:
            figures = Figures()
            history.listen(lambda event: self._heard(event, figures, history, subject))

    def close(self) -> None:
        """Write what waits, in `CLOSE_S` at most."""
        until_s = time.monotonic() + CLOSE_S
        for writer in self._writers:
            writer.end()
        for writer in self._writers:
            writer.wait(until_s - time.monotonic())

    def _heard(self, event: Mapping[str, Any], figures: Figures, history: History, subject: Subject) -> None:
        values = figures.of(event)
        for writer in self._writers:
            if values:
                writer.put(Point(subject=subject, round=event["round"], at_s=event["t"], values=values))
            if problem := writer.news():
                history.add("curves_stopped", to=str(writer.target), detail=problem)


# -- what of a history is a curve


class Figures:
    """From the events of one history to the figures of its rounds."""

    def __init__(self) -> None:
        self._receipts = 0

    def of(self, event: Mapping[str, Any]) -> dict[str, float]:
        """The figures of the round that this event ends; none for another event."""
        self._receipts += event["ev"] == "receipt"
        if event["ev"] == "round":
            receipts, self._receipts = self._receipts, 0
            return known(_of_volunteer(event) | {"receipts": receipts})
        return known(_of_coordinator(event)) if event["ev"] == "judged" else {}


def _of_volunteer(event: Mapping[str, Any]) -> dict[str, float | None]:
    training_s = event["training_s"]
    return {
        f"loss/{event['path']}": event["loss"],  # with fewer volunteers than paths, one trains several in a round
        "tokens_per_s": event["tokens"] / training_s if training_s > 0 else None,
        "round_s": event["seconds"],
        "captured": event.get("captured"),
        "owed": event.get("owed"),
    }


def _of_coordinator(event: Mapping[str, Any]) -> dict[str, float | None]:
    losses = known(event["path_losses"])
    return {
        "validation_loss": event["loss"],
        "validation_perplexity": event["perplexity"],
        "validation_loss_mean": math.fsum(losses.values()) / len(losses) if losses else None,
        **{f"validation_loss/{path}": loss for path, loss in losses.items()},
        "volunteers_alive": event["volunteers"],
        "paths_covered": event["covered"],
    }


def known(values: Mapping[str, float | None]) -> dict[str, float]:
    """Without what nobody knows."""
    return {name: value for name, value in values.items() if value is not None}


# -- writers


class Sink(Protocol):
    """Where points end up. Whatever it raises stops its writer."""

    def write(self, point: Point) -> None: ...

    def close(self) -> None: ...


class _Writer:
    """Writes the points of one target in a thread of its own."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target = target
        self._folder = folder
        self._points: queue.Queue[Point | None] = queue.Queue(POINTS_MAX)
        self._thread: threading.Thread | None = None
        self._stopping = threading.Lock()
        self._problem = ""
        self._is_told = False

    def put(self, point: Point) -> None:
        """Write it soon."""
        if self._problem:
            return
        if self._thread is None:  # a daemon: a library that hangs must not keep the program from ending
            self._thread = threading.Thread(target=self._work, name=f"curves {self.target}", daemon=True)
            self._thread.start()
        try:
            self._points.put_nowait(point)
        except queue.Full:
            self._stop(f"{POINTS_MAX} rounds wait to be written")

    def news(self) -> str:
        """Why it has stopped, once; else nothing."""
        if not self._problem or self._is_told:
            return ""
        self._is_told = True
        return self._problem

    def end(self) -> None:
        """Nothing more will come."""
        if self._thread is not None and not self._problem:
            try:
                self._points.put_nowait(None)
            except queue.Full:
                self._stop(f"{POINTS_MAX} rounds were never written")

    def wait(self, time_s: float) -> None:
        """Until all is written, so long at most."""
        if self._thread is not None and not self._problem:
            self._thread.join(max(time_s, 0.0))
            if self._thread.is_alive():
                self._stop("it takes too long to end, so the last rounds may be missing")

    def _work(self) -> None:
        try:
            with contextlib.closing(SINKS[self.target.kind](self.target, self._folder)) as sink:
                while not self._problem and (point := self._points.get()) is not None:
                    sink.write(point)
        except BaseException as error:  # of any library, wandb's KeyboardInterrupt where nobody answers it too
            self._stop(_in_a_line(error))

    def _stop(self, why: str) -> None:
        with self._stopping:
            if not self._problem:
                log.warning("curves to %s have stopped: %s", self.target, why[:DETAIL_CHARS_MAX])
                self._problem = why[:DETAIL_CHARS_MAX]


def _in_a_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


class _Csv:
    """A file of rows. A row that a crash cut short is removed, since half of a number is a number too."""

    def __init__(self, target: Target, folder: Path) -> None:
        self._path = target.path
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            tail = file.read()
            file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)

    def write(self, point: Point) -> None:
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        at = datetime.fromtimestamp(point.at_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        with self._path.open("ab") as file:  # for each point: somebody may have moved the file
            if file.tell() == 0:
                rows.writerow(COLUMNS)
            rows.writerows((at, point.subject.stage, point.round, name, value) for name, value in point.values.items())
            file.write(text.getvalue().encode())

    def close(self) -> None:
        pass


class _TensorBoard:
    """One event file.

    tensorboardX's SummaryWriter would write in a thread of its own, in which an error ends in a traceback, and after
    which `add_scalar` waits for ever: so the class below it is used, which writes here.
    """

    def __init__(self, target: Target, folder: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        target.path.mkdir(parents=True, exist_ok=True)
        # Two programs that start in one second must not take the same name.
        self._events = EventsWriter(str(target.path / "events"), filename_suffix=f".{os.getpid()}")

    def write(self, point: Point) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in point.named()]
        self._events.write_event(Event(wall_time=point.at_s, step=point.round, summary=Summary(value=scalars)))
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class _WeightsAndBiases:
    """One run there, begun at the first point.

    Nothing of the machine is sent along: no host, user, command line, git state, packages, output or load.
    """

    def __init__(self, target: Target, folder: Path) -> None:
        self._project = target.place or DEFAULT_PROJECT
        self._folder = folder
        self._run: Any = None
        self._stages: set[str] = set()

    def write(self, point: Point) -> None:
        run = self._run = self._run or self._begin(point.subject)
        stage = point.subject.stage
        if stage not in self._stages:  # wandb's own step may only grow, and each stage begins at its first round
            self._stages.add(stage)
            run.define_metric(f"{stage}/*", step_metric=f"{stage}/round")
        run.log({f"{stage}/round": point.round, **dict(point.named())})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _begin(self, subject: Subject) -> Any:
        import wandb

        # Without a key wandb would ask for one on the terminal, in the midst of training.
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise ConfigError("no key of Weights & Biases is known here; `wandb login` asks for one")
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            x_save_requirements=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            finish_timeout=CLOSE_S / 2,
        )
        return wandb.init(
            project=self._project,
            id=f"{subject.run_id[:16]}-{subject.peer[-8:]}",
            name=f"{subject.run} ...{subject.peer[-6:]}",
            resume="allow",
            dir=str(self._folder),
            settings=settings,
        )


SINKS: Mapping[str, Callable[[Target, Path], Sink]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
    "csv": _Csv,
}
