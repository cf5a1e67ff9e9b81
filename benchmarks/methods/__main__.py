"""`python -m benchmarks.methods`: what of the method holds on one machine, with its controls."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.report import require_known, run_benchmark
from dipaco_p2p.errors import Interrupted
from dipaco_p2p.program.console import run_command

EPILOG = """Exit codes: 0 `2x2 k-means`, routed once, beats `dense + outer step` in every seed, or a comparison is
finished; 1 it does not, or was not run; 2 a wrong flag or corpus; 130 stopped: the same command goes on."""


def main(
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            help="A file or folder of text, JSONL (gzip or not) or Parquet; may be given several times. Default: what "
            "is found on this machine; for comparisons `own`, this project's text."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, nothing tuned: a few minutes.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="All methods and ablations: hours.")] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=64, help="Default: 2, 5 for lost-work; 1 with --quick.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this method or change, by its name; repeatable.")] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            help="Instead: lost-work, compression, compression-long, compression-mixed, "
            "compression-curve, density, repair, overlap or muon, of a 2x2 grid."
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Of a comparison's runs. Default: 6; 20 of muon, 60 if long.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Inner steps of these rounds. Default: 30.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Everything is kept here, and goes on from here. Default: `methods`, or the comparison."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=64, help="Worker processes of one thread each.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Train without the fast mode, as the swarm does.")] = False,
) -> None:
    """Train every method for the same steps per path on the same text, and say which of the paper's claims hold."""
    from .comparisons import COMPARISONS
    from .experiment import Choice, run_comparison, run_experiment

    require_known("comparison", filter(None, [compare]), COMPARISONS)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    choice = Choice(
        corpus=tuple(corpus or []),
        quick=quick,
        everything=everything,
        seeds=seeds,
        only=tuple(only or []),
        processes=threads,
        fast=not exact,
    )
    done: list[bool] = []

    def work() -> None:
        try:
            if compare is None:
                done.append(run_experiment(choice, out or Path("methods")))
            else:
                run_comparison(compare, choice, out or Path(compare), rounds=rounds, steps=steps)
                done.append(True)
        except KeyboardInterrupt:
            raise Interrupted("stopped", hint="the same command goes on") from None

    raise typer.Exit(run_command(work) or (0 if done == [True] else 1))


if __name__ == "__main__":
    run_benchmark(main, epilog=EPILOG)
