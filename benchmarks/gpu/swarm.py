"""A whole swarm on one GPU: the demo's programs with paths of 20 million parameters, a SIGKILL, and its promises.

The coordinator judges on the processor, as everywhere; volunteers share the GPU as four programs of one user would.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import TYPE_CHECKING

from .case import Bench, Case, Figures, Found, Part, number, table, verdict

if TYPE_CHECKING:
    from bootstrap.demo import DemoConfig

PATH = {"vocab_size": 12_288, "width": 384, "heads": 6, "ffn_width": 1152, "context": 512}
"""With eight blocks 20 million parameters."""
SHOWN = ("routed_perplexity", "dense_perplexity", "pretrained_perplexity", "reassigned_after_s", "receipts",
         "receipts_lost", "chains_verified")  # fmt: skip


def _swarm(bench: Bench) -> Figures:
    from bootstrap.demo import run_demo  # it signs and publishes: that needs what collect.py brings

    folder = bench.folder / "swarm"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was ended
    folder.mkdir()
    json_file = folder / "demo.json"
    broken = asyncio.run(run_demo(config(bench), folder=folder / "demo", json_file=json_file))
    found = json.loads(json_file.read_text("utf-8"))
    return {key: found.get(key) for key in SHOWN} | {"broken": broken, "ok": not broken or bench.is_small}


def config(bench: Bench) -> DemoConfig:
    """The demo's, on this device; at small size two of its small paths. Always of text that the machine has."""
    from bootstrap.demo import DemoConfig

    if bench.is_small:
        return DemoConfig(
            peers=2,
            grid="1x2",
            rounds=2,
            steps=4,
            kills=1,
            corpus="found",
            seed=0,
            device=bench.device,
            bytes_max=600_000,
        )
    return DemoConfig(
        peers=4,
        grid="2x2",
        rounds=8,
        steps=30,
        kills=1,
        corpus="found",
        seed=0,
        device=bench.device,
        threads=4,
        path=PATH,
        blocks=8,
        bytes_max=4_000_000,
    )


def _rows(found: Found) -> list[str]:
    own = found["demo"]
    rows: list[tuple[object, ...]] = [("routed perplexity", f"{number(own, 'routed_perplexity'):.2f}")]
    rows += [("after the warm-up", f"{number(own, 'pretrained_perplexity'):.2f}")]
    rows += [("dense baseline, same outer step", f"{number(own, 'dense_perplexity'):.2f}")]
    if own.get("reassigned_after_s") is not None:
        rows.append(("killed volunteer's path taken over after", f"{number(own, 'reassigned_after_s'):.1f} s"))
    rows += [("receipts, lost", f"{own['receipts']}, {own['receipts_lost']}")]
    rows += [("chains recomputed to the bit", own["chains_verified"]), ("all promises kept", verdict(own))]
    broken = own["broken"]
    assert isinstance(broken, list)
    return table(("what", "found"), *rows) + [f"- Broken: {promise}" for promise in broken] + ([""] if broken else [])


CASES = (Case(name="demo", limit_s=450, ask=_swarm),)
PART = Part(name="swarm", about="Does a swarm keep its promises on a GPU?", cases=CASES, rows=_rows)
