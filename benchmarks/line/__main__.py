"""`python -m benchmarks.line`: one round's traffic of a path of 150M parameters on a home line. Needs root."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

QUICK_MBIT = 4.0


def main(
    codec: Annotated[list[str] | None, typer.Option(help="Of the uplink; default: the run file's.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds with each codec.")] = 3,
    up_mbit: Annotated[float, typer.Option(min=0.1, help="What the line carries up.")] = 20.0,
    down_mbit: Annotated[float, typer.Option(min=0.1, help="What the line carries down.")] = 100.0,
    quick: Annotated[bool, typer.Option("--quick", help="A small path on a slower line: for trying.")] = False,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Where the peers' disks are; default: temporary.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Push both modules of a path over a line in network namespaces, and pull their next versions."""
    from dipaco_p2p.config import CompressionConfig
    from dipaco_p2p.core.compress import CODECS
    from dipaco_p2p.program.console import run_program

    from .experiment import PATH_150M, QUICK_PATH, Wish
    from .report import run

    codecs = tuple(dict.fromkeys(codec or (CompressionConfig().uplink,)))
    if unknown := [name for name in codecs if name not in CODECS]:
        raise typer.BadParameter(f"no codec `{unknown[0]}`; there are {', '.join(CODECS)}")
    wishes = [
        Wish(
            model=QUICK_PATH if quick else PATH_150M,
            codec=name,
            rounds=1 if quick else rounds,
            up_mbit=min(up_mbit, QUICK_MBIT) if quick else up_mbit,
            down_mbit=min(down_mbit, QUICK_MBIT) if quick else down_mbit,
        )
        for name in codecs
    ]
    raise typer.Exit(run_program(lambda: run(wishes, folder=folder, json_file=json_file)))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
