"""What a peer believes of who leads: it goes back to the coordinator, and the newest is on disk."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from tiny_run import SEED_NUMBER, granted, make_run, signer, tiny_config

from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node.authority import KNOWN_MAX, Mandates, grant_of
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.protocol.documents import Grant, ModuleVersion, Sealed, seal
from dipaco_p2p.protocol.liveness import Head
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.topology import ModuleId

MODULE, OTHER_MODULE = ModuleId(1, 0), ModuleId(1, 1)
COORDINATOR, LEADER, MIRROR, STRANGER = signer(SEED_NUMBER), signer(1), signer(2), signer(3)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def run(store: Store) -> Run:
    return make_run(store, tiny_config())


@pytest.fixture
def mandates(run: Run, store: Store) -> Mandates:
    return Mandates(run, store)


def first(run: Run, *, term: int = 1) -> Sealed[Grant]:
    return granted(run, MODULE, term=term, leader=LEADER.peer, mirrors=(MIRROR.peer,))


def by_member(
    run: Run, author: Signer, *, term: int = 2, leader: Signer = MIRROR, mirrors: tuple[PeerId, ...] = ()
) -> Sealed[Grant]:
    return seal(
        author,
        Grant(
            run=run.id,
            module=MODULE,
            term=term,
            leader=leader.peer,
            mirrors=mirrors,
            after=term - 1,
            author=author.peer,
        ),
    )


def head_of(sealed: Sealed[Grant]) -> Head:
    """What its leader says."""
    grant = sealed.document
    return Head(
        version=0,
        digest="0" * 64,
        term=grant.term,
        mirrors=grant.mirrors,
        after=grant.after,
        granted_by=grant.author,
        grant=sealed.signature,
    )


def test_nobody_is_believed_at_first(mandates: Mandates) -> None:
    assert mandates.newest(MODULE) == () and mandates.grant(MODULE) is None and mandates.term(MODULE) == 0


def test_a_grant_of_the_coordinator_is_believed_by_itself(run: Run, mandates: Mandates) -> None:
    assert mandates.believes(MODULE, first(run, term=7))
    assert mandates.term(MODULE) == 7
    assert mandates.grant(MODULE) == first(run, term=7).document
    assert mandates.term(OTHER_MODULE) == 0


def test_a_members_grant_is_believed_after_the_one_that_it_follows(run: Run, mandates: Mandates) -> None:
    second = by_member(run, MIRROR)
    assert not mandates.believes(MODULE, second), "what it follows is not known here"
    assert mandates.believes(MODULE, first(run))
    assert mandates.believes(MODULE, second)
    assert mandates.newest(MODULE) == (first(run), second)


def test_a_strangers_grant_is_believed_by_nobody(run: Run, mandates: Mandates) -> None:
    mandates.learn(MODULE, [first(run)])
    own = by_member(run, STRANGER, leader=STRANGER)
    assert not mandates.believes(MODULE, own)
    with pytest.raises(IntegrityError, match="nobody who may"):
        mandates.learn(MODULE, [first(run), own])
    with pytest.raises(IntegrityError, match="nobody who may"):
        mandates.grant_next(STRANGER, MODULE, leader=STRANGER.peer, mirrors=())
    assert mandates.newest(MODULE) == (first(run),)


def test_a_forged_signature_is_not_believed(run: Run, mandates: Mandates) -> None:
    """A head carries the signature and the words apart, so that nobody else has put them together before."""
    good = first(run)
    for change in ({"term": 2}, {"leader": STRANGER.peer}, {"mirrors": ()}):
        assert not mandates.believes(MODULE, Sealed(dataclasses.replace(good.document, **change), good.signature))
    assert not mandates.believes(MODULE, Sealed(good.document, "0" * 128))
    assert not mandates.believes(MODULE, Sealed(good.document, ""))
    assert mandates.newest(MODULE) == ()


def test_what_the_coordinator_granted_in_another_stage_is_not_believed(
    run: Run, store: Store, mandates: Mandates
) -> None:
    """Attack: modules have the same names in every stage, and whoever showed an old grant deposed a living leader."""
    assert mandates.believes(MODULE, first(run))
    document = dataclasses.replace(first(run).document, run="ab" * 32, term=7)
    assert not mandates.believes(MODULE, seal(COORDINATOR, document))
    assert not mandates.believes(OTHER_MODULE, first(run, term=7))
    assert mandates.newest(MODULE) == (first(run),) and mandates.newest(OTHER_MODULE) == ()
    assert Mandates(run, Store(store.folder)).newest(MODULE) == (first(run),), "nor is the real one lost on disk"


def test_a_head_shows_the_very_grant_that_was_signed(run: Run, mandates: Mandates) -> None:
    for sealed in (first(run), by_member(run, MIRROR, mirrors=(LEADER.peer,))):
        grant, head = sealed.document, head_of(sealed)
        assert grant_of(head, run=run.id, module=MODULE, leader=grant.leader) == sealed
        assert mandates.believes(MODULE, grant_of(head, run=run.id, module=MODULE, leader=grant.leader))
        assert not mandates.believes(MODULE, grant_of(head, run=run.id, module=MODULE, leader=STRANGER.peer))


def test_the_senior_of_two_that_compete_is_the_newest(run: Run, mandates: Mandates) -> None:
    mandates.learn(MODULE, [first(run)])
    small, great = sorted((LEADER, MIRROR), key=lambda one: one.peer)
    for author in (great, small):
        assert mandates.believes(MODULE, by_member(run, author, leader=author))
    assert mandates.newest(MODULE)[-1].document.leader == great.peer
    by_coordinator = granted(run, MODULE, term=2, leader=small.peer)
    assert mandates.believes(MODULE, by_coordinator)
    assert mandates.newest(MODULE) == (by_coordinator,)


def test_a_later_grant_of_the_coordinator_ends_what_members_of_earlier_groups_grant_each_other(
    run: Run, store: Store, mandates: Mandates
) -> None:
    """Attack: whoever was once in a group could go on from that grant by itself, for 1023 terms. With two of these it
    deposed the peer that the coordinator had granted the module to since, and again after each new grant."""
    mandates.learn(MODULE, [first(run)])
    mandates.learn(MODULE, [latest := granted(run, MODULE, term=2, leader=STRANGER.peer)])
    own = [by_member(run, MIRROR, term=term) for term in range(2, 9)]
    mandates.learn(MODULE, [first(run), *own])
    assert mandates.newest(MODULE) == (latest,)
    assert mandates.believes(MODULE, after := by_member(run, STRANGER, term=3, leader=STRANGER))
    for known in (mandates, Mandates(run, Store(store.folder))):
        assert known.newest(MODULE) == (latest, after), "who was granted it goes on"
    mandates.grant_next(COORDINATOR, MODULE, leader=LEADER.peer, mirrors=())
    assert mandates.term(MODULE) == 9, "versions of term 8 may be on the chain"


def test_a_friend_of_a_banned_member_is_followed_no_longer_than_until_the_coordinators_next_grant(
    run: Run, mandates: Mandates
) -> None:
    """Attack: a signature has no date. After its ban a member granted the next term to a new key, and that key itself
    the ones after it: the mandate did not end with a grant by the banned peer."""
    mandates.learn(MODULE, [first(run)])
    mandates._is_banned = lambda peer: peer == MIRROR.peer
    mandates.grant_next(COORDINATOR, MODULE, leader=LEADER.peer, mirrors=())
    friend = [by_member(run, MIRROR, leader=STRANGER), by_member(run, STRANGER, term=3, leader=STRANGER)]
    mandates.learn(MODULE, [first(run), *friend])
    assert mandates.leader(MODULE) == LEADER.peer


def test_who_led_before_the_coordinators_last_grant_leads_no_more_though_nobody_else_does(
    run: Run, mandates: Mandates
) -> None:
    """Attack: when the leader died and no seed node lived, a head of somebody who had led long before kept everybody
    from taking over: they saw a leader that lives."""
    mandates.learn(MODULE, [first(run)])
    heads = {LEADER.peer: head_of(first(run))}
    assert mandates.best_head(MODULE, heads) == (LEADER.peer, heads[LEADER.peer])
    mandates.learn(MODULE, [latest := granted(run, MODULE, term=2, leader=STRANGER.peer)])
    assert mandates.best_head(MODULE, heads) is None
    heads[STRANGER.peer] = head_of(latest)
    assert mandates.best_head(MODULE, heads) == (STRANGER.peer, heads[STRANGER.peer])


def test_a_leader_whose_group_the_coordinator_changed_is_seen_to_lead_until_it_says_so(
    run: Run, mandates: Mandates
) -> None:
    mandates.learn(MODULE, [first(run)])
    heads = {LEADER.peer: head_of(first(run))}
    mandates.learn(MODULE, [granted(run, MODULE, term=2, leader=LEADER.peer)])
    assert mandates.best_head(MODULE, heads) == (LEADER.peer, heads[LEADER.peer])


def test_all_peers_follow_the_same_leader_in_whatever_order_they_heard_of_them(run: Run) -> None:
    one, other = sorted((signer(4), signer(5)), key=lambda each: each.peer)
    latest = granted(run, MODULE, term=2, leader=STRANGER.peer, mirrors=(one.peer, other.peer))
    learnt = [
        (first(run),),
        (first(run), *(by_member(run, MIRROR, term=term) for term in (2, 3, 4))),
        (latest,),
        *((latest, by_member(run, mirror, term=3, leader=mirror)) for mirror in (one, other)),
    ]
    heads = {mandate[-1].document.leader: head_of(mandate[-1]) for mandate in learnt}
    assert len(heads) == len(learnt)
    for order in itertools.permutations(learnt):
        mandates, left = Mandates(run), dict(heads)
        for mandate in order:
            mandates.learn(MODULE, mandate)
        for leader in (other.peer, one.peer, STRANGER.peer):
            shown = itertools.permutations(left.items())
            assert {mandates.best_head(MODULE, dict(some)) for some in shown} == {(leader, left.pop(leader))}
        assert mandates.best_head(MODULE, left) is None


def test_an_older_mandate_changes_nothing(run: Run, mandates: Mandates) -> None:
    mandates.learn(MODULE, [first(run, term=5)])
    mandates.learn(MODULE, [first(run, term=3)])
    assert mandates.term(MODULE) == 5


def test_what_was_granted_is_on_disk_before_it_is_used(run: Run, store: Store, mandates: Mandates) -> None:
    mandates.learn(MODULE, [first(run)])
    mandates.grant_next(MIRROR, MODULE, leader=MIRROR.peer, mirrors=(LEADER.peer,))
    again = Mandates(run, Store(store.folder))
    assert again.newest(MODULE) == mandates.newest(MODULE) and again.term(MODULE) == 2
    again.grant_next(MIRROR, MODULE, leader=MIRROR.peer, mirrors=())
    assert again.term(MODULE) == 3, "a term is never granted twice by the same peer"
    grant = again.grant(MODULE)
    assert grant is not None and grant.after == 2


def test_the_coordinator_grants_without_a_chain(run: Run, mandates: Mandates) -> None:
    mandates.learn(MODULE, [first(run), by_member(run, MIRROR)])
    mandates.grant_next(COORDINATOR, MODULE, leader=STRANGER.peer, mirrors=())
    [sealed] = mandates.newest(MODULE)
    assert (sealed.document.term, sealed.document.leader, sealed.document.after) == (3, STRANGER.peer, 0)


def test_a_term_of_a_banned_leader_is_neither_followed_nor_forgotten_nor_granted_again(
    run: Run, store: Store, mandates: Mandates
) -> None:
    mandates.learn(MODULE, [first(run)])
    assert mandates.believes(MODULE, by_member(run, MIRROR))
    mandates._is_banned = lambda peer: peer == MIRROR.peer
    assert mandates.term(MODULE) == 1, "who granted term 2 is banned"
    mandates.learn(MODULE, [first(run), by_member(run, MIRROR, leader=STRANGER)])
    again = Mandates(run, Store(store.folder))
    again._is_banned = mandates._is_banned
    assert again.newest(MODULE) == mandates.newest(MODULE) == (first(run),)
    for known in (again, mandates):
        known.grant_next(COORDINATOR, MODULE, leader=STRANGER.peer, mirrors=())
        assert known.term(MODULE) == 3, "versions of term 2 may be on the chain"


def test_after_a_ban_no_leader_before_the_banned_one_leads_again(run: Run, mandates: Mandates) -> None:
    mandates.learn(MODULE, [granted(run, MODULE, term=1, leader=STRANGER.peer)])
    mandates.learn(MODULE, [first(run, term=2)])
    mandates._is_banned = lambda peer: peer == LEADER.peer
    assert mandates.term(MODULE) == 2
    mandates.grant_next(COORDINATOR, MODULE, leader=STRANGER.peer, mirrors=())
    assert mandates.term(MODULE) == 3


def test_the_banned_crowd_does_not_push_out_whom_to_follow(run: Run, mandates: Mandates) -> None:
    mandates._is_banned = lambda peer: peer not in (LEADER.peer, COORDINATOR.peer)
    mandates.learn(MODULE, [first(run)])
    for number in range(2 * KNOWN_MAX):
        grants = mandates.newest(MODULE)
        mandates.believes(MODULE, by_member(run, MIRROR, leader=signer(20 + number)))
        assert mandates.newest(MODULE) == grants
    assert mandates.newest(MODULE) == (first(run),) and len(mandates._known[MODULE]) <= KNOWN_MAX


def version(run: Run, grant: Sealed[Grant], author: Signer, *, term: int, by: Signer = MIRROR) -> Sealed[ModuleVersion]:
    """A version that names `grant`, cosigned by another peer."""
    first = genesis_version(run.manifest, MODULE)
    made = {"version": 1, "parent": first.digest, "grant": grant.id, "term": term, "author": author.peer}
    return Sealed(dataclasses.replace(first, **made), "", {by.peer: "00" * 64})


def test_a_version_of_a_later_term_than_was_granted_is_vouched_for_by_nobody_but_the_coordinator(
    run: Run, mandates: Mandates
) -> None:
    """Attack: terms do not fall along a chain, so after a version of the greatest nobody could ever lead."""
    mandates.learn(MODULE, [grant := first(run, term=3)])
    for term, is_granted in ((1, True), (3, True), (4, False), (2**40, False)):
        assert mandates.is_vouched(version(run, grant, LEADER, term=term)) is is_granted
        assert mandates.is_vouched(version(run, grant, LEADER, term=term, by=COORDINATOR))
    mandates.require_granted(version(run, grant, LEADER, term=3).document)
    with pytest.raises(IntegrityError, match="the latest that was granted is 3"):
        mandates.require_granted(version(run, grant, LEADER, term=4).document)


def test_the_coordinators_choice_of_a_mirror_is_for_one_leader_and_one_term(run: Run, mandates: Mandates) -> None:
    """Attack: a leader that chose its mirrors itself named an earlier grant of the coordinator, whose first mirror was
    its friend, and trainers took what these two had signed."""
    mandates.learn(MODULE, [grant := first(run)])
    mandates.believes(MODULE, by_member(run, MIRROR, leader=STRANGER, mirrors=(MIRROR.peer,)))
    assert mandates.is_vouched_from_outside(version(run, grant, LEADER, term=1))
    assert not mandates.is_vouched_from_outside(version(run, grant, STRANGER, term=1))
    assert not mandates.is_vouched_from_outside(version(run, grant, STRANGER, term=2))
    assert not mandates.is_vouched_from_outside(version(run, grant, LEADER, term=2))


def test_a_peer_that_only_reads_writes_nothing(run: Run, store: Store) -> None:
    reader = Mandates(run)
    reader.learn(MODULE, [first(run)])
    assert reader.term(MODULE) == 1 and not store.documents("mandate-")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"[7]", b'[{"document":{},"signature":""}]', b"\xff"])
def test_a_damaged_mandate_is_learnt_again(run: Run, store: Store, mandates: Mandates, damage: bytes) -> None:
    mandates.learn(MODULE, [first(run)])
    store.write_document(f"mandate-{MODULE}", damage)
    again = Mandates(run, store)
    assert again.newest(MODULE) == ()
    again.learn(MODULE, [first(run)])
    assert Mandates(run, store).newest(MODULE) == (first(run),)


def test_junk_heads_do_not_push_out_the_newest(run: Run, mandates: Mandates) -> None:
    """Any member may sign as many grants of its term as it likes."""
    mandates.learn(MODULE, [first(run, term=9)])
    for number in range(2 * KNOWN_MAX):
        leader = signer(20 + number).peer
        assert mandates.believes(MODULE, granted(run, MODULE, term=2, leader=leader))
    assert mandates.newest(MODULE) == (first(run, term=9),)
    assert len(mandates._known[MODULE]) <= KNOWN_MAX + 1
