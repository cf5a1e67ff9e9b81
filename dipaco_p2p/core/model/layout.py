"""How the tensors of one module lie in its flat vector, and which tensors a module of each level holds;
and a module as a file.

Rule 1: all owner arithmetic works on one flat float32 vector per module, tensors in sorted order of their names.
Rule 2: names are those of Hugging Face's LlamaForCausalLM, with layers counted over all levels, so that the union of
the tensors of a path's modules is a LlamaForCausalLM state dict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...canonical import Parts
from ...config import ModelConfig
from ...errors import IntegrityError
from ..arrays import Array, Floats
from ..tensor_file import decode, encode_parts, memory, short

if TYPE_CHECKING:  # commands that only look at a run need no tensors, and torch takes seconds to import
    import torch

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Names and shapes of a module's tensors, in the order of its flat vector."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.shapes), (self.names, self.shapes)
        assert list(self.names) == sorted(set(self.names)), self.names

    @property
    def size(self) -> int:
        """Values in the flat vector."""
        return sum(math.prod(shape) for shape in self.shapes)

    def flatten(self, tensors: Mapping[str, Array | torch.Tensor]) -> Floats:
        """The tensors as a fresh flat vector; raises IntegrityError when names or shapes are not this layout's."""
        if tensors.keys() != set(self.names):
            odd = sorted(tensors.keys() ^ set(self.names))
            raise IntegrityError(f"tensors of another module: `{odd[0][:80]}` is missing or unknown")
        flat = np.empty(self.size, dtype="<f4")
        for name, view in self.split(flat).items():
            value = _as_array(tensors[name])
            if value.shape != view.shape:
                raise IntegrityError(f"`{name}` has the shape {value.shape}, expected {view.shape}")
            view[...] = value
        return flat

    def split(self, flat: Floats) -> dict[str, Floats]:
        """Views of `flat`, one per tensor."""
        assert flat.shape == (self.size,), (flat.shape, self.size)
        views, start = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            end = start + math.prod(shape)
            views[name] = flat[start:end].reshape(shape)
            start = end
        return views


def module_layout(model: ModelConfig, level: int) -> Layout:
    """The layout that every module of `level` has."""
    tensors = dict(sorted(_tensors(model, level)))
    return Layout(names=tuple(tensors), shapes=tuple(tensors.values()))


def first_layer(model: ModelConfig, level: int) -> int:
    """Index of the first decoder layer of `level`, counted over all levels."""
    return sum(other.blocks for other in model.levels[:level])


def hidden_values(model: ModelConfig) -> int:
    """Values of a path in matrices inside its blocks."""
    shapes = [shape for _, shape in _layer_tensors(model) if len(shape) == 2]
    return sum(level.blocks for level in model.levels) * sum(math.prod(shape) for shape in shapes)


def encode_module(flat: Floats, layout: Layout) -> bytes:
    """A module as a safetensors file with one tensor per name of `layout`."""
    return b"".join(module_parts(flat, layout))


def module_parts(flat: Floats, layout: Layout) -> Parts:
    """The same, not joined: the header and the memory of `flat`, in which the tensors lie in the order of the file."""
    head, *_ = encode_parts(layout.split(flat))
    return [head, memory(flat.astype("<f4", copy=False))]


def decode_module(data: bytes, layout: Layout) -> Floats:
    """The flat vector of a module; raises IntegrityError unless it has exactly `layout`, float32, all finite."""
    tensors, _ = decode(data, is_view=True)
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32:
            raise IntegrityError(f"`{short(name)}` holds {tensor.dtype}, expected float32")
    flat = layout.flatten(tensors)
    if not np.isfinite(flat).all():
        raise IntegrityError("a module with values that are not finite")
    return flat


def _tensors(model: ModelConfig, level: int) -> Iterator[tuple[str, Shape]]:
    config = model.levels[level]
    if config.embedding:
        yield EMBEDDING, (model.vocab_size, model.width)
    start = first_layer(model, level)
    for layer in range(start, start + config.blocks):
        for name, shape in _layer_tensors(model):
            yield f"model.layers.{layer}.{name}", shape
    if config.head:
        yield FINAL_NORM, (model.width,)
        if not model.tied:
            yield HEAD, (model.vocab_size, model.width)


def _layer_tensors(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    width, ffn = model.width, model.ffn_width
    for part in ("q", "k", "v", "o"):
        yield f"self_attn.{part}_proj.weight", (width, width)
    yield "mlp.gate_proj.weight", (ffn, width)
    yield "mlp.up_proj.weight", (ffn, width)
    yield "mlp.down_proj.weight", (width, ffn)
    yield "input_layernorm.weight", (width,)
    yield "post_attention_layernorm.weight", (width,)


def _as_array(tensor: Array | torch.Tensor) -> Array:
    return tensor if isinstance(tensor, np.ndarray) else tensor.detach().float().cpu().numpy()
