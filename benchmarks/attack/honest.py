"""`python -m benchmarks.attack.honest`: how much honest work judges and auditors refuse, in runs without a stranger.

Each run has its work come in another way that may look odd: late, sparse, from a machine that computes in bfloat16.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.report import Corpus, require_known, run_benchmark, show, table, write_json
from benchmarks.swarm_faults.evidence import read_events
from benchmarks.swarm_faults.swarm import require_new, stoppable
from dipaco_p2p.errors import DipacoError

from .twins import HISTORIES, Game, Options, honest_refused, play, prepare

REFUSED_MAX = 0.01
TWIN = Game(attack="")
EPILOG = "Exit codes: 0 at most 1 % of all contributions is refused; 1 more is; 2 a wrong flag or corpus; 130 stopped."


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way in which honest work comes."""

    game: Game = TWIN
    warmup: int = 0
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


KINDS = {
    "plain": Kind(),
    "warm-up": Kind(warmup=3),
    "sparse": Kind(settings={"compression": {"uplink": '"top128"'}}),
    "bfloat16": Kind(game=replace(TWIN, last=("--engine", "bf16"))),
    "late": Kind(game=replace(TWIN, last=("--cpu", "0.05")), settings={"rounds": {"deadline_s": "5.0"}}),
    "overlapped": Kind(settings={"rounds": {"overlap": "true"}, "outer": {"lr": "0.5", "momentum": "0.7"}}),
    "re-sharded": Kind(settings={"routing": {"reshard_rounds": "[3, 6]"}}),
    "newcomer": Kind(game=replace(TWIN, joins_at=5), settings={"rounds": {"min_paths": "2"}}),
}
"""In `bfloat16` and `late` one of the three volunteers is another machine; a newcomer is the third of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came of one run."""

    kind: str
    seconds: float
    versions: int
    taken: int
    late: int
    refused: dict[str, int]
    checking: tuple[float, float]


def main(
    kinds: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(KINDS)}; default: all.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, with other weights and batches.")] = 1,
    rounds: Annotated[int, typer.Option(min=7, help="Rounds of each run.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps of a round.")] = 20,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 4,
    limit: Annotated[float, typer.Option(min=10, help="Seconds after which a run is stopped.")] = 240.0,
    corpus: Corpus = "found",
    out: Annotated[Path, typer.Option(help="A new folder for logs, homes and the result.")] = Path("honest"),
) -> None:
    """Run three honest volunteers in each way, count which of their contributions judges and auditors refused, and
    compare the time that judging and auditing took with that of training."""
    from dipaco_p2p.program.console import run_program

    wanted = kinds or list(KINDS)
    require_known("kind of work", wanted, KINDS)
    options = Options(rounds=rounds, steps=steps, corpus=corpus, limit_s=limit)
    found: list[Played] = []

    async def run() -> None:
        require_new(out)
        with stoppable():
            for seed in range(seeds):
                for name in wanted:
                    kind, work = KINDS[name], out / f"seed-{seed}" / name
                    settings = {"inner": {"batch": str(batch)}, **kind.settings}
                    altered = replace(options, warmup=kind.warmup, settings=settings)
                    prepared = await prepare(work, altered, seed=seed)
                    left = await play(prepared, work / "run", altered, kind.game)
                    taken, refused = honest_refused(prepared)
                    found.append(
                        Played(
                            kind=name,
                            seconds=left.seconds,
                            versions=left.versions,
                            taken=left.taken + taken,
                            late=left.late,
                            refused=dict(Counter(left.refused) + Counter(refused)),
                            checking=checking(left.folder),
                        )
                    )
                    write_json(out / "honest.json", [asdict(one) for one in found])
                    show(_table(found[-1:]))

    code = run_program(run)
    if found:
        show(_table(found))
    raise typer.Exit(code or int(_refused(found) > REFUSED_MAX * sum(one.taken for one in found)))


def checking(folder: Path) -> tuple[float, float]:
    """Time of all judges and auditors, as a share of the volunteers' training: in the first half of the run, in the
    second."""
    events = read_events([*folder.parent.glob(f"*/{HISTORIES}"), *folder.glob("*/history.jsonl")])
    rounds_s = [event.t_s for event in events if event.ev == "round"]
    if len(rounds_s) < 2:
        raise DipacoError(f"nobody trained two rounds in {folder.parent}", hint="see its logs, or raise --limit")
    middle_s = (min(rounds_s) + max(rounds_s)) / 2
    halves = [[event for event in events if (event.t_s >= middle_s) == is_later] for is_later in (False, True)]
    first, second = (
        sum(event["seconds"] for event in half if event.ev in ("appraised", "audited"))
        / sum(event["training_s"] for event in half if event.ev == "round")
        for half in halves
    )
    return first, second


def _refused(found: Sequence[Played]) -> int:
    return sum(sum(one.refused.values()) for one in found)


def _table(found: Sequence[Played]) -> object:
    rows = []
    for kind in dict.fromkeys(one.kind for one in found):
        runs = [one for one in found if one.kind == kind]
        counts = (min(one.versions for one in runs), sum(one.taken for one in runs), sum(one.late for one in runs))
        costs = ", ".join(f"{statistics.mean(half):.1%}" for half in zip(*(one.checking for one in runs), strict=True))
        reasons = ", ".join(sorted({reason for one in runs for reason in one.refused}))
        rows.append((kind, *map(str, counts), str(_refused(runs)), costs, reasons))
    title = f"Honest work: {_refused(found)} of {sum(one.taken for one in found)} contributions refused"
    return table(title, ("work", "rounds", "taken", "late", "refused", "checking", "why"), rows, left=("why",))


if __name__ == "__main__":
    run_benchmark(main, epilog=EPILOG)
