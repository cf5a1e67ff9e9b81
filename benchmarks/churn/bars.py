"""What the run under faults must show, each with what was measured; what nothing tried is neither kept nor missed."""

from __future__ import annotations

from dataclasses import dataclass

from .measure import Figures, median

GOODPUT_MIN = 0.80
LOSS_MAX = 0.03
REASSIGNED_EXPIRIES_MAX = 3.0
LEADER_EXPIRIES_MAX = 2.0
"""And one round besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One promise, what was measured, and whether it was kept; None: no kill put it to the test."""

    name: str
    measured: str
    wanted: str
    is_kept: bool | None


def bars(twin: Figures, faults: Figures, *, loss: dict[str, float], ttl_s: float) -> list[Bar]:
    """All bars; `loss` by the run's name, at the same version."""
    ratio, change = faults.goodput / twin.goodput if twin.goodput else 0.0, loss["faults"] / loss["twin"] - 1
    return [
        _bar("goodput, share of the twin's", f"{ratio:.1%}", f"at least {GOODPUT_MIN:.0%}", ratio >= GOODPUT_MIN),
        _bar("validation loss against the twin's", f"{change:+.2%}", f"within {LOSS_MAX:.0%}", change <= LOSS_MAX),
        _bar("contributions lost", str(faults.lost), "0 of those with a receipt", not faults.lost),
        _bar("contributions counted twice", str(faults.twice), "0", not faults.twice),
        _bar("chains", _chains(faults), "recomputed to the bit", faults.chains_verified),
        _reassigned(faults, ttl_s),
        _leader(twin, faults, ttl_s),
        _bar("other promises broken", _others(faults), "none", not _other_breaches(faults)),
    ]


def _bar(name: str, measured: str, wanted: str, is_kept: bool | None) -> Bar:
    return Bar(name=name, measured=measured, wanted=wanted, is_kept=is_kept)


def _reassigned(faults: Figures, ttl_s: float) -> Bar:
    alone = [kill.reassigned_s for kill in faults.kills if kill.was_alone]
    found, wanted = median(alone), f"median at most {REASSIGNED_EXPIRIES_MAX:g} expiries"
    name = f"path reassigned ({len(alone)} of {len(faults.kills)} kills left one uncovered)"
    if not alone:
        return _bar(name, "another trained it already", wanted, None if not faults.kills else True)
    return _bar(name, _expiries(found, ttl_s), wanted, found is not None and found <= REASSIGNED_EXPIRIES_MAX * ttl_s)


def _leader(twin: Figures, faults: Figures, ttl_s: float) -> Bar:
    gaps = [gap for kill in faults.kills for gap in kill.led.values()]
    bound_s = LEADER_EXPIRIES_MAX * ttl_s + twin.round_s
    worst = None if None in gaps else max((gap for gap in gaps if gap is not None), default=None)
    wanted = f"all within {LEADER_EXPIRIES_MAX:g} expiries and a round: {bound_s:.1f} s"
    name = f"leader killed to next version ({len(gaps)} modules)"
    if not gaps:
        return _bar(name, "no leader was killed", wanted, None)
    measured = f"median {_seconds(median(gaps))}, slowest {_seconds(worst)}"
    return _bar(name, measured, wanted, worst is not None and worst <= bound_s)


def _other_breaches(faults: Figures) -> list[str]:
    told = ("lost", "twice", "verify")
    return [str(breach) for breach in faults.breaches if breach.rule not in told]


def _others(faults: Figures) -> str:
    found = _other_breaches(faults)
    return f"{len(found)}: {found[0]}" if found else "none"


def _chains(faults: Figures) -> str:
    return "all verify" if faults.chains_verified else next(b.detail for b in faults.breaches if b.rule == "verify")


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def _expiries(value: float | None, ttl_s: float) -> str:
    return "never" if value is None else f"{value / ttl_s:.2f} expiries ({value:.1f} s)"
