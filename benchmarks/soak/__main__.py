"""`python -m benchmarks.soak`: does anything grow while a swarm of real processes runs for an hour?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EPILOG = """Exit codes: 0 nothing grows beyond its bound; 1 something does; 2 a wrong flag or corpus; 5 this machine
cannot; 130 stopped. docs/churn.md says what is measured and which bounds hold."""


def main(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 60.0,
    peers: Annotated[int, typer.Option(min=2, max=32, help="Volunteers; faults befall the first half of them.")] = 4,
    faults_per_minute: Annotated[float, typer.Option(min=0, help="SIGKILL, SIGTERM or SIGSTOP, and back.")] = 0.5,
    warm_up: Annotated[float, typer.Option(min=0, max=0.9, help="Share of the time that does not count.")] = 0.3,
    corpus: Annotated[str, typer.Option(help="`found`, a file or folder of text, JSONL or Parquet.")] = "found",
    seed: Annotated[int, typer.Option(min=0, help="Decides the run and the schedule.")] = 0,
    shared: Annotated[
        bool, typer.Option("--shared", help="Others start peers here, too: measure nothing that is the machine's.")
    ] = False,
    out: Annotated[Path, typer.Option(help="A new folder; logs, homes and the result.")] = Path("soak"),
) -> None:
    """Run a swarm under mild churn, sample what its processes hold, and say what grows."""
    from dipaco_p2p.program.console import run_program

    from .experiment import Options

    options = Options(
        minutes=minutes,
        peers=peers,
        seed=seed,
        faults_per_minute=faults_per_minute,
        corpus=corpus,
        is_alone=not shared,
    )
    grown: list[str] = []

    async def run() -> None:
        from .run import run_soak

        grown.extend(await run_soak(options, out, warm_up=warm_up))

    code = run_program(run)
    raise typer.Exit(code or (1 if grown else 0))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=EPILOG)(main)
    app()
