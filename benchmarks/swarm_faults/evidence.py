"""What a swarm left on disk: the histories of all members, the seed's chains, and what was done to whom.

`gather` reads it, `Timeline` answers questions about moments of the run. The values are plain: tests make them by hand.
Times are wall-clock seconds, since all processes ran on one machine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bootstrap.archives.verify import verify_stages
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.program.history import read_history
from dipaco_p2p.protocol.documents import ModuleVersion
from dipaco_p2p.use.folder import GRID, RunFolder

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


def gather(folder: Path, homes: Mapping[str, Path], *, done: Sequence[Done], ended_s: float) -> Evidence:
    """The evidence of the grid's stage; `folder` is the seed's, `homes` those of the volunteers by name.

    All programs must have ended. Raises DipacoError when there is no run.
    """
    files = RunFolder(folder)
    run, store = files.require()
    archive = SeedArchive(run, store)
    histories = {name: read_events(home.glob(f"runs/{run.id[:16]}*/history.jsonl")) for name, home in homes.items()}
    return Evidence(
        ttl_s=run.config.liveness.heartbeat_ttl_s,
        ended_s=ended_s,
        histories=histories | {SEED_NODE: read_events([files.stage(GRID) / "history.jsonl"])},
        chains={
            str(module): tuple(_link(sealed.document) for sealed in ledger.versions)
            for module, ledger in archive.ledgers.items()
        },
        kept=_kept([files.stage(GRID), *(path for home in homes.values() for path in home.glob("runs/*"))]),
        staleness=run.config.rounds.staleness,
        done=tuple(done),
        problems=tuple(f"{r.module}: {r.problem}" for r in verify_stages(files) if r.problem),
    )


def peer_of(evidence: Evidence, name: str) -> str:
    """The peer id of a volunteer, as it said when it joined; empty if it never did."""
    return next((str(event["peer"]) for event in evidence.histories.get(name, ()) if event.ev == "joined"), "")


def read_events(paths: Iterable[Path]) -> tuple[Event, ...]:
    """The events of these history files, in the order of time."""
    rows = [row for path in paths for row in read_history(path)]
    rows.sort(key=lambda row: float(row["t"]))
    return tuple(
        Event(ev=row["ev"], t_s=float(row["t"]), values={k: v for k, v in row.items() if k not in ("ev", "t")})
        for row in rows
    )


def _kept(folders: Iterable[Path]) -> frozenset[str]:
    """Contributions in any ledger (dipaco_p2p/node/ledger.py names its files so)."""
    paths = (path for folder in folders for path in folder.glob("documents/open-*.json"))
    return frozenset(path.stem.rpartition("-")[2] for path in paths)


def _link(version: ModuleVersion) -> Link:
    shares = tuple(
        Share(
            id=share.contribution, path=str(share.path), peer=share.peer, base=share.base_version, tokens=share.tokens
        )
        for share in version.shares
    )
    return Link(version=version.version, digest=version.digest, term=version.term, shares=shares)


class Timeline:
    """Questions about moments of a run that has ended."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._claims = {name: _steps(events) for name, events in evidence.histories.items()}

    def path_of(self, name: str, at_s: float) -> str | None:
        """The path that a member claimed at a time, by its own word; it may be dead."""
        times, paths = self._claims.get(name, ([], []))
        place = bisect_right(times, at_s)
        return paths[place - 1] if place else None

    def is_up(self, name: str, at_s: float) -> bool:
        """Whether the member was running, not frozen, and had not left."""
        history = self._evidence.histories.get(name, ())
        last = [event.ev for event in history if event.t_s <= at_s and event.ev in ("joined", "left")][-1:]
        return last == ["joined"] and not any(death.t_s <= at_s < back_s for death, back_s in self._absences(name))

    def claimants(self, path: str, at_s: float) -> set[str]:
        """The members that ran and claimed this path."""
        return {name for name in self._claims if self.path_of(name, at_s) == path and self.is_up(name, at_s)}

    def led_by(self, name: str, at_s: float) -> set[str]:
        """The modules for which nobody had begun a newer term than this member, and which it had not handed over."""
        leads: dict[str, tuple[int, str]] = {}
        moves = [(event.t_s, who, event) for who, event in self._evidence.events("leads", "handed_over")]
        for t_s, who, event in sorted(moves, key=lambda move: move[0]):
            if t_s > at_s:
                break
            module = event["module"]
            if event.ev == "leads":
                leads[module] = max(leads.get(module, (0, "")), (event["term"], who))
            elif leads.get(module, (0, ""))[1] == who:
                del leads[module]
        return {module for module, (_, who) in leads.items() if who == name}

    def retaken_s(self, death: Done, path: str) -> float | None:
        """When the path had a claimant again that is not the victim: the death itself if it had one then."""
        if self.claimants(path, death.t_s) - {death.name}:
            return death.t_s
        return self.first("claimed", after_s=death.t_s, without=death.name, path=path)

    def first(self, *names: str, after_s: float, without: str = "", by: str = "", **values: object) -> float | None:
        """When the first such event came after a time."""
        times = [
            event.t_s
            for name, event in self._evidence.events(*names)
            if event.t_s > after_s
            and name != without
            and by in ("", name)
            and all(event.values.get(key) == value for key, value in values.items())
        ]
        return min(times, default=None)

    def _absences(self, name: str) -> list[tuple[Done, float]]:
        found = []
        for death in self._evidence.deaths():
            if death.name == name:
                back_s = self._evidence.back_s(death)
                found.append((death, float("inf") if back_s is None else back_s))
        return found


def _steps(events: tuple[Event, ...]) -> tuple[list[float], list[str | None]]:
    """The times at which a member's path changed, and what it was from then on."""
    times, paths = list[float](), list[str | None]()
    for event in events:
        if event.ev in ("claimed", "released", "joined"):
            times.append(event.t_s)
            paths.append(event["path"] if event.ev == "claimed" else None)
    return times, paths
