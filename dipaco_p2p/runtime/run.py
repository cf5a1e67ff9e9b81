"""A run as a peer holds it: the checked manifest, and the sizes and bounds that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..config import PROTOCOL_VERSION, RunConfig
from ..core.compress import BLOCK
from ..core.layout import Layout, module_layout
from ..errors import IntegrityError, WrongRun
from ..protocol.documents import Manifest, Sealed, ShardRef, run_name, unseal
from ..protocol.versions import genesis_version
from ..topology import ModuleId, PathId, Topology

HEADER_BYTES_SPARE = 4096


@dataclass(frozen=True)
class Run:
    """The manifest and what follows from it."""

    sealed: Sealed[Manifest]

    @cached_property
    def id(self) -> str:
        """The run's fingerprint."""
        return self.sealed.id

    @property
    def name(self) -> str:
        return run_name(self.id)

    @property
    def manifest(self) -> Manifest:
        return self.sealed.document

    @property
    def config(self) -> RunConfig:
        return self.manifest.config

    @cached_property
    def topology(self) -> Topology:
        return self.config.topology

    def layout(self, module: ModuleId) -> Layout:
        """Names and shapes of the module's tensors."""
        return module_layout(self.config.model, module.level)

    def shard(self, path: PathId) -> ShardRef:
        return self.manifest.shards[self.topology.number(path)]

    def shard_tokens(self, path: PathId) -> int:
        return self.shard(path).sequences * self.config.model.context

    @property
    def tokens_full(self) -> int:
        """Tokens of a full round of inner steps."""
        return self.config.inner.steps * self.config.inner.batch * self.config.model.context

    def payload_bytes_max(self, module: ModuleId) -> int:
        """Largest compressed outer gradient: a code per value, a scale per block, a header."""
        size = self.layout(module).size
        return size + 4 * -(-size // BLOCK) + HEADER_BYTES_SPARE

    def snapshot_bytes_max(self, module: ModuleId) -> int:
        """Largest snapshot, and half of the largest outer state."""
        return 4 * self.layout(module).size + 64 * HEADER_BYTES_SPARE

    def check_genesis(self) -> None:
        """Raise IntegrityError when the genesis does not have the sizes that the model says."""
        for module in self.topology.modules():
            ref = genesis_version(self.manifest, module).snapshot
            if not 4 * self.layout(module).size <= ref.size <= self.snapshot_bytes_max(module):
                raise IntegrityError(f"the genesis of {module} has {ref.size} bytes, which does not fit the model")


def open_run(value: object, *, expected: str | None = None) -> Run:
    """Check a manifest from outside; `expected` is the start of the run's id. Raises WrongRun or IntegrityError."""
    document = value.get("document") if isinstance(value, dict) else None
    protocol = document.get("protocol") if isinstance(document, dict) else None
    if isinstance(protocol, int) and protocol != PROTOCOL_VERSION:
        raise WrongRun(
            f"the run speaks protocol {protocol}, this program speaks {PROTOCOL_VERSION}",
            hint="install the version of dipaco-p2p that the coordinator names",
        )
    run = Run(unseal(Manifest, value))
    if expected is not None and not run.id.startswith(expected.removeprefix("run:")):
        raise WrongRun(
            f"this address serves {run.name}, not run:{expected.removeprefix('run:')[:8]}",
            hint="ask the coordinator for the line to join with, or leave --run out to join what is there",
        )
    run.check_genesis()
    return run
