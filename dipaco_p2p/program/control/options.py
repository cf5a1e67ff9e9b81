"""Options that the commands of both programs share, and how a command leaves."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, NoReturn

import typer

from ... import __version__


def print_version(is_asked: bool) -> None:
    """What `--version` does."""
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit()


Version = Annotated[
    bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it, until the program ends or Ctrl-C.")]


def end(work: Callable[[], int | None]) -> NoReturn:
    """Leave with the exit code of `work`."""
    from ..console import run_command

    raise typer.Exit(run_command(work))


def end_program(main: Callable[[], Coroutine[Any, Any, int | None]]) -> NoReturn:
    """The same of `main`, which needs an event loop."""
    from ..console import run_program

    raise typer.Exit(run_program(main))
