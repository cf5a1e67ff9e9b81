"""A path as GGUF, read back with the `gguf` package: the same weights and tokens, as llama.cpp takes them."""

from __future__ import annotations

import asyncio
import json

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from serving_harness import CONTEXT, PRIVATE, TIED, TOKENIZER, UNTIED, Served, make_served
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from bootstrap.use.export import Wish, export_run
from bootstrap.use.gguf_file import read_tokenizer
from dipaco_p2p.config import ModelConfig
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.topology import PathId
from dipaco_p2p.use.tokenizer import Tokenizer

MODELS = {"tied": (TIED, "P0-1-1"), "untied": (UNTIED, "P1-0"), "private": (PRIVATE, "P1-0-2")}
TEXTS = [
    "the path of the prompt, and the rest",
    "na\u00efve cafe\u0301 \u4f60\u597d \u0434\u0430 \u0645\u0631\u062d\u0628\u0627 \N{FIRE}\u200d\N{FIRE}",
    "  two  spaces\n\n\ttab \r\n end ",
    "I'll they've 'S 12345 \u0661\u0662 x_1 <|end|>\x00",
    "\u00a0\u3000\u2028 ideographic and line separators",
]


@pytest.fixture(scope="module", params=list(MODELS))
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Served, PathId, gguf.GGUFReader]:
    folder = tmp_path_factory.mktemp(request.param)
    model, path = MODELS[request.param]
    served = make_served(folder / "run", model=model)
    asyncio.run(export_run(served.open(), Wish(path=path, has_gguf=True), folder / "out"))
    return served, PathId.parse(path), gguf.GGUFReader(folder / "out" / "model.gguf")


def value(reader: gguf.GGUFReader, key: str) -> object:
    field = reader.fields[key]
    return field.contents()


def test_it_says_what_the_model_is(written: tuple[Served, PathId, gguf.GGUFReader]) -> None:
    served, path, reader = written
    model = served.run.config.model
    assert value(reader, "general.architecture") == "llama"
    assert value(reader, "general.name") == f"tiny-served {path}"
    wanted = {
        "context_length": CONTEXT,
        "embedding_length": model.width,
        "block_count": sum(level.blocks for level in model.levels),
        "feed_forward_length": model.ffn_width,
        "attention.head_count": model.heads,
        "attention.head_count_kv": model.heads,
        "rope.dimension_count": model.width // model.heads,
        "rope.freq_base": model.rope_theta,
        "vocab_size": model.vocab_size,
    }
    assert {key: value(reader, f"llama.{key}") for key in wanted} == wanted
    assert value(reader, "llama.attention.layer_norm_rms_epsilon") == pytest.approx(model.norm_eps)


@torch.no_grad()
def test_its_weights_give_the_same_logits(written: tuple[Served, PathId, gguf.GGUFReader]) -> None:
    served, path, reader = written
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 260, (1, CONTEXT)))
    found = logits_of(tensors, served.run.config.model, tokens[0])
    torch.testing.assert_close(found, served.model(path)(tokens)[0], atol=1e-4, rtol=0)


def logits_of(tensors: dict[str, NDArray[np.float32]], model: ModelConfig, tokens: torch.Tensor) -> torch.Tensor:
    """A Llama as llama.cpp computes it: neighbours of a head's numbers are turned together."""
    weight = {name: torch.from_numpy(data.copy()) for name, data in tensors.items()}
    width = model.width // model.heads
    angles = torch.outer(torch.arange(len(tokens)), model.rope_theta ** -(torch.arange(0, width, 2) / width))
    turn = torch.polar(torch.ones_like(angles), angles)

    def norm(values: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(values, (model.width,), weight[name], model.norm_eps)

    def heads(values: torch.Tensor, name: str) -> torch.Tensor:
        return (values @ weight[name].T).view(len(tokens), model.heads, width).transpose(0, 1)

    def turned(values: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(values.reshape(*values.shape[:-1], -1, 2)) * turn
        return torch.view_as_real(pairs).flatten(-2)

    hidden = weight["token_embd.weight"][tokens]
    for layer in range(sum(level.blocks for level in model.levels)):
        at = f"blk.{layer}"
        normed = norm(hidden, f"{at}.attn_norm.weight")
        query, key = (turned(heads(normed, f"{at}.attn_{kind}.weight")) for kind in "qk")
        mixed = F.scaled_dot_product_attention(query, key, heads(normed, f"{at}.attn_v.weight"), is_causal=True)
        hidden = hidden + mixed.transpose(0, 1).flatten(1) @ weight[f"{at}.attn_output.weight"].T
        normed = norm(hidden, f"{at}.ffn_norm.weight")
        gate, up = (normed @ weight[f"{at}.ffn_{kind}.weight"].T for kind in ("gate", "up"))
        hidden = hidden + (F.silu(gate) * up) @ weight[f"{at}.ffn_down.weight"].T
    head = weight.get("output.weight", weight["token_embd.weight"])
    return norm(hidden, "output_norm.weight") @ head.T


@pytest.mark.parametrize("text", TEXTS)
def test_its_vocabulary_and_merges_give_the_same_tokens(
    written: tuple[Served, PathId, gguf.GGUFReader], text: str
) -> None:
    reader = written[2]
    assert (value(reader, "tokenizer.ggml.model"), value(reader, "tokenizer.ggml.pre")) == ("gpt2", "gpt-2")
    tokens: list[str] = value(reader, "tokenizer.ggml.tokens")  # type: ignore[assignment]
    merges: list[str] = value(reader, "tokenizer.ggml.merges")  # type: ignore[assignment]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    bpe = Library(models.BPE(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    assert bpe.encode(text).ids == Tokenizer(TOKENIZER).encode(text)


def test_the_end_of_a_document_is_no_text_and_nothing_stands_before_one(
    written: tuple[Served, PathId, gguf.GGUFReader],
) -> None:
    reader = written[2]
    types: list[int] = value(reader, "tokenizer.ggml.token_type")  # type: ignore[assignment]
    assert types == [gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * 259]
    assert value(reader, "tokenizer.ggml.eos_token_id") == 0
    assert value(reader, "tokenizer.ggml.add_bos_token") is False


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
        {"normalizer": {"type": "NFC"}},
    ],
)
def test_a_tokenizer_that_llama_cpp_does_not_know_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="llama.cpp does not know this run's tokenizer"):
        read_tokenizer(json.dumps(json.loads(TOKENIZER) | change).encode())
