"""int8 blocks: error bounds, error feedback, exact norms, and what is refused."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dipaco_p2p.core.codec import encode
from dipaco_p2p.core.compress import (
    BLOCK,
    METADATA,
    compress,
    decode_compressed,
    encode_compressed,
    expand,
    norm,
)
from dipaco_p2p.errors import IntegrityError


def values(size: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 1000])
def test_each_value_is_within_half_a_step(size):
    wanted = values(size)
    compressed, residual = compress(wanted)
    steps = np.repeat(compressed.scales, BLOCK)[:size]
    assert (np.abs(wanted - expand(compressed)) <= steps * 0.5001).all()
    assert residual.shape == (size,) and compressed.scales.shape == (-(-size // BLOCK),)


def test_halves_are_rounded_to_even():
    wanted = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5], dtype=np.float32)
    assert compress(wanted)[0].codes.tolist() == [127, 0, 2, 2, 0, -2]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.floats(2.0**-119, 2.0**127, width=32, allow_subnormal=False))
def test_the_largest_value_of_a_block_has_the_code_127(largest):
    codes = compress(np.array([largest, -largest], dtype=np.float32))[0].codes
    assert codes.tolist() == [127, -127]


def test_what_was_sent_and_the_residual_add_up_to_the_values():
    residual, sent, given_total = None, np.zeros(700, np.float64), np.zeros(700, np.float64)
    for seed in range(20):
        wanted = values(700, seed, scale=10.0 ** (seed % 5 - 2))
        compressed, residual = compress(wanted, residual)
        sent += expand(compressed)
        given_total += wanted
    np.testing.assert_allclose(sent + residual, given_total, atol=1e-3)
    assert np.abs(residual).max() < 2.0  # half a step of the last values, which are of deviation 100


def test_error_feedback_delivers_in_time_what_one_message_cannot_say():
    wanted = np.full(BLOCK, 0.001, dtype=np.float32)
    wanted[0] = 1.0
    residual, sent = None, np.zeros(BLOCK)
    for _ in range(100):
        compressed, residual = compress(wanted, residual)
        sent += expand(compressed)
    assert expand(compress(wanted)[0])[1] == 0
    np.testing.assert_allclose(sent[1:] / 100, 0.001, rtol=0.05)


def test_zero_blocks_and_values_too_small_for_a_scale_become_zero_and_stay_in_the_residual():
    wanted = np.full(2 * BLOCK, 1e-40, dtype=np.float32)
    wanted[:BLOCK] = 0
    compressed, residual = compress(wanted)
    assert not compressed.codes.any() and not compressed.scales.any()
    assert residual.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
def test_values_that_cannot_be_scaled_are_refused(bad):
    wanted = values(300)
    wanted[7] = bad
    with pytest.raises(ValueError, match="cannot be compressed"):
        compress(wanted)


def test_an_overflow_by_the_residual_is_refused():
    huge = np.full(4, 2.5e38, dtype=np.float32)
    with np.errstate(over="ignore"), pytest.raises(ValueError, match="not finite"):
        compress(huge, huge)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(size=st.integers(1, 700), seed=st.integers(0, 2**32), power=st.integers(-30, 30))
def test_the_norm_is_exact(size, seed, power):
    compressed, _ = compress(values(size, seed, scale=10.0**power))
    products = zip(compressed.codes.tolist(), np.repeat(compressed.scales, BLOCK).tolist(), strict=False)
    square = sum((Fraction(code) * Fraction(scale)) ** 2 for code, scale in products)
    assert norm(compressed) == pytest.approx(math.sqrt(square), rel=1e-15)


def test_bytes_round_trip_at_about_one_byte_per_value():
    compressed, _ = compress(values(10_000))
    data = encode_compressed(compressed)
    again = decode_compressed(data, size=10_000)
    assert expand(again).tobytes() == expand(compressed).tobytes()
    assert encode_compressed(again) == data
    assert len(data) < 10_000 * 1.05


def tampered(**changes: np.ndarray) -> bytes:
    tensors = {"codes": np.zeros(300, np.int8), "scales": np.ones(2, np.float32)} | changes
    return encode({name: value for name, value in tensors.items() if value is not None}, metadata=METADATA)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"junk", "too short"),
        (encode({"codes": np.zeros(300, np.int8), "scales": np.ones(2, np.float32)}), "another codec"),
        (tampered(codes=None), "without `codes`"),
        (tampered(scales=None), "without `scales`"),
        (tampered(codes=np.zeros(299, np.int8)), "expected int8"),
        (tampered(codes=np.zeros((300, 1), np.int8)), "expected int8"),
        (tampered(codes=np.zeros(300, np.uint8)), "expected int8"),
        (tampered(codes=np.full(300, -128, np.int8)), "code -128"),
        (tampered(scales=np.ones(3, np.float32)), "expected float32"),
        (tampered(scales=np.ones(2, np.float16)), "expected float32"),
        (tampered(scales=np.array([1, np.nan], np.float32)), "a scale"),
        (tampered(scales=np.array([1, np.inf], np.float32)), "a scale"),
        (tampered(scales=np.array([1, -1], np.float32)), "a scale"),
        (tampered(scales=np.array([1, 3e38], np.float32)), "a scale"),
        (tampered(scales=np.array([1, 1e-40], np.float32)), "a scale"),
        (tampered(extra=np.ones(3, np.float32)), "extra tensor"),
    ],
)
def test_a_malformed_vector_is_refused(data, message):
    with pytest.raises(IntegrityError, match=message):
        decode_compressed(data, size=300)
