"""The whole benchmark: both runs, their figures, the tables, the JSON and the picture."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from benchmarks.chaos.swarm import require_new, told_when_stopped

from .bars import bars
from .experiment import Outcome, run_twins
from .loss import losses
from .measure import figures
from .options import Options
from .plot import can_plot, draw
from .report import print_result, to_dict


async def run_churn(options: Options, out: Path) -> bool:
    """Run and report; whether every bar that was tried was kept. Raises DipacoError."""
    require_new(out)
    with told_when_stopped():
        twin, faults = await run_twins(options, out)
    return await asyncio.to_thread(report, options, {"twin": twin, "faults": faults}, out)


def report(options: Options, outcomes: dict[str, Outcome], out: Path) -> bool:
    """Write and print what the two runs showed."""
    runs = {name: figures(outcome.evidence, began_s=outcome.began_s) for name, outcome in outcomes.items()}
    folders = {name: outcome.folder for name, outcome in outcomes.items()}
    version = min(run.versions for run in runs.values())
    loss = losses(folders, dict.fromkeys(runs, version))
    more = {
        "version": version,
        "loss": loss,
        "last_loss": losses(folders, {name: run.versions for name, run in runs.items()}),
        "busy": {name: outcome.busy for name, outcome in outcomes.items()},
    }
    found = bars(runs["twin"], runs["faults"], loss=loss, ttl_s=options.heartbeat_ttl_s)
    (out / "churn.json").write_text(json.dumps(to_dict(options, runs, found, more), indent=1, default=str) + "\n")
    print_result(options, runs, found, more)
    if can_plot():
        evidence = {name: (outcome.began_s, outcome.evidence) for name, outcome in outcomes.items()}
        draw(evidence, runs["faults"], ttl_s=options.heartbeat_ttl_s, folder=out)
    print(f"everything is in {out}")
    return all(bar.is_kept is not False for bar in found)
