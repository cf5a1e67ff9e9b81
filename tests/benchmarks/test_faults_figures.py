"""The figures of a churn benchmark, of histories made by hand: as they are defined; and every bar can be missed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.swarm_faults.evidence import Done, Event, Evidence, Link, Share
from benchmarks.swarm_faults.figures import Bar, Figures, bars, figures, median
from benchmarks.swarm_faults.observer import OBSERVER
from benchmarks.swarm_faults.schedule import SEED_NODE, Verb

TTL_S, BEGAN_S, KILLED_S, ENDED_S = 10.0, 100.0, 130.0, 200.0
MODULE, PATH, OTHER = "L0.M0", "P0-0", "P0-1"


def event(ev: str, t_s: float, **values: Any) -> Event:
    return Event(ev=ev, t_s=t_s, values=values)


def receipt(id_: str, t_s: float, *, path: str = PATH, base: int = 0) -> Event:
    return event("receipt", t_s, id=id_, module=MODULE, path=path, base=base, holders=["ann"])


def version(ev: str, number: int, t_s: float, *, term: int = 1) -> Event:
    return event(ev, t_s, module=MODULE, version=number, digest=f"digest-{number}", term=term)


def link(number: int, *ids: str, term: int = 1) -> Link:
    shares = tuple(Share(id=id_, path=PATH, peer=id_[0], base=number - 1, tokens=50) for id_ in ids)
    return Link(version=number, digest=f"digest-{number}", term=term, shares=shares)


def run() -> Evidence:
    """Ann leads and trains a path alone; she is killed, bob takes both over, and she comes back."""
    ann = (
        event("joined", 90, peer="ann"),
        event("claimed", 91, path=PATH),
        event("leads", 92, module=MODULE, term=1, version=0),
        receipt("a0", 95),
        version("version", 1, 105),
        receipt("a1", 110, base=1),
        version("version", 2, 115),
        event("joined", 155, peer="ann"),
        event("claimed", 156, path=PATH),
        receipt("a3", 170, base=3),
    )
    bob = (
        event("joined", 90, peer="bob"),
        event("claimed", 91, path=OTHER),
        receipt("b1", 112, path=OTHER, base=1),
        event("claimed", 142, path=PATH),
        event("leads", 145, module=MODULE, term=2, version=2),
        receipt("b2", 148, base=2),
        version("version", 3, 150, term=2),
    )
    seed = tuple(version("archived", n, t_s, term=1 + (n > 2)) for n, t_s in ((1, 105), (2, 116), (3, 151)))
    observer = (event("sees", 90, peer="ann"), event("misses", 138, peer="ann"), event("sees", 156, peer="ann"))
    return Evidence(
        ttl_s=TTL_S,
        ended_s=ENDED_S,
        histories={"ann": ann, "bob": bob, SEED_NODE: seed, OBSERVER: observer},
        chains={MODULE: (link(1, "a0"), link(2, "a1", "b1"), link(3, "b2", term=2))},
        kept=frozenset({"a3"}),
        done=(Done(t_s=KILLED_S, verb=Verb.KILL, name="ann"), Done(t_s=150, verb=Verb.START, name="ann")),
    )


def test_the_figures_of_a_run() -> None:
    found = figures(run(), began_s=BEGAN_S)
    assert (found.contributions, found.tokens, found.versions) == (4, 200, 3)
    assert found.goodput == pytest.approx(4 / 100) and found.tokens_per_s == pytest.approx(2.0)
    assert (found.receipts, found.lost, found.kept, found.expired, found.twice) == (5, 0, 1, 0, 0)
    assert found.round_s == pytest.approx((11 + 35) / 2)
    assert found.chains_verified and found.breaches == ()


def test_what_came_after_a_kill() -> None:
    [kill] = figures(run(), began_s=BEGAN_S).kills
    assert (kill.victim, kill.path, kill.was_alone, kill.at_s) == ("ann", PATH, True, 30)
    assert (kill.detected_s, kill.reassigned_s, kill.resumed_s) == (8, 12, 18)
    assert (kill.started_s, kill.back_s) == (20, 40)
    assert kill.led == {MODULE: 20}


def test_versions_before_the_clock_began_do_not_count() -> None:
    assert figures(run(), began_s=110).contributions == 3


def test_a_path_that_another_trained_already_is_reassigned_at_once() -> None:
    evidence = run()
    cem = (event("joined", 90, peer="cem"), event("claimed", 91, path=PATH))
    [kill] = figures(replace(evidence, histories={**evidence.histories, "cem": cem}), began_s=BEGAN_S).kills
    assert not kill.was_alone and kill.reassigned_s == 0


def test_what_never_came_is_none_and_so_is_its_median() -> None:
    evidence = run()
    bob = tuple(e for e in evidence.histories["bob"] if e.t_s < KILLED_S)
    dead = replace(evidence, histories={**evidence.histories, "bob": bob}, done=evidence.done[:1], ended_s=KILLED_S + 5)
    [kill] = figures(
        replace(dead, histories={**dead.histories, "ann": dead.histories["ann"][:7]}), began_s=BEGAN_S
    ).kills
    assert (kill.reassigned_s, kill.resumed_s, kill.back_s, kill.started_s) == (None, None, None, None)
    assert median([1.0, None]) is None and median([]) is None and median([1.0, 5.0, 2.0]) == 2.0


def missed(found: Iterable[Bar]) -> set[str]:
    return {bar.name.split(" (")[0] for bar in found if bar.is_kept is False}


def judge(faults: Figures, *, twin: Figures | None = None, loss: float = 4.0) -> list[Bar]:
    return bars(twin or figures(run(), began_s=BEGAN_S), faults, loss={"twin": 4.0, "faults": loss}, ttl_s=TTL_S)


def test_a_run_like_its_twin_keeps_every_bar() -> None:
    found = judge(figures(run(), began_s=BEGAN_S))
    assert missed(found) == set() and all(bar.is_kept for bar in found)


def test_every_bar_can_be_missed() -> None:
    good = figures(run(), began_s=BEGAN_S)
    [kill] = good.kills
    late = replace(kill, reassigned_s=3 * TTL_S + 1)
    leaderless = replace(kill, led={MODULE: 2 * TTL_S + good.round_s + 1})
    assert missed(judge(replace(good, contributions=3))) == {"goodput, share of the twin's"}
    assert missed(judge(good, loss=4.13)) == {"validation loss against the twin's"}
    assert missed(judge(replace(good, lost=1))) == {"contributions lost"}
    assert missed(judge(replace(good, twice=1))) == {"contributions counted twice"}
    assert missed(judge(replace(good, kills=(late,)))) == {"path reassigned"}
    assert missed(judge(replace(good, kills=(replace(kill, reassigned_s=None),)))) == {"path reassigned"}
    assert missed(judge(replace(good, kills=(leaderless,)))) == {"leader killed to next version"}
    broken = figures(replace(run(), problems=("L0.M0: no digest",)), began_s=BEGAN_S)
    assert missed(judge(broken)) == {"chains"}
    gap = replace(run(), chains={MODULE: (link(1, "a0"), link(2, "a1", "b1"), link(3, "b2", term=0))})
    assert missed(judge(figures(gap, began_s=BEGAN_S))) == {"other promises broken"}


def test_a_bar_that_nothing_tried_is_not_called_kept() -> None:
    quiet = figures(replace(run(), done=()), began_s=BEGAN_S)
    untried = {bar.name.split(" (")[0] for bar in judge(quiet, twin=quiet) if bar.is_kept is None}
    assert untried == {"path reassigned", "leader killed to next version"}
