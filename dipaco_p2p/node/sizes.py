"""What taking part in a run takes of a machine, worked out from its config: memory, disk, bytes on the line.

The figures are the largest that the codecs can give, but for memory, which is an estimate: what is fixed is known (28
bytes a parameter, core/model/microbatch.py), what one sequence keeps on its way forward is counted by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import ModelConfig, RunConfig
from ..core.model.layout import module_layout
from ..core.model.microbatch import FIXED_BYTES, Need
from ..core.outer.compress import bytes_max
from ..topology import ModuleId, PathId
from .run import HEADER_BYTES_SPARE, Run

PROGRAM_BYTES = 300 * 2**20
"""Python, torch and the network, before any model; on a CPU they come out of the same memory."""
FLOAT_BYTES = 4
VERSIONS_KEPT = 2
STATES_KEPT, STATES_KEPT_AUDITED = 2, 4
"""Auditors ask for those before and after the steps of the last two rounds."""
MOMENTS_BYTES_A_VALUE = 2
STATE_BYTES_A_VALUE = MOMENTS_BYTES_A_VALUE + 2
"""Of a path's state: two moments in a byte each (core/model/moments.py), and a residual in bfloat16."""
VALUES_A_SCALE_BYTE = 32
"""Each moment has 4 bytes of scale for 256 values."""
STATE_HEADER_BYTES_MAX = 1 << 20
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
    manifest = run.manifest
    start = manifest.optimizer.size + manifest.tokenizer.size
    return path_needs(run.config, path, shard_bytes=run.shard(path).blob.size, start_bytes=start)


def path_needs(config: RunConfig, path: PathId, *, shard_bytes: int, start_bytes: int) -> Needs:
    """The same before there is a manifest; `start_bytes` are those of the first optimizer's state and the tokenizer."""
    sizes = [module_size(config, module) for module in path.modules()]
    up = sum(bytes_max(size, config.compression.uplink) for size in sizes)
    down = sum(bytes_max(size, config.compression.downlink) for size in sizes)
    parameters = sum(sizes)
    snapshots = FLOAT_BYTES * parameters
    kept = states_kept(config) * state_bytes_max(config, path) + VERSIONS_KEPT * (snapshots + down)
    return Needs(
        parameters=parameters,
        memory=memory_of(config.model, parameters),
        first_down=shard_bytes + snapshots + start_bytes,
        round_up=up,
        round_down=down,
        disk=shard_bytes + kept + up + max(led_bytes(config, module) for module in path.modules()),
    )


def module_size(config: RunConfig, module: ModuleId) -> int:
    """Parameters of a module."""
    return module_layout(config.model, module.level).size


def states_kept(config: RunConfig) -> int:
    """How many states of a path a volunteer keeps."""
    return STATES_KEPT_AUDITED if config.audited else STATES_KEPT


def state_bytes_max(config: RunConfig, path: PathId) -> int:
    """Size of the largest state that a path can have, beyond which nobody fetches it."""
    values = sum(module_size(config, module) for module in path.modules())
    return STATE_BYTES_A_VALUE * values + values // VALUES_A_SCALE_BYTE + STATE_HEADER_BYTES_MAX


def memory_of(model: ModelConfig, parameters: int) -> Need:
    """As `microbatch.measure` would find it, without making the model."""
    blocks = sum(level.blocks for level in model.levels)
    block = FLOAT_BYTES * model.context * (BLOCK_WIDTHS * model.width + BLOCK_FFN_WIDTHS * model.ffn_width)
    sequence = blocks * block + FLOAT_BYTES * model.context * 3 * model.width
    return Need(fixed=FIXED_BYTES * parameters, sequence=sequence, checkpointed=min(2 * sequence // blocks, sequence))


def led_bytes(config: RunConfig, module: ModuleId) -> int:
    """What the leader of `module` keeps besides: its outer state, and a round's contributions."""
    size = module_size(config, module)
    paths = len(config.topology.paths_through(module))
    return outer_state_bytes(size) + paths * bytes_max(size, config.compression.uplink)


def snapshot_bytes(size: int) -> int:
    """About the file of a module's parameters."""
    return FLOAT_BYTES * size + HEADER_BYTES_SPARE


def outer_state_bytes(size: int) -> int:
    """Momentum and residual of a module."""
    return 2 * FLOAT_BYTES * size
