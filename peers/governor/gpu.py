"""Which GPU, how much of its memory, and how much power: what training may have of a graphics card.

Power has two ways. Root may lower the card's own limit (`nvidia-smi -pl`), which is put back at the end; a SIGKILL
leaves it until the machine starts again. Everybody else waits between steps so that the mean stays at the limit
(brake.py). Not run on a GPU yet.
"""

from __future__ import annotations

import os

from dipaco_p2p.errors import EnvironmentUnfit
from dipaco_p2p.runtime.tools import output_of

TOOL = "nvidia-smi"


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


def uuid_of(device: str) -> str:
    """How nvidia-smi knows the card that torch calls `device`."""
    import torch

    index = torch.device(device).index or 0
    found = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return f"GPU-{found}" if found is not None else str(index)


class Card:
    """One card, asked through nvidia-smi."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._before_w: float | None = None

    def power_w(self) -> float | None:
        """What it draws now; None if it does not say."""
        return self._number("power.draw")

    def limit(self, watts: float) -> bool:
        """Let the card keep the limit itself; whether it does."""
        if os.geteuid() != 0:
            return False
        before = self._number("power.limit")
        if before is None or output_of(TOOL, "-i", self._name, "-pl", f"{watts:g}") is None:
            return False
        self._before_w = before
        return True

    def give_back(self) -> None:
        """The limit that it had before."""
        if self._before_w is not None:
            output_of(TOOL, "-i", self._name, "-pl", f"{self._before_w:g}")
            self._before_w = None

    def check(self) -> None:
        """Raises EnvironmentUnfit when its power cannot be read."""
        if self.power_w() is None:
            raise EnvironmentUnfit(
                f"the power of GPU {self._name} cannot be read, so `gpu_power_w` cannot be kept",
                hint=f"see what `{TOOL} -q -d POWER` says, or leave `gpu_power_w` out",
            )

    def _number(self, field: str) -> float | None:
        text = output_of(TOOL, "-i", self._name, f"--query-gpu={field}", "--format=csv,noheader,nounits")
        try:
            return None if text is None else float(text.strip().splitlines()[0])
        except (ValueError, IndexError):  # `[N/A]` on cards that do not know
            return None
