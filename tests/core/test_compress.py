"""The codecs: error bounds, error feedback, exact norms, sizes, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
TOP128, TERNARY = "top128", "ternary640"
KEPT = {"ternary640": 640, "ternary320": 320, "ternary160": 160, "top128": 128}
"""Of each chunk."""
LOW_BITS = {"ternary640": 2, "ternary320": 3, "ternary160": 4, "top128": 5}
TERNARIES = [codec for codec in KEPT if codec != TOP128]
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
    [
        (INT8, 3.9),
        (INT4, 7.7),
        ("int2", 15.0),
        (TERNARY, 40.0),
        ("ternary320", 65.0),
        ("ternary160", 110.0),
        (TOP128, 100.0),
    ],
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


@pytest.mark.parametrize("codec", KEPT)
def test_the_largest_of_each_chunk_are_kept_with_their_signs(codec: str) -> None:
    wanted, whole = values(2 * CHUNK + 130, 3), KEPT[codec]
    compressed, _ = compress(wanted, codec=codec)
    for start, kept in ((0, whole), (CHUNK, whole), (2 * CHUNK, -(-130 * whole // CHUNK))):
        chunk = wanted[start : start + CHUNK]
        places = [place - start for place in compressed.places if start <= place < start + CHUNK]
        assert set(places) == set(np.argsort(-np.abs(chunk), kind="stable")[:kept].tolist())
    found = compressed.expand()
    assert (np.sign(found[compressed.places]) == np.sign(wanted[compressed.places])).all()
    far = np.abs(found[compressed.places] - wanted[compressed.places]).max()
    assert far < np.abs(wanted).max() * (0.5 if codec == TOP128 else 0.6)


@pytest.mark.parametrize("codec", TERNARIES)
def test_one_magnitude_is_the_mean_of_what_is_kept_of_its_chunk(codec: str) -> None:
    wanted = values(CHUNK + 900, 6)
    compressed, _ = compress(wanted, codec=codec)
    for number, first in enumerate((0, CHUNK)):
        kept = [place for place in compressed.places if place // CHUNK == first // CHUNK]
        assert compressed.scales[number] == pytest.approx(np.abs(wanted[kept]).mean(), rel=1e-6)
    assert set(np.abs(compressed.expand()).tolist()) == {0.0, *compressed.scales.ravel().tolist()}


@pytest.mark.parametrize("codec", KEPT)
def test_of_equal_values_the_first_are_kept(codec: str) -> None:
    kept = KEPT[codec]
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


@pytest.mark.parametrize("size", SIZES)
def test_places_of_top128_take_two_bits_more_than_their_low_ones(size: int) -> None:
    compressed = compress(values(size, 9), codec=TOP128)[0]
    tensors, _ = decode(encode_compressed(compressed))
    kept = -(-size // 32)
    assert len(compressed.places) == kept
    assert (tensors["counts"].size, tensors["lows"].size) == (-(-2 * kept // 8), -(-5 * kept // 8))
    # Written out by hand: a 1 for each place of a group, a 0 after each group.
    groups = [[place for place in compressed.places if place // 32 == group] for group in range(kept)]
    written = "".join("1" * len(places) + "0" for places in groups)
    assert bits_of(tensors["counts"]).rstrip("0") == written.rstrip("0")
    assert tensors["lows"].tobytes() == lows(compressed.places.tolist()).tobytes()


@pytest.mark.parametrize("codec", TERNARIES)
@pytest.mark.parametrize("size", SIZES)
def test_gaps_are_in_the_code_of_rice(size: int, codec: str) -> None:
    """Written out by hand: the low bits of each, and of the rest so many zeros, and a 1."""
    compressed, low_bits = compress(values(size, 9), codec=codec)[0], LOW_BITS[codec]
    tensors, _ = decode(encode_compressed(compressed))
    places = compressed.places.tolist()
    gaps = [place - before - 1 for before, place in zip([-1, *places], places, strict=False)]
    written = "".join("0" * (gap >> low_bits) + "1" for gap in gaps)
    assert bits_of(tensors["gaps"]).rstrip("0") == written and tensors["gaps"].size == -(-len(written) // 8)
    assert tensors["lows"].tobytes() == lows(gaps, low_bits).tobytes()
    is_negative = "".join("1" if value < 0 else "0" for value in compressed.expand()[compressed.places])
    assert bits_of(tensors["signs"]).rstrip("0") == is_negative.rstrip("0")


@pytest.mark.parametrize("codec", TERNARIES)
def test_the_code_of_gaps_is_near_the_shortest_that_there_is(codec: str) -> None:
    """Of places taken by chance no code says more than their entropy."""
    size, share = 64 * CHUNK, KEPT[codec] / CHUNK
    tensors = compress(values(size, 2), codec=codec)[0].tensors()
    entropy = -size * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
    assert entropy < 8 * (tensors["gaps"].size + tensors["lows"].size) < 1.02 * entropy


@pytest.mark.parametrize("codec", TERNARIES)
@pytest.mark.parametrize("size", SIZES)
def test_places_far_from_chance_still_fit(codec: str, size: int) -> None:
    """The longest gaps that there can be: what is kept of each chunk lies at its end."""
    wanted = np.zeros(size, np.float32)
    for first in range(0, size, CHUNK):
        end = min(first + CHUNK, size)
        wanted[end - -(-(end - first) * KEPT[codec] // CHUNK) : end] = 1
    compressed = compress(wanted, codec=codec)[0]
    assert np.array_equal(compressed.expand(), wanted)
    assert sum(tensor.nbytes for tensor in compressed.tensors().values()) <= CODECS[codec].tensor_bytes(size)


@pytest.mark.parametrize("codec", KEPT)
def test_a_chunk_that_keeps_too_many_is_refused(codec: str) -> None:
    compressed, whole = compress(values(2 * CHUNK, 9), codec=codec)[0], KEPT[codec]
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


def bits_of(packed: np.ndarray) -> str:
    """From the lowest of the first byte on."""
    return "".join(f"{byte:08b}"[::-1] for byte in packed)


def lows(places: Sequence[int], bits: int = 5) -> np.ndarray:
    """The low bits of each, one after the other."""
    number = sum((place % (1 << bits)) << bits * index for index, place in enumerate(places))
    return np.frombuffer(number.to_bytes(-(-bits * len(places) // 8), "little"), np.uint8)


def ternary_parts(codec: str) -> dict[str, np.ndarray]:
    """Of 301 values the first are kept: no gaps."""
    kept = -(-301 * KEPT[codec] // CHUNK)
    return {
        "gaps": np.packbits(np.ones(kept, np.uint8), bitorder="little"),
        "lows": lows([0] * kept, LOW_BITS[codec]),
        "signs": np.zeros(-(-kept // 8), np.uint8),
        "scales": np.ones(1, np.float32),
    }


def good(codec: str) -> dict[str, np.ndarray]:
    """Of 301 values."""
    return {
        INT8: {"codes": np.zeros(301, np.int8), "scales": np.ones(2, np.float32)},
        INT4: {"codes": np.full(151, 0x88, np.uint8), "scales": np.ones(2, np.float32)},
        "int2": {"codes": np.zeros(76, np.uint8), "scales": np.ones(2, np.float32)},
        TOP128: {
            "counts": np.array([0xFF, 0x03, 0], np.uint8),
            "lows": lows(range(10)),
            "codes": np.zeros(3, np.uint8),
            "scales": np.ones(2, np.float32),
        },
        **{name: ternary_parts(name) for name in TERNARIES},
    }[codec]


def tampered(codec: str, **changes: np.ndarray | None) -> bytes:
    tensors = good(codec) | changes
    return encode(
        {name: value for name, value in tensors.items() if value is not None}, metadata=CODECS[codec].metadata
    )


@pytest.mark.parametrize("codec", CODECS)
def test_what_the_tampering_begins_with_is_fine(codec: str) -> None:
    assert decode_compressed(tampered(codec), size=301, codec=codec).size == 301


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("codes", lambda _: None, "without `"),
        ("scales", lambda _: None, "without `scales`"),
        ("codes", lambda codes: codes.astype(np.int32), "` is int32"),
        ("scales", lambda scales: np.append(scales, np.float32(1)), "expected float32"),
        ("scales", lambda scales: scales.astype(np.float16), "expected float32"),
        *(
            ("scales", lambda scales, bad=bad: np.append(scales[1:], np.float32(bad)), "a scale")
            for bad in (np.nan, np.inf, -1, 3e38, 1e-40)
        ),
        ("extra", lambda _: np.ones(3, np.float32), "extra tensor"),
    ],
)
def test_a_malformed_vector_is_refused(codec: str, name: str, changed: Callable[..., object], message: str) -> None:
    name = "signs" if name == "codes" and codec in TERNARIES else name
    data = tampered(codec, **{name: changed(good(codec).get(name))})
    with pytest.raises(IntegrityError, match=message):
        decode_compressed(data, size=301, codec=codec)


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
        (TOP128, {"scales": np.array([2, 1], np.float32)}, "magnitudes"),
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
        (TERNARY, {"gaps": None}, "without `gaps`"),
        (TERNARY, {"lows": None}, "without `lows`"),
        (TERNARY, {"gaps": np.full(17, 0xFF, np.uint8)}, "17 bytes of gaps"),
        (TERNARY, {"gaps": np.array([0xFF] * 6 + [1], np.uint8)}, "not 48"),
        (TERNARY, {"gaps": np.array([0xFF] * 5 + [0x7F], np.uint8)}, "not 48"),
        (TERNARY, {"gaps": np.array([0xFF] * 6 + [0], np.uint8)}, "end before"),
        (TERNARY, {"gaps": np.array([0] * 8 + [0xFF] * 6, np.uint8)}, "beyond its end"),
        (TERNARY, {"lows": np.zeros(11, np.uint8)}, "expected uint8"),
        ("ternary160", {"signs": np.array([0, 0x10], np.uint8)}, "a sign beyond its end"),
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
