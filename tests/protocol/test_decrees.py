"""The coordinator's decrees: what a decree may say, how they follow each other, what holds, what a version shows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import pytest
from version_harness import COORDINATOR, GENESIS, LEADER, MANIFEST, MODULE, blob, chain, child, shares

from dipaco_p2p.canonical import digest
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.protocol.audits import Audit
from dipaco_p2p.protocol.decrees import (
    ACTS,
    DECREES_MAX,
    REASON_CHARS_MAX,
    Decree,
    Decreed,
    Rebuilt,
    ShownDecree,
    check_next,
)
from dipaco_p2p.protocol.documents import DOCUMENT_BYTES_MAX, ModuleVersion, document_id, seal, unseal
from dipaco_p2p.protocol.expulsion import Expulsion
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.protocol.versions import Damage, Tally, built_on, check_chain, check_successor, damage_by
from dipaco_p2p.strict import plain

RUN = document_id(MANIFEST)
BOB = Signer(bytes([3]) * 32).peer


BLOBS = {"snapshot": plain(blob("rebuilt")), "state": plain(blob("rebuilt state"))}


def decree(act: str = "freeze", /, number: int = 1, **changes: Any) -> Decree:
    """A good one, but for the changes."""
    of_act: dict[str, dict[str, Any]] = {
        "ban": {"peer": BOB},
        "admit": {"peer": BOB},
        "appoint": {"peer": BOB},
        "dismiss": {"peer": BOB},
        "hide-name": {"peer": BOB},
        "show-name": {"peer": BOB},
        "rollback": {"stage": RUN, "module": MODULE, "to": 1, "after": 2},
        "grow": {"stage": RUN, "to": 4, "after": 2, "levels": (2, 4)},
    }
    good: dict[str, Any] = {
        "run": RUN,
        "number": number,
        "previous": digest(b"the one before") if number > 1 else "",
        "at_s": 100.0,
        "act": act,
        "reason": "a test",
        "author": COORDINATOR.peer,
        **of_act.get(act, {}),
    }
    return Decree(**{**good, **changes})


def decreed(decrees: Iterable[Decree]) -> Decreed:
    """What holds by these, the oldest first."""
    return functools.reduce(Decreed.after, decrees, Decreed())


def undoing(parent: ModuleVersion, to: ModuleVersion, /, signer: Signer = COORDINATOR, **changes: Any) -> ModuleVersion:
    """A version that carries a rollback to `to` out."""
    wanted = decree("rollback", **{"to": to.version, "after": parent.version, **changes})
    rollback = ShownDecree(decree=wanted, signature=seal(Signer(bytes([1]) * 32), wanted).signature)
    if signer is not COORDINATOR:
        rollback = dataclasses.replace(rollback, signature=signer.sign("decree", b"something"))
    return child(parent, snapshot=to.snapshot, update=None, shares=(), rollback=rollback)


@pytest.mark.parametrize("act", ACTS)
def test_a_decree_comes_back_from_the_wire_and_is_small(act: str) -> None:
    sealed = seal(COORDINATOR, decree(act, reason="x" * REASON_CHARS_MAX))
    assert unseal(Decree, sealed.to_dict()) == sealed
    assert len(str(sealed.to_dict())) < 1536 < DOCUMENT_BYTES_MAX


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"act": "pardon"}, "act"),
        ({"number": 0}, "number"),
        ({"number": DECREES_MAX + 1, "previous": digest(b"x")}, "number"),
        ({"number": 2, "previous": ""}, "not a digest"),
        ({"previous": digest(b"x")}, "none before it"),
        ({"reason": ""}, "needs a reason"),
        ({"reason": "x" * (REASON_CHARS_MAX + 1)}, "characters"),
        ({"reason": "\x1b[2J"}, "one line"),
        ({"peer": str(BOB)}, "names a peer"),
        ({"to": 1}, "no module and no version"),
        ({"act": "ban"}, "names a peer"),
        ({"act": "ban", "peer": "nobody"}, "not an Ed25519"),
        ({"act": "ban", "peer": str(COORDINATOR.peer)}, "itself"),
        ({"act": "hide-name"}, "names a peer"),
        ({"act": "hide-name", "peer": str(BOB), "reason": ""}, "needs a reason"),
        ({"act": "rollback", "stage": RUN, "module": str(MODULE), "to": 2, "after": 2}, "before its newest"),
        ({"act": "rollback", "module": str(MODULE), "to": 1, "after": 2}, "not a digest"),
        ({"act": "rollback", "stage": RUN, "to": 1, "after": 2}, "names a module"),
        ({"act": "freeze", "rebuilt": {"without": [BOB], **BLOBS}}, "a freeze rebuilds nothing"),
        ({"levels": [1, 2]}, "names no levels"),
        ({"act": "grow", "stage": RUN, "to": 4, "after": 2}, "the modules of each level"),
        ({"act": "grow", "stage": RUN, "to": 4, "after": 2, "levels": [1, 0]}, "the modules of each level"),
        ({"act": "grow", "stage": RUN, "to": 4, "after": 2, "levels": [1] * 17}, "levels"),
        ({"act": "grow", "to": 4, "after": 2, "levels": [1, 2]}, "not a digest"),
        ({"corpus": "ab" * 32}, "no text"),
        ({"act": "grow", "stage": RUN, "to": 4, "after": 2, "levels": [1, 2], "corpus": "a/file"}, "not a digest"),
        (
            {"act": "grow", "stage": RUN, "module": str(MODULE), "to": 4, "after": 2, "levels": [1, 2]},
            "no single module",
        ),
        ({"act": "grow", "stage": RUN, "to": 3, "after": 2, "levels": [1, 2]}, "2 at least must lie before it"),
    ],
)
def test_a_decree_that_says_nonsense_is_none_though_it_is_signed(changes: dict[str, Any], why: str) -> None:
    from dipaco_p2p.canonical import canonical_bytes

    document = {**plain(decree()), **changes}
    signature = COORDINATOR.sign("decree", canonical_bytes(document))
    with pytest.raises(IntegrityError, match=why):
        unseal(Decree, {"document": document, "signature": signature})


def test_of_two_growths_of_one_stage_the_first_holds_since_peers_may_have_ended_by_it() -> None:
    other = {"stage": digest(b"another stage")}
    state = decreed([decree("grow"), decree("grow", 2, to=9), decree("grow", 3, **other)])
    assert state.growths == {RUN: 1, other["stage"]: 3}


def test_a_forged_decree_is_refused() -> None:
    """Signed by another than it names; and who signs for itself is not the coordinator."""
    sealed = seal(COORDINATOR, decree())
    with pytest.raises(IntegrityError, match="signature"):
        unseal(Decree, {**sealed.to_dict(), "signature": LEADER.sign("decree", b"x")})
    own = decree(author=LEADER.peer)
    with pytest.raises(IntegrityError, match="not this run's coordinator's"):
        check_next(own, number=0, previous="", run=RUN, coordinator=COORDINATOR.peer)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"number": 3}, "does not follow decree 1"),
        ({"previous": digest(b"another")}, "does not follow decree 1"),
        ({"run": digest(b"another run")}, "not this run's"),
    ],
)
def test_decrees_are_one_chain_without_a_gap(changes: dict[str, Any], why: str) -> None:
    first = decree()
    good: dict[str, Any] = {"number": 2, "previous": document_id(first)}

    def check(**values: Any) -> None:
        check_next(
            decree("unfreeze", **values), number=1, previous=document_id(first), run=RUN, coordinator=COORDINATOR.peer
        )

    check(**good)
    with pytest.raises(IntegrityError, match=why):
        check(**{**good, **changes})


def test_what_holds_is_what_was_said_last() -> None:
    carol = PeerId(Signer(bytes([4]) * 32).peer)
    said = [decree("ban"), decree("freeze", 2), decree("ban", 3, peer=carol, reason="spam"), decree("admit", 4)]
    state = decreed(said)
    assert (state.banned, state.frozen) == ({carol: "spam"}, "a test")
    assert decreed([*said, decree("unfreeze", 5)]).frozen is None
    assert decreed([*said, decree("ban", 5, reason="again")]).banned[BOB] == "again"
    assert decreed([decree("appoint"), decree("appoint", 2, peer=carol), decree("dismiss", 3)]).seeds == {carol}
    undone = decreed([decree("rollback"), decree("rollback", 2), decree("rollback", 3, module=type(MODULE)(0, 0))])
    assert undone.rollbacks == {(RUN, MODULE): 2, (RUN, type(MODULE)(0, 0)): 3}
    assert decreed([]) == Decreed()


def test_a_name_is_hidden_by_decree_and_while_its_peer_is_banned() -> None:
    said = [decree("hide-name"), decree("ban", 2), decree("admit", 3), decree("show-name", 4)]
    states = [decreed(said[:count]) for count in range(len(said) + 1)]
    assert [state.hides(BOB) for state in states] == [False, True, True, True, False]
    assert [state.nameless for state in states[1:4]] == [{BOB: "a test"}] * 3 and states[4].nameless == {}
    assert not any(state.hides(LEADER.peer) for state in states), "the names of others stay"
    assert decreed([decree("ban"), decree("admit", 2)]) == Decreed()


# -- rollbacks as versions


FIRST = child()
SECOND = child(FIRST)


def damage(*peers: PeerId, **found: Any) -> Damage:
    return Damage(peers=frozenset(peers), module=MODULE, **found)


def counts(parent: ModuleVersion, *names: str) -> ModuleVersion:
    return child(parent, shares=shares(*names, base=parent.version))


def test_a_rollback_follows_as_any_version_and_brings_earlier_parameters_back() -> None:
    """In a run of three rounds the third may be one; also to the genesis."""
    for back in (GENESIS, FIRST):
        third = undoing(SECOND, back)
        check_chain(chain(FIRST, SECOND, third), MANIFEST, MODULE)
        assert (third.digest, third.weight) == (back.digest, SECOND.weight)


def test_what_a_chain_is_built_on_says_how_far_back_a_peers_work_goes() -> None:
    bad, good = PeerId("peer bad"), PeerId("peer good")
    first = counts(GENESIS, "good")
    second = counts(first, "bad", "good")
    third = counts(second, "bad", "good", "better")
    fourth = undoing(third, first)
    fifth = counts(fourth, "good")
    chain = [first, second, third, fourth, fifth]

    assert damage_by(bad, [first]) is None
    assert damage_by(bad, chain[:3]) == damage(bad, to=1, after=3, others=3, sound=(0, 1))
    assert damage_by(good, chain[:3]) == damage(good, to=0, after=3, others=3, sound=(0,))
    assert damage_by(bad, chain) is None  # undone, as if it had never been
    assert damage_by(good, chain) == damage(good, to=0, after=5, others=0, sound=(0,))
    sixth = counts(fifth, "bad")
    assert damage_by(bad, [*chain, sixth]) == damage(bad, to=5, after=6, others=0, sound=(0, 4, 5))


# -- rebuilt versions


def rebuilding(parent: ModuleVersion, to: ModuleVersion, *peers: PeerId, **changes: Any) -> ModuleVersion:
    """A version that carries out a rollback which has rebuilt what follows `to` without the work of these peers."""
    rebuilt = Rebuilt(without=peers, snapshot=blob(f"rebuilt {parent.version}"), state=blob("rebuilt state"))
    version = undoing(parent, to, rebuilt=rebuilt, **changes)
    return dataclasses.replace(version, snapshot=rebuilt.snapshot, state=rebuilt.state)


def test_a_rebuilt_version_has_what_its_decree_says() -> None:
    good = rebuilding(SECOND, FIRST, BOB)
    check_successor(SECOND, good, MANIFEST)
    tally = Tally()
    for version in (FIRST, SECOND):
        tally.add(version)
    tally.check(good)
    for changes in ({"snapshot": FIRST.snapshot}, {"state": blob("another state")}):
        with pytest.raises(IntegrityError, match="not what decree 1 has rebuilt"):
            check_successor(SECOND, dataclasses.replace(good, **changes), MANIFEST)


def test_what_a_rebuilt_version_is_built_on() -> None:
    """Also by a second decree, which rebuilds what the first one has rebuilt, and leaves its peer out as well."""
    bad, worse, good = (PeerId(f"peer {name}") for name in ("bad", "worse", "good"))
    first = counts(GENESIS, "good")
    second = counts(first, "bad", "good", "worse")
    third = counts(second, "good")
    fourth = rebuilding(third, first, bad)
    fifth = counts(fourth, "good", "worse")
    chain = [first, second, third, fourth, fifth]

    def told(versions: list[ModuleVersion]) -> list[tuple[int, int, set[PeerId]]]:
        steps = built_on(versions)
        return [(step.version.version, step.base, {one.peer for one in step.shares}) for step in steps]

    assert told(chain) == [(1, 0, {good}), (2, 1, {good, worse}), (3, 1, {good}), (5, 4, {good, worse})]
    assert damage_by(bad, chain) is None
    found = damage_by(worse, chain)
    assert found == damage(worse, to=1, after=5, others=3, sound=(0, 1))
    sixth = rebuilding(fifth, first, worse, number=2)
    assert told([*chain, sixth]) == [(1, 0, {good}), (2, 1, {good}), (3, 1, {good}), (5, 1, {good})]
    assert damage_by(worse, [*chain, sixth]) is None and damage_by(bad, [*chain, sixth]) is None
    with pytest.raises(IntegrityError, match="does not go back to version 2"):
        built_on(chain, after=2)


def test_a_decree_that_takes_anothers_place_undoes_the_same_besides() -> None:
    """Only the newest of a module is carried out, so damage is what the one before would leave."""
    bad, worse = (PeerId(f"peer {name}") for name in ("bad", "worse"))
    first = counts(GENESIS, "bad", "good")
    second = counts(first, "worse", "good")
    third = counts(second, "good")

    def due(version: ModuleVersion) -> Decree:
        assert version.rollback is not None
        return version.rollback.decree

    rebuilt = due(rebuilding(second, GENESIS, bad))
    found = damage_by(worse, [first, second, third], due=rebuilt)
    assert found == damage(bad, worse, to=0, after=2, others=2, sound=(0,))  # the third is undone in any case
    chain = [first, second, third]
    assert damage_by(worse, chain, due=due(undoing(third, GENESIS))) is None
    assert damage_by(worse, chain, due=due(undoing(third, first))) is None
    found = damage_by(worse, chain, due=due(undoing(third, second)))
    assert found == damage(worse, to=1, after=2, others=1, sound=(0, 1))
    fourth = undoing(third, first)
    found = damage_by(worse, [*chain, fourth, counts(fourth, "worse")], due=due(undoing(fourth, third)))
    assert found == damage(worse, to=1, after=3, others=2, sound=(0, 1)), "of what was undone, it has come back"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"update": blob("update")}, "names an update"),
        ({"state": None}, "no state"),
        ({"shares": shares("a")}, "contributions"),
        ({"is_fresh": True}, "contributions"),
        ({"clip_norm": 1.0}, "clip"),
        ({"expels": Expulsion(peer=LEADER.peer, found=1, votes=())}, "expels"),
        ({"audits": (Audit(work="ab" * 32, by=COORDINATOR.peer, tokens=1),)}, "audits"),
        ({"weight": 7}, "weighs"),
    ],
)
def test_a_rollback_counts_nothing(changes: dict[str, Any], why: str) -> None:
    good = undoing(SECOND, FIRST)
    check_successor(SECOND, good, MANIFEST)
    with pytest.raises(IntegrityError, match=why):
        changed = dataclasses.replace(good, **changes)
        weight = SECOND.weight + sum(one.tokens for one in changed.shares) if "weight" not in changes else 7
        check_successor(SECOND, dataclasses.replace(changed, weight=weight), MANIFEST)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"stage": digest(b"another stage")}, "something else"),
        ({"run": digest(b"another run")}, "something else"),
        ({"module": type(MODULE)(0, 0)}, "something else"),
        ({"after": 3}, "something else"),
        ({"signer": LEADER}, "not the coordinator's"),
    ],
)
def test_a_rollback_shows_the_coordinators_decree_about_it(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(IntegrityError, match=why):
        check_successor(SECOND, undoing(SECOND, FIRST, **changes), MANIFEST)


def test_a_rollback_to_other_parameters_than_decreed_is_refused() -> None:
    honest = undoing(SECOND, FIRST)
    lie = dataclasses.replace(honest, snapshot=blob("something of the leader's own"))
    check_successor(SECOND, lie, MANIFEST)
    with pytest.raises(IntegrityError, match="not what its decree says"):
        check_chain(chain(FIRST, SECOND, lie), MANIFEST, MODULE)


def tally_of(*versions: ModuleVersion) -> Tally:
    tally = Tally()
    for version in versions:
        tally.check(version)
        tally.add(version)
    return tally


def test_a_decree_is_carried_out_once_and_not_after_a_newer_one() -> None:
    """Played again by a leader that would like to have an old version back."""
    third = undoing(SECOND, FIRST, number=2)
    fourth = child(third)
    tally = tally_of(FIRST, SECOND, third, fourth)
    assert (tally.rolled_back_by, tally.base_min, tally.digest(0)) == (2, 3, GENESIS.digest)
    for number in (2, 1):
        with pytest.raises(IntegrityError, match="not what its decree says"):
            tally.check(undoing(fourth, FIRST, number=number, after=2))
    tally.check(undoing(fourth, FIRST, number=3))


def test_nothing_counts_after_a_rollback_that_began_before_it() -> None:
    third = undoing(SECOND, FIRST)
    tally = tally_of(FIRST, SECOND, third)
    tally.check(child(third))
    for late in (2, 1):
        with pytest.raises(IntegrityError, match="rolled back"):
            tally.check(child(third, shares=shares("late", base=late)))


def test_on_another_branch_a_rollback_has_not_been() -> None:
    tally = tally_of(FIRST, SECOND, undoing(SECOND, FIRST))
    copy = tally.copy()
    tally.drop_after(2)
    assert (tally.base_min, tally.rolled_back_by, tally.digest(3)) == (0, 0, "")
    assert copy.base_min == 3, "a copy keeps its own"
    tally.check(undoing(SECOND, GENESIS))
