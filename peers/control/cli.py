"""The commands of `dipaco-peer` about a volunteer that runs, or ran, on this machine. Heavy imports stay inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dipaco_p2p.program.control.options import Json, Watch, end

from ..preferences.commands import Home

Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]

EPILOG = """Exit codes: 0 done; 2 a wrong flag or value; 3 no volunteer runs in this home; 4 it does not answer; 5 this
machine or user cannot; 6 it is of another version; 8 a damaged file; 130 Ctrl-C."""

identity_app = typer.Typer(no_args_is_help=True, help="The volunteer's key: look at it, take it elsewhere.")


def add_commands(app: typer.Typer) -> None:
    """Put them among the program's own."""
    for command in (status, pause, resume, finish, stop, logs, paths, bugreport):
        app.command(epilog=EPILOG)(command)
    app.add_typer(identity_app, name="identity")


def _do(home: Path | None, work: Callable[[Any, Path], None]) -> None:
    """Leave with the exit code of `work`, which is given commands.py and the volunteer's folder."""
    from ..config import default_home
    from . import commands

    end(lambda: work(commands, home or default_home()))


def status(
    home: Home = None,
    is_json: Json = False,
    watch: Watch = False,
) -> None:
    """Say what the running volunteer does: its path, round, loss, receipts, what it leads, whom it waits for.

    Exit code 3 if none runs. With --watch and --json, one document a line. Example: dipaco-peer status --watch
    """
    _do(home, lambda do, folder: do.status(folder, is_json=is_json, is_watched=watch))


def pause(
    home: Home = None,
    length: Annotated[
        str | None, typer.Option("--for", help="How long: 90s, 30m, 2h, 1d. Default: until `resume`.")
    ] = None,
) -> None:
    """Give the machine back for a while: no training, no claim, nothing is led; the program stays.

    It finishes the present step and hands in your work. Example: dipaco-peer pause --for 2h
    """
    _do(home, lambda do, folder: do.pause(folder, length=length))


def resume(home: Home = None) -> None:
    """Go on after `pause`; what else it pauses for, such as a schedule, stays. Example: dipaco-peer resume"""
    _do(home, lambda do, folder: do.resume(folder))


def finish(
    home: Home = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when it has ended.")] = False,
) -> None:
    """Leave without wasting work: finishes this round with all its steps and hands it in first.

    Example: dipaco-peer finish --wait
    """
    _do(home, lambda do, folder: do.finish(folder, is_waited=wait))


def stop(
    home: Home = None,
    now: Annotated[bool, typer.Option("--now", help="At once, as a second Ctrl-C: nothing is handed in.")] = False,
) -> None:
    """Leave soon, as after Ctrl-C: hands in your work; returns when the program has ended.

    Example: dipaco-peer stop
    """
    _do(home, lambda do, folder: do.stop(folder, is_now=now))


def logs(
    home: Home = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    count: Annotated[int, typer.Option("--lines", "-n", min=0, max=100_000, help="How many of the last lines.")] = 50,
) -> None:
    """Say what happened: rounds, receipts and the like, with the program's log between them, whether it runs or not.

    Example: dipaco-peer logs -f -n 20
    """
    _do(home, lambda do, folder: do.show_logs(folder, count=count, is_followed=follow))


def paths(home: Home = None, is_json: Json = False) -> None:
    """List every file and folder that the volunteer uses, and what each takes. Example: dipaco-peer paths --json"""
    _do(home, lambda do, folder: do.show_paths(folder, is_json=is_json))


def bugreport(
    home: Home = None,
    to: Annotated[Path | None, typer.Option(help="The file to write. Default: one of this second, here.")] = None,
) -> None:
    """Pack versions, settings, status and the end of the log into one file for whoever is to help.

    Keys, addresses, names and folders are taken out. Example: dipaco-peer bugreport --to report.tar.gz
    """
    _do(home, lambda do, folder: do.bug_report(folder, to))


@identity_app.command("show", epilog=EPILOG)
def show_identity(home: Home = None, is_json: Json = False) -> None:
    """Say who this volunteer is; nothing of it is secret. Example: dipaco-peer identity show --json"""
    _do(home, lambda do, folder: do.show_identity(folder, is_json=is_json))


@identity_app.command("export", epilog=EPILOG)
def export_identity(
    file: Annotated[Path, typer.Argument(help="Where to write the key.")],
    home: Home = None,
    force: Force = False,
) -> None:
    """Copy the key to a file that only you may read. Example: dipaco-peer identity export my.key"""
    _do(home, lambda do, folder: do.export_identity(folder, file, is_forced=force))


@identity_app.command("import", epilog=EPILOG)
def import_identity(
    file: Annotated[Path, typer.Argument(help="What `export` wrote.")],
    home: Home = None,
    force: Force = False,
) -> None:
    """Be the volunteer of this key from the next start on; with --force the key that was there is kept beside it.

    Not while the volunteer runs. Example: dipaco-peer identity import my.key --home second
    """
    _do(home, lambda do, folder: do.import_identity(file, folder, is_forced=force))
