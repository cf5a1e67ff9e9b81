"""The offline checker on hand-made evidence: a good run passes, and each broken promise is found by its rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.swarm_faults.check import RETAKEN_EXPIRIES_MAX, check
from benchmarks.swarm_faults.evidence import Done, Event, Evidence, Link, Share
from benchmarks.swarm_faults.schedule import SEED_NODE, Verb

TTL_S = 10.0
MODULE, PATH = "L0.M0", "P0-0"
LATE_S = (RETAKEN_EXPIRIES_MAX + 1) * TTL_S


def event(ev: str, t_s: float, **values: Any) -> Event:
    return Event(ev=ev, t_s=t_s, values=values)


def share(id_: str, *, peer: str = "ann", base: int = 0) -> Share:
    return Share(id=id_, path=PATH, peer=peer, base=base)


def link(version: int, *shares: Share, digest: str = "", term: int = 1) -> Link:
    return Link(version=version, digest=digest or f"digest-{version}", term=term, shares=shares)


def receipt(id_: str, t_s: float, *, base: int, holders: tuple[str, ...] = ("leader",)) -> Event:
    return event("receipt", t_s, id=id_, module=MODULE, path=PATH, base=base, holders=list(holders))


def made(version: int, *, digest: str = "", term: int = 1) -> dict[str, Any]:
    return {"module": MODULE, "version": version, "digest": digest or f"digest-{version}", "term": term}


def good() -> Evidence:
    """Ann trains a path for two versions, is killed, and bob takes the path over; the third round is open."""
    ann = (
        event("joined", 0, peer="ann"),
        event("claimed", 1, path=PATH),
        receipt("a0", 5, base=0),
        receipt("a1", 15, base=1),
    )
    bob = (
        event("joined", 0, peer="bob"),
        event("leads", 1, module=MODULE, term=1, version=0),
        event("version", 10, **made(1)),
        event("version", 20, **made(2)),
        event("claimed", 40, path=PATH),
        receipt("b2", 50, base=2),
    )
    seed = (event("archived", 11, **made(1)), event("archived", 21, **made(2)))
    return Evidence(
        ttl_s=TTL_S,
        ended_s=200,
        histories={"ann": ann, "bob": bob, SEED_NODE: seed},
        chains={MODULE: (link(1, share("a0")), link(2, share("a1", base=1)))},
        kept=frozenset({"b2"}),
        done=(Done(t_s=22, verb=Verb.KILL, name="ann"),),
    )


def saying(evidence: Evidence, name: str, *events: Event) -> Evidence:
    """The same, and this member says these things as well."""
    told = sorted((*evidence.histories.get(name, ()), *events), key=lambda e: e.t_s)
    return replace(evidence, histories={**evidence.histories, name: tuple(told)})


def without(evidence: Evidence, name: str, ev: str) -> Evidence:
    told = tuple(e for e in evidence.histories[name] if e.ev != ev)
    return replace(evidence, histories={**evidence.histories, name: told})


def chained(evidence: Evidence, *links: Link) -> Evidence:
    chains: Mapping[str, tuple[Link, ...]] = {MODULE: links}
    return replace(evidence, chains=chains)


def test_a_rollback_is_no_breach_and_what_expires_with_it_is_no_loss() -> None:
    """Version 3 has the digest of version 1 and counts nothing; the open contribution was reported."""
    evidence = chained(good(), *good().chains[MODULE], link(3, digest="digest-1"))
    told = (event("version", 60, **made(3, digest="digest-1")), event("expired", 61, id="b2", reason="rolled-back"))
    seed = event("archived", 62, **made(3, digest="digest-1"))
    assert check(replace(saying(saying(evidence, "bob", *told), SEED_NODE, seed), kept=frozenset())) == []


Planted = Callable[[Evidence], Evidence]
BAD: dict[str, tuple[str, Planted]] = {
    "a receipt that no version counts": ("lost", lambda e: saying(e, "ann", receipt("x", 6, base=0))),
    "kept on a disk, for a round that is closed": (
        "lost",
        lambda e: replace(saying(e, "ann", receipt("x", 6, base=0)), kept=frozenset({"x", "b2"})),
    ),
    "one of two holders still has its disk": (
        "lost",
        lambda e: replace(
            saying(e, "ann", receipt("x", 6, base=0, holders=("leader", "mirror"))), lost_disks=frozenset({"leader"})
        ),
    ),
    "one contribution in two versions": (
        "twice",
        lambda e: chained(e, link(1, share("a0")), link(2, share("a1", base=1), share("a0", peer="bob"))),
    ),
    "one work under two names": (
        "twice",
        lambda e: chained(e, link(1, share("a0"), share("x")), link(2, share("a1", base=1))),
    ),
    "two digests for a version in one term": (
        "digest",
        lambda e: saying(e, "bob", event("version", 21, **made(2, digest="other"))),
    ),
    "two digests, though another version was given up": (
        "digest",
        lambda e: saying(
            e,
            "bob",
            event("gave_up", 21, module=MODULE, after=2),
            event("gave_up", 21, module="L9.M9", after=0),
            event("version", 22, **made(2, digest="other")),
        ),
    ),
    "the chain is not what was archived": (
        "digest",
        lambda e: chained(e, link(1, share("a0")), link(2, share("a1", base=1), digest="other")),
    ),
    "a version is missing": ("grow", lambda e: chained(e, link(1, share("a0")), link(2, share("a1", base=1)), link(4))),
    "terms fall": (
        "grow",
        lambda e: chained(e, link(1, share("a0"), term=2), link(2, share("a1", base=1), term=1)),
    ),
    "a version is archived again": ("grow", lambda e: saying(e, SEED_NODE, event("archived", 30, **made(1)))),
    "a chain does not come out again": ("verify", lambda e: replace(e, problems=("L0.M0: another digest",))),
    "nobody takes the path": ("retaken", lambda e: without(e, "bob", "claimed")),
    "the path is taken too late": (
        "retaken",
        lambda e: saying(without(e, "bob", "claimed"), "bob", event("claimed", 22 + LATE_S, path=PATH)),
    ),
    "the claimant was dead itself": (
        "retaken",
        lambda e: replace(
            saying(without(e, "bob", "claimed"), "cem", event("joined", 0, peer="cem"), event("claimed", 2, path=PATH)),
            done=(Done(t_s=21, verb=Verb.KILL, name="cem"), *e.done),
        ),
    ),
}


def test_a_good_run_has_no_breach() -> None:
    assert check(good()) == []


@pytest.mark.parametrize(("rule", "plant"), BAD.values(), ids=BAD.keys())
def test_a_planted_breach_is_found_by_its_rule(rule: str, plant: Planted) -> None:
    assert {breach.rule for breach in check(plant(good()))} == {rule}


EXCUSED: dict[str, Planted] = {
    "it was reported as expired": lambda e: saying(
        e, "ann", receipt("x", 6, base=0), event("expired", 30, id="x", module=MODULE, reason="stale-base")
    ),
    "all its holders lost their disks": lambda e: replace(
        saying(e, "ann", receipt("x", 6, base=0)), lost_disks=frozenset({"leader"})
    ),
    "the other half of the swarm made another version in its term": lambda e: saying(
        e, "ann", event("version", 19, **made(2, digest="other"))
    ),
    "the first one was given up for a better branch": lambda e: saying(
        e, "bob", event("gave_up", 21, module=MODULE, after=1), event("version", 22, **made(2, digest="other"))
    ),
    "another branch was made in another term": lambda e: saying(
        e, "ann", event("version", 19, **made(2, digest="other", term=2))
    ),
    "two works of one author from two versions": lambda e: chained(
        e, link(1, share("a0")), link(2, share("a1", base=1), share("x", base=0, peer="bob"))
    ),
    "it came back before the path was missed": lambda e: replace(
        without(e, "bob", "claimed"), done=(*e.done, Done(t_s=30, verb=Verb.START, name="ann"))
    ),
    "another one had the path already": lambda e: saying(
        without(e, "bob", "claimed"), "cem", event("joined", 0, peer="cem"), event("claimed", 2, path=PATH)
    ),
    "the run ended before the bound": lambda e: replace(without(e, "bob", "claimed"), ended_s=60),
}


@pytest.mark.parametrize("plant", EXCUSED.values(), ids=EXCUSED.keys())
def test_what_no_promise_forbids_is_no_breach(plant: Planted) -> None:
    assert check(plant(good())) == []
