"""`make mutants`: plant one error after the other, and play seeds until a checker finds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from .catalogue import MUTANTS
from .runner import Result, Wish, play_seed, pool_of


def hunt(seeds: int, *, first: int, workers: int, names: Sequence[str] = ()) -> int:
    """Try every mutant, or those of these names, on up to so many seeds; prints a table, and gives the exit code."""
    survivors = 0
    for name, found in _catches(names or tuple(MUTANTS), range(first, first + seeds), workers):
        survivors += found is None
        where = f"seed {found.seed:4}  {found.broken[0]}" if found else f"SURVIVED {seeds} seeds"
        print(f"{name:48} {where}", flush=True)
    print(f"{len(names or MUTANTS)} mutants, " + (f"{survivors} survived" if survivors else "all caught"))
    return 1 if survivors else 0


def catch(name: str, seeds: Sequence[int]) -> Result | None:
    """The first run with the error that breaks something which the same run without it keeps."""
    mutant = MUTANTS[name]
    faults = mutant.faults or Wish().faults
    for seed in dict.fromkeys([*mutant.seeds, *seeds]):
        result = play_seed(seed, Wish(mutant=name, faults=faults))
        if result.broken and not play_seed(seed, Wish(faults=faults)).broken:
            return result
    return None


def _catches(names: Sequence[str], seeds: range, workers: int) -> Iterator[tuple[str, Result | None]]:
    if workers < 2:
        yield from ((name, catch(name, seeds)) for name in names)
        return
    with pool_of(workers) as pool:
        yield from zip(names, pool.map(partial(catch, seeds=seeds), names), strict=True)
