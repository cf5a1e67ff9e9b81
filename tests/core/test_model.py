"""The path model against Hugging Face's LlamaForCausalLM, and its sliced loss against the plain one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from models_harness import llama, path_model, plain_loss, small, tokens_of

from dipaco_p2p.config import LevelConfig
from dipaco_p2p.core.model import transformer as head_loss_module

GRID = (LevelConfig(modules=2, blocks=1), LevelConfig(modules=2, blocks=2))
WIDE = {"vocab_size": 300, "width": 32, "ffn_width": 48, "context": 160}
TIED = small(*GRID, **WIDE, rope_theta=500.0, norm_eps=1e-4)
UNTIED = small(levels=(replace(GRID[1], embedding=True), replace(GRID[0], head=True)), **WIDE, heads=4, tied=False)


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@torch.no_grad()
def test_logits_equal_those_of_transformers_llama(config):
    model, tokens = path_model(config), tokens_of(config)
    expected = llama(model)(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(model(tokens), expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_token_does_not_change_what_comes_before_it():
    model, tokens = path_model(TIED), tokens_of(TIED)
    before = model.hidden(tokens)
    tokens[:, 140] = (tokens[:, 140] + 1) % TIED.vocab_size
    after = model.hidden(tokens)
    assert torch.equal(before[:, :140], after[:, :140])
    assert (before[:, 140:] != after[:, 140:]).any(dim=2).all()


@torch.no_grad()
def test_hidden_comes_before_the_final_norm():
    model, tokens = path_model(TIED), tokens_of(TIED)
    normed = F.rms_norm(model.hidden(tokens), (TIED.width,), model.model.norm.weight, TIED.norm_eps)
    torch.testing.assert_close(model(tokens), normed @ model.model.embed_tokens.weight.T)


def test_loss_counts_exactly_the_tokens_after_the_first():
    model, tokens = path_model(TIED), tokens_of(TIED)
    torch.testing.assert_close(model.loss(tokens), plain_loss(model, tokens))


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
def test_sliced_loss_has_the_gradients_of_the_plain_one(config, monkeypatch):
    monkeypatch.setattr(head_loss_module, "CPU_LOGITS", 300 * 7)
    model, tokens = path_model(config), tokens_of(config)
    plain = torch.autograd.grad(plain_loss(model, tokens), list(model.parameters()))
    sliced = torch.autograd.grad(model.loss(tokens), list(model.parameters()))
    for one, other in zip(sliced, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_loss_stays_finite_for_a_word_of_vanishing_probability():
    hidden = torch.tensor([[200.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    loss = head_loss_module.head_loss(hidden, weight, torch.tensor([1]))
    assert loss.item() == 400.0
