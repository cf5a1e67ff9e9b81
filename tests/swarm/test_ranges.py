"""The parts of a blob: each is given out until it is here, and what is kept has no holes."""

from __future__ import annotations

import random

import pytest

from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.blobs.fetch import AHEAD_BYTES_MAX, Ranges

ANN, BEN = PeerId("ann"), PeerId("ben")


@pytest.mark.parametrize("seed", range(20))
def test_parts_in_any_order_cut_short_and_given_back_become_the_blob(seed: int) -> None:
    chance = random.Random(seed)
    blob = chance.randbytes(chance.randrange(1, 5000))
    ranges = Ranges(len(blob), blob[: chance.randrange(len(blob))])
    asked: list[range] = []
    while not ranges.is_whole:
        part = ranges.take(chance.randrange(1, 400))
        if part is not None:
            asked.append(part)
        if part is None or chance.random() < 0.6:
            answered = asked.pop(chance.randrange(len(asked)))
            count = chance.randrange(len(answered) + 1)
            ranges.put(answered.start, blob[answered.start : answered.start + count], ANN)
            ranges.give_back(answered[count:])
        assert ranges.read(0, ranges.whole) == blob[: ranges.whole]
        assert ranges.here + sum(map(len, asked)) <= len(blob)
    assert ranges.value() == blob and ranges.here == len(blob) and ranges.take(1) is None


def test_nothing_far_ahead_of_a_hole_is_given_out() -> None:
    ranges, length = Ranges(4 * AHEAD_BYTES_MAX), AHEAD_BYTES_MAX // 4
    hole = ranges.take(length)
    others = []
    while (part := ranges.take(length)) is not None:
        others.append(part)
        ranges.put(part.start, bytes(len(part)), ANN)
    assert hole is not None and ranges.whole == 0 and others[-1].stop == AHEAD_BYTES_MAX
    ranges.put(0, bytes(len(hole)), BEN)
    assert ranges.whole == AHEAD_BYTES_MAX and ranges.take(length) == range(ranges.whole, ranges.whole + length)


def test_what_one_brought_is_forgotten_and_comes_back_without_the_rest() -> None:
    ranges = Ranges(10, b"01")
    for peer, data in ((ANN, b"23"), (BEN, b"4567"), (ANN, b"89")):
        part = ranges.take(len(data))
        assert part is not None
        ranges.put(part.start, data, peer)
    assert ranges.sources() == [None, ANN, BEN]
    lost = ranges.forget(ANN)
    assert ranges.whole == 2 and ranges.here == 6 and ranges.sources() == [None, BEN]
    for answer in (b"a", b"b", b"c", b"d"):
        part = ranges.take(1)
        assert part is not None
        ranges.put(part.start, answer, BEN)
    assert ranges.value() == b"01ab4567cd" and ranges.sources() == [None, BEN]
    ranges.restore(lost, ANN)
    assert ranges.value() == b"0123456789" and set(ranges.sources()) == {None, ANN, BEN}
    assert ranges.forget(BEN) == [(range(4, 8), b"4567")]
