"""`python -m benchmarks.methods`: what of the method holds on one machine, with its controls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EPILOG = """Exit codes: 0 `2x2 k-means`, routed once, beats `dense + outer step` in every seed; 1 it does not, or was
not run; 2 a wrong flag or corpus; 130 stopped: the same command goes on."""


def main(
    corpus: Annotated[
        list[str] | None,
        typer.Option(help="A file or folder of text, JSONL (gzip or not) or Parquet; may be given several times."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, nothing tuned: a few minutes.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="All methods and ablations: hours.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, max=16, help="Default: 2; 1 with --quick.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this method, change or drill, by its name; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Everything is kept here, and goes on from here.")] = Path("methods"),
    threads: Annotated[int | None, typer.Option(min=1, max=64, help="Worker processes of one thread each.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Train without the fast mode, as the swarm does.")] = False,
) -> None:
    """Train every method for the same steps per path on the same text, and say which of the paper's claims hold."""
    import signal

    from dipaco_p2p.errors import DipacoError, Interrupted
    from dipaco_p2p.program.console import print_error

    from .experiment import Choice, run_experiment

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    choice = Choice(
        corpus=tuple(corpus or ["found"]),
        quick=quick,
        everything=everything,
        seeds=seeds or (1 if quick else 2),
        only=tuple(only or []),
        processes=threads,
        fast=not exact,
    )
    try:
        beats_dense = run_experiment(choice, out)
    except DipacoError as error:
        print_error(error)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        interrupted = Interrupted("stopped", hint="the same command goes on")
        print_error(interrupted)
        raise typer.Exit(interrupted.exit_code) from None
    raise typer.Exit(0 if beats_dense else 1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=EPILOG)(main)
    app()
