"""Whether a GPU computes what a CPU does: losses, outer gradients, optimizers, the state's way between them, bits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dipaco_p2p.config import ADAMW, MUON, InnerConfig, LevelConfig, ModelConfig
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.model.engine import AUTO, at_first, choose
from dipaco_p2p.core.model.inner import InnerLoop, StepReport
from dipaco_p2p.core.model.shards import Shard
from dipaco_p2p.core.model.transformer import initial_modules
from dipaco_p2p.core.outer.outer_step import outer_gradient

from .case import Bench, Case, Figures, Found, Part, number, table, verdict

STEPS = 50
MUONS = "float32 with Muon"
LOSS_MAX = {"float32": 2e-3, "bf16": 3e-2, MUONS: 3e-2}
"""Nats that any of 50 losses may be off the CPU's in float32."""
GRADIENT_MAX = {"float32": 0.05, "bf16": 0.1, MUONS: 0.1}
"""Length of what an outer gradient of 50 steps may be off, to its own: AdamW makes much of small differences. On a CPU
with bfloat16 products it is 0.045, and a loss 0.015 nats off. Muon computes its steps in bfloat16, everywhere.
"""
EIGHT_BIT_MAX = 0.1
"""Of what was learned, how much 8-bit moments may be off."""
MOVED_MAX = 5e-3
"""Nats that a loss may be off after the state went to the GPU and back."""
MODEL = ModelConfig(
    vocab_size=2048,
    width=256,
    heads=4,
    ffn_width=768,
    context=256,
    levels=(LevelConfig(embedding=True, head=True), LevelConfig(blocks=4)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A path after some steps."""

    losses: list[float]
    gradients: list[Floats]
    flats: list[Floats]
    state: bytes


@functools.cache
def model_of(is_small: bool) -> ModelConfig:
    """The path that is trained here."""
    if not is_small:
        return MODEL
    levels = (LevelConfig(embedding=True, head=True), LevelConfig(blocks=2))
    return replace(MODEL, vocab_size=300, width=64, heads=2, ffn_width=96, context=64, levels=levels)


def text(model: ModelConfig) -> Shard:
    """Sequences with something to learn: each goes on by a step of its own."""
    generator = np.random.default_rng(0)
    starts, steps = generator.integers(0, model.vocab_size, (64, 1)), generator.integers(1, 9, (64, 1))
    return Shard(tokens=((starts + steps * np.arange(model.context)) % model.vocab_size).astype(np.int32))


class Trainer:
    """A volunteer's inner loop on `device`, always with the same start, text and schedule."""

    def __init__(
        self, bench: Bench, device: str, *, fast: bool = False, eight_bit: bool | None = False, optimizer: str = ADAMW
    ) -> None:
        self.model = model_of(bench.is_small)
        self.start = list(initial_modules(self.model, seed=0).values())
        inner = InnerConfig(batch=8, optimizer=optimizer)
        self.loop = InnerLoop(inner, 4 * STEPS, self.model, device=device, seed=1, eight_bit=eight_bit)
        self.loop.use(fast=fast, compiled=False)

    def train(self, steps: int, *, first: int = 0, flats: Sequence[Floats] | None = None) -> Trained:
        """So many steps from `flats`, or from the start."""
        losses: list[float] = []

        def on_step(report: StepReport) -> bool:
            losses.append(report.loss)
            return True

        before = list(flats or self.start)
        after = self.loop.run(before, text(self.model), first_step=first, steps=steps, on_step=on_step).flats
        gradients = [outer_gradient(old, new) for old, new in zip(before, after, strict=True)]
        return Trained(losses=losses, gradients=gradients, flats=after, state=self.loop.state_bytes())


def off(one: Sequence[Floats], other: Sequence[Floats]) -> float:
    """How far `one` is off `other`, to its length."""
    far = [np.linalg.norm(a - b) for a, b in zip(one, other, strict=True)]
    return float(np.linalg.norm(far) / np.linalg.norm([np.linalg.norm(b) for b in other]))


def _beside_the_cpu(bench: Bench, *, precision: str) -> Figures:
    steps = 6 if bench.is_small else STEPS
    optimizer = MUON if precision == MUONS else ADAMW
    exact = Trainer(bench, "cpu", optimizer=optimizer).train(steps)
    own = Trainer(bench, bench.device, fast=precision == "bf16", optimizer=optimizer).train(steps)
    loss_off = max(abs(a - b) for a, b in zip(own.losses, exact.losses, strict=True))
    gradient_off = off(own.gradients, exact.gradients)
    return {
        "loss_off": loss_off,
        "gradient_off": gradient_off,
        "first": exact.losses[0],
        "last": exact.losses[-1],
        "ok": loss_off <= LOSS_MAX[precision] and gradient_off <= GRADIENT_MAX[precision],
    }


def _eight_bit(bench: Bench) -> Figures:
    steps = 12 if bench.is_small else STEPS
    whole, eight = (Trainer(bench, bench.device, eight_bit=bits).train(steps) for bits in (False, True))
    learned = whole.losses[0] - whole.losses[-1]
    share = abs(eight.losses[-1] - whole.losses[-1]) / learned
    return {"float32": whole.losses[-1], "8-bit": eight.losses[-1], "off": share, "ok": share <= EIGHT_BIT_MAX}


def _moved(bench: Bench) -> Figures:
    """CPU -> GPU -> CPU, ten steps on each, beside thirty on the CPU."""
    steps = 3 if bench.is_small else 10
    stayed = Trainer(bench, "cpu").train(3 * steps)
    trained = Trainer(bench, "cpu").train(steps)
    same = True
    for number_, device in enumerate((bench.device, "cpu"), start=1):
        trainer = Trainer(bench, device)
        trainer.loop.load_state(trained.state)
        same = same and trainer.loop.state_bytes() == trained.state
        trained = trainer.train(steps, first=number_ * steps, flats=trained.flats)
    loss_off = abs(trained.losses[-1] - stayed.losses[-1])
    return {"loss_off": loss_off, "same_bytes": same, "ok": same and loss_off <= MOVED_MAX}


def _choice(bench: Bench) -> Figures:
    return {
        "at first": str(at_first(AUTO, bench.device)),
        "100 steps of 100 ms left": str(choose(AUTO, bench.device, step_s=0.1, steps_left=100)),
        "100,000 steps of 100 ms left": str(choose(AUTO, bench.device, step_s=0.1, steps_left=100_000)),
    }


def _same_bits(bench: Bench) -> Figures:
    one, other = (Trainer(bench, bench.device).train(6 if bench.is_small else STEPS) for _ in range(2))
    values = all(a.tobytes() == b.tobytes() for a, b in zip(one.flats, other.flats, strict=True))
    return {"modules": values, "state": one.state == other.state, "ok": values and one.state == other.state}


def _rows(found: Found) -> list[str]:
    rows: list[tuple[object, ...]] = [("what", "found", "wanted", "as wanted")]
    for precision in LOSS_MAX:
        if own := found.get(f"{precision} beside a CPU"):
            said = (
                f"losses off by {number(own, 'loss_off'):.1e} nats at most, outer gradient by {own['gradient_off']:.2%}"
            )
            wanted = f"{LOSS_MAX[precision]:g} nats, {GRADIENT_MAX[precision]:.0%}"
            rows.append((f"{STEPS} steps in {precision} beside a CPU in float32", said, wanted, verdict(own)))
    if own := found.get("8-bit AdamW"):
        said = f"last loss {number(own, '8-bit'):.4f}, with float32 moments {number(own, 'float32'):.4f}"
        rows.append(("8-bit AdamW", said, f"off by {EIGHT_BIT_MAX:.0%} of what was learned", verdict(own)))
    if own := found.get("state there and back"):
        said = f"same bytes: {own['same_bytes']}; last loss off by {number(own, 'loss_off'):.1e} nats"
        rows.append(("state: CPU, GPU, CPU", said, f"the same bytes, {MOVED_MAX:g} nats", verdict(own)))
    if own := found.get("exact twice"):
        rows.append(("`--engine exact` twice", f"same modules: {own['modules']}, same state: {own['state']}", "both",
                     verdict(own)))  # fmt: skip
    lines = table(*rows)
    if own := found.get("choice"):
        lines += [f"- Engine, {name}: {engine}" for name, engine in own.items()] + [""]
    return lines


CASES = (
    *(
        Case(name=f"{name} beside a CPU", limit_s=90, ask=functools.partial(_beside_the_cpu, precision=name))
        for name in LOSS_MAX
    ),
    Case(name="exact twice", limit_s=60, ask=_same_bits),
    Case(name="state there and back", limit_s=60, ask=_moved),
    Case(name="8-bit AdamW", limit_s=60, ask=_eight_bit),
    Case(name="choice", limit_s=40, ask=_choice),
)
PART = Part(name="right", about="Does it compute what a CPU does?", cases=CASES, rows=_rows)
