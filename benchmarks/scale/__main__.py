"""`python -m benchmarks.scale`: what a peer pays for the swarm it is in, against how many peers there are."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

GRID = "4x4"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    options = _options(arguments)
    from .counted import HEADER, MEASURES, count

    print(HEADER)
    found = []
    for volunteers in options.counted:
        found.append(count(volunteers, grid=options.grid, minutes=options.minutes, warm_up_s=options.warm_up_s))
        print(found[-1].row(), flush=True)
    if len(found) > 1:
        sizes = [each.volunteers for each in found]
        told = "  ".join(f"{exponent(sizes, [each.median[name] for each in found]):10.2f}" for name in MEASURES)
        print(f"{'exponent':>10}  {told}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    return 0


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The power of the size that the values grow with: the slope of a line through their logarithms."""
    points = [(math.log(size), math.log(value)) for size, value in zip(sizes, values, strict=True) if value > 0]
    if len(points) < 2:
        return 0.0
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description="What a swarm costs its peers.")
    parser.add_argument("--counted", type=_sizes, default=(12, 25, 50), help="real programs, so many: 12,25,50")
    parser.add_argument("--grid", type=_grid, default=GRID, help="modules of each level")
    parser.add_argument("--minutes", type=float, default=2.0, help="that are counted, of virtual time")
    parser.add_argument("--warm-up-s", type=float, default=60.0, help="before them")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args(arguments)
    options.grid = _grid(options.grid) if isinstance(options.grid, str) else options.grid
    return options


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 2:
        raise argparse.ArgumentTypeError(f"`{text}` is no list of sizes of at least 2, such as 12,25,50")
    return sizes


def _grid(text: str) -> tuple[int, ...]:
    try:
        widths = tuple(int(part) for part in text.split("x"))
    except ValueError:
        widths = ()
    if not widths or min(widths) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is no grid, such as 4x4")
    return widths


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # as the simulator: a run must repeat itself
        environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.scale", *sys.argv[1:]], environment)
    sys.exit(main())
