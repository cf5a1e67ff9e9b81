"""The codecs: error bounds, error feedback, exact norms, sizes, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dipaco_p2p.config import DOWNLINKS, UPLINKS
from dipaco_p2p.core.outer.codec import BLOCK, CHUNK, CODE_MAX, KEPT, TOP128, Blocks, Sparse
from dipaco_p2p.core.outer.compress import (
    CODECS,
    INT4,
    INT8,
    beginning,
    bytes_max,
    compress,
    decode_compressed,
    encode_compressed,
)
from dipaco_p2p.core.tensor_file import decode, encode
from dipaco_p2p.errors import IntegrityError

BITS = {INT8: 8, INT4: 4}
SIZES = [0, 1, 2, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 777]


def values(size: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def test_the_codecs_of_a_run_file_are_those_that_there_are() -> None:
    assert set(UPLINKS) == set(CODECS)
    assert set(DOWNLINKS) <= {name for name, codec in CODECS.items() if not codec.goes_on}


# -- every codec


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", SIZES)
def test_bytes_round_trip_within_the_bound(codec: str, size: int) -> None:
    compressed, residual = compress(values(size), codec=codec)
    data = encode_compressed(compressed)
    again = decode_compressed(data, size=size, codec=codec)
    assert again.expand().tobytes() == compressed.expand().tobytes() and encode_compressed(again) == data
    assert len(data) <= bytes_max(size, codec) and residual.shape == (size,) and again.codec == codec


@pytest.mark.parametrize(("codec", "ratio"), [(INT8, 3.9), (INT4, 7.7), (TOP128, 100.0)])
def test_how_much_smaller_than_float32(codec: str, ratio: float) -> None:
    size = 256 * CHUNK
    assert 4 * size / len(encode_compressed(compress(values(size), codec=codec)[0])) > ratio


@pytest.mark.parametrize("codec", CODECS)
def test_what_was_sent_and_the_residual_add_up_to_the_values(codec: str) -> None:
    residual, sent, given_total = None, np.zeros(700, np.float64), np.zeros(700, np.float64)
    for seed in range(20):
        wanted = values(700, seed, scale=10.0 ** (seed % 5 - 2))
        compressed, residual = compress(wanted, residual, codec=codec)
        sent += compressed.expand()
        given_total += wanted
    np.testing.assert_allclose(sent + residual, given_total, atol=1e-2)


@pytest.mark.parametrize("codec", CODECS)
def test_values_too_small_for_a_scale_become_zero_and_stay_in_the_residual(codec: str) -> None:
    wanted = np.full(2 * BLOCK, 1e-40, dtype=np.float32)
    wanted[:BLOCK] = 0
    compressed, residual = compress(wanted, codec=codec)
    assert not compressed.expand().any() and not compressed.scales.any()
    assert residual.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
def test_values_that_cannot_be_scaled_are_refused(bad: float, codec: str) -> None:
    wanted = values(300)
    wanted[7] = bad
    with pytest.raises(ValueError, match="cannot be compressed"):
        compress(wanted, codec=codec)


@pytest.mark.parametrize("codec", CODECS)
def test_an_overflow_by_the_residual_is_refused(codec: str) -> None:
    huge = np.full(4, 2.5e38, dtype=np.float32)
    with np.errstate(over="ignore"), pytest.raises(ValueError, match="not finite"):
        compress(huge, huge, codec=codec)


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(size=st.integers(1, 700), seed=st.integers(0, 2**32), power=st.integers(-30, 30))
def test_the_norm_is_exact(codec: str, size: int, seed: int, power: int) -> None:
    compressed, _ = compress(values(size, seed, scale=10.0**power), codec=codec)
    square = sum(Fraction(value) ** 2 for value in _exact(compressed))
    assert compressed.norm() == pytest.approx(math.sqrt(square), rel=1e-15)


def _exact(compressed: object) -> list[Fraction]:
    """The values before they are rounded to float32."""
    if isinstance(compressed, Blocks):
        products = zip(compressed.codes.tolist(), np.repeat(compressed.scales, BLOCK).tolist(), strict=False)
        return [Fraction(code) * Fraction(scale) for code, scale in products]
    return [Fraction(value) for value in compressed.expand().tolist()]


# -- blocks


@pytest.mark.parametrize("codec", BITS)
@pytest.mark.parametrize("size", SIZES)
def test_each_value_is_within_half_a_step(size: int, codec: str) -> None:
    wanted = values(size)
    compressed, residual = compress(wanted, codec=codec)
    steps = np.repeat(compressed.scales, BLOCK)[:size]
    assert (np.abs(wanted - compressed.expand()) <= steps * 0.5001).all()
    assert compressed.scales.shape == (-(-size // BLOCK),)


def test_halves_are_rounded_to_even() -> None:
    wanted = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5], dtype=np.float32)
    assert compress(wanted)[0].codes.tolist() == [127, 0, 2, 2, 0, -2]
    assert compress(wanted / 127 * 7 + 0, codec=INT4)[0].codes.tolist()[0] == 7


@pytest.mark.parametrize("codec", BITS)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(largest=st.floats(2.0**-119, 2.0**126, width=32, allow_subnormal=False))
def test_the_largest_value_of_a_block_has_the_largest_code(codec: str, largest: float) -> None:
    codes = compress(np.array([largest, -largest], dtype=np.float32), codec=codec)[0].codes
    assert codes.tolist() == [CODE_MAX[BITS[codec]], -CODE_MAX[BITS[codec]]]


def test_error_feedback_delivers_in_time_what_one_message_cannot_say() -> None:
    wanted = np.full(BLOCK, 0.001, dtype=np.float32)
    wanted[0] = 1.0
    residual, sent = None, np.zeros(BLOCK)
    for _ in range(100):
        compressed, residual = compress(wanted, residual)
        sent += compressed.expand()
    assert compress(wanted)[0].expand()[1] == 0
    np.testing.assert_allclose(sent[1:] / 100, 0.001, rtol=0.05)


# -- the largest of each chunk


def test_the_largest_of_each_chunk_are_kept_with_their_signs() -> None:
    wanted = values(2 * CHUNK + 130, 3)
    compressed, _ = compress(wanted, codec=TOP128)
    for start, kept in ((0, KEPT), (CHUNK, KEPT), (2 * CHUNK, 5)):
        chunk = wanted[start : start + CHUNK]
        places = [place - start for place in compressed.places if start <= place < start + CHUNK]
        assert set(places) == set(np.argsort(-np.abs(chunk), kind="stable")[:kept].tolist())
    found = compressed.expand()
    assert (np.sign(found[compressed.places]) == np.sign(wanted[compressed.places])).all()
    assert np.abs(found[compressed.places] - wanted[compressed.places]).max() < np.abs(wanted).max() / 2


def test_with_error_feedback_every_value_is_sent_in_time() -> None:
    wanted = np.abs(values(256, 5)) + 0.5  # eight of these go in a message
    residual, sent = None, np.zeros(256)
    for _ in range(1500):
        compressed, residual = compress(wanted, residual, codec=TOP128)
        sent += compressed.expand()
    np.testing.assert_allclose(sent / 1500, wanted, rtol=0.15)


def furthest(*, goes_on: bool) -> tuple[float, float]:
    """A path that is drawn half the way to 1 in every round and sends 8 of 256 values: the furthest that any value of
    the version gets, and how far from 1 they are at last."""
    version, owed, highest = np.zeros(256, dtype=np.float32), None, 0.0
    for _ in range(400):
        begun = beginning(version, owed, codec=TOP128) if goes_on else version
        sent, owed = compress(begun - (begun + (1 - begun) / 2), owed, codec=TOP128)
        version = version - sent.expand()
        highest = max(highest, float(version.max()))
    return highest, float(np.abs(version - 1).max())


def test_a_path_that_goes_on_from_where_it_is_does_nothing_twice() -> None:
    """One that begins at the version is drawn again and again until its turn comes, and sends all of it."""
    highest, missing = furthest(goes_on=True)
    assert highest < 1.05 and missing < 0.05
    highest, missing = furthest(goes_on=False)
    assert highest > 5 and missing > 1


@pytest.mark.parametrize("codec", [INT8, INT4])
def test_what_is_nearly_sent_begins_at_the_version(codec: str) -> None:
    version = values(300, 7)
    assert beginning(version, values(300, 8), codec=codec) is version
    assert beginning(version, None, codec=TOP128) is version


@pytest.mark.parametrize("size", SIZES)
def test_places_take_seven_bits_and_come_back(size: int) -> None:
    compressed, _ = compress(values(size, 9), codec=TOP128)
    tensors, _ = decode(encode_compressed(compressed))
    kept = -(-size // 32)
    assert len(compressed.places) == kept
    assert (tensors["counts"].size, tensors["lows"].size) == (-(-2 * kept // 8), -(-5 * kept // 8))
    # Written out by hand: a 1 for each place of a group of 32, a 0 after each group.
    written = "".join("1" * sum(place // 32 == group for place in compressed.places) + "0" for group in range(kept))
    bits = "".join(f"{byte:08b}"[::-1] for byte in tensors["counts"])
    assert bits.rstrip("0") == written.rstrip("0")
    assert tensors["lows"].tobytes() == lows(compressed.places.tolist()).tobytes()
    again = decode_compressed(encode_compressed(compressed), size=size, codec=TOP128)
    assert np.array_equal(again.places, compressed.places)


def test_a_chunk_that_keeps_too_many_is_refused() -> None:
    compressed, _ = compress(values(2 * CHUNK, 9), codec=TOP128)
    places = compressed.places.copy()
    places[KEPT] = compressed.places[KEPT - 1] + 1  # one more in the first chunk, one less in the second
    assert places[KEPT] < CHUNK
    moved = Sparse(size=2 * CHUNK, places=places, codes=compressed.codes, scales=compressed.scales)
    with pytest.raises(IntegrityError, match="not 128 values"):
        decode_compressed(encode_compressed(moved), size=2 * CHUNK, codec=TOP128)


# -- what is refused


def lows(places: Sequence[int]) -> np.ndarray:
    """The low five bits of each, one after the other."""
    number = sum((place % 32) << 5 * index for index, place in enumerate(places))
    return np.frombuffer(number.to_bytes(-(-5 * len(places) // 8), "little"), np.uint8)


def tampered(codec: str, **changes: np.ndarray | None) -> bytes:
    good = {
        INT8: {"codes": np.zeros(301, np.int8), "scales": np.ones(2, np.float32)},
        INT4: {"codes": np.full(151, 0x88, np.uint8), "scales": np.ones(2, np.float32)},
        TOP128: {
            "counts": np.array([0xFF, 0x03, 0], np.uint8),  # all ten in the first group
            "lows": lows(range(10)),
            "codes": np.zeros(3, np.uint8),
            "scales": np.ones(2, np.float32),
        },
    }[codec]
    tensors = good | changes
    return encode(
        {name: value for name, value in tensors.items() if value is not None}, metadata=CODECS[codec].metadata
    )


@pytest.mark.parametrize("codec", CODECS)
def test_what_the_tampering_begins_with_is_fine(codec: str) -> None:
    assert decode_compressed(tampered(codec), size=301, codec=codec).size == 301


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": None}, "without `codes`"),
        ({"scales": None}, "without `scales`"),
        ({"codes": np.zeros(150, np.int32)}, "`codes` is int32"),
        ({"scales": np.ones(3, np.float32)}, "expected float32"),
        ({"scales": np.ones(2, np.float16)}, "expected float32"),
        ({"scales": np.array([1, np.nan], np.float32)}, "a scale"),
        ({"scales": np.array([1, np.inf], np.float32)}, "a scale"),
        ({"scales": np.array([1, -1], np.float32)}, "a scale"),
        ({"scales": np.array([1, 3e38], np.float32)}, "a scale"),
        ({"scales": np.array([1, 1e-40], np.float32)}, "a scale"),
        ({"extra": np.ones(3, np.float32)}, "extra tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_malformed_vector_is_refused(codec: str, changes: dict[str, np.ndarray | None], message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        decode_compressed(tampered(codec, **changes), size=301, codec=codec)


@pytest.mark.parametrize(
    ("codec", "changes", "message"),
    [
        (INT8, {"codes": np.full(301, -128, np.int8)}, "code -128"),
        (INT8, {"codes": np.zeros(300, np.int8)}, "expected int8"),
        (INT8, {"codes": np.zeros((301, 1), np.int8)}, "expected int8"),
        (INT4, {"codes": np.full(151, 0x80, np.uint8)}, "code -8"),
        (INT4, {"codes": np.full(151, 0x98, np.uint8)}, "beyond its end"),
        (TOP128, {"counts": None}, "without `counts`"),
        (TOP128, {"lows": None}, "without `lows`"),
        (TOP128, {"lows": np.zeros(7, np.uint8)}, "do not rise"),
        (TOP128, {"lows": lows([*range(9), 8])}, "do not rise"),
        (TOP128, {"lows": lows(range(10)) | np.array([0] * 6 + [0x04], np.uint8)}, "beyond its end"),
        (TOP128, {"counts": np.array([0xFF, 0x01, 0], np.uint8)}, "not 10 places"),
        (TOP128, {"counts": np.array([0xFF, 0x07, 0], np.uint8)}, "not 10 places"),
        (TOP128, {"counts": np.array([0xFF, 0x01, 0x10], np.uint8)}, "not 10 places"),
        (TOP128, {"counts": np.array([0xFF, 0x01, 0x08], np.uint8)}, "not 10 places"),
        (TOP128, {"counts": np.array([0xFF, 0x01, 0x04], np.uint8), "lows": lows([*range(9), 13])}, "beyond its end"),
        (TOP128, {"codes": np.array([0, 0, 0x10], np.uint8)}, "beyond its end"),
        (TOP128, {"scales": np.array([2, 1], np.float32)}, "magnitudes"),
    ],
)
def test_what_only_one_codec_has_is_checked_too(
    codec: str, changes: dict[str, np.ndarray | None], message: str
) -> None:
    with pytest.raises(IntegrityError, match=message):
        decode_compressed(tampered(codec, **changes), size=301, codec=codec)


def test_junk_and_other_codecs_are_refused() -> None:
    with pytest.raises(IntegrityError, match="too short"):
        decode_compressed(b"junk", size=301)
    for codec in CODECS:
        for other in set(CODECS) - {codec}:
            with pytest.raises(IntegrityError, match="another codec"):
                decode_compressed(tampered(codec), size=301, codec=other)
