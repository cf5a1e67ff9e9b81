"""AdamW's moments in a byte each, as a path keeps them between rounds: floats of 8 bits in blocks that share a scale.

The scale of a block of 256 values is the greatest magnitude in it. A code is the upper bits of value / scale as a
float32, rounded: of a value with a sign this and 7 bits, of a square 8 bits; 3 and 4 of them are of the mantissa.
Code 0 is zero, and the others reach from 2^-16 of the scale to the scale itself. A square that is not zero never gets
code 0, since a step is divided by its root.

Rule 1: the same bits on every device: all of it is whole numbers, and single divisions and products of float32.
Rule 2: what was unpacked packs into the same codes and scales, so a state that is read and written stays as it is.

What it costs in loss cannot be told from chance (docs/performance.md). Source: "8-bit Optimizers via Block-wise
Quantization" (arXiv 2110.02861), with floats in place of its table of codes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
SPAN, SPANS_OF_A_GPU = 1 << 18, 16
"""Values that are worked on at a time, a whole number of blocks: on a processor they stay in its cache."""
SCALE_MIN = 1e-37
"""A block of smaller values is zero: some machines flush them, too."""
MANTISSA_BITS = 23
EXPONENT_OF_ONE = 127


@dataclass(frozen=True, slots=True)
class Form:
    """How many codes there are besides zero, and how many bits of the mantissa each has."""

    codes: int
    mantissa: int

    @property
    def shift(self) -> int:
        """Bits of a float32 that are rounded away."""
        return MANTISSA_BITS - self.mantissa

    @property
    def below(self) -> int:
        """What is taken off the upper bits of a float32, so that those of 1.0 are the last code."""
        return (EXPONENT_OF_ONE << self.mantissa) - self.codes


SIGNED, SQUARES = Form(127, 3), Form(255, 4)
SIGN = 128
"""The bit of a code that says minus."""


def pack(values: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Codes of `values`, uint8 in their shape, and scales (ceil(n / 256),), float32; on the device of `values`."""
    found = [_pack(part, form) for part in torch.split(values.reshape(-1), _span(values))]
    codes, scales = (torch.cat(parts) for parts in zip(*found, strict=True))
    return codes.view(values.shape), scales


def unpack(codes: Tensor, scales: Tensor, form: Form) -> Tensor:
    """The float32 values that codes and scales stand for, in the shape and on the device of `codes`."""
    flat, span = codes.reshape(-1), _span(codes)
    if flat.numel() <= span:
        return _unpack(flat, scales, form).view(codes.shape)
    parts = zip(torch.split(flat, span), torch.split(scales, span // BLOCK), strict=True)
    return torch.cat([_unpack(*part, form) for part in parts]).view(codes.shape)


def _span(values: Tensor) -> int:
    return SPAN if values.device.type == "cpu" else SPANS_OF_A_GPU * SPAN


def _pack(flat: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    blocks = _in_blocks(flat)
    scales = blocks.abs().amax(1)
    scales = torch.where(scales < SCALE_MIN, 0.0, scales)
    shares = torch.where(scales[:, None] == 0, 0.0, blocks / scales[:, None])
    bits = shares.abs().view(torch.int32)
    codes = (((bits + (1 << (form.shift - 1))) >> form.shift) - form.below).clamp(min=0)
    if form is SQUARES:
        codes = torch.where((shares > 0) & (codes == 0), 1, codes)
    else:
        codes = codes + SIGN * ((shares < 0) & (codes > 0))
    return codes.to(torch.uint8).view(-1)[: flat.numel()], scales


def _unpack(flat: Tensor, scales: Tensor, form: Form) -> Tensor:
    values = _shares(form, flat.device)[_in_blocks(flat).to(torch.int32)] * scales[:, None]
    return values.view(-1)[: flat.numel()]


# With this table a tiny parameter is unpacked in less than half the time that computing each share takes. A million
# means take 8.3 ms of CPU instead of 13.2, a million squares 6.3 instead of 5.2.
@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)  # a table that is kept must be an ordinary tensor
def _shares(form: Form, device: torch.device) -> Tensor:
    """The share of its scale that each code stands for: 256 values, made of whole numbers."""
    codes = torch.arange(256, dtype=torch.int32)
    size = codes & (SIGN - 1) if form is SIGNED else codes
    shares = torch.where(size > 0, ((size + form.below) << form.shift).view(torch.float32), 0.0)
    return (torch.where(codes >= SIGN, -shares, shares) if form is SIGNED else shares).to(device)


def _in_blocks(flat: Tensor) -> Tensor:
    """Rows (ceil(n / 256), 256), the last one filled up with zeros."""
    return F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
