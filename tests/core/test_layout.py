"""Flat vectors: names, order, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dipaco_p2p.config import LevelConfig, ModelConfig
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.core.model.transformer import PathModel, initial_modules, load_modules, read_module
from dipaco_p2p.errors import IntegrityError

UNTIED = ModelConfig(
    vocab_size=300,
    width=16,
    heads=2,
    ffn_width=24,
    context=64,
    tied=False,
    levels=(
        LevelConfig(modules=2, blocks=1, embedding=True),
        LevelConfig(modules=3, blocks=2),
        LevelConfig(modules=1, head=True),
    ),
)


def test_union_of_a_paths_modules_is_the_models_state_dict():
    names = [name for level in range(3) for name in module_layout(UNTIED, level).names]
    assert sorted(names) == sorted(PathModel(UNTIED).state_dict())
    assert "model.layers.2.mlp.up_proj.weight" in module_layout(UNTIED, 1).names


def test_modules_survive_loading_and_reading_bit_for_bit():
    modules = initial_modules(UNTIED, seed=3)
    model = PathModel(UNTIED)
    load_modules(model, [modules[level] for level in range(3)])
    for level, flat in modules.items():
        assert read_module(model, level).tobytes() == flat.tobytes()
        assert flat.size == module_layout(UNTIED, level).size


def test_what_was_read_does_not_change_when_the_model_does():
    modules = initial_modules(UNTIED, seed=3)
    model = PathModel(UNTIED)
    load_modules(model, [modules[level] for level in range(3)])
    before = read_module(model, 1)
    load_modules(model, [modules[level] * 2 for level in range(3)])
    assert before.tobytes() == modules[1].tobytes()


def test_initial_norms_are_one_and_weights_small_and_seeded():
    modules = initial_modules(UNTIED, seed=3)
    tensors = module_layout(UNTIED, 1).split(modules[1])
    assert (tensors["model.layers.1.input_layernorm.weight"] == 1).all()
    std = 0.02 * math.sqrt(768 / UNTIED.width)  # GPT-2's, for its width
    assert tensors["model.layers.1.self_attn.q_proj.weight"].std() == pytest.approx(std, rel=0.25)
    assert tensors["model.layers.1.mlp.down_proj.weight"].std() < std * 0.6
    assert modules[1].tobytes() == initial_modules(UNTIED, seed=3)[1].tobytes()
    assert modules[1].tobytes() != initial_modules(UNTIED, seed=4)[1].tobytes()


def test_split_gives_views_and_flatten_takes_arrays_and_tensors():
    layout = module_layout(UNTIED, 2)
    flat = np.arange(layout.size, dtype=np.float32)
    views = layout.split(flat)
    assert all(np.shares_memory(view, flat) for view in views.values())
    assert layout.flatten(views).tobytes() == flat.tobytes()
    assert layout.flatten({name: torch.tensor(view) for name, view in views.items()}).tobytes() == flat.tobytes()


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_flatten_refuses_tensors_of_another_module(change):
    layout = module_layout(UNTIED, 2)
    tensors = layout.split(np.zeros(layout.size, dtype=np.float32))
    if change == "missing":
        del tensors["model.norm.weight"]
    elif change == "extra":
        tensors["model.layers.9.mlp.up_proj.weight"] = np.zeros(3, dtype=np.float32)
    else:
        tensors["model.norm.weight"] = np.zeros((1, 16), dtype=np.float32)
    with pytest.raises(IntegrityError, match="model"):
        layout.flatten(tensors)
