"""`python -m benchmarks.lost_work`: what missing and late contributions cost, and which rule for them is better."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

QUICK_DRAWS, DRAWS = 1, 5
QUICK_ROUNDS = 3


def main(
    corpus: Annotated[Path | None, typer.Option(help="A file or folder of text; default: this project's own.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One draw, three rounds: no spread, and below two minutes.")
    ] = False,
    draws: Annotated[int | None, typer.Option(min=1, max=64, help="Default: 5; 1 with --quick.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here after every draw.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Train without the fast mode, as the swarm does.")] = False,
) -> None:
    """Train a 2x2 grid for six rounds while contributions are lost, late, or of one path never come."""
    from dipaco_p2p.errors import DipacoError
    from dipaco_p2p.program.console import print_error

    from .cases import ROUNDS
    from .report import run

    try:
        count = draws or (QUICK_DRAWS if quick else DRAWS)
        run(corpus, draws=count, rounds=QUICK_ROUNDS if quick else ROUNDS, json_file=json_file, fast=not exact)
    except DipacoError as error:
        print_error(error)
        raise typer.Exit(error.exit_code) from None


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
