"""Who leads a module: the same peer in everybody's view, moved as little as possible, the seed node last."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.owners import leader, rank
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.topology import ModuleId, Topology

PEERS = [Signer(bytes([number]) * 32).peer for number in range(1, 13)]
SEED_NODE = Signer(bytes([99]) * 32).peer
MODULES = Topology((16,) * 4).modules()
OWNER, TRAINER = Heartbeat(owns=True), Heartbeat(owns=False)
SEED = Heartbeat(role="seed", owns=True)


def leaders(peers: list[PeerId]) -> dict[ModuleId, PeerId | None]:
    return {module: leader(module, dict.fromkeys(peers, OWNER), incumbent=None) for module in MODULES}


@given(st.permutations(PEERS))
def test_the_order_of_the_view_does_not_matter(peers: list[PeerId]) -> None:
    assert rank(MODULES[0], peers) == rank(MODULES[0], PEERS)
    assert leader(MODULES[0], dict.fromkeys(peers, OWNER), incumbent=None) == rank(MODULES[0], PEERS)[0]


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
        assert all(leader(module, view, incumbent=peer) == peer for peer in PEERS)


def test_a_dead_incumbent_is_followed_by_the_first_in_rank() -> None:
    for module in MODULES:
        first, second, *others = rank(module, PEERS)
        assert leader(module, dict.fromkeys([second, *others], OWNER), incumbent=first) == second


def test_who_cannot_own_never_leads() -> None:
    view = dict.fromkeys(PEERS, TRAINER)
    assert leader(MODULES[0], view, incumbent=None) is None
    assert leader(MODULES[0], view, incumbent=PEERS[0]) is None, "it led once, but can be dialled no more"
    assert leader(MODULES[0], view | {PEERS[3]: OWNER}, incumbent=PEERS[0]) == PEERS[3]


def test_nobody_leads_an_empty_swarm() -> None:
    assert leader(MODULES[0], {}, incumbent=None) is None
    assert leader(MODULES[0], {}, incumbent=PEERS[0]) is None


def test_the_seed_node_leads_only_while_no_volunteer_can() -> None:
    alone = {SEED_NODE: SEED} | dict.fromkeys(PEERS, TRAINER)
    for module in MODULES:
        assert leader(module, alone, incumbent=None) == SEED_NODE
        assert leader(module, alone | {PEERS[0]: OWNER}, incumbent=None) == PEERS[0]


def test_the_seed_node_hands_over_and_volunteers_do_not_hand_back() -> None:
    view = {SEED_NODE: SEED, PEERS[0]: OWNER}
    for module in MODULES:
        assert leader(module, view, incumbent=SEED_NODE) == PEERS[0]
        assert leader(module, view, incumbent=PEERS[0]) == PEERS[0]
        assert leader(module, {SEED_NODE: SEED}, incumbent=PEERS[0]) == SEED_NODE


def test_of_two_seed_nodes_the_incumbent_is_kept() -> None:
    view = {SEED_NODE: SEED, PEERS[0]: SEED}
    for module in MODULES:
        assert leader(module, view, incumbent=SEED_NODE) == SEED_NODE
        assert leader(module, view, incumbent=PEERS[0]) == PEERS[0]
