"""AdamW for a path, in the form that suits the device: torch's fused one, or bitsandbytes' with 8-bit moments.

8-bit moments save 6 bytes a parameter, but bitsandbytes waits for the GPU after every parameter (0.50, its
`Optimizer8bit.step`), so that the processor cannot launch work ahead: they are for GPUs that are short of memory.
A limit on a GPU's memory counts as its size. Not measured on a GPU yet.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import cast

import torch

from ..config import InnerConfig

MOMENTS_SHARE = 0.1
"""Of a GPU's memory: where float32 moments would take more, they are held in 8 bits."""
MOMENTS_BYTES, MOMENTS_BYTES_8BIT = 8, 2
"""Of one parameter, in float32 and in 8 bits."""


def make_optimizer(
    model: torch.nn.Module, config: InnerConfig, *, eight_bit: bool | None = None
) -> torch.optim.Optimizer:
    """AdamW that decays matrices but not norms.

    `eight_bit` says outright whether its moments have 8 bits; None leaves it to the device.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    if _is_8bit_better(parameters) if eight_bit is None else eight_bit:
        optimizer = importlib.import_module("bitsandbytes.optim").AdamW8bit(groups, lr=config.lr, betas=betas)
        return cast(torch.optim.Optimizer, optimizer)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """For people."""
    return "fused AdamW" if isinstance(optimizer, torch.optim.AdamW) else "8-bit AdamW"


def moments_bytes_to_come(optimizer: torch.optim.Optimizer) -> int:
    """What the optimizer's first step will take for moments: those that a state has brought are there already."""
    each = MOMENTS_BYTES if isinstance(optimizer, torch.optim.AdamW) else MOMENTS_BYTES_8BIT
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return each * sum(int(p.numel()) for p in parameters if p not in optimizer.state)


def is_short(parameter_count: int, *, memory_bytes: int) -> bool:
    """Whether float32 moments of so many parameters would take too much of a device's memory."""
    return MOMENTS_BYTES * parameter_count > MOMENTS_SHARE * memory_bytes


def _is_8bit_better(parameters: list[torch.nn.Parameter]) -> bool:
    device = parameters[0].device
    if device.type != "cuda" or importlib.util.find_spec("bitsandbytes") is None:
        return False
    return is_short(sum(p.numel() for p in parameters), memory_bytes=_allowed_bytes(device))


def _allowed_bytes(device: torch.device) -> int:
    """Of a GPU's memory, what this process may take (`set_per_process_memory_fraction`)."""
    fraction_of = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)  # newer than our oldest torch
    fraction = 1.0 if fraction_of is None else float(fraction_of(device))
    return int(fraction * int(torch.cuda.get_device_properties(device).total_memory))
