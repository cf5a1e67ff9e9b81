"""Who is there now, by their own word: heartbeats, claims, heads and open rounds of one moment. All of it is a hint.

No address is in here: it must not be shown, so it is not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dipaco_p2p.node.watch import Watch
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId, PathId

DOING_CHARS_MAX = 32
SEEN_MAX = 10_000
"""Peers of which it is known when they were last there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """Who leads a module."""

    leader: PeerId
    mirrors: tuple[PeerId, ...]
    term: int
    version: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The open stage, now."""

    volunteers: Mapping[PeerId, str] = field(default_factory=dict)
    """Those alive, and what they do; seed nodes are not among them."""
    claims: Mapping[PathId, Mapping[PeerId, float]] = field(default_factory=dict)
    """Who trains a path, and since when."""
    leads: Mapping[ModuleId, Lead] = field(default_factory=dict)
    open_contributions: Mapping[ModuleId, int] = field(default_factory=dict)
    last_seen_s: Mapping[PeerId, float] = field(default_factory=dict)
    """Unix time of the last heartbeat, also of peers that are gone."""
    path_states: Mapping[PathId, tuple[str, float]] = field(default_factory=dict)
    """The state of a path, and since when."""
    heard_s: float | None = None


def read_live(watch: Watch, before: Live, *, now_s: float) -> Live:
    """What `watch` has seen, after what was known before."""
    volunteers = {peer: cleaned(beat.doing) for peer, beat in watch.heartbeats.items() if beat.role == "volunteer"}
    return Live(
        volunteers=volunteers,
        claims={path: {peer: claim.since_s for peer, claim in found.items()} for path, found in watch.claims.items()},
        leads={module: lead for module in watch.heads if (lead := _lead(watch, module)) is not None},
        open_contributions={module: len(found.entries) for module, found in watch.rounds.items()},
        last_seen_s=_newest({**before.last_seen_s, **dict.fromkeys(watch.heartbeats, now_s)}),
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


def _lead(watch: Watch, module: ModuleId) -> Lead | None:
    leader = watch.leader(module)
    if leader is None:
        return None
    head = watch.heads[module][leader]
    return Lead(leader=leader, mirrors=head.mirrors, term=head.term, version=head.version, digest=head.digest)
