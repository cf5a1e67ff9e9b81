"""Who should own a module: the same group in everybody's view, moved as little as possible, the seed node last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from version_harness import LEADER, child, share

from dipaco_p2p.protocol.documents import ModuleVersion, Sealed, seal
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.owners import AHEAD_MAX, mirrors, rank, runs_ahead, successors
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.topology import ModuleId, PathId, Topology

PEERS = [Signer(bytes([number]) * 32).peer for number in range(1, 13)]
SEED_NODE = Signer(bytes([99]) * 32).peer
MODULES = Topology((16,) * 4).modules()
OWNER, TRAINER = Heartbeat(owns=True), Heartbeat(owns=False)
SEED = Heartbeat(role="seed", owns=True)


def first(
    module: ModuleId,
    view: Mapping[PeerId, Heartbeat],
    *,
    incumbent: PeerId | None = None,
    group: Collection[PeerId] = (),
    workers: Collection[PeerId] = (),
) -> PeerId | None:
    return next(iter(successors(module, view, incumbent=incumbent, group=group, workers=workers)), None)


def leaders(peers: list[PeerId]) -> dict[ModuleId, PeerId | None]:
    return {module: first(module, dict.fromkeys(peers, OWNER)) for module in MODULES}


@given(st.permutations(PEERS))
def test_the_order_of_the_view_does_not_matter(peers: list[PeerId]) -> None:
    view, group = dict.fromkeys(peers, OWNER), PEERS[:3]
    assert rank(MODULES[0], peers) == rank(MODULES[0], PEERS)
    assert first(MODULES[0], view) == rank(MODULES[0], PEERS)[0]
    known = dict.fromkeys(PEERS, OWNER)
    assert successors(MODULES[0], view, incumbent=None, group=group) == successors(
        MODULES[0], known, incumbent=None, group=group[::-1]
    )
    assert mirrors(MODULES[0], view, leader=PEERS[0], present=(), owners=3) == mirrors(
        MODULES[0], known, leader=PEERS[0], present=(), owners=3
    )


@pytest.mark.parametrize("module", MODULES[:8])
def test_who_is_dialled_directly_comes_before_who_is_dialled_through_a_relay_among_equals(module: ModuleId) -> None:
    direct, relayed, workers = PEERS[:6], PEERS[6:], PEERS[3:9]
    view = dict.fromkeys(direct, replace(OWNER, addresses=("/ip4/203.0.113.7/tcp/1/p2p/A",)))
    view |= dict.fromkeys(relayed, replace(OWNER, addresses=("/ip4/203.0.113.7/tcp/1/p2p/R/p2p-circuit/p2p/A",)))
    order = list(successors(module, view, incumbent=None, group=PEERS[8:], workers=workers))
    assert [{*order[0:3]}, {*order[3:6]}, {*order[6:9]}] == [{*PEERS[3:6]}, {*PEERS[6:9]}, {*PEERS[0:3]}]
    assert first(module, view, incumbent=PEERS[11], workers=workers) == PEERS[11], "who leads is not displaced"
    assert set(mirrors(module, view, leader=PEERS[0], present=(PEERS[11],), owners=4)) > {PEERS[11]}
    assert not set(mirrors(module, view, leader=PEERS[0], present=(), owners=6)) & set(relayed)


@pytest.mark.parametrize("gone", PEERS)
def test_a_peer_that_leaves_moves_only_what_it_led(gone: PeerId) -> None:
    before, after = leaders(PEERS), leaders([peer for peer in PEERS if peer != gone])
    assert all(after[module] == before[module] for module in MODULES if before[module] != gone)
    for module in MODULES:
        assert [peer for peer in rank(module, PEERS) if peer != gone] == rank(module, set(PEERS) - {gone})


@pytest.mark.parametrize("new", PEERS)
def test_a_peer_that_comes_takes_only_for_itself(new: PeerId) -> None:
    before, after = leaders([peer for peer in PEERS if peer != new]), leaders(PEERS)
    assert all(after[module] in (before[module], new) for module in MODULES)


def test_modules_spread_over_the_peers() -> None:
    """64 modules over 12 peers: 5.3 each; fixed keys, so these numbers never change."""
    counts = Counter(leaders(PEERS).values())
    assert set(counts) == set(PEERS)
    assert max(counts.values()) <= 12


def test_an_incumbent_that_lives_is_kept() -> None:
    view = dict.fromkeys(PEERS, OWNER)
    for module in MODULES:
        for peer in PEERS:
            assert successors(module, view, incumbent=peer, group=PEERS[:3]) == [peer]


def test_a_mirror_takes_over_before_anybody_else() -> None:
    for module in MODULES:
        *others, one, two, dead = rank(module, PEERS)
        view = dict.fromkeys([*others, one, two], OWNER)
        order = successors(module, view, incumbent=dead, group=(dead, two, one))
        assert order == [one, two, *others]


def test_without_a_living_member_the_first_in_rank_takes_over() -> None:
    for module in MODULES:
        dead, *others = rank(module, PEERS)
        view = dict.fromkeys(others, OWNER)
        assert successors(module, view, incumbent=dead, group=(dead,)) == others
        assert first(module, view, incumbent=None, group=()) == others[0]


def test_who_cannot_own_never_leads() -> None:
    view = dict.fromkeys(PEERS, TRAINER)
    assert first(MODULES[0], view) is None
    assert first(MODULES[0], view, incumbent=PEERS[0]) is None, "it led once, but can be dialled no more"
    assert first(MODULES[0], view | {PEERS[3]: OWNER}, incumbent=PEERS[0], group=PEERS[:3]) == PEERS[3]


def test_nobody_leads_an_empty_swarm() -> None:
    assert first(MODULES[0], {}) is None
    assert first(MODULES[0], {}, incumbent=PEERS[0], group=PEERS) is None


def test_the_seed_node_leads_only_while_nobody_who_has_worked_can() -> None:
    alone, worked = {SEED_NODE: SEED} | dict.fromkeys(PEERS, TRAINER), PEERS[:1]
    for module in MODULES:
        assert first(module, alone, workers=worked) == SEED_NODE
        with_one = alone | {PEERS[0]: OWNER, PEERS[1]: OWNER}
        assert first(module, with_one, group=PEERS[:2]) == SEED_NODE
        assert successors(module, with_one, incumbent=None, group=(), workers=worked) == [
            PEERS[0], SEED_NODE, PEERS[1]
        ]  # fmt: skip


def test_the_seed_node_hands_over_and_volunteers_do_not_hand_back() -> None:
    view, worked = {SEED_NODE: SEED, PEERS[0]: OWNER}, PEERS[:1]
    for module in MODULES:
        assert first(module, view, incumbent=SEED_NODE, group=(SEED_NODE,), workers=worked) == PEERS[0]
        assert first(module, view, incumbent=PEERS[0], group=(PEERS[0],)) == PEERS[0]
        assert first(module, {SEED_NODE: SEED}, incumbent=PEERS[0], group=(PEERS[0],)) == SEED_NODE


def test_of_two_seed_nodes_the_incumbent_is_kept() -> None:
    view = {SEED_NODE: SEED, PEERS[0]: SEED}
    for module in MODULES:
        assert first(module, view, incumbent=SEED_NODE) == SEED_NODE
        assert first(module, view, incumbent=PEERS[0]) == PEERS[0]


def test_a_group_is_a_leader_and_the_next_in_rank() -> None:
    view = {SEED_NODE: SEED} | dict.fromkeys(PEERS, OWNER)
    for module in MODULES:
        leader, *others = rank(module, PEERS)
        for owners in (1, 2, 3, 5):
            assert mirrors(module, view, leader=leader, present=(), owners=owners) == tuple(others[: owners - 1])


def test_a_newcomer_fills_a_gap_and_displaces_nobody() -> None:
    for module in MODULES:
        newcomer, leader, one, two = rank(module, PEERS[:4])
        view = dict.fromkeys([newcomer, leader, one, two], OWNER)
        assert mirrors(module, view, leader=leader, present=(two, one), owners=3) == (two, one)
        del view[two]
        assert mirrors(module, view, leader=leader, present=(two, one), owners=3) == (one, newcomer)
        del view[newcomer]
        assert mirrors(module, view, leader=leader, present=(two, one), owners=3) == (one,)


def test_a_gap_is_filled_with_those_who_have_worked_before_strangers() -> None:
    """Attack: a key made to come first in rank was in every group, and a member can grant itself the next term."""
    for module in MODULES:
        stranger, leader, one, two = rank(module, PEERS[:4])
        view = dict.fromkeys([stranger, leader, one, two], OWNER)
        assert mirrors(module, view, leader=leader, present=(), owners=3, workers={one, two}) == (one, two)
        assert mirrors(module, view, leader=leader, present=(), owners=3, workers={two}) == (two, stranger)


def test_neither_the_seed_nor_who_cannot_own_is_a_mirror() -> None:
    view = {SEED_NODE: SEED, PEERS[0]: OWNER, PEERS[1]: TRAINER, PEERS[2]: OWNER}
    for module in MODULES:
        present = (SEED_NODE, PEERS[1])
        assert mirrors(module, view, leader=PEERS[0], present=present, owners=5) == (PEERS[2],)
        assert mirrors(module, view, leader=PEERS[0], present=(PEERS[0],), owners=5) == (PEERS[2],)


def test_a_smaller_group_keeps_its_first_mirrors() -> None:
    view = dict.fromkeys(PEERS, OWNER)
    for module in MODULES:
        assert mirrors(module, view, leader=PEERS[0], present=tuple(PEERS[1:5]), owners=3) == tuple(PEERS[1:3])


TRUNK, RIVAL = ModuleId(0, 0), PEERS[0]


def counting(*rounds: tuple[PathId, PeerId]) -> list[Sealed[ModuleVersion]]:
    """Versions of the trunk, each of the work of one peer on one path."""
    return [
        seal(
            LEADER,
            replace(
                child(),
                module=TRUNK,
                version=number,
                shares=(replace(share(f"{number}", base=number - 1), path=path, peer=peer),),
            ),
        )
        for number, (path, peer) in enumerate(rounds, start=1)
    ]


@pytest.mark.parametrize(
    ("rounds", "others", "is_ahead"),
    [
        ([(PathId((0, 0)), LEADER.peer)] * AHEAD_MAX, 0, False),
        ([(PathId((0, 0)), LEADER.peer)] * (AHEAD_MAX + 1), 0, True),
        ([(PathId((0, 0)), LEADER.peer)] * (AHEAD_MAX + 1), 1, False),
        ([(PathId((0, 0)), LEADER.peer)] * 40 + [(PathId((0, 0)), RIVAL)], 0, False),
        ([(PathId((0, 0)), RIVAL)] * 40 + [(PathId((0, 0)), LEADER.peer)] * AHEAD_MAX, 0, False),
        ([(PathId((0, number % 4)), LEADER.peer) for number in range(40)], 10, False),
        ([(PathId((0, number % 4)), LEADER.peer) for number in range(40)], 5, True),
        ([(PathId((0,)), LEADER.peer)] * 40, 0, False),
    ],
    ids=["lost", "alone", "in step", "others' work", "others' before", "all paths in turn", "too fast", "one level"],
)
def test_a_leader_runs_ahead_that_counts_more_rounds_of_its_own_than_there_were(
    rounds: list[tuple[PathId, PeerId]], others: int, is_ahead: bool
) -> None:
    assert runs_ahead(counting(*rounds), LEADER.peer, lambda module: others) is is_ahead
