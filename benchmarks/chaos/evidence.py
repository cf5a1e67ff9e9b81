"""What a swarm left behind, parsed: the histories of all members, the seed's chains, and what was done to whom.

Pure values; gather.py reads them from files, tests make them by hand. Times are wall-clock seconds: all processes are
of one machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .schedule import SEED_NODE, Verb


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a member's history (dipaco_p2p/program/history.py)."""

    ev: str
    t_s: float
    values: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One contribution that a version counts."""

    id: str
    path: str
    peer: str
    base: int
    tokens: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One version of a module's chain in the seed's folder."""

    version: int
    digest: str
    term: int
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """An action of the schedule, when it was really done."""

    t_s: float
    verb: Verb
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that the checker and the figures are made of."""

    ttl_s: float
    """Life of a heartbeat: the expiry that times are told in."""
    ended_s: float
    """When the run was stopped or complete."""
    histories: Mapping[str, tuple[Event, ...]]
    """By member; the seed's is among them."""
    chains: Mapping[str, tuple[Link, ...]]
    """By module, from version 1 on."""
    kept: frozenset[str] = frozenset()
    """Contributions that somebody still keeps on disk: a round may be open in which they count."""
    staleness: int = 1
    """How many versions behind the head the base of a contribution may be that still counts."""
    done: tuple[Done, ...] = ()
    problems: tuple[str, ...] = ()
    """What recomputing the chains from genesis to head found."""
    lost_disks: frozenset[str] = frozenset()
    """Peer ids whose folders were deleted, or that never came back."""

    def events(self, *names: str) -> Iterator[tuple[str, Event]]:
        """All events of these names, with their member."""
        for member, events in self.histories.items():
            yield from ((member, event) for event in events if event.ev in names)

    @property
    def counted(self) -> frozenset[str]:
        """Contributions that the chains count."""
        return frozenset(share.id for links in self.chains.values() for link in links for share in link.shares)

    @property
    def expired(self) -> frozenset[str]:
        """Contributions that were reported as expired."""
        return frozenset(event["id"] for _, event in self.events("expired"))

    def can_count(self, receipt: Event) -> bool:
        """Whether the contribution of a receipt is kept, and its base new enough for the open round."""
        links = self.chains.get(receipt["module"], ())
        return receipt["id"] in self.kept and len(links) - receipt["base"] <= self.staleness

    @property
    def receipts(self) -> dict[str, tuple[str, Event]]:
        """Every receipt by its contribution, with the trainer's name."""
        return {event["id"]: (name, event) for name, event in self.events("receipt")}

    def deaths(self) -> list[Done]:
        """Every SIGKILL, SIGTERM and SIGSTOP of a volunteer, in order."""
        ends = (Verb.KILL, Verb.TERM, Verb.FREEZE)
        return sorted((d for d in self.done if d.verb in ends and d.name != SEED_NODE), key=lambda d: d.t_s)

    def back_s(self, death: Done) -> float | None:
        """When the victim was started or woken again; None: never."""
        times = [d.t_s for d in self.done if d.name == death.name and d.t_s > death.t_s]
        return min(times, default=None)
