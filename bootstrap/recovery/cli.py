"""The commands of `dipaco-bootstrap` for when a host is lost. Heavy imports stay inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EPILOG = """Exit codes: 0 done; 2 a wrong flag, folder or file; 4 nobody answers; 5 this machine cannot (disk, port,
clock); 6 another run or version; 8 damaged data; 130 Ctrl-C."""


def add_commands(app: typer.Typer) -> None:
    """Put them among the program's own."""
    app.command(epilog=f"Example: dipaco-bootstrap backup my-run --to /mnt/safe\n\n{EPILOG}")(backup)
    app.command(epilog=f"Example: dipaco-bootstrap restore my-run.tar --dir my-run\n\n{EPILOG}")(restore)
    app.command(epilog=f"Example: dipaco-bootstrap seed dipaco1... --dir second-seed\n\n{EPILOG}")(seed)


def backup(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, as given to `start --dir`.")],
    to: Annotated[Path, typer.Option(help="A new file, or a folder that gets one with the run's name and the time.")],
) -> None:
    """Copy a run into one file, while its coordinator is at work.

    THE COORDINATOR'S KEY IS INSIDE: whoever has the file can sign for the run. Only you may read it; keep it so.
    """
    from dipaco_p2p.program.console import run_program

    async def main() -> None:
        from dipaco_p2p.clock import SystemClock
        from dipaco_p2p.program.text import in_bytes

        from .backup import back_up

        written = back_up(folder, to, now_s=SystemClock().now_s())
        print(f"wrote {written.path}: {written.run}, {written.files} files, {in_bytes(written.bytes)}")
        print("the coordinator's key is inside: whoever has this file can sign for the run, so keep it safe")

    raise typer.Exit(run_program(main))


def restore(
    backup_file: Annotated[Path, typer.Argument(metavar="BACKUP", help="A file that `backup` wrote.")],
    folder: Annotated[Path, typer.Option("--dir", help="A folder that is new or empty.")],
) -> None:
    """Make a run's folder of a backup, every byte checked. `start` then first learns what came after the backup.

    Be sure that the old coordinator is gone: two of them, with one key, would split the run.
    """
    from dipaco_p2p.program.console import run_program

    async def main() -> None:
        import time

        from .restore import restore as make_folder

        found = make_folder(backup_file, folder)
        made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(found.made_s))
        print(f"restored run:{found.run[:8]} as of {made} to {found.folder}: {found.files} files, all as they were")
        print("be sure that the old coordinator never runs again: it has the same key")
        print(f"go on with: dipaco-bootstrap start RUN.toml --dir {found.folder} --through ADDRESS")

    raise typer.Exit(run_program(main))


def seed(
    ticket: Annotated[str, typer.Argument(help="The ticket, a file or link with it, or an address of the run.")],
    folder: Annotated[Path, typer.Option("--dir", help="Where its copy of the archive and its own key are kept.")],
    listen: Annotated[str, typer.Option(help="Where others reach it.")] = "/ip4/0.0.0.0/tcp/31337",
    up_mbit: Annotated[float, typer.Option(min=0, help="What blobs may take of the uplink, in Mbit/s; 0: all.")] = 0.0,
    down_mbit: Annotated[float, typer.Option(min=0, help="The same of the downlink.")] = 0.0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details to seed.log.")] = False,
) -> None:
    """Be a further seed node of a run: newcomers join through it, and it keeps a second archive.

    Needs no key of the coordinator's, and signs nothing for the run. While the coordinator is lost, this is where
    others find in, and what a restored one fills its archive from.
    """
    from dipaco_p2p.program.console import run_program

    async def main() -> None:
        from dipaco_p2p.node.entry import read_entry
        from dipaco_p2p.swarm.blobs.bandwidth import Line

        read_entry(ticket)  # before the imports that take seconds
        line = Line(up_mbit=up_mbit or None, down_mbit=down_mbit or None)

        from .standby import keep_seed

        await keep_seed(ticket, folder, listen=listen, line=line, verbose=verbose)

    raise typer.Exit(run_program(main))
