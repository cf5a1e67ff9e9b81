"""What a graphics card says of itself and of those who use it, through NVML. It is only asked, nothing is ever set.

`pynvml` is NVIDIA's own binding (nvidia-ml-py); it loads the driver's library when the first card is opened. Each
question may be one that this card, driver or container does not answer; then there is nothing, and no failure.

    memory by process   not on WSL; in a container perhaps of it alone, or with the numbers that processes have outside
    use by process      the same, and not on a card that is divided (MIG)
    use of the card     not on a card that is divided
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dipaco_p2p.errors import EnvironmentUnfit


def choose_gpu(gpu: str) -> None:
    """Let CUDA see this GPU only, numbered as nvidia-smi does; before anything asks CUDA how many there are."""
    if gpu not in ("auto", "none"):
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu


def limit_memory(device: str, share: float | None) -> None:
    """Beyond its share torch runs out of memory, and batches get smaller (core/model/microbatch.py)."""
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


UNANSWERED = frozenset({2, 3, 4, 6, 13, 21})
"""NVML_ERROR_: INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND, NO_DATA (nvml.h)."""
NOTHING_NEW = 6
"""NVML_ERROR_NOT_FOUND: nobody has used the card since."""
SENSOR = 0
"""NVML_TEMPERATURE_GPU."""
PERCENT_MAX = 100
"""Drivers have been seen to say more: such a sample is left out."""
INSTALL_HINT = "pip install nvidia-ml-py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One card at one moment; None: it does not say."""

    own_bytes: int = 0
    """What we hold of its memory."""
    memory: Mapping[int, int | None] | None = None
    """Bytes by process, of all that have anything on the card."""
    use: Mapping[int, float] | None = None
    """Percent of the time since the last reading in which a process computed there, of all that did."""
    card_use: float | None = None
    """The same of all of them together, us included."""
    used_bytes: int | None = None
    """Of the card's memory, by everybody."""
    celsius: float | None = None


class Card:
    """One card."""

    def __init__(self, nvml: Any, names: tuple[str, ...], *, own_bytes: Callable[[], int]) -> None:
        """`nvml` is the module pynvml; the card is the first of `names` that it knows. Raises EnvironmentUnfit."""
        self._nvml = nvml
        self._own_bytes = own_bytes
        self._seen_us: int | None = None
        """Time of the newest sample of use that was read."""
        with _failing():
            nvml.nvmlInit()
            self._handle = self._find(names)

    def read(self) -> Reading:
        """Takes some milliseconds. Raises EnvironmentUnfit when NVML fails altogether."""
        nvml, before = self._nvml, self._own_bytes()
        with _failing():
            memory = self._memory()
            use = self._use()
            rates = self._ask(nvml.nvmlDeviceGetUtilizationRates)
            info = self._ask(nvml.nvmlDeviceGetMemoryInfo)
            celsius = self._ask(nvml.nvmlDeviceGetTemperature, SENSOR)
        return Reading(
            own_bytes=max(before, self._own_bytes()),  # what came or went meanwhile is never taken for others' growth
            memory=memory,
            use=use,
            card_use=None if rates is None else float(rates.gpu),
            used_bytes=None if info is None else int(info.used),
            celsius=None if celsius is None else float(celsius),
        )

    def _find(self, names: tuple[str, ...]) -> Any:
        for name in names:
            with contextlib.suppress(self._nvml.NVMLError):
                return self._nvml.nvmlDeviceGetHandleByUUID(name)
        if names:
            raise EnvironmentUnfit(f"NVML knows no card {names[0]}")
        raise EnvironmentUnfit("torch does not say which card it trains on", hint="install torch 2.5 or newer")

    def _ask(self, question: Callable[..., Any], *parts: Any) -> Any:
        try:
            return question(self._handle, *parts)
        except self._nvml.NVMLError as error:
            if error.value not in UNANSWERED:
                raise
            return None

    def _memory(self) -> dict[int, int | None] | None:
        questions = (self._nvml.nvmlDeviceGetComputeRunningProcesses, self._nvml.nvmlDeviceGetGraphicsRunningProcesses)
        answers = [found for found in map(self._ask, questions) if found is not None]
        return {each.pid: each.usedGpuMemory for found in answers for each in found} if answers else None

    def _use(self) -> dict[int, float] | None:
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._seen_us or 0)
        except self._nvml.NVMLError as error:
            if error.value == NOTHING_NEW:
                return {}
            if error.value not in UNANSWERED:
                raise
            return None
        is_first, seen_us = self._seen_us is None, self._seen_us or 0
        self._seen_us = max([seen_us, *(each.timeStamp for each in samples)])
        found: dict[int, float] = {}
        for each in samples:
            if not is_first and each.timeStamp > seen_us and each.smUtil <= PERCENT_MAX:
                found[each.pid] = max(found.get(each.pid, 0.0), float(each.smUtil))
        return found  # of the first reading nothing: it goes back to before we came


def open_card(device: str) -> Card:
    """The card that torch calls `device`. Raises EnvironmentUnfit."""
    try:
        import pynvml
    except ImportError:
        raise EnvironmentUnfit("nvidia-ml-py is not installed", hint=INSTALL_HINT) from None
    return Card(pynvml, uuids_of(device), own_bytes=lambda: reserved_bytes(device))


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """Whatever goes wrong in the binding or the driver's library is one thing: NVML fails."""
    try:
        yield
    except EnvironmentUnfit:
        raise
    except Exception as error:
        raise EnvironmentUnfit(f"NVML fails: {str(error) or repr(error)}") from error
