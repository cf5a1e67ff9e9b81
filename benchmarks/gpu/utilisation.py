"""Model FLOPs utilisation: the share of a GPU's bfloat16 rate that the products of a 150M-parameter path reach.

Counted are the products that the model needs, forward and twice as many on the way back: of every matrix, and of
attention those that a causal mask leaves. What is computed again for want of memory does not count.
The count is compared with torch's own in the tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks.trainer.loops import TOTAL_STEPS, noise
from dipaco_p2p.config import ADAMW, InnerConfig, LevelConfig, ModelConfig
from dipaco_p2p.core.model.engine import compile_hindrance, hindrance
from dipaco_p2p.core.model.inner import InnerLoop, StepReport
from dipaco_p2p.core.model.microbatch import MicroBatch
from dipaco_p2p.core.model.transformer import PathModel, initial_modules

PATH = ModelConfig(
    vocab_size=32_000,
    width=896,
    heads=14,
    ffn_width=2560,
    context=1024,
    levels=(LevelConfig(embedding=True, head=True), LevelConfig(blocks=6), LevelConfig(blocks=6)),
)
"""149.8 million parameters, 12 blocks."""
BATCH = 32
PEAK_SIZE = 8192
REPEATS = 20
WARM_STEPS = 5
NOMINAL = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""FLOP/s in bfloat16 with float32 sums, without sparsity, from NVIDIA's data sheets; by a part of the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """How busy a path keeps a device."""

    device: str
    setup: str
    """What it was trained with."""
    parameters: int
    step_s: float
    tokens_per_s: float
    flops_per_token: int
    peak: float
    """FLOP/s of a product of two large matrices, in this run."""
    nominal: float | None
    """What the maker says; None for a device that is not in the table."""
    memory_bytes: int

    @property
    def of_peak(self) -> float:
        return self.tokens_per_s * self.flops_per_token / self.peak

    @property
    def of_nominal(self) -> float | None:
        return None if self.nominal is None else self.tokens_per_s * self.flops_per_token / self.nominal


def product_weights(model: ModelConfig) -> int:
    """Parameters that every token is multiplied with: all but the norms; the head even if it is the embedding."""
    blocks = sum(level.blocks for level in model.levels)
    return blocks * (4 * model.width**2 + 3 * model.width * model.ffn_width) + model.vocab_size * model.width


def attention_flops(model: ModelConfig) -> int:
    """Of one token in one step, of the products that a causal mask leaves: the half."""
    blocks = sum(level.blocks for level in model.levels)
    return 6 * blocks * model.context * model.width


def flops_per_token(model: ModelConfig) -> int:
    """Of one token in one step."""
    return 6 * product_weights(model) + attention_flops(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a path is trained: as a volunteer would in a long run, unless it says otherwise."""

    batch: int = BATCH
    is_compiled: bool = True
    is_exact: bool = False
    optimizer: str = ADAMW


class Bare:
    """A volunteer's inner loop on random text, and nothing around it."""

    def __init__(
        self,
        device: str,
        way: Way,
        *,
        model: ModelConfig = PATH,
        micro: MicroBatch | None = None,
        prepare: Callable[[PathModel], object] = lambda path: None,
    ) -> None:
        """`prepare` may change the path before its first step."""
        inner = replace(InnerConfig(), batch=way.batch, optimizer=way.optimizer)
        self.loop = InnerLoop(inner, TOTAL_STEPS, model, device=device, seed=0, micro=micro or MicroBatch())
        fast = not way.is_exact and hindrance(device) is None
        self.loop.use(fast=fast, compiled=fast and way.is_compiled and compile_hindrance(device) is None)
        self.flats = list(initial_modules(model, seed=0).values())
        self._shard = noise(model)
        self._done = 0
        prepare(self.loop.path)
        self.take(WARM_STEPS)

    def take(self, steps: int, on_step: Callable[[StepReport], bool] | None = None) -> None:
        """So many steps; the next ones go on from there, but for the modules."""
        self.loop.run(self.flats, self._shard, first_step=self._done, steps=steps, on_step=on_step)
        self._done += steps

    def step_s(self, steps: int) -> float:
        """Mean seconds of one of so many."""
        ended_s: list[float] = []

        def on_step(report: StepReport) -> bool:
            ended_s.append(time.perf_counter())
            return True

        # One more before, for the modules go in with the first, and one after: the last report of a GPU does not wait
        # for a next step.
        self.take(steps + 2, on_step)
        return (ended_s[-2] - ended_s[0]) / steps


def utilisation(
    device: str, *, model: ModelConfig = PATH, way: Way | None = None, steps: int, peak_size: int = PEAK_SIZE
) -> Utilisation:
    """Train `model` for some steps, and see how busy the device was."""
    way, name = way or Way(), device_name(device)
    bare = Bare(device, way, model=model)
    step_s = bare.step_s(steps)
    return Utilisation(
        device=name,
        setup=bare.loop.described(),
        parameters=sum(flat.size for flat in bare.flats),
        step_s=step_s,
        tokens_per_s=way.batch * model.context / step_s,
        flops_per_token=flops_per_token(model),
        peak=peak_flops(device, size=peak_size),
        nominal=nominal_flops(name),
        memory_bytes=memory_bytes(device),
    )


def memory_bytes(device: str) -> int:
    """The most that torch has held of a GPU's memory, free blocks among it; 0 elsewhere."""
    return torch.cuda.max_memory_reserved(device) if torch.device(device).type == "cuda" else 0


def peak_flops(device: str, *, size: int) -> float:
    """FLOP/s of the quickest of some products of two bfloat16 matrices."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    quickest_s = float("inf")
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        left @ right
        if left.is_cuda:
            torch.cuda.synchronize(left.device)
        quickest_s = min(quickest_s, time.perf_counter() - began_s)
    return 2 * size**3 / quickest_s


def nominal_flops(name: str) -> float | None:
    """The maker's figure for a device of that name."""
    return next((flops for part, flops in NOMINAL.items() if part in name), None)


def device_name(device: str) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device
