"""`python -m benchmarks.scale`: what a peer pays for the swarm it is in, against how many peers there are."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dipaco_p2p.config import DOWNLINKS, SHARES_MAX, UPLINKS
from dipaco_p2p.topology import Topology
from simulation import with_fixed_hashes

GRID = "4x4"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    options = _options(arguments)
    found: dict[str, list[dict[str, Any]]] = {}
    if options.counted:
        found["counted"] = _count(options)
    if options.real:
        found["real"] = _check(options)
    if options.modelled:
        runs = [(size, options.hours, False) for size in options.modelled]
        found["modelled"] = _play(runs, options)
    if options.flash:
        found["flash"] = _play([(size, options.flash_hours, True) for size in options.flash], options)
    if options.lines:
        found["lines"] = _lines(options)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _count(options: argparse.Namespace) -> list[dict[str, Any]]:
    from .counted import HEADER, MEASURES, count

    print("real programs in the simulator, a minute of the median volunteer:")
    print(HEADER)
    found = []
    for volunteers in options.counted:
        found.append(count(volunteers, grid=options.grid, minutes=options.minutes, warm_up_s=options.warm_up_s))
        print(found[-1].row(), flush=True)
    if len(found) > 1:
        sizes = [each.volunteers for each in found]
        told = "  ".join(f"{exponent(sizes, [each.median[name] for each in found]):10.2f}" for name in MEASURES)
        print(f"{'exponent':>10}  {told}")
    return [asdict(each) for each in found]


def _check(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Real processes beside the model at their pace."""
    from dipaco_p2p.program.console import run_program

    from .real import HOURS, Real, count_real, model_of

    told: list[dict[str, Any]] = []

    def beside_model(real: Real) -> dict[str, Any]:
        model = model_of(real, options.grid)
        pairs = {"reads": model.reads, "records": model.records, "puts": model.puts, "asked": model.calls}
        beside = ((name, real.median[name], value) for name, value in pairs.items())
        parts = [f"{name} {seen:,.0f} {value:,.0f} {value / seen:.2f}" for name, seen, value in beside]
        cadence = f"a version each {real.cadence_s:.0f} s, {3600 * HOURS / max(model.rounds, 1):.0f} s"
        print(f"{real.volunteers:10d}  {cadence}  " + "  ".join(parts), flush=True)
        spent = (
            ("beside inner steps", real.median, real.median["cpu_s"]),
            ("idle in a frozen run", real.idle, real.idle["all_cpu_s"]),
        )
        for what, counts, cpu_s in spent:
            core, daemon = cpu_s / 60, counts["daemon_bytes"] / 1e6
            print(f"            {what}: {core:.1%} of a core, {daemon:.2f} MB a minute; reads {counts['reads']:,.0f}")
        print(f"            memory {real.memory_bytes / 2**20:.0f} MiB", flush=True)
        return asdict(real) | {"model": pairs}

    async def run() -> None:
        limits = {"minutes": options.minutes, "warm_up_s": options.warm_up_s}
        for size in options.real:
            work = Path(tempfile.mkdtemp(prefix="dipaco-scale-")) / str(size)
            told.append(beside_model(await count_real(size, grid=options.grid, work=work, **limits)))
            shutil.rmtree(work.parent)  # after an error its logs are wanted

    print("real processes, a minute of the median volunteer that leads nothing; the model; the model by the processes:")
    if code := run_program(run):
        sys.exit(code)
    return told


def _lines(options: argparse.Namespace) -> list[dict[str, Any]]:
    from .lines import load, rows

    widths = options.modelled_grid
    kinds = {"uplink": options.uplink, "downlink": options.downlink, "round_s": options.round_s}
    bounds = {"contributions_max": options.contributions_max, "keepers": options.keepers}
    values = round(options.path_values / len(widths))
    loads = [load(size, widths=widths, values=values, **kinds, **bounds) for size in options.lines]
    line = f"{options.up_mbit:g} Mbit/s up and {options.down_mbit:g} down"
    print(f"Mbit/s on lines of {line}, worked out from the rules, {Topology(widths)} paths:")
    print(*rows(loads, up_mbit=options.up_mbit, down_mbit=options.down_mbit), sep="\n")
    return [asdict(one) for one in loads]


def _play(runs: Sequence[tuple[int, float, bool]], options: argparse.Namespace) -> list[dict[str, Any]]:
    from .churned import Churn
    from .costs import Figures
    from .model import Swarm

    found: list[Figures] = []
    widths = options.modelled_grid
    print(f"the model, {Topology(widths)} paths, under churn, then its twin without:")
    print(
        "volunteers  hours    reads  records  bytes/min  calls  |  leader: records  calls  |  node: reads  MB/min  ",
        end="",
    )
    print("|  fullest key  bytes  |  covered  all in s  goodput of twin  leaderless s  shares  |  took s")
    twins = []
    for size, hours, is_flash in runs:
        began_s = time.process_time()
        churn = Churn(flash_at_s=600.0 if is_flash else math.inf, region_at_s=hours * 1800)
        one = Swarm(size, hours=hours, churn=churn, widths=widths).play()
        twin = Swarm(size, hours=min(hours, 4.0), churn=Churn(is_quiet=True), widths=widths).play()
        found.append(one)
        twins.append(twin)
        everywhere = "-" if one.all_covered_s is None else f"{one.all_covered_s:.0f}"
        print(
            f"{size:10d}  {hours:5.0f}  {one.reads:7.0f}  {one.records:7.0f}  {one.bytes:9,.0f}  {one.calls:5.1f}  |"
            f"  {one.leader_records:15.0f}  {one.leader_calls:5.0f}  |"
            f"  {one.node_reads:11.0f}  {one.node_bytes / 1e6:6.1f}  |"
            f"  {one.fullest_records:11d}  {one.fullest_bytes:6,d}  |  {one.covered:7.2%}  {everywhere:>8}"
            f"  {one.goodput / twin.goodput:15.1%}  {one.leaderless_max_s:12.0f}  {one.shares_max:6d}  |"
            f"  {time.process_time() - began_s:6.0f}",
            flush=True,
        )
    if len(found) > 1:
        sizes = [each.volunteers for each in found]
        names = ("reads", "records", "bytes", "puts", "calls")
        slopes = {name: exponent(sizes, [getattr(each, name) for each in found]) for name in names}
        print("exponents:", ", ".join(f"{name} {slope:.2f}" for name, slope in slopes.items()))
    return [asdict(one) | {"twin": asdict(twin)} for one, twin in zip(found, twins, strict=True)]


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
    parser.add_argument("--counted", type=_sizes, default=(), help="real programs, so many: 12,25,50")
    parser.add_argument("--real", type=_sizes, default=(), help="processes on this machine beside the model: 12,24")
    parser.add_argument("--modelled", type=_sizes, default=(), help="the model, so many volunteers: 100,300,1000")
    parser.add_argument("--hours", type=float, default=24.0, help="of the model")
    parser.add_argument("--flash", type=_sizes, default=(), help="the model with a flash crowd: 3000,10000")
    parser.add_argument("--flash-hours", type=float, default=2.0, help="of the model with a flash crowd")
    parser.add_argument("--modelled-grid", type=_grid, default="16x16", help="modules of each level in the model")
    parser.add_argument("--lines", type=_sizes, default=(), help="what lines carry in a round: 256,1000,10000")
    parser.add_argument("--path-values", type=_size, default=25_000_000, help="parameters of a path, for --lines")
    parser.add_argument("--round-s", type=_positive, default=600.0, help="how long a round lasts, for --lines")
    parser.add_argument("--up-mbit", type=_positive, default=20.0, help="everybody's uplink, for --lines")
    parser.add_argument("--down-mbit", type=_positive, default=100.0, help="everybody's downlink, for --lines")
    parser.add_argument("--contributions-max", type=_size, default=SHARES_MAX, help="of a version, for --lines")
    parser.add_argument("--keepers", type=_size, default=100, help="that keep all that they can, for --lines")
    parser.add_argument("--uplink", choices=UPLINKS, default="int4", help="codec of outer gradients, for --lines")
    parser.add_argument("--downlink", choices=DOWNLINKS, default="int4", help="codec of updates, for --lines")
    parser.add_argument("--grid", type=_grid, default=GRID, help="modules of each level")
    parser.add_argument("--minutes", type=float, default=2.0, help="that are counted, of virtual time")
    parser.add_argument("--warm-up-s", type=float, default=60.0, help="before them")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args(arguments)
    widths = options.modelled_grid
    through = math.prod(widths) // min(widths)
    if options.lines and not through <= options.contributions_max <= SHARES_MAX:
        parser.error(f"--contributions-max {options.contributions_max} is not between {through} and {SHARES_MAX}")
    if not (options.counted or options.real or options.modelled or options.flash or options.lines):
        options.modelled = (100, 300, 1000)
    return options


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 2:
        raise argparse.ArgumentTypeError(f"`{text}` is no list of sizes of at least 2, such as 12,25,50")
    return sizes


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is no whole number above 0, such as 25000000")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"`{text}` is no number above 0")
    return value


def _grid(text: str) -> tuple[int, ...]:
    try:
        widths = tuple(int(part) for part in text.split("x"))
    except ValueError:
        widths = ()
    if not widths or min(widths) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is no grid, such as 4x4")
    return widths


if __name__ == "__main__":
    with_fixed_hashes("benchmarks.scale")
    sys.exit(main())
