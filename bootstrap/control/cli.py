"""The commands of `dipaco-bootstrap` about a coordinator that runs on this machine. Heavy imports stay inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dipaco_p2p.program.control.options import Json, Watch, end

Folder = Annotated[
    Path | None,
    typer.Argument(
        help="The run's folder or run file. Default: the current folder, else your only running coordinator."
    ),
]

CODES = """Exit codes: 0 done; 2 a wrong flag, folder or run file; 3 no coordinator runs there; 4 it does not answer;
5 another user's coordinator; 6 it is of another version; 8 its answer is damaged; 130 Ctrl-C."""


def add_commands(app: typer.Typer) -> None:
    """Put them among the program's own."""
    for command in (status, peers, paths, modules):
        app.command(epilog=CODES)(command)


def status(
    folder: Folder = None,
    is_json: Json = False,
    watch: Watch = False,
) -> None:
    """Show how the run stands: round, perplexity, volunteers, paths and modules, line and disk.

    With --watch and --json, one document per line.

    Example: dipaco-bootstrap status my-run --watch
    """
    from . import commands

    end(lambda: commands.status(folder, is_json=is_json, is_watched=watch))


def peers(folder: Folder = None, is_json: Json = False) -> None:
    """List who is alive: role, path, round, what each does, tokens/s, when last heard, what it leads, its name.

    Peers say all of this themselves.

    Example: dipaco-bootstrap peers my-run
    """
    from . import commands

    end(lambda: commands.show_list(folder, "peers", commands.PEERS, is_json=is_json))


def paths(folder: Folder = None, is_json: Json = False) -> None:
    """List the paths: who claims each, whether any of them is alive, its round and its last judged loss.

    Example: dipaco-bootstrap paths my-run
    """
    from . import commands

    end(lambda: commands.show_list(folder, "paths", commands.PATHS, is_json=is_json))


def modules(folder: Folder = None, is_json: Json = False) -> None:
    """List the modules: newest and final version, how far each is behind the furthest, leader, term, mirrors.

    Example: dipaco-bootstrap modules my-run --json
    """
    from . import commands

    end(lambda: commands.show_list(folder, "modules", commands.MODULES, is_json=is_json))
