"""`python -m benchmarks.overlap`: final loss and share of time in inner steps, with `overlap` on and off."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    corpus: Annotated[Path | None, typer.Option(help="A file or folder of text; default: this project's own.")] = None,
    seeds: Annotated[int, typer.Option(min=0, max=64, help="Draws of weights and batches; 0: no losses.")] = 2,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each run for the losses.")] = 6,
    up_mbit: Annotated[float, typer.Option(min=0.01, help="Every volunteer's uplink.")] = 20.0,
    down_mbit: Annotated[float, typer.Option(min=0.01, help="Every volunteer's downlink.")] = 100.0,
    values: Annotated[int, typer.Option(min=0, help="Of the path for the shares of time; 0: no shares.")] = 150_000_000,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, three rounds: for trying.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Train without the fast mode.")] = False,
) -> None:
    """Play swarms over slow lines in virtual time, then train a 2x2 grid from each estimate of the next versions."""
    from dipaco_p2p.errors import DipacoError
    from dipaco_p2p.program.console import print_error

    from .report import Wish, run
    from .share import Lines

    wish = Wish(
        corpus=corpus,
        seeds=min(seeds, 1) if quick else seeds,
        rounds=3 if quick else rounds,
        lines=Lines(up_mbit=up_mbit, down_mbit=down_mbit, values=values),
        has_shares=values > 0,
        is_quick=quick,
        fast=not exact,
    )
    try:
        run(wish, json_file=json_file)
    except DipacoError as error:
        print_error(error)
        raise typer.Exit(error.exit_code) from None


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
