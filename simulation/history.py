"""What a simulated run showed: plain values, from which the checkers judge (checks.py). No program code in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One line of somebody's history, or what the simulator did to somebody."""

    t_s: float
    """Virtual time, the same for all."""
    who: str
    ev: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A contribution that a version counts."""

    id: str
    peer: str
    path: str
    base: int
    base_digest: str
    """Empty when the contribution itself is not in the archive."""
    tokens: int
    """Of it that count."""
    said: int = 0
    """Tokens of the contribution itself; 0 when it is not in the archive."""
    work: str = ""
    """The id of the whole round's work; empty when the contribution is not in the archive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One version of a module."""

    version: int
    digest: str
    parent: str
    term: int
    counts: tuple[Counted, ...]
    is_rollback: bool = False
    """Made by the coordinator's decree: it counts nothing, and what began before it counts no more."""
    is_judged: bool = False
    """Whether it names appraisals."""
    forgers: frozenset[str] = frozenset()
    """Peers with a work of which two auditors or more, and all of them, came to something else, as it says."""
    harmful: frozenset[str] = frozenset()
    """Works that two judges or more, and all of them, surely found to make their path worse, as it says."""
    gaining: frozenset[str] = frozenset()
    """Peers with a work that all who judged it surely found to gain."""
    repeated: frozenset[tuple[str, str]] = frozenset()
    """Peers and works of which it tells what came of repeating them, or that it could not be done."""
    audits: tuple[tuple[str, str], ...] = ()
    """Works and those who earn credit for repeating them."""
    found: frozenset[str] = frozenset()
    """Peers that it calls forgers."""
    is_unmeasured: bool = False
    """Whether it scales nothing down, though two authors did a whole round's steps from its parent."""
    is_far: bool = False
    """Whether it is the first one, and a parameter moves further by it than the learning rates can take it."""
    findings: tuple[tuple[str, str, str], ...] = ()
    """All that it notes: kind, peer and work."""
    leader: str = ""
    expels: str = ""
    """Whom the module's owners ban in it; empty for nobody."""
    voters: frozenset[str] = frozenset()
    """Those owners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What could be seen of the run at one moment."""

    t_s: float
    alive: frozenset[str]
    """Volunteers that run and are connected."""
    led: frozenset[str]
    """Modules whose leader is among them, or is the seed node."""
    claimed: frozenset[str]
    """Paths that one of them claims."""
    versions: Mapping[str, int]
    """The greatest version of each module that a live head names."""
    archived: Mapping[str, int] = field(default_factory=dict)
    """The newest version of each module on the coordinator's disk."""
    kept: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Ids of the contributions on each machine's disk, whether the machine runs or not."""
    terms: Mapping[tuple[str, str], int] | None = None
    """The newest term on the disk of each machine, by machine and module; None where nobody looked at disks."""
    outlived: frozenset[str] = frozenset()
    """Keys of records that somebody still shows long after their signed expiry."""
    hidden: frozenset[str] = frozenset()
    """Volunteers that run, of which no other machine has a heartbeat; told where buckets are small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A whole run."""

    events: tuple[Event, ...]
    genesis: Mapping[str, str]
    """The digest of version 0 of each module."""
    chains: Mapping[str, tuple[Link, ...]]
    """The canonical chain of each module: the coordinator's."""
    looks: tuple[Look, ...]
    paths: Mapping[str, tuple[str, ...]]
    """The modules of each path."""
    names: Mapping[str, str]
    """Honest peers by their id."""
    rounds: int
    staleness: int
    tokens_max: int
    """Of one path in one round."""
    ttl_s: float
    deadline_s: float
    """The longest that a round waits after the last path that came, before it gives up what is missing."""
    calm_s: float
    """From here on there were no faults."""
    bound_s: float
    """The time that the run had from there to its end."""
    end_s: float
    problems: tuple[str, ...] = ()
    """What recomputing the chains found."""
    not_finite: tuple[str, ...] = ()
    """Modules of which a version is not finite, or has not the size of its module."""
    bugs: tuple[str, ...] = ()
    """Exceptions of the programs that are no errors of the world around them."""
    waits: tuple[str, ...] = ()
    """Both sides of every wait, if the swarm stood still for longer than any rule lets it; else nothing."""
    unfinished: tuple[str, ...] = ()
    """Who had not come to the end of the run in time, and where it was."""
    unkept: tuple[str, ...] = ()
    """Versions that the coordinator would forget for keepers, of which one of these has less than it proved."""
    behind: tuple[str, ...] = ()
    """Modules of which somebody who was there at the end held another newest version."""

    def of(self, ev: str) -> list[Event]:
        return [event for event in self.events if event.ev == ev]

    def counted(self) -> dict[str, tuple[str, int]]:
        """Where each contribution counts, by id: module and version."""
        return {
            each.id: (module, link.version)
            for module, chain in self.chains.items()
            for link in chain
            for each in link.counts
        }

    def reported_s(self) -> dict[str, float]:
        """When the loss of a contribution was first reported, by id."""
        return {str(event.facts["id"]): event.t_s for event in reversed(self.of("expired"))}


@dataclass(frozen=True, slots=True)
class Broken:
    """A promise that a run broke; 0 stands for a bug, which is no promise."""

    promise: int
    what: str

    def __str__(self) -> str:
        return f"promise {self.promise}: {self.what}" if self.promise else f"bug: {self.what}"
