"""From the tables to one `Snapshot`: a pure function of the records, what was observed, and the time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dipaco_p2p import strict
from dipaco_p2p.node.run import Run
from dipaco_p2p.protocol.claims import taking_part
from dipaco_p2p.protocol.judgement import Judgement
from dipaco_p2p.protocol.liveness import Claim
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId, PathId

from .contributors import contributor_rows
from .live import Live
from .model import ModuleRow, PathRow, PathState, RunInfo, Snapshot, StageInfo
from .rows import StageRecords, StageRows, stage_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """All that is known at one moment."""

    stages: tuple[StageRecords, ...]
    """The first one first; at least one."""
    live: Live = Live()
    """Of the last one."""
    refused: Mapping[str, int] = field(default_factory=dict)
    join: str = ""


def take_snapshot(tables: Tables, *, now_s: float, rows: Sequence[StageRows] | None = None) -> Snapshot:
    """What is shown at `now_s`. `rows` are those of the stages, if they were made before and are still good."""
    made = [stage_rows(records) for records in tables.stages] if rows is None else rows
    live, stage = tables.live, tables.stages[-1]
    paths = tuple(_path_rows(stage, made[-1], live))
    work = [one for found in made for one in found.work]
    losses = tuple(row for found in made for row in found.losses)
    checks = tuple(row for found in made for row in found.checked.rows)
    return Snapshot(
        run=run_info([records.run for records in tables.stages]),
        taken_s=now_s,
        heard_s=live.heard_s,
        state=_state(stage, paths),
        peers_alive=len(live.volunteers),
        peers_training=len(taking_part(_claims(live))),
        paths_covered=sum(bool(row.peers) for row in paths),
        credit_total=sum(one.credit for one in work),
        refused=dict(tables.refused),
        modules=tuple(_module_rows(stage, made[-1], live)),
        paths=paths,
        rounds=tuple(row for found in made for row in found.rounds),
        versions=tuple(row for found in made for row in found.versions),
        losses=losses,
        checks=checks,
        contributors=contributor_rows(work, losses, live, checks=checks, now_s=now_s),
        join=tables.join,
    )


def path_states(run: Run, reached: Mapping[ModuleId, int], live: Live) -> dict[PathId, PathState]:
    """What goes on with each path of the open stage; `reached` says the version of each module."""

    def state(path: PathId) -> PathState:
        if path_round(path, reached) >= run.config.rounds.rounds:
            return PathState.DONE
        return PathState.TRAINING if live.claims.get(path) else PathState.FREE

    return {path: state(path) for path in run.topology.paths()}


def path_round(path: PathId, reached: Mapping[ModuleId, int]) -> int:
    """The version that all modules of `path` have."""
    return min(reached[module] for module in path.modules())


def run_info(stages: Sequence[Run]) -> RunInfo:
    """What does not change while a stage is open."""
    return RunInfo(
        name=stages[-1].manifest.config.name,
        origin=stages[-1].origin,
        coordinator=stages[-1].manifest.author,
        stages=tuple(map(_stage_info, stages)),
        settings=tuple(_settings(strict.plain(stages[-1].manifest.config))),
    )


def _stage_info(run: Run) -> StageInfo:
    topology = run.topology
    return StageInfo(
        id=run.id,
        name=run.manifest.stage,
        grid=str(topology),
        modules=len(topology.modules()),
        paths=topology.path_count,
        rounds=run.config.rounds.rounds,
        steps=run.config.inner.steps,
        parameters=sum(run.layout(module).size for module in topology.modules()),
    )


def _settings(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """`model.width` and its value, and so on; values as JSON, texts bare."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)


def _state(stage: StageRecords, paths: Sequence[PathRow]) -> str:
    if stage.run.is_last_stage and all(row.state is PathState.DONE for row in paths):
        return "complete"
    return "training" if any(row.peers for row in paths) else "waiting"


def _claims(live: Live) -> dict[PathId, dict[PeerId, Claim]]:
    return {
        path: {peer: Claim(path=path, since_s=since_s) for peer, since_s in found.items()}
        for path, found in live.claims.items()
    }


def _path_rows(stage: StageRecords, rows: StageRows, live: Live) -> Iterable[PathRow]:
    newest = max(stage.judgements, default=None)
    losses = {found.path: found.loss for found in stage.judgements[newest].paths} if newest is not None else {}
    best = best_rounds(stage.judgements.values())
    reached = {module: len(chain) for module, chain in stage.chains.items()}
    for path, state in path_states(stage.run, reached, live).items():
        known = live.path_states.get(path)
        yield PathRow(
            path=path,
            state=state,
            round=path_round(path, reached),
            peers=tuple(sorted(live.claims.get(path, {}))),
            loss=losses.get(path),
            best_round=best.get(path),
            covered_s=known[1] if known is not None and known[0] == state else None,
            checks=rows.checked.of_path(newest, path) if newest is not None and losses.get(path) is not None else None,
        )


def best_rounds(judgements: Iterable[Judgement]) -> dict[PathId, int]:
    """The round that each path is served with: the best on the holdout since the last sharding, ties to the newer; the
    newest for a path that nothing of the holdout is routed to."""
    judged = sorted(judgements, key=lambda judgement: judgement.version)
    last = max((judgement.sharding for judgement in judged), default=0)
    best: dict[PathId, tuple[float, int]] = {}
    for judgement in (one for one in judged if one.sharding == last):
        for found in judgement.paths:
            loss = found.holdout_loss
            if found.path not in best or loss is None or loss <= best[found.path][0]:
                best[found.path] = (float("inf") if loss is None else loss, judgement.version)
    return {path: version for path, (_, version) in best.items()}


def _module_rows(stage: StageRecords, rows: StageRows, live: Live) -> Iterable[ModuleRow]:
    losses: dict[ModuleId, float] = {}
    for row in rows.versions:  # in order: the newest judged one stays
        if row.loss_after is not None:
            losses[row.module] = row.loss_after
    for module, chain in stage.chains.items():
        head = chain[-1].version if chain else stage.genesis[module]
        lead = live.leads.get(module)
        yield ModuleRow(
            module=module,
            version=head.version,
            digest=head.digest,
            loss=losses.get(module),
            leader=lead.leader if lead is not None else None,
            mirrors=lead.mirrors if lead is not None else (),
            term=lead.term if lead is not None else head.term,
            paths=len(stage.run.topology.paths_through(module)),
            open_contributions=live.open_contributions.get(module, 0),
        )
