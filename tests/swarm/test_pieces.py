"""The parts of a blob: each is given out until it is here, and what is kept has no holes."""

from __future__ import annotations

import random

import pytest

from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.pieces import AHEAD_BYTES_MAX, Pieces

ANN, BEN = PeerId("ann"), PeerId("ben")


@pytest.mark.parametrize("seed", range(20))
def test_parts_in_any_order_cut_short_and_given_back_become_the_blob(seed: int) -> None:
    chance = random.Random(seed)
    blob = chance.randbytes(chance.randrange(1, 5000))
    pieces = Pieces(len(blob), blob[: chance.randrange(len(blob))])
    asked: list[range] = []
    while not pieces.is_whole:
        part = pieces.take(chance.randrange(1, 400))
        if part is not None:
            asked.append(part)
        if part is None or chance.random() < 0.6:
            answered = asked.pop(chance.randrange(len(asked)))
            count = chance.randrange(len(answered) + 1)
            pieces.put(answered.start, blob[answered.start : answered.start + count], ANN)
            pieces.give_back(answered[count:])
        assert pieces.read(0, pieces.whole) == blob[: pieces.whole]
        assert pieces.here + sum(map(len, asked)) <= len(blob)
    assert pieces.value() == blob and pieces.here == len(blob) and pieces.take(1) is None


def test_nothing_far_ahead_of_a_hole_is_given_out() -> None:
    pieces, length = Pieces(4 * AHEAD_BYTES_MAX), AHEAD_BYTES_MAX // 4
    hole = pieces.take(length)
    others = []
    while (part := pieces.take(length)) is not None:
        others.append(part)
        pieces.put(part.start, bytes(len(part)), ANN)
    assert hole is not None and pieces.whole == 0 and others[-1].stop == AHEAD_BYTES_MAX
    pieces.put(0, bytes(len(hole)), BEN)
    assert pieces.whole == AHEAD_BYTES_MAX and pieces.take(length) == range(pieces.whole, pieces.whole + length)


def test_what_one_brought_is_forgotten_and_comes_back_without_the_rest() -> None:
    pieces = Pieces(10, b"01")
    for peer, data in ((ANN, b"23"), (BEN, b"4567"), (ANN, b"89")):
        part = pieces.take(len(data))
        assert part is not None
        pieces.put(part.start, data, peer)
    assert pieces.sources() == [None, ANN, BEN]
    lost = pieces.forget(ANN)
    assert pieces.whole == 2 and pieces.here == 6 and pieces.sources() == [None, BEN]
    for answer in (b"a", b"b", b"c", b"d"):
        part = pieces.take(1)
        assert part is not None
        pieces.put(part.start, answer, BEN)
    assert pieces.value() == b"01ab4567cd" and pieces.sources() == [None, BEN]
    pieces.restore(lost, ANN)
    assert pieces.value() == b"0123456789" and set(pieces.sources()) == {None, ANN, BEN}
    assert pieces.forget(BEN) == [(range(4, 8), b"4567")]
