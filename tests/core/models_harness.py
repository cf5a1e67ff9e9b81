"""Small models for the tests of the core: a configuration, a path with values, and transformers' model of the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from dipaco_p2p.config import LevelConfig, ModelConfig
from dipaco_p2p.core.model.transformer import PathModel, initial_modules, load_modules

TRUNK = LevelConfig(embedding=True, head=True)


def small(*levels: LevelConfig, **changes: Any) -> ModelConfig:
    """A model of width 16; a trunk, then `levels`, by default one of two modules with a block."""
    sizes: dict[str, Any] = {"vocab_size": 258, "width": 16, "heads": 2, "ffn_width": 24, "context": 64}
    return ModelConfig(**{**sizes, "levels": (TRUNK, *(levels or (LevelConfig(modules=2, blocks=1),))), **changes})


def path_model(config: ModelConfig, seed: int = 0) -> PathModel:
    """With fresh modules. Narrow models begin with large weights: attention is far from uniform, and a wrong rotation
    or position would show."""
    model = PathModel(config)
    load_modules(model, list(initial_modules(config, seed=seed).values()))
    return model


def plain_loss(model: PathModel, tokens: torch.Tensor) -> torch.Tensor:
    """By torch alone, with all logits at once."""
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def llama(model: PathModel) -> LlamaForCausalLM:
    """The same, by transformers."""
    config = model.config
    found = LlamaForCausalLM(
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
    missing, unexpected = found.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if config.tied else set())
    found.tie_weights()
    return found


def tokens_of(config: ModelConfig, batch: int = 2) -> torch.Tensor:
    """Random ids (batch, context)."""
    return torch.randint(config.vocab_size, (batch, config.context), generator=torch.Generator().manual_seed(0))
