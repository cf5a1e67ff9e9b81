"""A path as a GGUF file, which llama.cpp and what is built on it read: weights in float32, and the run's tokenizer.

Rule 1: tokens are the same. Byte-level BPE is the model that llama.cpp calls `gpt2`, and the splitting before it that
of its pre-tokenizer `gpt-2`; a tokenizer that splits otherwise is refused.
Rule 2: queries and keys turn in the other convention: where we pair the halves of a head, llama.cpp pairs neighbours.
Sources: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; llama.cpp, conversion/llama.py and llama-vocab.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import gguf

from dipaco_p2p.config import ModelConfig
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.use.served import Flat
from dipaco_p2p.use.tokenizer import END_ID

TURNED = ("q_proj.weight", "k_proj.weight")


def write_gguf(to: Path, model: ModelConfig, flats: Sequence[Flat], tokenizer: bytes, *, name: str) -> None:
    """Write the path whose modules are `flats`, one per level. Raises ConfigError for a tokenizer that llama.cpp does
    not know, and OSError."""
    vocabulary, merges = read_tokenizer(tokenizer)
    layers = sum(level.blocks for level in model.levels)
    writer = gguf.GGUFWriter(to, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    try:
        writer.add_name(name)
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        writer.add_vocab_size(model.vocab_size)
        writer.add_context_length(model.context)
        writer.add_embedding_length(model.width)
        writer.add_block_count(layers)
        writer.add_feed_forward_length(model.ffn_width)
        writer.add_head_count(model.heads)
        writer.add_head_count_kv(model.heads)
        writer.add_rope_dimension_count(model.width // model.heads)
        writer.add_rope_freq_base(model.rope_theta)
        writer.add_layer_norm_rms_eps(model.norm_eps)
        _add_tokenizer(writer, vocabulary, merges)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
        for level, flat in enumerate(flats):
            for tensor_name, values in module_layout(model, level).split(flat).items():
                here = names.get_name(tensor_name, try_suffixes=(".weight",))
                assert here is not None, tensor_name
                writer.add_tensor(here, _turned(values, model.heads) if tensor_name.endswith(TURNED) else values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def read_tokenizer(data: bytes) -> tuple[list[str], list[str]]:
    """The tokens by number, and the merges in order, each as two tokens with a space between; raises ConfigError."""
    whole = json.loads(data)
    before, model = whole["pre_tokenizer"] or {}, whole["model"]
    is_plain = before.get("type") == "ByteLevel" and before.get("use_regex", True) and not before["add_prefix_space"]
    if model["type"] != "BPE" or not is_plain or whole["normalizer"] or model.get("ignore_merges"):
        raise ConfigError("llama.cpp does not know this run's tokenizer", hint="leave --gguf out")
    vocabulary = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return vocabulary, [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]


def _add_tokenizer(writer: gguf.GGUFWriter, vocabulary: list[str], merges: list[str]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    types = [gguf.TokenType.CONTROL if number == END_ID else gguf.TokenType.NORMAL for number in range(len(vocabulary))]
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(END_ID)
    # Training puts the end of a document behind each one, and nothing before the first.
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)


def _turned(values: Flat, heads: int) -> Flat:
    """Rows (D, D) of a projection, those of each head in the order of the other convention."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape)
