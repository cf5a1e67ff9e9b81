"""A graphics card and the programs on it, as NVML and the kernel would tell of them. It can only be asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from peers.governor.nvml import Card

GIB = 1 << 30
US = 1_000_000
OURS = 100
NAME = "GPU-1"
NOT_SUPPORTED, NOT_FOUND, LOST = 3, 6, 15


class FakeNvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class FakeNvml:
    """Stands for the module pynvml; its functions have the names there."""

    NVMLError = FakeNvmlError

    memory: dict[int, int | None] = field(default_factory=dict)
    """Bytes by process."""
    use: dict[int, int] = field(default_factory=dict)
    """Percent by process."""
    hidden_bytes: int = 0
    hidden_use: int = 0
    """Of programs in other containers."""
    celsius: int = 60
    own_bytes: int = 0
    unanswered: set[str] = field(default_factory=set)
    failure: int | None = None
    now_s: float = 1_000_000.0
    """When the samples are from."""
    names: tuple[str, ...] = (NAME,)

    def card(self) -> Card:
        return Card(self, (NAME,), own_bytes=lambda: self.own_bytes)

    def put(self, pid: int, *, memory: int | None, use: int = 0) -> None:
        """A program is on the card."""
        self.memory[pid], self.use[pid] = memory, use

    def take(self, pid: int) -> None:
        """It has ended."""
        del self.memory[pid], self.use[pid]

    def nvmlInit(self) -> None:
        self._answer("init")

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        if name not in self.names:
            raise FakeNvmlError(NOT_FOUND)
        return name

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        self._answer("processes")
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in self.memory.items() if pid % 2 == 0]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Any]:
        self._answer("processes")
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in self.memory.items() if pid % 2]

    def nvmlDeviceGetProcessUtilization(self, handle: str, since_us: int) -> list[Any]:
        self._answer("use")
        at_us = int(self.now_s * US)
        found = [SimpleNamespace(pid=pid, smUtil=use, timeStamp=at_us) for pid, use in self.use.items() if use]
        if not found or at_us <= since_us:
            raise FakeNvmlError(NOT_FOUND)
        return found

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._answer("rates")
        return SimpleNamespace(gpu=min(100, sum(self.use.values()) + self.hidden_use), memory=0)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        self._answer("memory")
        return SimpleNamespace(used=sum(held or 0 for held in self.memory.values()) + self.hidden_bytes)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        self._answer("temperature")
        return self.celsius

    def _answer(self, question: str) -> None:
        if self.failure is not None:
            raise FakeNvmlError(self.failure)
        if question in self.unanswered:
            raise FakeNvmlError(NOT_SUPPORTED)


@dataclass
class FakePrograms:
    """Stands for peers/governor/machine.py."""

    names: dict[int, str] = field(default_factory=dict)
    volunteers: set[int] = field(default_factory=set)

    def ours(self) -> frozenset[int]:
        return frozenset({OURS})

    def name_of(self, pid: int) -> str:
        return self.names[pid]

    def is_named(self, pid: int, names: frozenset[str]) -> bool:
        return self.names[pid].lower() in names

    def is_volunteer(self, pid: int) -> bool:
        return pid in self.volunteers
