"""`python -m benchmarks.swarm_faults churn`, `... soak` and `... paced`: what faults cost a swarm of real processes."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from benchmarks.report import Corpus, JsonFile

CODES = "2 a wrong flag or corpus; 5 this machine cannot; 130 stopped. docs/churn.md defines every figure and bound."
Out = Annotated[Path, typer.Option(help="A new folder for logs, histories, homes and the result.")]
Seed = Annotated[int, typer.Option(min=0, help="Decides weights, shards, batches, and the schedule of faults.")]
Away = Annotated[tuple[float, float], typer.Option(help="A victim starts again after this many seconds.")]
Peers = Annotated[int, typer.Option(min=2, max=32, help="Volunteers.")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, help=__doc__)


@app.command(epilog=f"Exit codes: 0 every bar that was tested is kept; 1 one is missed; {CODES}")
def churn(
    peers: Peers = 8,
    minutes: Annotated[float, typer.Option(min=0.2, help="How long there are kills.")] = 10.0,
    away: Away = (15.0, 25.0),
    never_back: Annotated[float, typer.Option(min=0, max=1, help="Share of the victims that stay away.")] = 0.0,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps per round.")] = 100,
    corpus: Corpus = "found",
    seed: Seed = 0,
    out: Out = Path("churn"),
    quick: Annotated[bool, typer.Option("--quick", help="4 volunteers, 2 minutes: for trying.")] = False,
    at_once: Annotated[bool, typer.Option("--at-once", help="Both runs at the same time.")] = False,
) -> None:
    """Run a swarm without faults and one whose volunteers are killed; show what the kills cost and what was kept."""
    from .churn import Options, run_churn

    options = Options(
        peers=4 if quick else peers,
        minutes=2.0 if quick else minutes,
        away_s=away,
        never_back=never_back,
        seed=seed,
        steps=steps,
        corpus=corpus,
        at_once=at_once,
    )
    _run(run_churn(options, out))


@app.command(epilog=f"Exit codes: 0 nothing grows beyond its bound; 1 something does; {CODES}")
def soak(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 60.0,
    peers: Peers = 4,
    faults_per_minute: Annotated[
        float, typer.Option(min=0, help="SIGKILL, SIGTERM or SIGSTOP, and back, for the first half of the volunteers.")
    ] = 0.5,
    warm_up: Annotated[float, typer.Option(min=0, max=0.9, help="Share of the time that does not count.")] = 0.3,
    corpus: Corpus = "found",
    seed: Seed = 0,
    shared: Annotated[
        bool, typer.Option("--shared", help="Others start peers here too: leave out what belongs to the machine.")
    ] = False,
    out: Out = Path("soak"),
) -> None:
    """Run a swarm under mild churn, sample what its processes hold, and show what grows."""
    from .soak import run_soak

    soaking = run_soak(
        out,
        minutes=minutes,
        peers=peers,
        seed=seed,
        faults_per_minute=faults_per_minute,
        warm_up=warm_up,
        corpus=corpus,
        is_alone=not shared,
    )
    _run(soaking)


@app.command(epilog=f"Exit codes: 0 it ran; {CODES}")
def paced(
    peers: Peers = 4,
    minutes: Annotated[float, typer.Option(min=1, help="How long, in virtual time.")] = 60.0,
    round_s: Annotated[float, typer.Option(min=1, help="How long the steps of a round take a volunteer.")] = 60.0,
    ttl_s: Annotated[float, typer.Option(min=1, help="How long a heartbeat lives.")] = 10.0,
    kills_per_minute: Annotated[float, typer.Option(min=0, help="0: no run under kills.")] = 0.0,
    seed: Seed = 1,
    json_file: JsonFile = None,
) -> None:
    """Run the real programs in virtual time, where every step takes as long as it is told to; show what judging, audits
    and kills cost."""
    from simulation import with_fixed_hashes

    with_fixed_hashes("benchmarks.swarm_faults")
    from .paced import run_paced

    run_paced(
        peers=peers,
        minutes=minutes,
        round_s=round_s,
        ttl_s=ttl_s,
        kills_per_minute=kills_per_minute,
        seed=seed,
        json_file=json_file,
    )


def _run(work: Awaitable[bool]) -> NoReturn:
    from dipaco_p2p.program.console import run_program

    held: list[bool] = []

    async def run() -> None:
        held.append(await work)

    raise typer.Exit(run_program(run) or int(held != [True]))


if __name__ == "__main__":
    app()
