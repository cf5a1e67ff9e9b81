"""The codecs: error bounds, error feedback, exact norms, sizes, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dipaco_p2p.config import DOWNLINKS, UPLINKS
from dipaco_p2p.core.outer.blocks import BLOCK, CODE_MAX, Blocks
from dipaco_p2p.core.outer.compress import (
    CODECS,
    INT4,
    INT8,
    Sent,
    beginning,
    bytes_max,
    compress,
    decode_compressed,
    encode_compressed,
)
from dipaco_p2p.core.outer.sparse import CHUNK
from dipaco_p2p.core.outer.two_bits import WIDTH
from dipaco_p2p.core.tensor_file import decode, encode
from dipaco_p2p.errors import IntegrityError

BITS = {INT8: 8, INT4: 4}
TOP128 = "top128"
EVERY = {"top128": 32, "top256": 16, "top512": 8}
"""Of how many values one is kept."""
SIZES = [0, 1, 2, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 777]


def values(size: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def test_the_codecs_of_a_run_file_are_those_that_there_are() -> None:
    assert set(UPLINKS) == set(CODECS)
    assert set(DOWNLINKS) <= set(CODECS)


# -- every codec


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", SIZES)
def test_bytes_round_trip_within_the_bound(codec: str, size: int) -> None:
    compressed, residual = compress(values(size), codec=codec)
    data = encode_compressed(compressed)
    again = decode_compressed(data, size=size, codec=codec)
    assert again.expand().tobytes() == compressed.expand().tobytes() and encode_compressed(again) == data
    assert len(data) <= bytes_max(size, codec) and residual.shape == (size,) and again.codec == codec


@pytest.mark.parametrize(
    ("codec", "ratio"),
    [(INT8, 3.9), (INT4, 7.7), ("int2", 15.0), ("top512", 35.0), ("top256", 60.0), (TOP128, 100.0)],
)
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


@pytest.mark.parametrize("codec", CODECS)
def test_what_was_captured_and_what_is_owed(codec: str) -> None:
    wanted, residual = values(3 * CHUNK, 4), values(3 * CHUNK, 5, scale=0.5)
    compressed, left = compress(wanted, residual, codec=codec)
    told = Sent.of(float(np.linalg.norm(wanted)), compressed, left)
    lost = float(np.linalg.norm(left) / np.linalg.norm(wanted + residual)) ** 2
    assert told.captured == pytest.approx(1 - lost, abs=0.02)
    assert told.owed == pytest.approx(float(np.linalg.norm(left) / np.linalg.norm(wanted)))
    zeros = np.zeros(300, np.float32)
    assert Sent.of(0.0, *compress(zeros, codec=codec)) == Sent(captured=0.0, owed=0.0)


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


@pytest.mark.parametrize("codec", EVERY)
def test_the_largest_of_each_chunk_are_kept_with_their_signs(codec: str) -> None:
    wanted, whole = values(2 * CHUNK + 130, 3), CHUNK // EVERY[codec]
    compressed, _ = compress(wanted, codec=codec)
    for start, kept in ((0, whole), (CHUNK, whole), (2 * CHUNK, -(-130 // EVERY[codec]))):
        chunk = wanted[start : start + CHUNK]
        places = [place - start for place in compressed.places if start <= place < start + CHUNK]
        assert set(places) == set(np.argsort(-np.abs(chunk), kind="stable")[:kept].tolist())
    found = compressed.expand()
    assert (np.sign(found[compressed.places]) == np.sign(wanted[compressed.places])).all()
    assert np.abs(found[compressed.places] - wanted[compressed.places]).max() < np.abs(wanted).max() / 2


@pytest.mark.parametrize("codec", EVERY)
def test_of_equal_values_the_first_are_kept(codec: str) -> None:
    kept = CHUNK // EVERY[codec]
    wanted = np.concatenate([np.ones(CHUNK), np.zeros(CHUNK), np.repeat([1, 3, 1], [CHUNK - 9, 2, 7])]).astype("f4")
    places = compress(wanted, codec=codec)[0].places
    last = [*range(2 * CHUNK, 2 * CHUNK + kept - 2), 3 * CHUNK - 9, 3 * CHUNK - 8]
    assert places.tolist() == [*range(kept), *range(CHUNK, CHUNK + kept), *last]


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


@pytest.mark.parametrize("codec", EVERY)
@pytest.mark.parametrize("size", SIZES)
def test_places_take_two_bits_more_than_their_low_ones_and_come_back(size: int, codec: str) -> None:
    every, compressed = EVERY[codec], compress(values(size, 9), codec=codec)[0]
    tensors, _ = decode(encode_compressed(compressed))
    kept, bits = -(-size // every), every.bit_length() - 1
    assert len(compressed.places) == kept
    assert (tensors["counts"].size, tensors["lows"].size) == (-(-2 * kept // 8), -(-bits * kept // 8))
    # Written out by hand: a 1 for each place of a group, a 0 after each group.
    groups = [[place for place in compressed.places if place // every == group] for group in range(kept)]
    written = "".join("1" * len(places) + "0" for places in groups)
    found = "".join(f"{byte:08b}"[::-1] for byte in tensors["counts"])
    assert found.rstrip("0") == written.rstrip("0")
    assert tensors["lows"].tobytes() == lows(compressed.places.tolist(), bits).tobytes()
    again = decode_compressed(encode_compressed(compressed), size=size, codec=codec)
    assert np.array_equal(again.places, compressed.places)


@pytest.mark.parametrize("codec", EVERY)
def test_a_chunk_that_keeps_too_many_is_refused(codec: str) -> None:
    compressed, whole = compress(values(2 * CHUNK, 9), codec=codec)[0], CHUNK // EVERY[codec]
    places = compressed.places.copy()
    free = next(place for place in range(CHUNK - 1, 0, -1) if place not in places)
    moved = np.sort(np.append(np.delete(places, whole), free))  # one more in the first chunk, one less in the second
    changed = replace(compressed, places=moved)
    with pytest.raises(IntegrityError, match=f"not {whole} values"):
        decode_compressed(encode_compressed(changed), size=2 * CHUNK, codec=codec)


# -- two bits for each value


def centroids(block: np.ndarray) -> tuple[float, float]:
    """Two steps of Lloyd's method, by the letter, of magnitudes in 127ths of the largest."""
    whole = [round(float(size) / (float(np.abs(block).max()) / 127)) for size in np.abs(block)]
    bound = 0.9957 * math.sqrt(sum(one * one for one in whole) / len(whole))
    low = high = 0.0
    for _ in range(2):
        below, above = [one for one in whole if one <= bound], [one for one in whole if one > bound]
        high = sum(above) / len(above)
        low = sum(below) / len(below) if below else high
        bound = (low + high) / 2 if below else bound
    return low, high


@pytest.mark.parametrize("size", [1, 2, WIDTH - 1, WIDTH, WIDTH + 1, 3 * WIDTH + 77])
def test_magnitudes_are_centroids_of_their_block(size: int) -> None:
    wanted = values(size, 4)
    compressed, _ = compress(wanted, codec="int2")
    for number, start in enumerate(range(0, size, WIDTH)):
        block = wanted[start : start + WIDTH]
        expected = np.array(centroids(block)) * float(np.abs(block).max()) / 127
        np.testing.assert_allclose(compressed.scales[number], expected, rtol=1e-6)
    found = compressed.expand()
    assert (np.sign(found) == np.sign(wanted)).all()
    middle = compressed.scales.mean(axis=1).repeat(WIDTH)[:size]
    is_clear = np.abs(np.abs(wanted) - middle) > 0.01 * np.abs(wanted).max()  # elsewhere a 127th decides
    greater = np.abs(found) == compressed.scales[:, 1].repeat(WIDTH)[:size]
    assert (greater == (np.abs(wanted) > middle))[is_clear].all()


@pytest.mark.parametrize(("draw", "error"), [("standard_normal", 0.1175), ("standard_laplace", 0.1762)])
def test_two_bits_are_as_good_as_four_levels_can_be(draw: str, error: float) -> None:
    """The least mean square errors of four levels: Max (1960) for a normal distribution, 0.1762 for Laplace's."""
    chance = np.random.default_rng(3)
    wanted = (chance.standard_normal(1 << 18) if draw == "standard_normal" else chance.laplace(size=1 << 18)).astype(
        "f4"
    )
    _, residual = compress(wanted, codec="int2")
    assert float((residual**2).mean() / (wanted**2).mean()) < 1.02 * error


# -- what is refused


def lows(places: Sequence[int], bits: int = 5) -> np.ndarray:
    """The low bits of each, one after the other."""
    number = sum((place % (1 << bits)) << bits * index for index, place in enumerate(places))
    return np.frombuffer(number.to_bytes(-(-bits * len(places) // 8), "little"), np.uint8)


def sparse_parts(every: int) -> dict[str, np.ndarray]:
    """Of 301 values the first are kept."""
    kept, bits = -(-301 // every), every.bit_length() - 1
    counts = np.zeros(-(-2 * kept // 8), np.uint8)
    written = np.array([bit for _ in range(-(-kept // every)) for bit in [1] * every + [0]][: 2 * kept], np.uint8)
    ones = np.flatnonzero(written)[:kept]
    flags = np.zeros(8 * counts.size, np.uint8)
    flags[ones] = 1
    return {
        "counts": np.packbits(flags, bitorder="little"),
        "lows": lows(range(kept), bits),
        "codes": np.zeros(-(-kept // 4), np.uint8),
        "scales": np.ones(2, np.float32),
    }


def tampered(codec: str, **changes: np.ndarray | None) -> bytes:
    good = {
        INT8: {"codes": np.zeros(301, np.int8), "scales": np.ones(2, np.float32)},
        INT4: {"codes": np.full(151, 0x88, np.uint8), "scales": np.ones(2, np.float32)},
        "int2": {"codes": np.zeros(76, np.uint8), "scales": np.ones(2, np.float32)},
        **{name: sparse_parts(every) for name, every in EVERY.items()},
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
        ("int2", {"codes": np.zeros(75, np.uint8)}, "expected uint8"),
        ("int2", {"codes": np.array([0] * 75 + [0x04], np.uint8)}, "beyond its end"),
        ("int2", {"scales": np.array([2, 1], np.float32)}, "magnitudes"),
        *((name, {"scales": np.array([2, 1], np.float32)}, "magnitudes") for name in EVERY),
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
