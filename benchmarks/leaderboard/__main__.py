"""`python -m benchmarks.leaderboard`: how fast and how heavy the public site is with 10,000 versions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    seed: Annotated[int, typer.Option(min=0, help="Decides the figures of the run that never was.")] = 0,
    repeats: Annotated[
        int, typer.Option(min=1, max=1_000, help="Requests of each page; the table says the median.")
    ] = 9,
    browser: Annotated[
        Path | None, typer.Option(help="A Chromium. Default: the one on the PATH; without one that part is left out.")
    ] = None,
    load: Annotated[
        int,
        typer.Option(min=0, max=100_000, help="Versions in the tables that are read as at a start; 0: leave it out."),
    ] = 10_000,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Serve 10,000 versions, 1,000 contributors and 256 paths on this machine, and read every kind of page."""
    from .report import run

    raise typer.Exit(run(seed=seed, repeats=repeats, browser=browser, load=load, json_file=json_file))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
