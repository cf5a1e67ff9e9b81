"""What one run under faults cost, in figures, and the bars that it must keep; docs/churn.md defines every figure.

Pure functions of the evidence. Times after a kill are in seconds; an expiry is the life of a heartbeat.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .check import Breach, check, counted_twice, lost_receipts
from .evidence import Done, Evidence, Timeline, peer_of
from .observer import OBSERVER
from .schedule import Verb


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
    archived = {(event["module"], event["version"]): event.t_s for _, event in evidence.events("archived")}
    within = [
        share
        for module, links in evidence.chains.items()
        for link in links
        if began_s <= archived.get((module, link.version), 0.0) <= evidence.ended_s
        for share in link.shares
    ]
    receipts = evidence.receipts
    lost, timeline = lost_receipts(evidence), Timeline(evidence)
    killed = [death for death in evidence.deaths() if death.verb is Verb.KILL]
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
        kills=tuple(_kill(evidence, timeline, death, began_s) for death in killed),
    )


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


def _round_s(archived: dict[tuple[str, int], float], began_s: float) -> float:
    times: dict[str, list[float]] = {}
    for (module, _), t_s in sorted(archived.items(), key=lambda item: item[1]):
        if t_s >= began_s:
            times.setdefault(module, []).append(t_s)
    gaps: Sequence[float] = [b - a for ts in times.values() for a, b in zip(ts, ts[1:], strict=False)]
    return statistics.median(gaps) if gaps else 0.0


GOODPUT_MIN = 0.80
LOSS_MAX = 0.03
REASSIGNED_EXPIRIES_MAX = 3.0
LEADER_EXPIRIES_MAX = 2.0
"""And one round besides."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One promise, what was measured, and whether it was kept; None: no kill tested it."""

    name: str
    measured: str
    wanted: str
    is_kept: bool | None


def bars(twin: Figures, faults: Figures, *, loss: dict[str, float], ttl_s: float) -> list[Bar]:
    """All bars; `loss` by the run's name, at the same version."""
    ratio, change = faults.goodput / twin.goodput if twin.goodput else 0.0, loss["faults"] / loss["twin"] - 1
    broken = [str(breach) for breach in faults.breaches if breach.rule not in ("lost", "twice", "verify")]
    chains = next((breach.detail for breach in faults.breaches if breach.rule == "verify"), "all verify")
    return [
        Bar("goodput, share of the twin's", f"{ratio:.1%}", f"at least {GOODPUT_MIN:.0%}", ratio >= GOODPUT_MIN),
        Bar("validation loss against the twin's", f"{change:+.2%}", f"within {LOSS_MAX:.0%}", change <= LOSS_MAX),
        Bar("contributions lost", str(faults.lost), "0 of those with a receipt", not faults.lost),
        Bar("contributions counted twice", str(faults.twice), "0", not faults.twice),
        Bar("chains", chains, "recomputed to the bit", faults.chains_verified),
        _reassigned(faults, ttl_s),
        _led_again(twin, faults, ttl_s),
        Bar("other promises broken", f"{len(broken)}: {broken[0]}" if broken else "none", "none", not broken),
    ]


def _reassigned(faults: Figures, ttl_s: float) -> Bar:
    alone = [kill.reassigned_s for kill in faults.kills if kill.was_alone]
    found, wanted = median(alone), f"median at most {REASSIGNED_EXPIRIES_MAX:g} expiries"
    name = f"path reassigned ({len(alone)} of {len(faults.kills)} kills left one uncovered)"
    if not alone:
        return Bar(name, "another trained it already", wanted, None if not faults.kills else True)
    told = "never" if found is None else f"{found / ttl_s:.2f} expiries ({found:.1f} s)"
    return Bar(name, told, wanted, found is not None and found <= REASSIGNED_EXPIRIES_MAX * ttl_s)


def _led_again(twin: Figures, faults: Figures, ttl_s: float) -> Bar:
    gaps = [gap for kill in faults.kills for gap in kill.led.values()]
    bound_s = LEADER_EXPIRIES_MAX * ttl_s + twin.round_s
    wanted = f"all within {LEADER_EXPIRIES_MAX:g} expiries and a round: {bound_s:.1f} s"
    name = f"leader killed to next version ({len(gaps)} modules)"
    if not gaps:
        return Bar(name, "no leader was killed", wanted, None)
    known = [gap for gap in gaps if gap is not None]
    if len(known) < len(gaps):
        return Bar(name, f"{len(gaps) - len(known)} never", wanted, False)
    told = f"median {statistics.median(known):.1f} s, slowest {max(known):.1f} s"
    return Bar(name, told, wanted, max(known) <= bound_s)
