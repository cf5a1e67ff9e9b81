"""Training one path on this machine: inner steps in a worker thread, outer gradients, and the path's own state.

What stays with the path here, and is kept on disk between rounds: AdamW's moments, and per module the error that
compression has not sent yet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dipaco_p2p.core import codec
from dipaco_p2p.core.compress import Compressed, compress, encode_compressed
from dipaco_p2p.core.inner import InnerLoop, InnerResult, StepReport
from dipaco_p2p.core.outer import outer_gradient
from dipaco_p2p.core.shards import Shard
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.runtime.run import Run
from dipaco_p2p.runtime.store import write_atomically
from dipaco_p2p.topology import ModuleId, PathId

Flat = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterGradient:
    """One module's part of a round, ready to push; `keep` makes its compression error the path's residual."""

    module: ModuleId
    payload: bytes
    residual: Flat


class PathTrainer:
    """The inner loop of one path, and what it keeps between rounds."""

    def __init__(
        self, run: Run, path: PathId, shard: Shard, *, optimizer: bytes, device: str, replica: int, folder: Path
    ) -> None:
        config = run.config
        self.path = path
        self._run = run
        self._shard = shard
        # Replicas of a path draw other batches, else the second would add nothing.
        seed = (config.seed * 1_000_003 + run.topology.number(path) * 7919 + replica) % 2**31
        self._loop = InnerLoop(config.inner, config.total_steps, config.model, device=device, seed=seed)
        self._residuals: dict[ModuleId, Flat] = {}
        self._folder = folder
        self._loop.load_state(optimizer)
        self._load()

    async def train(
        self, flats: Sequence[Flat], *, round_number: int, on_step: Callable[[StepReport], bool]
    ) -> InnerResult:
        """tau inner steps from these modules; fewer if `on_step` says so. Raises DipacoError if training diverges."""
        steps = self._run.config.inner.steps
        first_step = self._run.config.pretrain_steps + round_number * steps
        return await asyncio.to_thread(
            self._loop.run, flats, self._shard, first_step=first_step, steps=steps, on_step=on_step
        )

    def outer_gradients(self, before: Sequence[Flat], after: Sequence[Flat]) -> list[OuterGradient]:
        """Per module: before minus after plus what was not sent yet, compressed."""
        made = []
        for module, old, new in zip(self.path.modules(), before, after, strict=True):
            compressed, residual = self._compress(module, outer_gradient(old, new))
            made.append(OuterGradient(module=module, payload=encode_compressed(compressed), residual=residual))
        return made

    def keep(self, sent: OuterGradient) -> None:
        """The leader has it: from now on only its compression error is owed."""
        self._residuals[sent.module] = sent.residual

    def save(self) -> None:
        """Keep the path's state on disk."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file("inner"), self._loop.state_bytes())
        write_atomically(self._file("residuals"), codec.encode({str(m): r for m, r in self._residuals.items()}))

    def _compress(self, module: ModuleId, gradient: Flat) -> tuple[Compressed, Flat]:
        return compress(gradient, self._residuals.get(module))

    def _load(self) -> None:
        """What is damaged is left behind, at little cost: the warm-up's moments do, and nothing is owed."""
        with contextlib.suppress(IntegrityError, FileNotFoundError):
            self._loop.load_state(self._file("inner").read_bytes())
        with contextlib.suppress(IntegrityError, FileNotFoundError):
            tensors, _ = codec.decode(self._file("residuals").read_bytes())
            for module in self.path.modules():
                residual = tensors.get(str(module))
                if residual is not None and self._fits(residual, module):
                    self._residuals[module] = residual

    def _fits(self, residual: NDArray[Any], module: ModuleId) -> bool:
        size = self._run.layout(module).size
        return residual.dtype == np.float32 and residual.shape == (size,) and bool(np.isfinite(residual).all())

    def _file(self, kind: str) -> Path:
        return self._folder / f"{self.path}.{kind}.safetensors"
