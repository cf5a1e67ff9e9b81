"""What taking part in a run takes of a machine, worked out from its manifest alone: memory, disk, bytes on the line.

The figures are the largest that the codecs can give, but for memory, which is an estimate: what is fixed is known (28
bytes a parameter, core/microbatch.py), what one sequence keeps on its way forward is counted by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from dipaco_p2p.config import ModelConfig
from dipaco_p2p.core.compress import bytes_max
from dipaco_p2p.core.microbatch import FIXED_BYTES, Need
from dipaco_p2p.runtime.run import Run
from dipaco_p2p.topology import PathId

from .trainer import state_bytes_max

PROGRAM_BYTES = 300 * 2**20
"""Python, torch and the network, before any model; on a CPU they come out of the same memory."""
FLOAT_BYTES = 4
VERSIONS_KEPT = 2
STATES_KEPT = 2
BLOCK_WIDTHS = 11
"""Values of `width` that a block keeps for each token: two norms with their inputs, q, k, v as made and as turned,
the mixed heads, the output."""
BLOCK_FFN_WIDTHS = 4
"""And of `ffn_width`: gate, its silu, up, their product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What one path of a run takes, in bytes."""

    parameters: int
    """How many the path has; not bytes."""
    memory: Need
    first_down: int
    """Before the first step: the shard, the modules, the state of the optimizer."""
    round_up: int
    round_down: int
    disk: int
    """Shard, states and versions of the path, and what leading one of its modules keeps."""

    def least_memory(self, *, is_cpu: bool) -> int:
        """With one sequence at a time and checkpointing: with less, no step is possible."""
        return self.memory.fixed + self.memory.checkpointed + (PROGRAM_BYTES if is_cpu else 0)


def needs_of(run: Run, path: PathId) -> Needs:
    """What training `path` takes."""
    sizes = [run.layout(module).size for module in path.modules()]
    parameters, codecs = sum(sizes), run.config.compression
    up = sum(bytes_max(size, codecs.uplink) for size in sizes)
    down = sum(bytes_max(size, codecs.downlink) for size in sizes)
    snapshots = FLOAT_BYTES * parameters
    shard = run.shard(path).blob.size
    kept = STATES_KEPT * state_bytes_max(run, path) + VERSIONS_KEPT * (snapshots + down)
    return Needs(
        parameters=parameters,
        memory=memory_of(run.config.model, parameters),
        first_down=shard + snapshots + run.manifest.optimizer.size + run.manifest.tokenizer.size,
        round_up=up,
        round_down=down,
        disk=shard + kept + up + _led(run, path),
    )


def memory_of(model: ModelConfig, parameters: int) -> Need:
    """As `microbatch.measure` would find it, without making the model."""
    blocks = sum(level.blocks for level in model.levels)
    block = FLOAT_BYTES * model.context * (BLOCK_WIDTHS * model.width + BLOCK_FFN_WIDTHS * model.ffn_width)
    sequence = blocks * block + FLOAT_BYTES * model.context * 3 * model.width
    return Need(fixed=FIXED_BYTES * parameters, sequence=sequence, checkpointed=min(2 * sequence // blocks, sequence))


def _led(run: Run, path: PathId) -> int:
    """What the leader of the largest module of `path` keeps besides: its outer state, and a round's contributions."""
    module = max(path.modules(), key=lambda module: run.layout(module).size)
    paths = sum(module in other.modules() for other in run.topology.paths())
    return 2 * FLOAT_BYTES * run.layout(module).size + paths * run.payload_bytes_max(module)
