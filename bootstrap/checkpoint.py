"""A Llama checkpoint in Hugging Face's format as the start of a run: shapes, tokenizer, and layers cut into levels.

    config.json                                             the shapes, which [model] of the run file has to say, too
    tokenizer.json                                          a byte-level BPE of the `tokenizers` library
    model.safetensors, or *.safetensors with an index       the weights

A run's text ends with token 0, `<|end|>` (use/tokenizer.py). A checkpoint whose end token has another number gives it
that one: the tokens, and their rows of embedding and head, change places, so that all logits stay what they were. Keys
and values that several heads share (grouped queries) become keys and values of each of these heads, which is the same
function with more parameters. What else a path of ours cannot compute is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dipaco_p2p.config import ModelConfig
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.model.layout import EMBEDDING, HEAD, module_layout
from dipaco_p2p.errors import ConfigError, IntegrityError
from dipaco_p2p.use.tokenizer import END, END_ID, Tokenizer

CONFIG, TOKENIZER, INDEX = "config.json", "tokenizer.json", "model.safetensors.index.json"
ROPE_THETA = 10_000.0
"""Of a checkpoint that says none."""
SHARED = (".self_attn.k_proj.weight", ".self_attn.v_proj.weight")
UNUSED = "<|unused_{}|>"


class Checkpoint:
    """A checkpoint that fits a model; nothing but its small files is read before it is asked for more."""

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        """Raises ConfigError for a folder that is no checkpoint, or not one of `model`."""
        self._folder = folder
        self._model = model
        self._config = _json(folder / CONFIG)
        _check_kind(self._config, folder)
        _check_shapes(self._config, model, folder)
        self._tokens = _json(folder / TOKENIZER)
        self._end = _end_token(self._config, self._tokens, folder)

    def tokenizer(self) -> bytes:
        """Its tokenizer, with `<|end|>` as token 0 and as many tokens as the model has; raises ConfigError."""
        data = json.dumps(_with_end(self._tokens, self._end, vocab_size=self._model.vocab_size)).encode()
        try:
            found = Tokenizer(data).vocab_size
        except IntegrityError as error:
            raise ConfigError(f"{self._folder / TOKENIZER}: {error}", hint=BPE_HINT) from None
        if found != self._model.vocab_size:
            raise ConfigError(f"{self._folder / TOKENIZER} has {found} tokens, its model {self._model.vocab_size}")
        return data

    def flats(self) -> list[Floats]:
        """The modules of a path, one per level; raises ConfigError for weights that are missing or of another shape."""
        tensors = self._tensors()
        try:
            levels = [module_layout(self._model, level) for level in range(len(self._model.levels))]
            return [layout.flatten({name: tensors[name] for name in layout.names}) for layout in levels]
        except KeyError as error:
            raise ConfigError(f"the checkpoint `{self._folder}` has no tensor {error}") from None
        except IntegrityError as error:
            raise ConfigError(f"the checkpoint `{self._folder}`: {error}") from None

    def _tensors(self) -> dict[str, Floats]:
        tensors = dict(_read(self._folder))
        for name in [name for name in tensors if name.endswith(SHARED)]:
            tensors[name] = self._for_each_head(tensors[name])
        if not self._model.tied and HEAD not in tensors and EMBEDDING in tensors:
            tensors[HEAD] = tensors[EMBEDDING].copy()  # tied so far: each goes its own way from here
        for name in (EMBEDDING, HEAD):
            if name in tensors and self._end != END_ID:
                tensors[name][[END_ID, self._end]] = tensors[name][[self._end, END_ID]]
        return tensors

    def _for_each_head(self, shared: Floats) -> Floats:
        heads, groups = self._model.heads, int(self._config.get("num_key_value_heads") or self._model.heads)
        if groups == heads or len(shared) % groups:  # a wrong shape is told when the modules are put together
            return shared
        return np.repeat(shared.reshape(groups, -1, shared.shape[1]), heads // groups, axis=0).reshape(
            -1, shared.shape[1]
        )


BPE_HINT = "a run needs a byte-level BPE, as Llama 3, SmolLM and GPT-2 have one; train from random weights otherwise"


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        hint = "`from` of [warmup] names the folder of a Llama checkpoint: config.json, tokenizer.json, *.safetensors"
        raise ConfigError(f"checkpoint file `{path}` cannot be read: {error.strerror}", hint=hint) from None
    except ValueError:
        raise ConfigError(f"checkpoint file `{path}` is not JSON") from None
    if not isinstance(found, dict):
        raise ConfigError(f"checkpoint file `{path}` is not a table")
    return found


def _check_kind(config: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError for a function that a path of ours does not compute."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    head_width = config.get("head_dim")
    odd = {
        f"model_type {config.get('model_type')!r}": config.get("model_type") != "llama",
        f"hidden_act {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "biases": bool(config.get("attention_bias") or config.get("mlp_bias")),
        f"positions {rope}": rope.get("rope_type", rope.get("type", "default")) != "default",
        f"heads of width {head_width}": bool(head_width and heads and width and head_width * heads != width),
    }
    if wrong := [name for name, is_odd in odd.items() if is_odd]:
        hint = "a run begins from a LlamaForCausalLM with plain rotary positions and no biases"
        raise ConfigError(f"the checkpoint `{folder}` has {', '.join(wrong)}", hint=hint)


def _check_shapes(config: Mapping[str, Any], model: ModelConfig, folder: Path) -> None:
    """Raise ConfigError, which says what to write, unless [model] says what the checkpoint is."""
    rope = config.get("rope_parameters") or {}
    wanted: dict[str, tuple[Any, Any]] = {
        "vocab_size": (config.get("vocab_size"), model.vocab_size),
        "width": (config.get("hidden_size"), model.width),
        "heads": (config.get("num_attention_heads"), model.heads),
        "ffn_width": (config.get("intermediate_size"), model.ffn_width),
        "rope_theta": (float(config.get("rope_theta") or rope.get("rope_theta") or ROPE_THETA), model.rope_theta),
        "norm_eps": (config.get("rms_norm_eps", 1e-6), model.norm_eps),
    }
    wrong = [f"`{key} = {theirs}`" for key, (theirs, ours) in wanted.items() if theirs != ours]
    layers, blocks = config.get("num_hidden_layers"), sum(level.blocks for level in model.levels)
    if layers != blocks:
        wrong.append(f"levels with {layers} blocks together, not {blocks}")
    if model.tied and not config.get("tie_word_embeddings", False):
        wrong.append("`tied = false`")
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and model.context > longest:
        wrong.append(f"a `context` of at most {longest}, not {model.context}")
    if wrong:
        raise ConfigError(f"[model] is not what the checkpoint `{folder}` is", hint=f"write {', '.join(wrong)}")


def _end_token(config: Mapping[str, Any], tokens: Mapping[str, Any], folder: Path) -> int:
    """The number that the end of a document has in the checkpoint. Raises ConfigError."""
    kind, pieces = tokens.get("model") or {}, json.dumps([tokens.get("pre_tokenizer"), tokens.get("decoder")])
    if kind.get("type") != "BPE" or kind.get("byte_fallback") or pieces.count('"ByteLevel"') < 2:
        raise ConfigError(f"the tokenizer of the checkpoint `{folder}` is not a byte-level BPE", hint=BPE_HINT)
    known = _vocabulary(tokens)
    if END in known:
        return known[END]
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if type(end) is not int or end not in known.values():
        raise ConfigError(f"the checkpoint `{folder}` has no end token: `eos_token_id` of config.json is {end!r}")
    return end


def _vocabulary(tokens: Mapping[str, Any]) -> dict[str, int]:
    added = {str(token["content"]): int(token["id"]) for token in tokens.get("added_tokens") or []}
    return {**{str(word): int(number) for word, number in tokens["model"].get("vocab", {}).items()}, **added}


def _with_end(tokens: Mapping[str, Any], end: int, *, vocab_size: int) -> dict[str, Any]:
    """The tokenizer's file with the end token as number 0 under its name, without what puts tokens around a text, and
    with names for the numbers that nothing has."""
    from tokenizers import pre_tokenizers

    swap, names = {end: END_ID, END_ID: end}, dict[str, str]()
    letters = set(pre_tokenizers.ByteLevel.alphabet())

    def moved(word: str, number: int) -> tuple[str, int]:
        is_odd = not letters.issuperset(word)  # it stands for no bytes; a text never has it
        names[word] = END if number == end else UNUSED.format(number) if is_odd else word
        return names[word], swap.get(number, number)

    vocab = dict(moved(word, number) for word, number in _vocabulary(tokens).items())
    taken = set(vocab.values())
    vocab |= {UNUSED.format(number): number for number in range(vocab_size) if number not in taken}
    added = [
        {**token, "content": names[token["content"]], "id": vocab[names[token["content"]]]}
        for token in tokens.get("added_tokens") or []
    ]
    if END not in {token["content"] for token in added}:
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": END_ID, "content": END, **plain, "special": True})
    added.sort(key=lambda token: token["id"])
    model = {**tokens["model"], "vocab": dict(sorted(vocab.items(), key=lambda item: item[1]))}
    return {**tokens, "added_tokens": added, "post_processor": None, "model": model}


def _read(folder: Path) -> Iterator[tuple[str, Floats]]:
    """All tensors as float32; raises ConfigError."""
    from safetensors import SafetensorError, safe_open

    files = (
        sorted(set(_json(folder / INDEX)["weight_map"].values()))
        if (folder / INDEX).exists()
        else ["model.safetensors"]
    )
    for name in files:
        path = folder / name
        if path.parent != folder:
            raise ConfigError(f"`{folder / INDEX}` names a file in another folder: {ascii(name)[:80]}")
        try:
            with safe_open(path, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118
                    yield key, opened.get_tensor(key).float().numpy().astype(np.float32, copy=True)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"checkpoint file `{path}` cannot be read: {error}") from None
