"""Which GPU, and how much of its memory: what training may have of a card. Its clocks and power are its owner's."""

from __future__ import annotations

import os


def choose(gpu: str) -> None:
    """Let CUDA see this GPU only, numbered as nvidia-smi does; before anything asks CUDA how many there are."""
    if gpu not in ("auto", "none"):
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu


def limit_memory(device: str, share: float | None) -> None:
    """Beyond its share torch runs out of memory, and batches get smaller (core/microbatch.py)."""
    if share is not None and device.startswith("cuda"):
        import torch

        torch.cuda.set_per_process_memory_fraction(share, torch.device(device).index or 0)


def uuids_of(device: str) -> tuple[str, ...]:
    """How NVML may know the card that torch calls `device`: as a whole, or as a part of one (MIG); nothing where torch
    does not say."""
    import torch

    found = getattr(torch.cuda.get_device_properties(torch.device(device)), "uuid", None)
    return () if found is None else (f"GPU-{found}", f"MIG-{found}")


def reserved_bytes(device: str) -> int:
    """Of the card's memory, what torch holds for this process, without CUDA's own some hundred MB."""
    import torch

    return torch.cuda.memory_reserved(torch.device(device))
