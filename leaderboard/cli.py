"""`dipaco-bootstrap leaderboard`: the commands of the leaderboard. Heavy imports stay inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dipaco_p2p.program.control.options import end_program

from .places import DEFAULT_PORT, check_base

EPILOG = """Exit codes: 0 done; 2 a wrong flag or folder; 4 nobody answers; 5 a problem on this machine (disk, port);
6 another run or version; 8 damaged data; 130 Ctrl-C before there was a result, or a second one."""

app = typer.Typer(no_args_is_help=True, help="The public page of a run: anybody may serve it, without a key.")

Expected = Annotated[
    str | None, typer.Option("--run", help="The run's id, or the start of it; any other run is refused.")
]
Join = Annotated[
    str, typer.Option(help="The line to join with that the page shows. Default: with the ticket, if it is known.")
]


@app.command(
    epilog="Example: dipaco-bootstrap leaderboard serve /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW...\n\n" + EPILOG
)
def serve(
    ticket: Annotated[str, typer.Argument(help="The run's ticket, or a peer's address.")],
    folder: Annotated[Path, typer.Option("--dir", help="The folder for the tables.")] = Path("leaderboard"),
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 means all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="The port; 0 takes any free one.")] = DEFAULT_PORT,
    run: Expected = None,
    join: Join = "",
    base: Annotated[str, typer.Option(help="The path below which a proxy puts the site, such as /board.")] = "",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details to leaderboard.log.")] = False,
) -> None:
    """Follow a run through the same protocol as any peer, check all signatures, and serve its pages.

    Ctrl-C stops it. The same command continues later, and asks for what it missed.
    """

    async def main() -> None:
        from dipaco_p2p.node.entry import read_entry

        read_entry(ticket, run=run)  # before the imports that take seconds
        check_base(base)

        from .program import Place
        from .program import serve as serve_run

        place = Place(host=host, port=port, base=base)
        await serve_run(ticket, folder, place, expected=run, join=join, verbose=verbose)

    end_program(main)


@app.command(epilog="Example: dipaco-bootstrap leaderboard export my-run pages\n\n" + EPILOG)
def export(
    source: Annotated[str, typer.Argument(help="A ticket, an address, or a coordinator's or leaderboard's folder.")],
    to: Annotated[Path, typer.Argument(help="A folder that is new, empty, or an earlier copy.")],
    run: Expected = None,
    join: Join = "",
) -> None:
    """Write the whole site as files, for any web host; a browser also opens `index.html` without one."""

    async def main() -> None:
        from .program import export as export_run

        snapshot = await export_run(source, to, expected=run, join=join)
        print(f"wrote {len(snapshot.versions)} versions to {to / 'index.html'}")

    end_program(main)


@app.command(epilog="Example: dipaco-bootstrap leaderboard rebuild my-run tables.sqlite\n\n" + EPILOG)
def rebuild(
    folder: Annotated[Path, typer.Argument(help="The folder of a coordinator, as given to `start --dir`.")],
    to: Annotated[Path, typer.Argument(help="The database to write: a new file.")],
) -> None:
    """Make the tables from a run's signed documents alone, to compare: nobody has to believe a leaderboard."""

    async def main() -> None:
        from .program import rebuild_tables

        print(f"wrote {rebuild_tables(folder, to)} versions to {to}")

    end_program(main)
