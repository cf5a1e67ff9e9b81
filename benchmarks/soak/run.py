"""The whole soak: the run, the trends, the table, the JSON."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.chaos.swarm import require_new, told_when_stopped

from .bounds import trends
from .experiment import Options, restarts, soak
from .report import print_trends, to_dict


async def run_soak(options: Options, out: Path, *, warm_up: float) -> list[str]:
    """Run and report; the measures that grow. Raises DipacoError."""
    require_new(out)
    with told_when_stopped():
        samples, done, rounds_per_s = await soak(options, out)
    found = trends(samples, rounds_per_s=rounds_per_s, warm_up=warm_up)
    more = {"rounds_per_s": rounds_per_s, "restarts": restarts(done), "warm_up": warm_up}
    (out / "soak.json").write_text(json.dumps(to_dict(found, samples, **more), indent=1) + "\n")
    print_trends(found, seconds=options.duration_s, faults=len(done) // 2)
    print(f"everything is in {out}")
    return [trend.measure for trend in found if trend.grows]
