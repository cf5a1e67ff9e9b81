"""`python -m benchmarks.trainer`: tokens a second of a volunteer's inner loop, beside one as anybody would write it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    steps: Annotated[int, typer.Option(min=1, help="Inner steps in each measurement.")] = 20,
    runs: Annotated[int, typer.Option(min=1, help="Measurements of each loop, one after the other in turns.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of torch.")] = 1,
    rounds: Annotated[int, typer.Option(min=0, help="Also compare so many whole rounds with bare steps.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; cuda: a 150M path too.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Three steps, two runs, no compiling: for trying.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Train the default path with each loop in turns; medians, and ratios to the plain loop in float32."""
    from peers.config import torch_device

    from .report import Wish, run

    run(
        Wish(
            steps=3 if quick else steps,
            runs=2 if quick else runs,
            threads=threads,
            rounds=rounds,
            device=torch_device(device),
            is_quick=quick,
        ),
        json_file=json_file,
    )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
