"""`dipaco-peer evaluate`: one's own figure beside the published one, of a round that the coordinator has judged.

A client that only reads: it listens nowhere, signs nothing, and forgets its identity.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dipaco_p2p.clock import Clock
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.node.measuring import Measuring
from dipaco_p2p.node.node import Reader, open_reader
from dipaco_p2p.node.reading import fetch_judgements, open_connection
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.node.store import Store
from dipaco_p2p.protocol.judgement import TOLERANCE_NATS, Judgement, agrees
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import PathId

SCHEMA = "dipaco.evaluation/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One path's loss, twice."""

    path: PathId
    published: float
    """Nats per token, as the coordinator signed it."""
    measured: float | None
    """The same, measured here; None if nothing is routed to the path here."""
    tokens: int

    @property
    def is_same(self) -> bool:
        return self.measured is not None and agrees(self.measured, self.published)


async def print_evaluation(
    address: str,
    round_number: int | None,
    path: str | None,
    *,
    expected: str | None,
    device: str,
    is_json: bool,
) -> list[str]:
    """Measure, and print; the names of the paths whose figure differs. Raises ConfigError for a round or path that has
    no published loss, and as joining does."""
    async with open_connection(address) as connection:
        run, found = await evaluate(
            connection.swarm,
            connection.host,
            connection.clock,
            connection.folder,
            round_number=round_number,
            path=path,
            expected=expected,
            device=device,
        )
    version, rows = found
    if is_json:
        print(json.dumps(document_of(run, version, rows)))
    else:
        Console().print(table_of(run, version, rows))
        print(f"two measurements agree if they differ by no more than {TOLERANCE_NATS:g} nats per token")
    return [str(row.path) for row in rows if not row.is_same]


async def evaluate(
    swarm: Swarm,
    host: PeerId,
    clock: Clock,
    folder: Path,
    *,
    round_number: int | None = None,
    path: str | None = None,
    expected: str | None = None,
    device: str = "cpu",
) -> tuple[Run, tuple[int, list[Compared]]]:
    """The run, the round, and its paths: the newest stage's newest judged round, unless one is named."""
    wanted = PathId.parse(path) if path is not None else None
    for run in reversed(await fetch_stages(swarm, host, expected=expected)):
        node = open_reader(run, ScopedSwarm(swarm, run.id), clock, Store(folder / run.id[:16]))
        await node.watch.refresh()
        judgement = await _judgement(node, round_number)
        if judgement is not None:
            return run, (judgement.version, await _compare(node, judgement, wanted, device))
    message = "no round is judged yet" if round_number is None else f"round {round_number} of this run is not judged"
    raise ConfigError(message, hint="wait until the coordinator has judged it, or name another with --round")


async def _judgement(node: Reader, round_number: int | None) -> Judgement | None:
    found = await fetch_judgements(node, begin=round_number or 0)
    chosen = [one for one in found if round_number is None or one.version == round_number]
    return chosen[-1] if chosen else None


async def _compare(node: Reader, judgement: Judgement, wanted: PathId | None, device: str) -> list[Compared]:
    known = {found.path: found.loss for found in judgement.paths if found.loss is not None}
    if wanted is not None and wanted not in known:
        hint = f"those of round {judgement.version}: {', '.join(map(str, list(known)[:8]))}"
        raise ConfigError(f"{wanted} has no published loss", hint=hint)
    measuring, rows = Measuring(node, device=device), []
    for path, loss in known.items():
        if wanted in (None, path):
            found = (await measuring.measure_again(judgement, path)).evaluation
            measured, tokens = (found.loss, found.tokens) if found is not None else (None, 0)
            rows.append(Compared(path=path, published=loss, measured=measured, tokens=tokens))
    return rows


def document_of(run: Run, version: int, rows: list[Compared]) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "schema": SCHEMA,
        "run": run.origin,
        "stage": run.id,
        "round": version,
        "tolerance_nats": TOLERANCE_NATS,
        "paths": [asdict(row) | {"path": str(row.path), "agrees": row.is_same} for row in rows],
    }


def table_of(run: Run, version: int, rows: list[Compared]) -> Table:
    """The same for people."""
    table = Table(title=f"{run.name}, {run.manifest.stage}, round {version}: nats per token", title_justify="left")
    for name in ("path", "published", "measured here", "difference", "tokens", ""):
        table.add_column(name, justify="left" if name in ("path", "") else "right")
    for row in rows:
        measured = "nothing" if row.measured is None else f"{row.measured:.4f}"
        difference = "" if row.measured is None else f"{row.measured - row.published:+.6f}"
        verdict = "agrees" if row.is_same else "DIFFERS"
        table.add_row(str(row.path), f"{row.published:.4f}", measured, difference, f"{row.tokens:,}", verdict)
    return table
