"""What the pages show: one moment of a run. Everything is immutable, and made from the records (ledger.py).

Figures are of three kinds, and every row says of which (`Mark`): what the coordinator recomputed, what others than its
author have signed, and what somebody says of itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.standing import Findings
from dipaco_p2p.topology import ModuleId, PathId

from .words import Words


class Mark(StrEnum):
    """Who stands for a figure."""

    VERIFIED = "verified"
    """The coordinator made the version again from its parent and its contributions, to the bit, and signed it. Of a
    loss: a peer that is independent of it measured the same, and signed that (protocol/judgement.py)."""
    RECEIPTED = "receipted"
    """Another peer than its author made it again, or has it on disk, and signed so. Of a loss: only the coordinator
    measured it, and signed that."""
    CLAIMED = "claimed"
    """Its author's word."""


class PathState(StrEnum):
    """What goes on with a path."""

    TRAINING = "training"
    """A live peer claims it."""
    FREE = "free"
    """Nobody does, and it has rounds to go."""
    DONE = "done"
    """All its modules have their last version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInfo:
    """One stage of the run: the warm-up, the grid, or a larger grid."""

    id: str
    name: str
    """`warmup`, `grid`, `grid-2` and so on."""
    grid: str
    """As in `2x2`."""
    modules: int
    paths: int
    rounds: int
    steps: int
    """Inner steps of a round."""
    parameters: int
    """Of all modules together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What does not change."""

    name: str
    origin: str
    """The id of the run's first stage: what `dipaco-peer join --run` takes."""
    coordinator: PeerId
    stages: tuple[StageInfo, ...]
    """The first one first; the last one is open."""
    settings: tuple[tuple[str, str], ...]
    """Section and key of the run file, and its value, as text."""
    rounds_after: int = 0
    """Of the stage that follows the open one."""

    @property
    def stage(self) -> StageInfo:
        return self.stages[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRow:
    """One contribution in one version."""

    contribution: str
    peer: PeerId
    path: PathId
    base_version: int
    weight: float
    tokens: int
    credit: float
    loss: float
    """Mean training loss, in nats per token; its author's word."""
    bytes: int | None
    """Of the payload; None while the contribution itself was not seen."""
    steps: int | None
    has_receipt: bool
    """Whether the leader's signed receipt was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossChecks:
    """Who stands for a loss that the coordinator has signed."""

    mark: Mark
    agree: int = 0
    """Measurements of its paths by others that gave the same, within the tolerance."""
    differ: int = 0
    """Those that did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One path's loss at one round, measured again by another peer than the coordinator."""

    stage: str
    version: int
    path: PathId
    peer: PeerId
    loss: float
    tokens: int
    published: float
    """What the coordinator signed."""
    agrees: bool
    is_independent: bool
    """Whether no version of the path's modules counts work of this peer on this path."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """One work that a peer has repeated, as a version names it."""

    work: str
    """Its id: the same in the chains of all modules of its path."""
    peer: PeerId
    """The auditor."""
    tokens: int
    credit: float
    """0 for what earns nothing (standing.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecreeRow:
    """One order of the coordinator about the run."""

    number: int
    at_s: float
    """Unix time on the coordinator's clock."""
    act: str
    """As in protocol/decrees.py: `ban`, say."""
    reason: str
    """The coordinator's words; may be empty where something is undone."""
    peer: PeerId | None = None
    """Who is banned, admitted again, appointed or dismissed, or whose name is hidden or shown again."""
    stage: str = ""
    """Of a rollback, as what follows, or of a growth; else empty."""
    module: ModuleId | None = None
    to: int | None = None
    """The version whose parameters come back; of a growth, the last one of its stage."""
    version: int | None = None
    """The version that carries it out; None until it is made."""
    ended_by: int | None = None
    """The number of the next decree about the same thing; None while this one is the newest."""
    levels: str = ""
    """Of a growth: the grid that follows, as in `2x4`; else empty."""
    corpus: str = ""
    """Of a growth that brings text: the digest of its sequences; else empty."""
    without: tuple[PeerId, ...] = ()
    """Of a rollback that keeps the work of others: whose is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRow:
    """Why a version has the parameters of an earlier one, or was rebuilt from it: it shows the coordinator's decree."""

    decree: int
    """Its number."""
    to: int
    """The earlier version."""
    reason: str
    at_s: float
    """Unix time of the decree on the coordinator's clock."""
    without: tuple[PeerId, ...] = ()
    """Whose contributions were left out when the versions since were rebuilt; empty where they were not."""

    @property
    def words(self) -> str:
        """What became of the module."""
        return f"rebuilt from version {self.to} on" if self.without else f"back to version {self.to}"

    @property
    def told(self) -> str:
        """The same, of the module, as a sentence ends."""
        return f"{'was' if self.without else 'went'} {self.words}"

    @property
    def is_now(self) -> str:
        """The same, of the version that carries it out."""
        return f"was {self.words}" if self.without else f"is version {self.to} again"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    """One version of one module."""

    stage: str
    module: ModuleId
    version: int
    digest: str
    parent: str
    """Digest; empty for version 0."""
    mark: Mark
    author: PeerId
    """Who led the module."""
    cosigners: tuple[PeerId, ...]
    term: int
    snapshot_bytes: int
    update_bytes: int
    lr: float
    momentum: float
    clip_norm: float | None
    is_fresh: bool
    """Made without the outer state of its parent, which was lost."""
    loss_before: float | None
    """Nats per token of the held-out text whose path goes through the module, at the round before; None if that is not
    judged. Of the coordinator, signed."""
    loss_after: float | None
    made_s: float | None
    """Unix time: when it was judged, as the coordinator signed it; before that when it was first seen here."""
    shares: tuple[ShareRow, ...]
    loss_checks: LossChecks | None
    """Of the loss after; None where there is none."""
    rollback: RollbackRow | None = None
    """None of a version that contributions made, or that a stage began with."""
    findings: Findings = Findings()
    """What judges and auditors found of whom."""
    audits: tuple[AuditRow, ...] = ()

    @property
    def contributors(self) -> int:
        return len({share.peer for share in self.shares})

    @property
    def tokens(self) -> int:
        return sum(share.tokens for share in self.shares)

    @property
    def credit(self) -> float:
        """For its shares and its audits."""
        return math.fsum([share.credit for share in self.shares] + [audit.credit for audit in self.audits])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """The whole grid after one round, judged by the coordinator on held-out text, each document routed once."""

    stage: str
    version: int
    sharding: int
    loss: float
    """Nats per token."""
    tokens: int
    at_s: float
    checks: LossChecks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow:
    """A contribution that the chain does not count: lost, though there was a receipt, or rejected, as a leader says."""

    stage: str
    module: ModuleId
    round: int
    contribution: str
    peer: PeerId
    kind: str
    """`lost` or `rejected`."""
    reason: str
    claimed_by: PeerId
    """The leader whose word the reason is; empty if it follows from signed records alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One module of the open stage, now."""

    module: ModuleId
    version: int
    digest: str
    loss: float | None
    leader: PeerId | None
    mirrors: tuple[PeerId, ...]
    term: int
    paths: int
    open_contributions: int
    """In its open round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRow:
    """One path of the open stage, now."""

    path: PathId
    state: PathState
    round: int
    """The version that all its modules have."""
    peers: tuple[PeerId, ...]
    """Who claims it."""
    loss: float | None
    best_round: int | None
    """The round that it is served with."""
    covered_s: float | None
    """Unix time: since when it is in this state, as far as it was seen."""
    checks: LossChecks | None
    """Of its loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributorRow:
    """One peer whose work is in a version, or who takes part now."""

    peer: PeerId
    rank: int
    credit: float
    recent: float
    """Credit a day, recently: older credit counts half for each half-life that has passed."""
    tokens: int
    contributions: int
    lost: int
    versions: int
    """Versions that count it."""
    rejected: int = 0
    """Its contributions that leaders say they refused; it changes no figure."""
    checks: int = 0
    """Losses that it measured again."""
    paths: tuple[PathId, ...]
    last_s: float | None
    """When the newest version that counts it was judged, or it was last seen alive."""
    is_alive: bool
    doing: str
    """Its own word: `training`, say. Empty when it is not alive."""
    repeated: int = 0
    """Works of it that auditors could repeat, as versions note: one for each module of its path."""
    forged: int = 0
    """Works of it that auditors found forged; likewise."""
    audits: int = 0
    """Works of others that it has repeated, and earns credit for."""
    audit_credit: float = 0.0
    """So much of its credit."""
    standings: tuple[tuple[ModuleId, str], ...] = ()
    """In words, in the modules of the open stage whose versions count or judge work of it; the gravest first."""
    name: str = ""
    """What it called itself last, its own word; empty without one, while it is banned, and by decree."""
    team: str = ""
    """Likewise."""

    @property
    def standing(self) -> str:
        """The gravest of them in words, or an empty text."""
        return self.standings[0][1] if self.standings else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that is shown at one moment."""

    run: RunInfo
    taken_s: float
    """Unix time."""
    heard_s: float | None
    """When the swarm last answered; None before it ever did."""
    state: str
    """`training`, `complete`, `frozen` by decree, or `waiting`: for paths to be claimed."""
    peers_alive: int
    peers_training: int
    paths_covered: int
    credit_total: float
    refused: Mapping[str, int]
    """Records that were not believed, by reason."""
    modules: tuple[ModuleRow, ...]
    paths: tuple[PathRow, ...]
    rounds: tuple[RoundRow, ...]
    """In order."""
    versions: tuple[VersionRow, ...]
    """By stage, module, version."""
    losses: tuple[LossRow, ...]
    checks: tuple[CheckRow, ...]
    """By stage, round, path, peer."""
    contributors: tuple[ContributorRow, ...]
    """By rank."""
    join: str
    """The line that volunteers join with, if whoever runs this said it."""
    decrees: tuple[DecreeRow, ...] = ()
    """Of all stages, the oldest first."""
    peers_relayed: int = 0
    """Of those alive, how many are dialled through relays."""
    words: Words = Words()
    """The coordinator's own; nothing on a page that somebody else serves."""
