"""A run as a peer holds it: the checked manifest, and the sizes and bounds that follow from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..config import RunConfig, check_protocol
from ..core.model.layout import Layout, module_layout
from ..core.outer.codec import Compressed
from ..core.outer.compress import bytes_max, decode_compressed
from ..errors import IntegrityError
from ..protocol.decrees import Decree, Rebuilt
from ..protocol.documents import (
    BlobRef,
    Contribution,
    Manifest,
    ModuleVersion,
    Sealed,
    Sharding,
    ShardRef,
    run_name,
    unseal,
)
from ..protocol.gate import Appraisal
from ..protocol.manifest import WARMUP
from ..protocol.norms import Norms, lr_percent, lr_sum
from ..protocol.standing import Standings
from ..protocol.verdicts import Verdicts
from ..topology import ModuleId, PathId, Topology

HEADER_BYTES_SPARE = 4096
Limit = tuple[BlobRef | None, int]
"""A blob that is named, and the most bytes that it may have."""
APPRAISALS_BYTES_MAX = 16 * 2**20
"""What judges said of one version takes no more."""


@dataclass(frozen=True)
class Run:
    """One stage of a run: its manifest and what follows from it."""

    sealed: Sealed[Manifest]
    _shardings: dict[int, Sealed[Sharding]] = field(default_factory=dict, compare=False, repr=False)
    """What the coordinator published since."""
    _growth: list[Sealed[Decree]] = field(default_factory=list, compare=False, repr=False)
    """The decree that ends this stage, once this peer has heard of it."""

    @cached_property
    def id(self) -> str:
        """The run's fingerprint."""
        return self.sealed.id

    @property
    def name(self) -> str:
        return run_name(self.origin)

    @property
    def manifest(self) -> Manifest:
        return self.sealed.document

    @cached_property
    def config(self) -> RunConfig:
        """What holds in this stage; `manifest.config` is the whole run's."""
        return self.manifest.stage_config

    @property
    def is_last_stage(self) -> bool:
        """Whether the run is over when this stage is, as far as this peer has heard."""
        return self.manifest.stage != WARMUP and not self._growth

    @property
    def growth(self) -> Decree | None:
        """The decree by which this stage ends early and a larger grid follows, if this peer has heard of one."""
        return self._growth[0].document if self._growth else None

    def end_early(self, sealed: Sealed[Decree]) -> None:
        """Take over the growth that the coordinator has decreed for this stage; the first one holds."""
        if sealed.document.stage == self.id and not self._growth:
            self._growth.append(sealed)

    @property
    def rounds(self) -> int:
        """The version with which every module of this stage ends."""
        return self.config.rounds.rounds if self.growth is None else min(self.growth.to, self.config.rounds.rounds)

    @property
    def rounds_after(self) -> int:
        """Rounds of the run that come in later stages."""
        if self.manifest.stage == WARMUP:
            return self.manifest.config.rounds.rounds
        return self.config.rounds.rounds - self.rounds

    @property
    def origin(self) -> str:
        """The id of the run's first stage: what a run is known by."""
        return self.manifest.origin or self.id

    def first_step(self, round_number: int) -> int:
        """Place of the round's first inner step in the schedule of `total_steps`."""
        return self.manifest.first_step + round_number * self.config.inner.steps

    @property
    def total_steps(self) -> int:
        """Inner steps of one path over all stages."""
        return self.manifest.config.total_steps

    def norms(self, module: ModuleId, history: Sequence[ModuleVersion]) -> Norms:
        """What outer gradients of `module` are measured by after the versions of `history`, the oldest first."""
        return Norms(
            history=history,
            paths=len(self.topology.paths_through(module)),
            size=self.layout(module).size,
            lr_sum=lambda base: lr_sum(self.config.inner, self.first_step(base), self.total_steps),
        )

    def lr_percent(self, contribution: Contribution) -> int:
        """Of its steps, as its recipe has them; 100 for one that names none."""
        if contribution.recipe is None:
            return 100
        return lr_percent(self.config.inner, self.first_step(contribution.recipe.round), self.total_steps)

    def verdicts(self, appraisals: Iterable[Sealed[Appraisal]], standings: Standings) -> Verdicts:
        """What follows from these appraisals for the next version of a chain with these `standings`."""
        return Verdicts(
            appraisals,
            standings,
            audited=self.config.audited,
            coordinator=self.manifest.author,
            earlier=self.manifest.workers,
            tokens_max=self.tokens_full,
        )

    @cached_property
    def topology(self) -> Topology:
        return self.config.topology

    def layout(self, module: ModuleId) -> Layout:
        """Names and shapes of the module's tensors."""
        return module_layout(self.config.model, module.level)

    def sharding(self, number: int) -> Sealed[Sharding] | None:
        """A sharding after the manifest's own, if this peer has learnt of it."""
        return self._shardings.get(number)

    @property
    def shardings(self) -> list[Sealed[Sharding]]:
        """All that this peer has learnt of, the oldest first."""
        return [self._shardings[number] for number in sorted(self._shardings)]

    def learn(self, sealed: Sealed[Sharding]) -> None:
        """A further sharding; raises IntegrityError unless it is the coordinator's, for this run and grid, one of those
        that the run file announces, and none of its shards is larger than all shards of the manifest together. All
        of it is kept here, and the shards are fetched: who has joined has agreed to the manifest, and to no more."""
        sharding, rounds = sealed.document, self.config.routing.reshard_rounds
        if sharding.author != self.manifest.author or sharding.run != self.id:
            raise IntegrityError(f"sharding {sharding.number} is not this run's coordinator's")
        if [ref.path for ref in sharding.shards] != list(self.topology.paths()):
            raise IntegrityError(f"sharding {sharding.number} does not list the grid's paths in order")
        if rounds[sharding.number - 1 : sharding.number] != (sharding.from_round,):
            raise IntegrityError(f"a sharding {sharding.number} from round {sharding.from_round} on is not announced")
        if max(ref.blob.size for ref in sharding.shards) > self._text_bytes:
            raise IntegrityError(
                f"a shard of sharding {sharding.number} is larger than all text that the stage began with"
            )
        if self._shardings.setdefault(sharding.number, sealed).document != sharding:
            raise IntegrityError(f"the coordinator signed two shardings with the number {sharding.number}")

    @cached_property
    def _text_bytes(self) -> int:
        """Of all shards of the manifest: each sequence is in one, at least."""
        return sum(ref.blob.size for ref in self.manifest.shards)

    def sharding_at(self, round_number: int) -> int:
        """The number of the newest known sharding that holds in a round; 0 is the manifest's own."""
        valid = [number for number, known in self._shardings.items() if known.document.from_round <= round_number]
        return max(valid, default=0)

    def shard(self, path: PathId, sharding: int = 0) -> ShardRef:
        """Raises KeyError for a sharding that this peer does not know."""
        shards = self._shardings[sharding].document.shards if sharding else self.manifest.shards
        return shards[self.topology.number(path)]

    def shard_tokens(self, path: PathId, sharding: int = 0) -> int:
        return self.shard(path, sharding).sequences * self.config.model.context

    @property
    def tokens_full(self) -> int:
        """Tokens of a full round of inner steps."""
        return self.config.inner.steps * self.config.inner.batch * self.config.model.context

    def payload_bytes_max(self, module: ModuleId) -> int:
        """Largest compressed outer gradient."""
        return bytes_max(self.layout(module).size, self.config.compression.uplink)

    def read_contribution(self, payload: bytes, module: ModuleId) -> Compressed:
        """The outer gradient of a contribution; raises IntegrityError."""
        return decode_compressed(payload, size=self.layout(module).size, codec=self.config.compression.uplink)

    def read_update(self, blob: bytes, module: ModuleId) -> Compressed:
        """What takes a module from one version to the next; raises IntegrityError."""
        return decode_compressed(blob, size=self.layout(module).size, codec=self.config.compression.downlink)

    def snapshot_bytes_max(self, module: ModuleId) -> int:
        """Largest snapshot, and half of the largest outer state."""
        return _snapshot_bytes_max(self.layout(module).size)

    def check_sizes(self, version: ModuleVersion) -> None:
        """Raise IntegrityError for a version that names a blob which is larger than any can be: before it is fetched,
        for its bytes come into memory."""
        size = self.layout(version.module).size
        limits = (
            *self._state_limits(version.module, version.snapshot, version.state),
            (version.update, bytes_max(size, self.config.compression.downlink)),
            (version.appraisals, APPRAISALS_BYTES_MAX),
        )
        _check_limits(f"version {version.version} of {version.module}", limits)

    def check_rebuilt(self, module: ModuleId, rebuilt: Rebuilt) -> None:
        """Raise IntegrityError for a decree whose rebuilt parameters or outer state are larger than any can be."""
        _check_limits(f"a rollback of {module}", self._state_limits(module, rebuilt.snapshot, rebuilt.state))

    def _state_limits(self, module: ModuleId, snapshot: BlobRef, state: BlobRef | None) -> tuple[Limit, Limit]:
        most = self.snapshot_bytes_max(module)
        return (snapshot, most), (state, 2 * most)

    def check_genesis(self) -> None:
        """Raise IntegrityError when the genesis does not have the sizes that the model says."""
        sizes = [module_layout(self.config.model, level).size for level in range(len(self.topology.widths))]
        for ref in self.manifest.genesis:
            size = sizes[ref.module.level]
            most = _snapshot_bytes_max(size)
            if not 4 * size <= ref.blob.size <= most:
                raise IntegrityError(
                    f"the genesis of {ref.module} has {ref.blob.size} bytes, which does not fit the model"
                )
            if ref.state is not None and ref.state.size > 2 * most:
                raise IntegrityError(
                    f"the outer state of {ref.module} has {ref.state.size} bytes, which does not fit the model"
                )


def _check_limits(name: str, limits: Iterable[Limit]) -> None:
    for ref, limit in limits:
        if ref is not None and ref.size > limit:
            raise IntegrityError(f"{name} names a blob of {ref.size} bytes, limit {limit}")


def _snapshot_bytes_max(size: int) -> int:
    return 4 * size + 64 * HEADER_BYTES_SPARE


def open_run(value: object) -> Run:
    """Check a manifest from outside. Raises WrongRun or IntegrityError."""
    run = read_run(value)
    run.check_genesis()
    return run


def read_run(value: object) -> Run:
    """The same, but for its genesis: what that costs follows from the model, so look first who signed it."""
    document = value.get("document") if isinstance(value, dict) else None
    protocol = document.get("protocol") if isinstance(document, dict) else None
    if isinstance(protocol, int):
        check_protocol(protocol, who="the run")
    return Run(unseal(Manifest, value))
