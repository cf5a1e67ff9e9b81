"""`python -m benchmarks.attack [NAMES]`: what each attack costs a run of real processes, beside a twin without it."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.report import Corpus, require_known, run_benchmark, show, table, write_json
from benchmarks.swarm_faults.swarm import LocalSwarm, require_new, stoppable

from .strangers import ATTACKS
from .twins import TTL_S, Game, Left, Options, play, prepare

PERPLEXITY_RISE_MAX = 0.03
FIRST = ("leader",)
"""Attacks that are also played by a stranger that is there first."""
CHURN = ("leader", "cold-start")
"""Attacks that need a leader that dies; their twin loses the same one."""
MEANS = ("rise", "stolen", "weight")
EPILOG = """Exit codes: 0 every run is within 3 % of its twin and nothing of a stranger's is signed; 1 one is not; 2 a
wrong flag or corpus; 130 stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run beside its twin."""

    game: str
    seed: int
    version: int
    """At which both are compared."""
    perplexity: float
    twin: float
    seconds: float
    twin_seconds: float
    gap_s: float
    twin_gap_s: float
    stolen: float
    weight: float
    signed: int
    heard: dict[str, int]
    taken: int
    refused: dict[str, int]

    @property
    def rise(self) -> float:
        return self.perplexity / self.twin - 1


def games(names: Sequence[str]) -> list[Game]:
    """What to play for these attacks, or for all."""
    require_known("attack", names, ATTACKS)
    wanted = names or list(ATTACKS)
    found = [Game(attack=name, has_churn=name in CHURN) for name in wanted]
    return found + [Game(attack=name, is_first=True) for name in wanted if name in FIRST]


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(ATTACKS)}; default: all.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, with other weights and batches.")] = 3,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each run.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps of a round.")] = 20,
    limit: Annotated[float, typer.Option(min=10, help="Seconds after which a run is stopped.")] = 240.0,
    corpus: Corpus = "found",
    judges: Annotated[int, typer.Option(min=0, max=8, help="Peers that measure each work; 0: none.")] = 2,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds of a warm-up by the volunteers alone, before.")] = 0,
    beside: Annotated[str, typer.Option(help="A second stranger with this attack beside each, as `idle`.")] = "",
    out: Annotated[Path, typer.Option(help="A new folder for logs, homes and the result.")] = Path("attack"),
) -> None:
    """Run three honest volunteers beside one stranger, for each attack, and the same volunteers alone; compare the
    perplexity at the same version, and count what the stranger got."""
    from dipaco_p2p.program.console import run_program

    wanted = games(names or [])
    require_known("attack", [beside] if beside else [], ATTACKS)
    options = Options(
        rounds=rounds, steps=steps, corpus=corpus, judges=judges, warmup=warmup, beside=beside, limit_s=limit
    )
    found: list[Figures] = []
    alone: list[Left] = []
    spreads: list[float] = []

    async def run() -> None:
        require_new(out)
        with stoppable():
            for seed in range(seeds):
                work = out / f"seed-{seed}"
                prepared = await prepare(work, options, seed=seed)
                twins, spread = await _play_twins(prepared, work, options, wanted)
                spreads.append(spread)
                alone.extend(twins.values())
                for game in wanted:
                    left = await play(prepared, work / game.name, options, game)
                    found.append(await asyncio.to_thread(_compared, game, left, twins[game.has_churn], seed))
                    show(_table(found[-1:]))
                    write_json(out / "attack.json", {"twins_differ": spreads, "runs": [asdict(one) for one in found]})

    code = run_program(run)
    if found:
        refused, taken = sum(sum(one.refused.values()) for one in alone), sum(one.taken for one in alone)
        spread = f"two twins differ by {statistics.mean(spreads):.1%} (mean of {len(spreads)})"
        show(_table(found), f"{spread}; in twins {refused} of {taken} contributions were refused")
    raise typer.Exit(code or int(not all(map(_is_kept, found))))


async def _play_twins(
    prepared: LocalSwarm, work: Path, options: Options, wanted: Sequence[Game]
) -> tuple[dict[bool, Left], float]:
    """The runs that nobody attacks, with churn and without, and by how much two of them differ."""
    needed = [
        Game(attack="", has_churn=has_churn) for has_churn in sorted({False, *(game.has_churn for game in wanted)})
    ]
    twins = {game.has_churn: await play(prepared, work / game.name, options, game) for game in needed}
    again = await play(prepared, work / "twin again", options, needed[0])
    return twins, abs(await asyncio.to_thread(_rise, twins[False], again))


def _rise(one: Left, other: Left) -> float:
    version = min(one.versions, other.versions)
    return other.perplexity(version) / one.perplexity(version) - 1


def _compared(game: Game, left: Left, twin: Left, seed: int) -> Figures:
    version = min(left.versions, twin.versions)
    return Figures(
        game=game.name,
        seed=seed,
        version=version,
        perplexity=left.perplexity(version),
        twin=twin.perplexity(version),
        seconds=left.seconds,
        twin_seconds=twin.seconds,
        gap_s=left.gap_s,
        twin_gap_s=twin.gap_s,
        stolen=left.stolen,
        weight=left.weight,
        signed=left.signed,
        heard=left.heard,
        taken=left.taken,
        refused=left.refused,
    )


def _is_kept(one: Figures) -> bool:
    return one.rise <= PERPLEXITY_RISE_MAX and not one.signed


def _table(found: Sequence[Figures]) -> object:
    rows = []
    for name in dict.fromkeys(one.game for one in found):
        runs = [one for one in found if one.game == name]
        mean = {key: statistics.mean(getattr(one, key) for one in runs) for key in MEANS}
        told = max(runs, key=lambda one: sum(one.heard.values())).heard
        most = ", ".join(f"{reason} {count}" for reason, count in sorted(told.items(), key=lambda item: -item[1])[:3])
        times = statistics.mean(one.seconds / one.twin_seconds for one in runs)
        longest = max(runs, key=lambda one: one.gap_s - one.twin_gap_s)
        rows.append(
            (
                name,
                str(min(one.version for one in runs)),
                f"{runs[0].twin:.1f}",
                f"{mean['rise']:+.1%}",
                f"{times:.2f}",
                f"{longest.gap_s:.0f} ({longest.twin_gap_s:.0f})",
                f"{mean['stolen']:.2f}",
                f"{mean['weight']:.1%}",
                str(sum(one.signed for one in runs)),
                f"{sum(sum(one.refused.values()) for one in runs)} of {sum(one.taken for one in runs)}",
                most,
            )
        )
    title = f"One stranger beside three volunteers (an expiry is {TTL_S:g} s)"
    figures = ("rounds", "twin", "perplexity", "time", "longest gap, s (twin)", "credit", "weight", "signed")
    return table(title, ("attack", *figures, "honest refused", "heard"), rows, left=("heard",))


if __name__ == "__main__":
    run_benchmark(main, epilog=EPILOG)
