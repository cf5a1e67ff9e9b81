"""From stages to one `Snapshot`: a pure function of the records, what was observed, and the time.

`Live` is what peers say of themselves at one moment: hints. No address is in it: what must not be shown is not kept.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dipaco_p2p import strict
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.watch import Watch
from dipaco_p2p.protocol.claims import taking_part
from dipaco_p2p.protocol.credit import Earned, recent_credit
from dipaco_p2p.protocol.decrees import FREEZE
from dipaco_p2p.protocol.judgement import Judgement
from dipaco_p2p.protocol.liveness import Head
from dipaco_p2p.protocol.names import clean_name
from dipaco_p2p.protocol.rounds import PathClaims
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId, PathId

from .ledger import Stage
from .model import (
    AuditRow,
    CheckRow,
    ContributorRow,
    DecreeRow,
    LossRow,
    ModuleRow,
    PathRow,
    PathState,
    RunInfo,
    ShareRow,
    Snapshot,
    StageInfo,
    VersionRow,
)
from .rows import RECEIPTED, PeersStandings, StageRows, decree_rows, stage_rows

DOING_CHARS_MAX = 32
SEEN_MAX = 10_000
"""Peers of which it is known when they were last there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The open stage, now."""

    volunteers: Mapping[PeerId, str] = field(default_factory=dict)
    """Those alive, and what they do; seed nodes are not among them."""
    relayed: frozenset[PeerId] = frozenset()
    """Those of them that are dialled through relays."""
    claims: PathClaims = field(default_factory=dict)
    """Who trains a path, and since when; in a large swarm nobody reads the claims of all."""
    told: Mapping[PathId, int] = field(default_factory=dict)
    """How many train a path, of those whose claims were not read, as the leaders of its modules tell."""
    alive: int | None = None
    """About how many volunteers live, where they were not counted."""
    leads: Mapping[ModuleId, tuple[PeerId, Head]] = field(default_factory=dict)
    """Who leads a module, and its announcement."""
    open_contributions: Mapping[ModuleId, int] = field(default_factory=dict)
    last_seen_s: Mapping[PeerId, float] = field(default_factory=dict)
    """Unix time of the last heartbeat, also of peers that are gone."""
    names: Mapping[PeerId, tuple[str, str]] = field(default_factory=dict)
    """The name and team that the last heartbeat of a peer said, if it said any; also those that a decree hides."""
    path_states: Mapping[PathId, tuple[str, float]] = field(default_factory=dict)
    """The state of a path, and since when."""
    heard_s: float | None = None


def read_live(watch: Watch, before: Live, *, now_s: float) -> Live:
    """What `watch` has seen, after what was known before."""
    volunteers = {peer: cleaned(beat.doing) for peer, beat in watch.heartbeats.items() if beat.role == "volunteer"}
    said = {peer: (clean_name(beat.name), clean_name(beat.team)) for peer, beat in watch.heartbeats.items()}
    seen_s = _newest({**before.last_seen_s, **dict.fromkeys(watch.heartbeats, now_s)})
    return Live(
        volunteers=volunteers,
        relayed=frozenset(peer for peer in volunteers if watch.heartbeats[peer].is_relayed),
        claims={path: dict(found) for path, found in watch.claims.items()},
        told=watch.paths.told(),
        alive=None if watch.neighbourhood.is_all else watch.peers_alive,
        leads={
            module: (leader, heads[leader])
            for module, heads in watch.heads.items()
            if (leader := watch.leader(module)) is not None
        },
        open_contributions={module: len(found.entries) for module, found in watch.rounds.items()},
        last_seen_s=seen_s,
        names={peer: names for peer, names in {**before.names, **said}.items() if any(names) and peer in seen_s},
        path_states=before.path_states,
        heard_s=now_s if watch.heartbeats else before.heard_s,
    )


def cleaned(text: str) -> str:
    """A short printable text: nothing that a terminal or a page could take for anything else."""
    return "".join(char for char in text if char.isprintable())[:DOING_CHARS_MAX]


def _newest(seen_s: dict[PeerId, float]) -> dict[PeerId, float]:
    """Not more than the bound: identities cost nothing."""
    if len(seen_s) <= SEEN_MAX:
        return seen_s
    return dict(sorted(seen_s.items(), key=lambda item: -item[1])[:SEEN_MAX])


def take_snapshot(
    stages: Sequence[Stage],
    *,
    now_s: float,
    refused: Mapping[str, int],
    live: Live | None = None,
    join: str = "",
    rows: Sequence[StageRows] | None = None,
) -> Snapshot:
    """What is shown at `now_s` of `stages`, the first one first, at least one; `live` is of the last one. `rows` are
    those of the stages, if they were made before and are still good."""
    made = [stage_rows(stage) for stage in stages] if rows is None else rows
    live, stage = live or Live(), stages[-1]
    paths = tuple(_path_rows(stage, made[-1], live))
    versions = tuple(row for found in made for row in found.versions)
    losses = tuple(row for found in made for row in found.losses)
    checks = tuple(row for found in made for row in found.checked.rows)
    decrees, decreed = decree_rows(tuple(stage.decrees.log), versions), stage.decrees.state
    live = replace(live, names={peer: said for peer, said in live.names.items() if not decreed.hides(peer)})
    return Snapshot(
        run=run_info([stage.run for stage in stages]),
        taken_s=now_s,
        heard_s=live.heard_s,
        state=_state(stage, paths, decrees),
        peers_alive=len(live.volunteers) if live.alive is None else live.alive,
        peers_training=len(taking_part(live.claims)) + sum(live.told.values()),
        peers_relayed=len(live.relayed),
        paths_covered=sum(bool(row.peers) or bool(live.told.get(row.path)) for row in paths),
        credit_total=math.fsum(row.credit for row in versions),
        refused=dict(refused),
        modules=tuple(_module_rows(stage, made[-1], live)),
        paths=paths,
        rounds=tuple(row for found in made for row in found.rounds),
        versions=versions,
        losses=losses,
        checks=checks,
        contributors=contributor_rows(versions, losses, live, checks=checks, standings=made[-1].standings, now_s=now_s),
        join=join,
        decrees=decrees,
    )


def path_states(run: Run, reached: Mapping[ModuleId, int], live: Live) -> dict[PathId, PathState]:
    """What goes on with each path of the open stage; `reached` says the version of each module."""

    def state(path: PathId) -> PathState:
        if path_round(path, reached) >= run.rounds:
            return PathState.DONE
        return PathState.TRAINING if live.claims.get(path) or live.told.get(path) else PathState.FREE

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
        rounds_after=stages[-1].rounds_after,
    )


def _stage_info(run: Run) -> StageInfo:
    topology = run.topology
    return StageInfo(
        id=run.id,
        name=run.manifest.stage,
        grid=str(topology),
        modules=len(topology.modules()),
        paths=topology.path_count,
        rounds=run.rounds,
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


def _state(stage: Stage, paths: Sequence[PathRow], decrees: Iterable[DecreeRow]) -> str:
    if stage.run.is_last_stage and all(row.state is PathState.DONE for row in paths):
        return "complete"
    if any(row.act == FREEZE and row.ended_by is None for row in decrees):
        return "frozen"
    return "training" if any(row.state is PathState.TRAINING for row in paths) else "waiting"


def _path_rows(stage: Stage, rows: StageRows, live: Live) -> Iterable[PathRow]:
    judgements = [sealed.document for _, sealed in sorted(stage.judgements.items())]
    newest = judgements[-1].version if judgements else None
    losses = {found.path: found.loss for found in judgements[-1].paths} if judgements else {}
    best = best_rounds(judgements)
    reached = {module: chain.head.version for module, chain in stage.chains.items()}
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
            checks=rows.checked.paths.get((newest, path), RECEIPTED)
            if newest is not None and losses.get(path) is not None
            else None,
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


def _module_rows(stage: Stage, rows: StageRows, live: Live) -> Iterable[ModuleRow]:
    # In order: the newest judged one stays.
    losses = {row.module: row.loss_after for row in rows.versions if row.loss_after is not None}
    for module, chain in stage.chains.items():
        head = chain.head
        leader, announced = live.leads.get(module, (None, None))
        yield ModuleRow(
            module=module,
            version=head.version,
            digest=head.digest,
            loss=losses.get(module),
            leader=leader,
            mirrors=announced.mirrors if announced is not None else (),
            term=announced.term if announced is not None else head.term,
            paths=len(stage.run.topology.paths_through(module)),
            open_contributions=live.open_contributions.get(module, 0),
        )


# -- contributors: whose work is in the versions, and how much, recently and in all

KINDS = ("lost", "rejected")
FOUND = ("repeated", "forged")
NEWCOMERS_MAX = 1000
"""Peers without any credit that are shown: claims cost nothing."""

Work = tuple[VersionRow, ShareRow]
"""One contribution in the version that counts it."""
Audit = tuple[VersionRow, AuditRow]
"""One that earns credit, in the version that names it."""


def contributor_rows(
    versions: Sequence[VersionRow],
    losses: Sequence[LossRow],
    live: Live,
    *,
    checks: Iterable[CheckRow],
    standings: PeersStandings,
    now_s: float,
) -> tuple[ContributorRow, ...]:
    """By rank: most recent credit first, then most credit, then by id. What a leader says that it refused changes none
    of that."""
    by_peer: dict[PeerId, list[Work]] = defaultdict(list)
    for row in versions:
        for share in row.shares:
            by_peer[share.peer].append((row, share))
    audits: dict[PeerId, list[Audit]] = defaultdict(list)
    for row in versions:
        for audit in row.audits:
            if audit.credit:
                audits[audit.peer].append((row, audit))
    counts = {kind: Counter(loss.peer for loss in losses if loss.kind == kind and loss.peer) for kind in KINDS}
    counts |= {kind: Counter(peer for row in versions for peer in getattr(row.findings, kind)) for kind in FOUND}
    counts["checks"] = Counter(check.peer for check in checks)
    claimed = _claimed_paths(live)
    known = claimed.keys() | standings.keys() | {peer for count in counts.values() for peer in count}
    newcomers = sorted(known - by_peer.keys() - audits.keys())[:NEWCOMERS_MAX]
    made = [
        _contributor_row(
            peer,
            by_peer.get(peer, ()),
            audits.get(peer, ()),
            claimed.get(peer, ()),
            live,
            now_s=now_s,
            standings=standings.get(peer, ()),
            **{kind: count[peer] for kind, count in counts.items()},
        )
        for peer in [*dict.fromkeys([*by_peer, *audits]), *newcomers]
    ]
    ranked = sorted(made, key=lambda row: (-row.recent, -row.credit, row.peer))
    return tuple(replace(row, rank=rank) for rank, row in enumerate(ranked, start=1))


def _contributor_row(
    peer: PeerId,
    work: Sequence[Work],
    audits: Sequence[Audit],
    claimed: Sequence[PathId],
    live: Live,
    *,
    now_s: float,
    standings: tuple[tuple[ModuleId, str], ...],
    **counts: int,
) -> ContributorRow:
    """Its rank is not known yet; `counts` are of what no version counts, of findings, and of checks."""
    for_audits = [(row, audit.credit) for row, audit in audits]
    credits = [*((row, share.credit) for row, share in work), *for_audits]
    earned = [Earned(credit=credit, at_s=row.made_s) for row, credit in credits if row.made_s is not None]
    times_s = [one.at_s for one in earned]
    times_s += [live.last_seen_s[peer]] if peer in live.last_seen_s else []
    name, team = live.names.get(peer, ("", ""))
    return ContributorRow(
        peer=peer,
        rank=0,
        credit=math.fsum(credit for _, credit in credits),
        recent=recent_credit(earned, now_s=now_s),
        tokens=_tokens(work),
        contributions=len({share.contribution for _, share in work}),
        versions=len({(row.stage, row.module, row.version) for row, _ in work}),
        paths=tuple(sorted({share.path for _, share in work} | set(claimed))),
        last_s=max(times_s, default=None),
        is_alive=peer in live.volunteers,
        doing=live.volunteers.get(peer, ""),
        standings=standings,
        audits=len(audits),
        audit_credit=math.fsum(credit for _, credit in for_audits),
        name=name,
        team=team,
        **counts,
    )


def _tokens(work: Iterable[Work]) -> int:
    """Each round counts once, though a version of each of its modules counts it."""
    rounds: dict[tuple[str, PathId, int], int] = {}
    for row, share in work:
        key = row.stage, share.path, share.base_version
        rounds[key] = max(share.tokens, rounds.get(key, 0))
    return sum(rounds.values())


def _claimed_paths(live: Live) -> Mapping[PeerId, Sequence[PathId]]:
    found: dict[PeerId, list[PathId]] = defaultdict(list)
    for path, peers in live.claims.items():
        for peer in peers:
            found[peer].append(path)
    return found
