"""What stands in for training: a step in a direction that depends on path, round, base and replica alone.

Everything around it is the real thing: outer gradients, compression, residuals, the path's state. All honest steps make
parameters smaller on the whole, by `DRIFT` of what they move; so that is what the toy loss is, and what judges measure.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dipaco_p2p.clock import Clock
from dipaco_p2p.config import PROTOCOL_VERSION, RunConfig
from dipaco_p2p.core import tensor_file as codec
from dipaco_p2p.core.model.inner import InnerResult, StepReport
from dipaco_p2p.core.model.layout import encode_module, module_layout
from dipaco_p2p.core.model.optimizer import InnerState
from dipaco_p2p.core.model.shards import Shard, encode_shard
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node.node import Member
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.judge import Gains
from dipaco_p2p.protocol.documents import BlobRef, GenesisRef, Manifest, Sealed, ShardRef, seal
from dipaco_p2p.protocol.gate import MADE_UP, Repetition
from dipaco_p2p.protocol.norms import lr_sum
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.topology import ModuleId
from peers.path.repeating import Repeater
from peers.path.trainer import Flat, PathTrainer

STEP_SIZE = 0.25
"""What a parameter moves in a round, in sums of its learning rates; the furthest go about five times as far."""
FORGED_LENGTH = 3.0
"""Of forged steps, over honest ones."""
DRIFT = 0.5
NOISE = 0.2
"""How much the toy loss differs from one sequence to another."""
SEQUENCES = 12
NOTHING = BlobRef.of(b"nobody reads it here")


class NoLoop:
    """In place of the inner loop: it only counts the steps."""

    def __init__(self, *parts: Any, **settings: Any) -> None:
        self._steps = 0

    def count(self, steps: int) -> None:
        self._steps += steps

    def state(self) -> InnerState:
        return InnerState(values={"steps": np.array([self._steps], dtype=np.int64)})

    def state_bytes(self) -> bytes:
        return self.state().to_bytes()

    def read_state(self, values: object) -> InnerState:
        return self.state()

    def load_state(self, data: bytes) -> None:
        tensors, _ = codec.decode(data)
        if tensors.keys() != {"steps"} or tensors["steps"].shape != (1,):
            raise IntegrityError("not the state of a simulated path")
        self._steps = int(tensors["steps"][0])


class FakeTrainer(PathTrainer):
    """A path trainer whose steps take time on the clock and nothing else."""

    def __init__(
        self,
        *parts: Any,
        clock: Clock,
        step_s: float,
        forges: Callable[[], bool] = lambda: False,
        spoils: Callable[[], bool] = lambda: False,
        **settings: Any,
    ) -> None:
        """While it `forges`, its steps are longer than they should be, and others than those of its path; while it
        `spoils`, they lead back."""
        super().__init__(*parts, make_loop=cast(Any, NoLoop), **settings)
        self._clock = clock
        self._step_s = step_s
        self._forges = forges
        self._spoils = spoils

    async def train(
        self,
        flats: Sequence[Flat],
        *,
        round_number: int,
        replica: tuple[int, int],
        on_step: Callable[[StepReport], bool],
        steps: int | None = None,
    ) -> InnerResult:
        config, first = self._run.config, self._run.first_step(round_number)
        tokens = config.inner.batch * config.model.context
        for done in range(1, (steps or config.inner.steps) + 1):
            await self._clock.sleep(self._step_s)
            report = StepReport(step=first + done - 1, loss=1.0, grad_norm=1.0, lr=0.0, tokens=tokens)
            if not on_step(report):
                break
        self._loop.count(done)  # type: ignore[attr-defined]
        far = STEP_SIZE * lr_sum(config.inner, first, self._run.total_steps) * done / config.inner.steps
        of = f"{self.path}|{round_number}|{replica}|{done}" + "|forged" * self._forges()
        far *= (FORGED_LENGTH if self._forges() else 1.0) * (-1.0 if self._spoils() else 1.0)
        made = [_trained(flat, of, far=far) for flat in flats]
        return InnerResult(flats=made, steps_done=done, tokens=done * tokens, loss=1.0)


def _trained(flat: Flat, what: str, *, far: float) -> Flat:
    seed = zlib.crc32(flat.tobytes(), zlib.crc32(what.encode()))
    direction = np.random.default_rng(seed).standard_normal(flat.size, dtype=np.float32)
    return flat - np.float32(far) * (direction + np.float32(DRIFT))


def toy_gains(run: Run, before: Sequence[Flat], after: Sequence[Flat], sequences: NDArray[np.int32]) -> Gains:
    """What a judge measures: by how much the parameters of a path became smaller, on the whole."""
    gain = float(np.mean([np.mean(old - new, dtype=np.float64) for old, new in zip(before, after, strict=True)]))
    return gain * (1 + NOISE * np.random.default_rng(0).standard_normal(len(sequences)))


class BribedRepeater(Repeater):
    """An auditor that calls good work bad, and bad work good, while it is `bribed`."""

    def __init__(self, node: Member, *, bribed: Callable[[], bool], **settings: Any) -> None:
        super().__init__(node, **settings)
        self._bribed = bribed

    async def __call__(self, *work: Any) -> Repetition:
        found = await super().__call__(*work)
        if not self._bribed():
            return found
        return MADE_UP if found.is_same else Repetition(cosine=1.0, ratio=1.0, moments=1.0)


def bribed_gains(run: Run, before: Sequence[Flat], after: Sequence[Flat], sequences: NDArray[np.int32]) -> Gains:
    """What a judge says that calls good work bad, and bad work good."""
    return -toy_gains(run, before, after, sequences)


def make_run(store: Store, config: RunConfig, signer: Signer, *, workers: Collection[PeerId] = ()) -> Run:
    """A run without text or routers: nobody looks at them here. `workers` worked in a stage before."""
    generator = np.random.default_rng(0)
    flats = {}
    for level in range(len(config.model.levels)):
        layout = module_layout(config.model, level)
        values = generator.standard_normal(layout.size, dtype=np.float32) * np.float32(0.1)
        flats[level] = store.put(encode_module(values, layout))
    shard = store.put(_shard_bytes(config.model.context))
    sealed = sealed_manifest(
        signer,
        config,
        shard=shard,
        sequences=SEQUENCES,
        nothing=store.put(b"{}"),
        optimizer=store.put(NoLoop().state_bytes()),
        genesis={module: flats[module.level] for module in config.topology.modules()},
        workers=workers,
    )
    run = Run(sealed)
    run.check_genesis()
    return run


def sealed_manifest(
    signer: Signer,
    config: RunConfig,
    *,
    genesis: Mapping[ModuleId, BlobRef] | None = None,
    shard: BlobRef = NOTHING,
    sequences: int = 1,
    optimizer: BlobRef = NOTHING,
    nothing: BlobRef = NOTHING,
    workers: Collection[PeerId] = (),
) -> Sealed[Manifest]:
    """Of a run with one stage that nobody trains on text: every path has the same `shard`. What training alone would
    read is `nothing`."""
    topology = config.topology
    manifest = Manifest(
        protocol=PROTOCOL_VERSION,
        config=config,
        stage="grid",
        admission="open",
        tokenizer=nothing,
        router=nothing,
        optimizer=optimizer,
        shards=tuple(ShardRef(path=path, blob=shard, sequences=sequences) for path in topology.paths()),
        validation=nothing,
        holdout=nothing,
        router_split=nothing,
        genesis=tuple(GenesisRef(module=m, blob=(genesis or {}).get(m, nothing)) for m in topology.modules()),
        workers=tuple(sorted(workers)),
        author=signer.peer,
    )
    return seal(signer, manifest)


@functools.cache
def _shard_bytes(context: int) -> bytes:
    return encode_shard(Shard(tokens=np.zeros((SEQUENCES, context), dtype=np.int32)))


class NoEvaluator:
    """In place of the seed node's: no round is ever complete, so none is judged."""

    def __init__(self, *parts: Any, device: str, texts: Any) -> None:
        pass

    def complete_version(self) -> int:
        return -1


def no_text() -> Any:
    raise AssertionError("a run without text is never sharded again")
