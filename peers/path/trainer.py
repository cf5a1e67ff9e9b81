"""Training one path on this machine: inner steps in a worker thread, outer gradients, and the path's own state.

The state goes with the path, not with the machine: AdamW's moments, and per module the error that compression has not
sent yet. As one blob it is named in the path's contributions, so that whoever trains the path next goes on from it,
with the same result to the bit. Batches depend on the path, the round and the part of the shard, never on who trains.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dipaco_p2p.canonical import Parts
from dipaco_p2p.core import tensor_file as codec
from dipaco_p2p.core.arrays import Halves, from_bfloat16, is_finite, to_bfloat16, trainer_thread
from dipaco_p2p.core.model.engine import AUTO, Engine, at_first, choose, compiling_s
from dipaco_p2p.core.model.inner import InnerLoop, InnerResult, StepReport
from dipaco_p2p.core.model.microbatch import MicroBatch
from dipaco_p2p.core.model.optimizer import InnerState
from dipaco_p2p.core.model.shards import Shard
from dipaco_p2p.core.outer.compress import Sent, beginning, compress, encode_compressed
from dipaco_p2p.core.outer.outer_step import outer_gradient
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node.run import Run
from dipaco_p2p.protocol.documents import BlobRef
from dipaco_p2p.topology import ModuleId, PathId

from ..governor.steps import BetweenSteps

STEPS_MIN = 8
"""Before these nothing is known: the first steps of a process are slow."""

OnStep = Callable[[StepReport], bool]


def _nobody(*values: object) -> None:
    """Is told."""


class Engines:
    """The choice of one process, for all stages: what one has compiled the next one need not repay."""

    def __init__(self, device: str, *, wanted: str = AUTO, on_choice: Callable[[Engine], None] = _nobody) -> None:
        """`on_choice` as in `follow`."""
        self._device = device
        self._wanted = wanted
        self._on_compiling: Callable[[float], None] = _nobody
        self._on_compiled: Callable[[], None] = _nobody
        self._has_compiled = False
        self.follow(on_choice)
        self._steps_s: list[float] = []
        self._chosen: Engine | None = None

    def follow(
        self,
        on_choice: Callable[[Engine], None],
        *,
        on_compiling: Callable[[float], None] = _nobody,
        on_compiled: Callable[[], None] = _nobody,
    ) -> None:
        """From now on tell these. `on_choice` the choice once, when a step was taken with it: then all that belongs to
        it is known. `on_compiling` when the next steps have to be compiled, with how long that takes at the most, and
        `on_compiled` when that is over."""
        self._on_choice, self._on_compiling, self._on_compiled = on_choice, on_compiling, on_compiled
        self._is_told = False

    def engine(self, *, steps_left: int) -> Engine:
        """What to train the next round with; at first what is measured."""
        if self._chosen is None:
            known = len(self._steps_s) >= STEPS_MIN
            step_s = statistics.median(self._steps_s) if known else None
            self._chosen = choose(self._wanted, self._device, step_s=step_s, steps_left=steps_left)
        return self._chosen or at_first(self._wanted, self._device)

    def must_compile(self) -> bool:
        """Whether the steps that begin now compile before they are taken; if so, that is told."""
        if self._has_compiled or self._chosen is None or not self._chosen.is_compiled:
            return False
        self._on_compiling(compiling_s(self._device))
        return True

    def compiled(self) -> None:
        """A step was taken that had to be compiled: later ones need not."""
        if not self._has_compiled:
            self._has_compiled = True
            self._on_compiled()

    def watched(self, on_step: OnStep, *, taken: Callable[[], None]) -> OnStep:
        """`on_step`; before the choice with what the steps take noted, right after it with one call of `taken`."""
        if self._chosen is None:
            return self._timed(on_step)
        return on_step if self._is_told else self._telling(on_step, taken)

    def tell(self, setup: str) -> None:
        """Pass the choice on, with what else was chosen on this machine."""
        assert self._chosen is not None
        self._on_choice(replace(self._chosen, setup=setup))

    def _telling(self, on_step: OnStep, taken: Callable[[], None]) -> OnStep:
        def telling(report: StepReport) -> bool:
            if not self._is_told:
                self._is_told = True
                taken()
            return on_step(report)

        return telling

    def _timed(self, on_step: OnStep) -> OnStep:
        last_s = time.perf_counter()

        def noted(report: StepReport) -> bool:
            nonlocal last_s
            now_s = time.perf_counter()
            self._steps_s.append(now_s - last_s)
            goes_on = on_step(report)
            last_s = time.perf_counter()
            return goes_on

        return noted


Flat = NDArray[np.float32]

RESIDUAL = "residual/"
"""What the names of residuals begin with in a path's state; no parameter of a model has this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterGradient:
    """One module's part of a round, ready to push; `keep` makes its compression error the path's residual."""

    module: ModuleId
    payload: bytes
    residual: Halves
    sent: Sent


class PathTrainer:
    """The inner loop of one path, and what it keeps between rounds."""

    def __init__(
        self,
        run: Run,
        path: PathId,
        shard: Shard,
        *,
        sharding: int = 0,
        optimizer: bytes,
        device: str,
        engines: Engines | None = None,
        micro: MicroBatch | None = None,
        eight_bit: bool | None = None,
        steps: BetweenSteps | None = None,
        make_loop: Callable[..., InnerLoop] = InnerLoop,
    ) -> None:
        """`shard` is of the sharding with that number; `optimizer` is AdamW's state when nobody has trained the path
        yet: raises IntegrityError if it is damaged. Without `engines` every step is exact, without `micro` the whole
        batch goes through at once; `eight_bit` as in core/model/optimizer.py; `steps` is what goes on between two of
        them.
        Raises EnvironmentUnfit when memory is too small."""
        config = run.config
        self.path = path
        self.sharding = sharding
        """The number of the sharding that the present shard belongs to."""
        self._run = run
        self._shard = shard
        self._engines = engines
        self._steps = steps
        self._is_on_cpu = device == "cpu"
        seed = (config.seed * 1_000_003 + run.topology.number(path) * 7919) % 2**31
        self._loop = make_loop(
            config.inner, run.total_steps, config.model, device=device, seed=seed, micro=micro, eight_bit=eight_bit
        )
        self._residuals: dict[ModuleId, Halves] = {}
        self.sent = Sent(captured=0.0, owed=0.0)
        """How much the newest outer gradients said, as means over the path's modules."""
        self._optimizer = optimizer
        self.state_ref: BlobRef | None = None
        """The state that it goes on from, as others can have it; None: that of the stage's start."""
        self.state_since = 0
        """After this version one should follow that names it."""
        self.start_over()

    async def train(
        self,
        flats: Sequence[Flat],
        *,
        round_number: int,
        replica: tuple[int, int],
        on_step: Callable[[StepReport], bool],
        steps: int | None = None,
    ) -> InnerResult:
        """tau inner steps, or `steps`, from these modules on the shard's part of `replica`, our place and the number of
        replicas; fewer if `on_step` says so, which a GPU hears a step late, and perhaps none if the GPU is wanted by
        others. Raises DipacoError if training diverges."""
        steps, first_step = steps or self._run.config.inner.steps, self._run.first_step(round_number)
        part = self._shard.part(*replica)
        goes_on = None if self._steps is None else self._steps.goes_on
        if self._steps is not None:
            on_step = self._steps.follow(on_step)
        if self._engines is not None:
            engine = self._engines.engine(steps_left=self._run.total_steps - first_step)
            self._loop.use(fast=engine.is_fast, compiled=engine.is_compiled)
            on_step = self._engines.watched(on_step, taken=self._tells_setup(self._engines))
            if self._engines.must_compile():
                on_step = self._until_compiled(self._engines, on_step)
        run = partial(self._loop.run, flats, part, first_step=first_step, steps=steps, on_step=on_step, goes_on=goes_on)
        if not self._is_on_cpu:  # what drives a GPU must not wait: the GPU would
            return await asyncio.to_thread(run)
        thread = trainer_thread()
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, run)
        finally:
            thread.shutdown(wait=False)

    def use_shard(self, shard: Shard, sharding: int) -> None:
        """Train on another shard from the next round on."""
        self._shard, self.sharding = shard, sharding

    def beginning(self, params: Sequence[Flat]) -> list[Flat]:
        """Where the steps of a round begin, by the newest versions of the modules."""
        codec, modules = self._run.config.compression.uplink, self.path.modules()
        return [beginning(flat, self._owed(module), codec=codec) for module, flat in zip(modules, params, strict=True)]

    def outer_gradients(self, before: Sequence[Flat], after: Sequence[Flat]) -> list[OuterGradient]:
        """Per module: before minus after plus what was not sent yet, compressed."""
        made, settings = [], self._run.config.compression
        for module, old, new in zip(self.path.modules(), before, after, strict=True):
            gradient = outer_gradient(old, new)
            norm = float(np.linalg.norm(gradient))
            compressed, left = compress(gradient, self._owed(module), codec=settings.uplink, out=gradient)
            payload = encode_compressed(compressed)
            told = Sent.of(norm, compressed, left)
            made.append(OuterGradient(module=module, payload=payload, residual=to_bfloat16(left), sent=told))
        self.sent = Sent(
            captured=statistics.fmean(one.sent.captured for one in made),
            owed=statistics.fmean(one.sent.owed for one in made),
        )
        return made

    def owed(self) -> list[Flat | None]:
        """Per module: what earlier rounds have not sent yet."""
        return [self._owed(module) for module in self.path.modules()]

    def _owed(self, module: ModuleId) -> Flat | None:
        kept, decay = self._residuals.get(module), self._run.config.compression.error_decay
        if kept is None:
            return None
        owed = from_bfloat16(kept)
        return owed if decay == 1 else np.multiply(owed, np.float32(decay), out=owed)

    def keep(self, sent: OuterGradient) -> None:
        """The leader has it: from now on only its compression error is owed."""
        self._residuals[sent.module] = sent.residual

    def state_parts(self, sent: Sequence[OuterGradient] = ()) -> Parts:
        """The path's state, as it is when the leaders have taken `sent`. A path of 150 million parameters has 0.6 GB of
        it: no copy is made that can be left out."""
        residuals = self._residuals | {gradient.module: gradient.residual for gradient in sent}
        owed = {f"{RESIDUAL}{module}": values for module, values in residuals.items()}
        return codec.encode_parts({**self._loop.state().values, **owed})

    def state_bytes(self, sent: Sequence[OuterGradient] = ()) -> bytes:
        """A copy of it."""
        return b"".join(self.state_parts(sent))

    def load_state(self, data: bytes) -> None:
        """Go on from `state_bytes`, perhaps another volunteer's; raises IntegrityError, and then nothing has changed.

        A state that is well-formed may still be a lie. It spoils what this path contributes, within the bounds of
        admission, and nothing else; `start_over` is the cure.
        """
        tensors, _ = codec.decode(data)
        residuals: dict[ModuleId, Halves] = {}
        for module in self.path.modules():
            residual = tensors.pop(f"{RESIDUAL}{module}", None)
            if residual is not None:
                residuals[module] = self._checked(residual, module)
        self._loop.load_state(codec.encode(tensors))
        self._residuals = residuals

    def read_state(self, data: bytes) -> tuple[list[Flat | None], InnerState]:
        """What a state says is owed, for each module; and what the optimizer keeps. Raises IntegrityError."""
        tensors, _ = codec.decode(data, is_view=True)
        owed: list[Flat | None] = []
        for module in self.path.modules():
            residual = tensors.pop(f"{RESIDUAL}{module}", None)
            owed.append(None if residual is None else from_bfloat16(self._checked(residual, module)))
        return owed, self._loop.read_state(tensors)

    def inner_state(self) -> InnerState:
        """What the optimizer keeps, as it is now."""
        return self._loop.state()

    def start_over(self) -> None:
        """As if nobody had trained the path yet: the moments of the stage's start, nothing owed."""
        self._loop.load_state(self._optimizer)
        self._residuals = {}
        self.goes_on_from(None)

    def goes_on_from(self, ref: BlobRef | None, *, since: int = 0) -> None:
        """Whatever it holds is this state, which a version after `since` counts, or will."""
        self.state_ref, self.state_since = ref, since

    def _tells_setup(self, engines: Engines) -> Callable[[], None]:
        """For the worker thread: what is told is told where everything but training happens."""
        events = asyncio.get_running_loop()

        def taken() -> None:
            events.call_soon_threadsafe(engines.tell, self._loop.described())

        return taken

    def _until_compiled(self, engines: Engines, on_step: OnStep) -> OnStep:
        """For the worker thread, as above. What follows a step still finds that it was compiled."""
        events = asyncio.get_running_loop()

        def followed(report: StepReport) -> bool:
            goes_on = on_step(report)
            if self._loop.has_compiled:
                events.call_soon_threadsafe(engines.compiled)
            return goes_on

        return followed

    def _checked(self, residual: NDArray[Any], module: ModuleId) -> Halves:
        size = self._run.layout(module).size
        if residual.dtype != np.uint16 or residual.shape != (size,) or not is_finite(residual):
            raise IntegrityError(f"the residual of {module} in a path's state is not {size} finite bfloat16 values")
        return residual
