"""`python -m benchmarks.compression`: bytes, speed and final loss of every codec, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

QUICK_VALUES, VALUES = 2_000_000, 25_000_000


def main(
    corpus: Annotated[Path | None, typer.Option(help="A file or folder of text; default: this project's own.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=64, help="Draws of weights and batches.")] = 2,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of the short runs; 0: none.")] = 6,
    long_rounds: Annotated[
        int, typer.Option("--long", min=0, help="Rounds of long runs, where top128 belongs; 0: none.")
    ] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps of each of their rounds.")] = 30,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, three rounds, small vectors: for trying.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Train without the fast mode.")] = False,
) -> None:
    """Encode and decode a large vector with every codec, then train a 2x2 grid with each."""
    from dipaco_p2p.errors import DipacoError
    from dipaco_p2p.program.console import print_error

    from .report import Wish, run

    wish = Wish(
        corpus=corpus,
        values=QUICK_VALUES if quick else VALUES,
        seeds=1 if quick else seeds,
        rounds=min(3, rounds) if quick else rounds,
        long_rounds=long_rounds,
        steps=steps,
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
