"""Which run a command is about: the ticket that was given, else `$DIPACO_TICKET`, else that of the run joined last.

    last_run.json     {"ticket": what leads there, a ticket or an address; "run": id of its first stage}

It is written once that run was found, checked and entered. The id is kept because an address names no run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dipaco_p2p.errors import ConfigError, DipacoError, EnvironmentUnfit, SwarmError, WrongRun
from dipaco_p2p.node.entry import Entry, bare, read_entry
from dipaco_p2p.program.files import write_atomically

log = logging.getLogger(__name__)

VARIABLE = "DIPACO_TICKET"
FILE_NAME = "last_run.json"
LOST = (SwarmError, WrongRun)
"""How a run ends that cannot be reached any more, or whose address is now another run's."""
ANOTHER = "for another run give its ticket: `dipaco-peer join TICKET`"
NONE_HINT = "ask the coordinator for a ticket: `dipaco-peer join dipaco1...`; later starts remember the run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One run, and why this one."""

    text: str
    """What leads to it, as `read_entry` takes it."""
    run: str | None = None
    """Its id, or the start of it, where that is demanded beside the text."""
    source: str = ""
    """Where the text was found; empty if the command was given it."""

    def entry(self) -> Entry:
        """Where to knock; raises as `read_entry`."""
        return read_entry(self.text, run=self.run)

    @property
    def bare(self) -> str:
        """The ticket or the address alone, without the file or link around it; raises ConfigError."""
        return bare(self.text)

    @property
    def name(self) -> str:
        """The run, for people; the text itself where that names none or cannot be read."""
        entry = None
        with contextlib.suppress(DipacoError):
            entry = read_entry(self.text)
        run = entry.run if entry is not None and entry.run is not None else self.run
        called = f" `{entry.name}`" if entry is not None and entry.name else ""
        return f"`{self.text[:120]}`" if run is None else f"run:{run[:8]}{called}"

    @property
    def line(self) -> str:
        """What to say first to a user who gave no ticket; empty for one who did."""
        return f"using {self.name}, {self.source}" if self.source else ""

    @property
    def closing(self) -> str:
        """The same when the run is complete."""
        return f"{self.name} is complete; {ANOTHER}" if self.source else ""

    @contextlib.contextmanager
    def explained(self, *kinds: type[DipacoError]) -> Iterator[None]:
        """Errors of these kinds name the run, where the user did not, and say how to take another one."""
        try:
            yield
        except kinds as error:
            if not self.source:
                raise
            hint = f"{error.hint}; {ANOTHER}" if error.hint else ANOTHER
            raise error.reworded(f"{self.name}, {self.source}: {error}", hint=hint) from None


def choose(
    given: str | None, home: Path, *, run: str | None = None, environment: Mapping[str, str] = os.environ
) -> Choice:
    """The run to take, its text checked; `run` is the start of an id that the user demands as well.

    Raises ConfigError if nothing names one, and as `read_entry`.
    """
    choice = find_choice(given, home, run=run, environment=environment)
    if choice is None:
        raise ConfigError(f"no ticket was given, and no run is remembered in `{home}`", hint=NONE_HINT)
    with choice.explained(ConfigError, WrongRun):
        choice.entry()
    return choice


def find_choice(
    given: str | None, home: Path, *, run: str | None = None, environment: Mapping[str, str] = os.environ
) -> Choice | None:
    """The same unchecked, and None if nothing names a run. Raises WrongRun if the remembered one is not `run`."""
    if given is not None:
        return Choice(text=given, run=run)
    if text := environment.get(VARIABLE, "").strip():
        return Choice(text=text, run=run, source=f"as {VARIABLE} says")
    last = _read(home / FILE_NAME)
    if last is None:
        return None
    choice = Choice(text=last[0], run=last[1], source=f"as remembered in {home / FILE_NAME}")
    wanted = (run or "").removeprefix("run:")
    if not last[1].startswith(wanted):
        raise WrongRun(f"{choice.name}, {choice.source}, is not run:{wanted[:8]}", hint=ANOTHER)
    return choice


def tell(choice: Choice | None) -> None:
    """Say which run a command takes, where its user named none."""
    if choice is not None and choice.line:
        print(choice.line, file=sys.stderr, flush=True)


def remember(home: Path, text: str, *, run: str) -> None:
    """The next command without a ticket is about `run`, the id of a first stage, to which `text` led just now."""
    try:
        write_atomically(home / FILE_NAME, json.dumps({"ticket": bare(text), "run": run}).encode())
    except EnvironmentUnfit as error:
        log.warning("the ticket was not noted: %s", error)


def _read(path: Path) -> tuple[str, str] | None:
    """The text and the run; a damaged file counts as none."""
    try:
        value = json.loads(path.read_bytes())
        text, run = value["ticket"], value["run"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return (text, run) if isinstance(text, str) and isinstance(run, str) and run else None
