"""Who keeps what: everybody computes it alike, a full disk gives up what others keep, and failing costs the role."""

from __future__ import annotations

from collections import Counter

import pytest
from tiny_run import signer

from dipaco_p2p.canonical import digest
from dipaco_p2p.protocol.documents import DOCUMENT_BYTES_MAX, seal, unseal
from dipaco_p2p.protocol.keeping import (
    COUNTS_MAX,
    FAILURES_MAX,
    KEEPERS,
    RANGE_VERSIONS,
    SHARES,
    Conduct,
    KeepersCount,
    Range,
    counts_of,
    keepers,
    lot,
    proof,
    range_of,
    ranges_up_to,
    share_without,
    takes,
)
from dipaco_p2p.topology import ModuleId

RUN, MODULE = digest(b"run"), ModuleId(1, 0)
PEERS = [signer(number).peer for number in range(1, 11)]
RANGES = [Range(ModuleId(1, index), number) for index in range(4) for number in range(50)]
ALL = dict.fromkeys(PEERS, SHARES)


def test_every_version_is_in_one_range() -> None:
    head = 3 * RANGE_VERSIONS + 2
    ranges = list(ranges_up_to(MODULE, head))
    assert [version for each in ranges for version in each.versions(head)] == list(range(1, head + 1))
    assert all(version in range_of(MODULE, version).versions(head) for version in range(1, head + 1))
    assert list(ranges_up_to(MODULE, 0)) == [] and str(ranges[1]) == "L1.M0 9-16"


def test_ranges_are_spread_over_those_who_offer() -> None:
    found = Counter(peer for each in RANGES for peer in keepers(RUN, each, ALL))
    assert sum(found.values()) == KEEPERS * len(RANGES) and min(found.values()) > 0.6 * max(found.values())


def test_who_dies_is_replaced_by_the_next_and_nobody_else_changes() -> None:
    for each in RANGES:
        before = keepers(RUN, each, ALL)
        after = keepers(RUN, each, {peer: SHARES for peer in PEERS if peer != before[0]})
        assert after[: KEEPERS - 1] == before[1:] and after[-1] not in before


def test_a_smaller_share_gives_up_the_ranges_that_others_are_likelier_to_keep() -> None:
    full = [each for each in RANGES if PEERS[0] in keepers(RUN, each, ALL)]
    half = [each for each in RANGES if PEERS[0] in keepers(RUN, each, ALL | {PEERS[0]: SHARES // 5})]
    assert 0 < len(half) < len(full) and set(half) < set(full)
    given_up = max(lot(RUN, each, PEERS[0]) for each in set(full) - set(half))
    assert given_up < min(lot(RUN, each, PEERS[0]) for each in half)


def test_the_share_without_a_lot_is_the_greatest_that_leaves_it_out() -> None:
    for each in RANGES:
        number = lot(RUN, each, PEERS[0])
        share = share_without(number)
        assert 0 <= share < SHARES and not takes(share, number) and takes(share + 1, number)
    assert takes(SHARES, 0) and not takes(0, 2**64 - 1)


def test_an_answer_is_of_one_peer_one_nonce_and_one_part() -> None:
    answers = {proof(nonce, peer, part) for nonce in ("a", "b") for peer in PEERS for part in (b"x", b"y")}
    assert len(answers) == 4 * len(PEERS)


def test_one_failure_is_forgiven_and_those_in_a_row_cost_all_proofs() -> None:
    tested = Conduct(proofs=7).failed(now_s=10.0, barred_s=5.0).passed()
    assert (tested.proofs, tested.failures) == (8, 0)
    for _ in range(FAILURES_MAX):
        assert not tested.is_barred(10.0)
        tested = tested.failed(now_s=10.0, barred_s=5.0)
    assert tested == Conduct(barred_until_s=15.0)
    assert tested.is_barred(14.9) and not tested.is_barred(15.0)


def test_the_longest_count_fits_a_document_and_names_the_barred_first() -> None:
    tested = {signer(1).peer[:-4] + f"{number:04}": Conduct(proofs=10**12 + number) for number in range(COUNTS_MAX + 5)}
    barred = list(tested)[3]
    tested[barred] = Conduct(barred_until_s=1.7e9)
    count = KeepersCount(run=RUN, number=1, keepers=counts_of(tested), author=signer(1).peer)  # type: ignore[arg-type]
    assert len(count.keepers) == COUNTS_MAX and count.keepers[0].peer == barred
    assert count.barred(1.6e9) == {barred} and count.barred(1.8e9) == frozenset()
    assert unseal(KeepersCount, seal(signer(1), count).to_dict()).document == count
    assert DOCUMENT_BYTES_MAX > 200 * COUNTS_MAX


@pytest.mark.parametrize("share", [0, 1, SHARES // 2, SHARES])
def test_as_many_lots_are_taken_as_are_offered(share: int) -> None:
    taken = sum(takes(share, lot(RUN, each, peer)) for each in RANGES for peer in PEERS)
    assert abs(taken / (len(RANGES) * len(PEERS)) - share / SHARES) < 0.03
