"""`python -m benchmarks.averaging`: seconds and memory of an owner's average, and what it costs a trainer beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

WIDTH, QUICK_WIDTH = 512, 128
"""Of the model: modules of 25 and 2 million values."""
STEPS, QUICK_STEPS = 40, 3
"""Inner steps in each measurement of the trainer."""
ROUND_S, QUICK_ROUND_S = 30.0, 1.0


def main(
    runs: Annotated[int, typer.Option(min=1, help="Measurements of each figure; medians are shown.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of torch in the trainer beside it.")] = 1,
    round_s: Annotated[float, typer.Option(min=0.1, help="Of a round in which one version is made.")] = ROUND_S,
    quick: Annotated[bool, typer.Option("--quick", help="A small module, two runs: for trying.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Average 2, 4, 8 and 16 contributions of every codec, each in a fresh process; then train beside an owner."""
    from .report import run

    width, steps = (QUICK_WIDTH, QUICK_STEPS) if quick else (WIDTH, STEPS)
    run(
        runs=2 if quick else runs,
        threads=threads,
        width=width,
        steps=steps,
        round_s=QUICK_ROUND_S if quick else round_s,
        json_file=json_file,
    )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
