"""Which AdamW a path gets, and which of its parameters decay."""

from __future__ import annotations

import pytest

from dipaco_p2p.config import InnerConfig, LevelConfig, ModelConfig
from dipaco_p2p.core.model import PathModel
from dipaco_p2p.core.optimizer import is_short, make_optimizer, optimizer_name

MODEL = ModelConfig(
    vocab_size=258,
    width=16,
    heads=2,
    ffn_width=24,
    context=64,
    levels=(LevelConfig(embedding=True, head=True), LevelConfig(blocks=1)),
)
CONFIG = InnerConfig()


def test_only_matrices_decay() -> None:
    groups = make_optimizer(PathModel(MODEL), CONFIG).param_groups
    assert {p.ndim for p in groups[0]["params"]} == {2} and groups[0]["weight_decay"] == CONFIG.weight_decay
    assert {p.ndim for p in groups[1]["params"]} == {1} and groups[1]["weight_decay"] == 0


@pytest.mark.parametrize(("eight_bit", "name"), [(None, "fused AdamW"), (False, "fused AdamW"), (True, "8-bit AdamW")])
def test_a_cpu_keeps_float32_moments_unless_told_otherwise(eight_bit: bool | None, name: str) -> None:
    assert optimizer_name(make_optimizer(PathModel(MODEL), CONFIG, eight_bit=eight_bit)) == name


def test_moments_have_8_bits_where_float32_would_take_a_tenth_of_the_memory() -> None:
    parameters = 150_000_000
    assert is_short(parameters, memory_bytes=8 * 2**30)
    assert not is_short(parameters, memory_bytes=24 * 2**30)
