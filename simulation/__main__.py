"""`python -m simulation --seeds 500`: runs of the whole swarm under faults, each from one integer.

The exit code is 1 if a promise was broken; then one command is printed for each seed that repeats it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from . import with_fixed_hashes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    options = _options(arguments)
    from .faults import FAULTS
    from .mutants import MUTANTS
    from .runner import Wish, end_in_good_order, hunt

    end_in_good_order()
    if options.list:
        print("faults:", *FAULTS, sep="\n  ")
        print("mutants:", *MUTANTS, sep="\n  ")
        return 0
    faults = tuple(name for name in options.faults.split(",") if name) if options.faults is not None else tuple(FAULTS)
    if unknown := set(faults) - FAULTS.keys():
        print(f"error: no fault is called {', '.join(sorted(unknown))}; --list shows them", file=sys.stderr)
        return 2
    if options.mutant is not None and options.mutant not in MUTANTS:
        print(f"error: no mutant is called {options.mutant}; --list shows them", file=sys.stderr)
        return 2
    wish = Wish(faults=faults, peers=options.peers, mutant=options.mutant)
    if options.seed is not None:
        return _one(options.seed, wish, is_verbose=options.verbose)
    if options.mutants:
        names = (options.mutant,) if options.mutant else ()
        return hunt(options.seeds, first=options.first, workers=options.workers, names=names)
    return _many(
        range(options.first, options.first + options.seeds), wish, workers=options.workers, folder=options.record
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m simulation", description="The swarm in virtual time, under faults."
    )
    parser.add_argument("--seeds", type=_positive, default=20, help="how many seeds to play")
    parser.add_argument("--first", type=_positive, default=1, help="the first of them")
    parser.add_argument("--seed", type=_positive, help="play only this one, here")
    parser.add_argument("--verbose", action="store_true", help="with --seed: tell everything that happened")
    parser.add_argument("--peers", type=_positive, help="volunteers, in place of what the seed says")
    parser.add_argument("--faults", help="only these, separated by commas; an empty text for none")
    parser.add_argument("--workers", type=_positive, default=2, help="processes")
    parser.add_argument("--mutant", help="with one planted error")
    parser.add_argument("--mutants", action="store_true", help="plant each error, until a checker finds it")
    parser.add_argument("--record", type=Path, help="keep results in this folder, and continue a range from them")
    parser.add_argument("--list", action="store_true", help="list faults and mutants")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _one(seed: int, wish, *, is_verbose: bool) -> int:  # type: ignore[no-untyped-def]
    from .checks import broken
    from .mutants import planted
    from .outcome import narrate, simulate
    from .plan import make_plan

    plan = make_plan(seed, wish.faults, volunteers=wish.peers)
    with planted(wish.mutant):
        outcome, world = simulate(plan, with_log=is_verbose)
    found = broken(outcome)
    if is_verbose:
        narrate(outcome, world)
    print(f"seed {seed}: {outcome.end_s:.0f} s, {len(outcome.events)} events")
    print(*(f"  {each}" for each in found) if found else ["  no promise broken"], sep="\n")
    return 1 if found else 0


def _many(seeds: Sequence[int], wish, *, workers: int, folder: Path | None = None) -> int:  # type: ignore[no-untyped-def]
    from .faults import fault_points
    from .runner import Played, Result, play_seeds

    played = Played(folder, wish) if folder is not None else None
    known = played.of(seeds) if played is not None else []
    if known:
        print(f"{len(known)} of these {len(seeds)} seeds were played before, at this state of the code", flush=True)
    began_s, done = time.monotonic(), len(known)

    def on_result(result: Result) -> None:
        nonlocal done
        done += 1
        if played is not None:
            played.add(result)
        for each in result.broken:
            print(f"seed {result.seed}: {each}", flush=True)
        if done % 25 == 0:
            print(f"{done} of {len(seeds)} seeds, {time.monotonic() - began_s:.0f} s", flush=True)

    left = sorted(set(seeds) - {result.seed for result in known})
    results = known + play_seeds(left, wish, workers=workers, on_result=on_result)
    faults = sum((result.faults for result in results), Counter[str]())
    points = sum((result.points for result in results), Counter[str]())
    print("faults:", ", ".join(f"{name} {count}" for name, count in sorted(faults.items())) or "none")
    print("fault points:", ", ".join(f"{name} {points[name]}" for name in fault_points()))
    missed = [name for name in fault_points() if not points[name]]
    if missed:
        print("never visited:", ", ".join(missed))
    virtual_s, cpu_s = sum(result.virtual_s for result in results), sum(result.cpu_s for result in results)
    print(f"{virtual_s / 3600:.1f} h of virtual time, {cpu_s / max(len(results), 1):.2f} s of CPU a seed")
    failing = sorted(result.seed for result in results if result.broken)
    for seed in failing:
        print(f"python -m simulation --seed {seed} --verbose{wish.flags}")
    verdict = f"{len(failing)} of them broke a promise" if failing else "no promise broken"
    print(f"{len(results)} seeds, {verdict} ({time.monotonic() - began_s:.0f} s)")
    return 1 if failing else 0


if __name__ == "__main__":
    with_fixed_hashes("simulation")
    sys.exit(main())
