"""AdamW's moments in a byte each: how near they come, and that they stay what they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dipaco_p2p.core.arrays import from_bfloat16, is_finite, to_bfloat16
from dipaco_p2p.core.model import moments
from dipaco_p2p.core.model.moments import BLOCK, SIGNED, SQUARES, Form, pack, unpack

OFF_MAX = {SIGNED: 1 / 16, SQUARES: 1 / 32}
"""Half of the last bit that is kept, as a share of the value."""
LEAST = 2.0**-16


def drawn(form: Form, count: int = 5 * BLOCK + 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    exponents = torch.randint(-9, 3, (count,), generator=generator)
    values = torch.randn(count, generator=generator) * 10.0**exponents
    return values if form is SIGNED else values.abs()


def scale_of_each(values: torch.Tensor) -> torch.Tensor:
    blocks = torch.nn.functional.pad(values.abs(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    return blocks.amax(1).repeat_interleave(BLOCK)[: values.numel()]


@pytest.mark.parametrize("form", [SIGNED, SQUARES])
def test_what_is_within_reach_of_the_scale_comes_out_near(form: Form) -> None:
    values = drawn(form)
    scales = scale_of_each(values)
    found = unpack(*pack(values, form), form)
    is_near = values.abs() >= 2 * LEAST * scales
    assert 0.3 < is_near.float().mean() < 1, "some are, and some are not"
    assert ((found - values).abs() <= OFF_MAX[form] * values.abs())[is_near].all()
    assert (found.abs() <= 4 * LEAST * scales)[~is_near].all()
    assert (found == scales)[values == scales].all(), "the greatest comes out as it is"


@pytest.mark.parametrize("form", [SIGNED, SQUARES])
def test_what_was_unpacked_packs_into_the_same_bytes(form: Form) -> None:
    codes, scales = pack(drawn(form), form)
    again = pack(unpack(codes, scales, form), form)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


@pytest.mark.parametrize("form", [SIGNED, SQUARES])
def test_every_code_stands_for_a_value_of_its_own_in_their_order(form: Form) -> None:
    codes = torch.arange(form.codes + 1, dtype=torch.uint8)
    values = unpack(codes, torch.ones(1), form)
    assert values[0] == 0 and values[-1] == 1 and (values.diff() > 0).all()
    assert LEAST < values[1] < 2 * LEAST
    if form is SIGNED:
        assert torch.equal(unpack(codes | 128, torch.ones(1), form)[1:], -values[1:])


def test_a_square_never_becomes_zero_and_nothing_stays_nothing() -> None:
    squares = torch.zeros(2 * BLOCK)
    squares[:3] = torch.tensor([1.0, 1e-30, 1e-6])
    found = unpack(*pack(squares, SQUARES), SQUARES)
    assert (found[:3] > 0).all() and not found[3:].any(), "a step is divided by its root"
    assert found[1] >= squares[1], "then steps are shorter, not longer"


@pytest.mark.parametrize("shape", [(1,), (BLOCK,), (3, 100)])
def test_any_shape_keeps_its_shape(shape: tuple[int, ...]) -> None:
    codes, scales = pack(torch.ones(shape), SIGNED)
    assert codes.shape == shape and scales.shape == (-(-codes.numel() // BLOCK),)
    assert torch.equal(unpack(codes, scales, SIGNED), torch.ones(shape))


def test_spans_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = drawn(SIGNED)
    whole = pack(values, SIGNED)
    monkeypatch.setattr(moments, "SPAN", 2 * BLOCK)
    parts = pack(values, SIGNED)
    assert torch.equal(parts[0], whole[0]) and torch.equal(parts[1], whole[1])
    assert torch.equal(unpack(*parts, SIGNED), unpack(*whole, SIGNED))


def test_bfloat16_is_torchs() -> None:
    values = drawn(SIGNED).numpy()
    values[:3] = [0.0, 1.00390625, -1.01171875]  # zero, and two halves: one goes down and one up
    found = to_bfloat16(values)
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    assert np.array_equal(from_bfloat16(found), expected) and is_finite(found)
    assert not is_finite(to_bfloat16(np.array([1.0, np.inf], np.float32)))
