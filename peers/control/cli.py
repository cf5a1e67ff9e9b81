"""The commands of `dipaco-peer` about a volunteer that runs, or ran, on this machine. Heavy imports stay inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dipaco_p2p.program.control.options import Json, Watch, end

from ..preferences.commands import Home

Force = Annotated[bool, typer.Option("--force", help="Replace an existing key.")]

EPILOG = """Exit codes: 0 done; 2 a wrong flag or value; 3 no volunteer runs in this home; 4 it does not answer;
5 a problem on this machine, or another user's volunteer; 6 it is of another version; 8 a damaged file; 130 Ctrl-C."""

identity_app = typer.Typer(no_args_is_help=True, help="The volunteer's key: show, export or import it.")


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
    """Show what the running volunteer is doing: path, round, loss, receipts, what it leads, whom it is waiting for.

    With --watch and --json, one document per line.

    Example: dipaco-peer status --watch
    """
    _do(home, lambda do, folder: do.status(folder, is_json=is_json, is_watched=watch))


def pause(
    home: Home = None,
    length: Annotated[
        str | None, typer.Option("--for", help="How long: 90s, 30m, 2h, 1d. Default: until `resume`.")
    ] = None,
) -> None:
    """Give the machine back for a while: no training, no claim, no led modules; the program keeps running.

    It finishes the current step and hands in your work first.

    Example: dipaco-peer pause --for 2h
    """
    _do(home, lambda do, folder: do.pause(folder, length=length))


def resume(home: Home = None) -> None:
    """End a `pause`. Other reasons to pause, such as a schedule, still hold.

    Example: dipaco-peer resume
    """
    _do(home, lambda do, folder: do.resume(folder))


def finish(
    home: Home = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the program has ended.")] = False,
) -> None:
    """Leave without wasting work: finish all steps of this round and hand it in first.

    Example: dipaco-peer finish --wait
    """
    _do(home, lambda do, folder: do.finish(folder, is_waited=wait))


def stop(
    home: Home = None,
    now: Annotated[
        bool, typer.Option("--now", help="Exit at once, like a second Ctrl-C, without handing in work.")
    ] = False,
) -> None:
    """Leave as after Ctrl-C: hand in your work, then exit. Returns when the program has ended.

    Example: dipaco-peer stop
    """
    _do(home, lambda do, folder: do.stop(folder, is_now=now))


def logs(
    home: Home = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines, until Ctrl-C.")] = False,
    count: Annotated[
        int, typer.Option("--lines", "-n", min=0, max=100_000, help="How many of the last lines to print.")
    ] = 50,
) -> None:
    """Show what happened: rounds, receipts and other events, with the program's log between them.

    It works whether or not the volunteer is running.

    Example: dipaco-peer logs -f -n 20
    """
    _do(home, lambda do, folder: do.show_logs(folder, count=count, is_followed=follow))


def paths(home: Home = None, is_json: Json = False) -> None:
    """List every file and folder that the volunteer uses, with its size.

    Example: dipaco-peer paths --json
    """
    _do(home, lambda do, folder: do.show_paths(folder, is_json=is_json))


def bugreport(
    home: Home = None,
    to: Annotated[
        Path | None, typer.Option(help="The file to write. Default: dipaco-bugreport-DATE-TIME.tar.gz here.")
    ] = None,
) -> None:
    """Pack versions, settings, status and the end of the log into one file for the person who helps you.

    Keys, addresses, names and folders are removed.

    Example: dipaco-peer bugreport --to report.tar.gz
    """
    _do(home, lambda do, folder: do.bug_report(folder, to))


@identity_app.command("show", epilog=EPILOG)
def show_identity(home: Home = None, is_json: Json = False) -> None:
    """Show this volunteer's peer id, which is no secret.

    Example: dipaco-peer identity show --json
    """
    _do(home, lambda do, folder: do.show_identity(folder, is_json=is_json))


@identity_app.command("export", epilog=EPILOG)
def export_identity(
    file: Annotated[Path, typer.Argument(help="Where to write the key.")],
    home: Home = None,
    force: Force = False,
) -> None:
    """Copy the key to a file that only you may read.

    Example: dipaco-peer identity export my.key
    """
    _do(home, lambda do, folder: do.export_identity(folder, file, is_forced=force))


@identity_app.command("import", epilog=EPILOG)
def import_identity(
    file: Annotated[Path, typer.Argument(help="What `export` wrote.")],
    home: Home = None,
    force: Force = False,
) -> None:
    """Use this key from the next start on. --force replaces an existing key, and keeps the old one beside it.

    The volunteer must not be running.

    Example: dipaco-peer identity import my.key --home second
    """
    _do(home, lambda do, folder: do.import_identity(file, folder, is_forced=force))
