"""`python -m benchmarks.churn`: what SIGKILLs cost a swarm of real processes, against a twin that nothing kills."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EPILOG = """Exit codes: 0 every bar that was tried is kept; 1 one is missed; 2 a wrong flag or corpus; 5 this machine
cannot; 130 stopped. docs/churn.md defines every figure."""


def main(
    peers: Annotated[int, typer.Option(min=2, max=32, help="Volunteers.")] = 8,
    minutes: Annotated[float, typer.Option(min=0.2, help="How long there are kills.")] = 10.0,
    kills_per_minute: Annotated[float, typer.Option(min=0, max=6, help="SIGKILLs, one after the other.")] = 1.0,
    away: Annotated[tuple[float, float], typer.Option(help="A victim is started again after this many seconds.")] = (
        15.0,
        25.0,
    ),
    never_back: Annotated[float, typer.Option(min=0, max=1, help="Share of the victims that stay away.")] = 0.0,
    heartbeat_ttl: Annotated[float, typer.Option(min=1, help="Seconds until a silent peer is given up.")] = 10.0,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps per round.")] = 100,
    corpus: Annotated[str, typer.Option(help="`found`, a file or folder of text, JSONL or Parquet.")] = "found",
    seed: Annotated[int, typer.Option(min=0, help="Decides weights, shards, batches, and the schedule.")] = 0,
    out: Annotated[Path, typer.Option(help="A new folder; logs, histories, both runs and the result.")] = Path("churn"),
    quick: Annotated[bool, typer.Option("--quick", help="4 volunteers, 2 minutes: for trying.")] = False,
    at_once: Annotated[bool, typer.Option("--at-once", help="Both runs at the same time.")] = False,
) -> None:
    """Run a swarm without faults and one whose volunteers are killed; say what the kills cost, and what was kept."""
    from dipaco_p2p.program.console import run_program

    from .options import Options

    options = Options(
        peers=4 if quick else peers,
        minutes=2.0 if quick else minutes,
        kills_per_minute=kills_per_minute,
        away_s=away,
        never_back=never_back,
        seed=seed,
        heartbeat_ttl_s=heartbeat_ttl,
        steps=steps,
        corpus=corpus,
        at_once=at_once,
    )
    kept: list[bool] = []

    async def run() -> None:
        from .run import run_churn

        kept.append(await run_churn(options, out))

    code = run_program(run)
    raise typer.Exit(code or (0 if kept == [True] else 1))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=EPILOG)(main)
    app()
