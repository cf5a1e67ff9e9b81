"""Which AdamW a path gets, and which of its parameters decay."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from models_harness import path_model, small

from dipaco_p2p.config import InnerConfig, LevelConfig
from dipaco_p2p.core.model.optimizer import (
    MOMENTS_BYTES,
    _allowed_bytes,
    is_short,
    make_optimizer,
    moments_bytes_to_come,
    optimizer_name,
)
from dipaco_p2p.core.model.transformer import PathModel

MODEL = small(LevelConfig(blocks=1))
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


@pytest.mark.parametrize(("eight_bit", "each"), [(False, 8), (True, 2)])
def test_moments_are_to_come_until_the_first_step(eight_bit: bool, each: int) -> None:
    model = path_model(MODEL)
    optimizer = make_optimizer(model, CONFIG, eight_bit=eight_bit)
    assert moments_bytes_to_come(optimizer) == each * sum(p.numel() for p in model.parameters())
    model.loss(torch.zeros(1, 8, dtype=torch.long)).backward()
    optimizer.step()
    assert moments_bytes_to_come(optimizer) == 0


@pytest.mark.parametrize(("fraction", "is_8bit"), [(1.0, False), (0.25, True)])
def test_a_limit_on_a_gpus_memory_counts_as_its_size(
    fraction: float, is_8bit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = sum(p.numel() for p in path_model(MODEL).parameters())
    card = SimpleNamespace(total_memory=20 * MOMENTS_BYTES * parameters)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda device: fraction)
    allowed = _allowed_bytes(torch.device("cuda"))
    assert allowed == fraction * card.total_memory and is_short(parameters, memory_bytes=allowed) == is_8bit
