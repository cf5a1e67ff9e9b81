"""The figures of a churn benchmark, from the evidence of both runs; pure, so that tests can make evidence by hand.

docs/churn.md defines every figure. Times after a kill are in seconds; an expiry is the life of a heartbeat.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.chaos.check import Breach, check, counted_twice, lost_receipts
from benchmarks.chaos.evidence import Done, Evidence
from benchmarks.chaos.gather import peer_of
from benchmarks.chaos.observer import OBSERVER
from benchmarks.chaos.schedule import Verb
from benchmarks.chaos.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill and what came after it, in seconds from the kill; None: it did not come before the end."""

    victim: str
    at_s: float
    """Since the run's clock began."""
    path: str | None
    was_alone: bool
    """Whether nobody else trained the path: then it had to be taken over."""
    detected_s: float | None
    reassigned_s: float | None
    """0 when another volunteer had the path already."""
    resumed_s: float | None
    back_s: float | None
    started_s: float | None
    """When the victim's process was started again."""
    led: dict[str, float | None]
    """The modules that it led, and when each had its next version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run in numbers."""

    seconds: float
    contributions: int
    tokens: int
    versions: int
    """That every module has."""
    receipts: int
    lost: int
    expired: int
    kept: int
    """With a receipt, for rounds that were open at the end."""
    twice: int
    chains_verified: bool
    round_s: float
    """Median time between two versions of a module."""
    breaches: tuple[Breach, ...]
    kills: tuple[Kill, ...] = ()

    @property
    def goodput(self) -> float:
        """Contributions counted on the chains, per second."""
        return self.contributions / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def figures(evidence: Evidence, *, began_s: float) -> Figures:
    """Everything that is measured of one run whose clock began at `began_s`."""
    archived = _archived(evidence)
    within = [
        share
        for module, links in evidence.chains.items()
        for link in links
        if began_s <= archived.get((module, link.version), 0.0) <= evidence.ended_s
        for share in link.shares
    ]
    receipts = evidence.receipts
    lost = lost_receipts(evidence)
    safe = evidence.counted | evidence.expired
    return Figures(
        seconds=evidence.ended_s - began_s,
        contributions=len(within),
        tokens=sum(share.tokens for share in within),
        versions=min((len(links) for links in evidence.chains.values()), default=0),
        receipts=len(receipts),
        lost=len(lost),
        expired=len(evidence.expired & receipts.keys()),
        kept=len(receipts.keys() - safe) - len(lost),
        twice=len(counted_twice(evidence)),
        chains_verified=not evidence.problems,
        round_s=_round_s(archived, began_s),
        breaches=tuple(check(evidence)),
        kills=kills(evidence, began_s=began_s),
    )


def kills(evidence: Evidence, *, began_s: float) -> tuple[Kill, ...]:
    """What came after each SIGKILL of a volunteer."""
    timeline = Timeline(evidence)
    deaths = [death for death in evidence.deaths() if death.verb is Verb.KILL]
    return tuple(_kill(evidence, timeline, death, began_s) for death in deaths)


def median(values: Iterable[float | None]) -> float | None:
    """The median; None if there is no value, or one that never came."""
    known = list(values)
    return None if not known or None in known else statistics.median(v for v in known if v is not None)


def _kill(evidence: Evidence, timeline: Timeline, death: Done, began_s: float) -> Kill:
    t_s, name = death.t_s, death.name
    path, started_s = timeline.path_of(name, t_s), evidence.back_s(death)
    others = timeline.claimants(path, t_s) - {name} if path else set[str]()

    def after(moment_s: float | None) -> float | None:
        return None if moment_s is None else moment_s - t_s

    missed_s = timeline.first("misses", after_s=t_s, by=OBSERVER, peer=peer_of(evidence, name))
    seen_again = started_s is not None and (missed_s is None or missed_s > started_s + evidence.ttl_s)
    return Kill(
        victim=name,
        at_s=t_s - began_s,
        path=path,
        was_alone=path is not None and not others,
        detected_s=None if seen_again else after(missed_s),
        reassigned_s=after(timeline.retaken_s(death, path)) if path else None,
        resumed_s=after(timeline.first("receipt", after_s=t_s, without=name, path=path)) if path else None,
        back_s=after(timeline.first("receipt", after_s=t_s, by=name)),
        started_s=after(started_s),
        led={module: after(_next_version_s(evidence, module, t_s)) for module in sorted(timeline.led_by(name, t_s))},
    )


def _next_version_s(evidence: Evidence, module: str, after_s: float) -> float | None:
    """When a version that is on the chain was first made after a time, by whomever leads then."""
    digests = {link.digest for link in evidence.chains.get(module, ())}
    times = [
        event.t_s
        for _, event in evidence.events("version")
        if event["module"] == module and event.t_s > after_s and event["digest"] in digests
    ]
    return min(times, default=None)


def _archived(evidence: Evidence) -> dict[tuple[str, int], float]:
    """When each version came into the archive."""
    return {(event["module"], event["version"]): event.t_s for _, event in evidence.events("archived")}


def _round_s(archived: dict[tuple[str, int], float], began_s: float) -> float:
    times: dict[str, list[float]] = {}
    for (module, _), t_s in sorted(archived.items(), key=lambda item: item[1]):
        if t_s >= began_s:
            times.setdefault(module, []).append(t_s)
    gaps: Sequence[float] = [b - a for ts in times.values() for a, b in zip(ts, ts[1:], strict=False)]
    return statistics.median(gaps) if gaps else 0.0
