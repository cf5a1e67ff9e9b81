"""The path model against Hugging Face's LlamaForCausalLM, and its sliced loss against the plain one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from dipaco_p2p.config import LevelConfig, ModelConfig
from dipaco_p2p.core import head_loss as head_loss_module
from dipaco_p2p.core.model import PathModel, initial_modules, load_modules, next_token_loss

TIED = ModelConfig(
    vocab_size=300,
    width=32,
    heads=2,
    ffn_width=48,
    context=160,
    rope_theta=500.0,
    norm_eps=1e-4,
    levels=(
        LevelConfig(embedding=True, head=True),
        LevelConfig(modules=2, blocks=1),
        LevelConfig(modules=2, blocks=2),
    ),
)
UNTIED = ModelConfig(
    vocab_size=300,
    width=32,
    heads=4,
    ffn_width=48,
    context=160,
    tied=False,
    levels=(LevelConfig(modules=2, blocks=2, embedding=True), LevelConfig(modules=2, blocks=1, head=True)),
)


def make_model(config: ModelConfig) -> PathModel:
    model = PathModel(config)
    # Narrow models begin with large weights: attention is far from uniform, and a wrong rotation would show.
    load_modules(model, list(initial_modules(config, seed=0).values()))
    return model


def make_tokens(config: ModelConfig, batch: int = 2) -> torch.Tensor:
    return torch.randint(config.vocab_size, (batch, config.context), generator=torch.Generator().manual_seed(0))


def llama(config: ModelConfig) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.ffn_width,
            num_hidden_layers=sum(level.blocks for level in config.levels),
            num_attention_heads=config.heads,
            max_position_embeddings=config.context,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied,
        )
    ).eval()


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@torch.no_grad()
def test_logits_equal_those_of_transformers_llama(config):
    model, reference, tokens = make_model(config), llama(config), make_tokens(config)
    missing, unexpected = reference.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if config.tied else set())
    reference.tie_weights()
    expected = reference(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(model(tokens), expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_token_does_not_change_what_comes_before_it():
    model, tokens = make_model(TIED), make_tokens(TIED)
    before = model.hidden(tokens)
    tokens[:, 140] = (tokens[:, 140] + 1) % TIED.vocab_size
    after = model.hidden(tokens)
    assert torch.equal(before[:, :140], after[:, :140])
    assert (before[:, 140:] != after[:, 140:]).any(dim=2).all()


@torch.no_grad()
def test_hidden_comes_before_the_final_norm():
    model, tokens = make_model(TIED), make_tokens(TIED)
    normed = F.rms_norm(model.hidden(tokens), (TIED.width,), model.model.norm.weight, TIED.norm_eps)
    torch.testing.assert_close(model(tokens), normed @ model.model.embed_tokens.weight.T)


@pytest.mark.parametrize("skip", [0, 1, 2, 40])
def test_loss_counts_exactly_the_targets_from_skip_on(skip):
    model, tokens = make_model(TIED), make_tokens(TIED)
    logits = model(tokens).detach()
    first = max(skip, 1)
    expected = F.cross_entropy(logits[:, first - 1 : -1].flatten(0, 1), tokens[:, first:].flatten())
    torch.testing.assert_close(next_token_loss(logits, tokens, skip=skip), expected)
    torch.testing.assert_close(model.loss(tokens, skip=skip).detach(), expected)


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
def test_sliced_loss_has_the_gradients_of_the_plain_one(config, monkeypatch):
    monkeypatch.setattr(head_loss_module, "CPU_LOGITS", 300 * 7)
    model, tokens = make_model(config), make_tokens(config)
    plain = torch.autograd.grad(next_token_loss(model(tokens), tokens, skip=5), list(model.parameters()))
    sliced = torch.autograd.grad(model.loss(tokens, skip=5), list(model.parameters()))
    for one, other in zip(sliced, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_loss_stays_finite_for_a_word_of_vanishing_probability():
    hidden = torch.tensor([[200.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    loss = head_loss_module.head_loss(hidden, weight, torch.tensor([1]))
    assert loss.item() == 400.0
