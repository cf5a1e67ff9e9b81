"""Every call of a run: what is asked, what is answered, who answers, and the reasons to refuse.

How they travel, and what is checked before a handler or a caller sees one: swarm/calls.py. Every call is idempotent.
The docstrings here become the table of calls in docs/protocol.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from ..canonical import is_digest
from ..config import LEVELS_MAX, MODULES_MAX
from ..errors import ConfigError
from ..protocol.decrees import DECREES_MAX, Decree
from ..protocol.documents import (
    MIRRORS_MAX,
    BlobRef,
    Contribution,
    Custody,
    Grant,
    ModuleVersion,
    Receipt,
    Rejection,
    Scores,
    Sealed,
    Sharding,
    require_peers,
)
from ..protocol.gate import Appraisal
from ..protocol.invitations import LINKS_MAX, Invitation
from ..protocol.judgement import Check, Judgement
from ..protocol.keeping import NONCE_CHARS, PROOF_BYTES_MAX, KeepersCount
from ..protocol.reasons import ADMISSION, COMMITMENT, Reason
from ..protocol.signing import PeerId, require_digest
from ..protocol.versions import Branch
from ..strict import bounded
from ..swarm.api import Reply
from ..swarm.calls import CALLS as CALLS  # with those below: all of a run
from ..swarm.calls import COUNT_MAX, Done, Request, call
from ..topology import ModuleId, PathId
from .items import CheckPage, Page

WAIT_MAX_S = 10.0
"""Longest wait for a new version in one call; well below a call's own time limit."""
IDS_MAX = 256
"""Contributions that one request may ask for."""
APPRAISALS_MAX = 64
"""Of one request; with about 1 KB each, they fit its header."""
LEADERS, MIRRORS, SEED = "leaders", "mirrors, the seed", "the seed"

R_co = TypeVar("R_co", covariant=True)


# -- of a whole run


@call("run.manifest")
class GetManifests(Request[Reply]):
    """The signed manifests of all stages so far, the first one first, as a JSON list."""


@call("run.decrees")
class GetDecrees(Request[Page[Decree]]):
    """The coordinator's decrees that follow number `after`."""

    after: int = 0


@call("run.shardings")
class GetShardings(Request[Page[Sharding]]):
    """The shardings that follow number `after`."""

    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """What to score: a path composed of these snapshots, from the first level on. Empty when nothing is wanted."""

    sharding: int | None = None
    path: PathId | None = None
    snapshots: tuple[BlobRef, ...] | None = None
    wait: bool | None = None
    """Others are at it: ask again later."""

    def __post_init__(self) -> None:
        if len({self.sharding is None, self.path is None, self.snapshots is None}) > 1:
            raise ConfigError("`sharding`, `path` and `snapshots` go together")


@call("run.work", by=SEED)
class GetWork(Request[Scoring]):
    """A path to score for the next sharding."""

    path: str = ""
    """The asker's own, if it is wanted; or empty."""


@call("run.scores", by=SEED, refuses=(Reason.PAYLOAD_MISSING, Reason.WRONG_RUN, Reason.OTHER, Reason.UNKNOWN_PEER))
class GiveScores(Request[Done]):
    """The scores of a path, whose table was uploaded."""

    scores: Sealed[Scores]


@call("run.judgements", by=SEED)
class GetJudgements(Request[Page[Judgement]]):
    """The judgements of round `from` and those that follow."""

    from_: int = bounded(low=0)


@call(
    "run.check",
    by=SEED,
    refuses=(
        Reason.NOT_AUTHOR,
        Reason.WRONG_RUN,
        Reason.WRONG_PATH,
        Reason.UNKNOWN_BASE,
        Reason.OTHER,
        Reason.ALREADY_CONTRIBUTED,
        Reason.UNKNOWN_PEER,
        Reason.ENOUGH,
    ),
)
class GiveCheck(Request[Done]):
    """A check of a judged round, to be kept; or what `run.measure` asked for."""

    check: Sealed[Check]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to measure: a path, composed of these snapshots, on what the router of a sharding gives it where untrained
    paths get nothing. Empty when nothing is wanted."""

    path: PathId | None = None
    version: int = bounded(0, low=0)
    sharding: int = bounded(0, low=0)
    snapshots: tuple[BlobRef, ...] = bounded((), items=LEVELS_MAX)
    untrained: tuple[PathId, ...] = bounded((), items=MODULES_MAX)
    wait: bool | None = None  # more will be wanted later


@call("run.measure", by="the coordinator's seed")
class GetMeasure(Request[Wanted]):
    """A path of the coordinator's choice, for a round that volunteers measure for it."""


@call("run.checks", by=SEED)
class GetChecks(Request[CheckPage]):
    """The checks from number `from` on."""

    from_: int = bounded(low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The round that each path is served with; all paths are named, or none before a round was judged."""

    rounds: dict[str, int]
    losses: dict[str, float] = field(default_factory=dict)
    """Nats per token on the validation part, where they are known."""


@call("run.serving", by=SEED)
class GetServing(Request[Serving]):
    """The round that each path is served with."""


# -- of a module, to who leads it


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipted:
    """The contribution is on disk, and has a place."""

    receipt: Sealed[Receipt]


@call("module.contribute", by=LEADERS, refuses=(Reason.PAYLOAD_MISSING, *ADMISSION))
class Contribute(Request[Receipted]):
    """A contribution, by its author, whose payload was uploaded."""

    contribution: Sealed[Contribution]
    sharding: Sealed[Sharding] | None = None
    """The one that the contribution names, for a leader that has not heard of it."""
    invitations: tuple[Sealed[Invitation], ...] | None = bounded(None, items=LINKS_MAX)
    """From the coordinator's down to the author's own, for a run of the invited."""


@call("module.next", by=LEADERS, refuses=(Reason.NOT_LEADER, Reason.UNKNOWN_BASE))
class GetVersions(Request[Page[ModuleVersion]]):
    """The published versions that follow `after`; empty if there is none after `wait_s`."""

    module: ModuleId
    after: int = bounded(low=0)
    digest: str | None = None
    """Of that version, if the caller has it; or empty."""
    weight: int | None = None
    """Of that version, as its chain counts it."""
    wait_s: float = bounded(low=0.0, high=WAIT_MAX_S)

    def __post_init__(self) -> None:
        if self.digest and not is_digest(self.digest):
            raise ConfigError(f"`digest` is `{self.digest[:80]}`")


@call("module.round", by=LEADERS, refuses=(Reason.NOT_LEADER,))
class GetOpenRound(Request[Reply]):
    """The module's open round."""

    module: ModuleId


@call("module.receipts", by=LEADERS, refuses=(Reason.NOT_LEADER,))
class GetReceipts(Request[Page[Receipt]]):
    """The receipts of the open round and the ones before, by contribution id."""

    module: ModuleId
    after: str = ""
    """Contribution id, empty at first."""


@call("module.rejections", by=LEADERS, refuses=(Reason.NOT_LEADER,))
class GetRejections(Request[Page[Rejection]]):
    """The leader's notes on what it refused in the open round and the ones before, by contribution id."""

    module: ModuleId
    after: str = ""
    """Contribution id, empty at first."""


@call("module.mandate", refuses=(Reason.WRONG_MODULE,))
class GetMandate(Request[Page[Grant]]):
    """The newest mandate's grants, the oldest first."""

    module: ModuleId


@dataclass(frozen=True, slots=True, kw_only=True)
class Appraised:
    """The work was measured."""

    appraisal: Sealed[Appraisal]


@call(
    "module.appraise",
    by="volunteers that can be dialled, the seed",
    refuses=(Reason.NOT_LEADER, Reason.PAYLOAD_MISSING, Reason.FULL, Reason.OTHER),
)
class Appraise(Request[Appraised]):
    """Measure the work that a contribution is a part of, for the module's leader; and repeat it, if that is wanted.
    While that takes, the answer is `busy`, and the caller asks again; while another work is repeated, it is `full`."""

    contribution: Sealed[Contribution]
    sharding: Sealed[Sharding] | None = None
    is_audit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A leader's signature of a work's id, kind `draw` (protocol/gate.py)."""

    signature: str


@call("module.draw", by=LEADERS, refuses=(Reason.NOT_LEADER, Reason.CONTRIBUTION_MISSING))
class GetDraw(Request[Draw]):
    """This leader's part of the draw that says who judges a work: for other leaders, once it has taken the work."""

    module: ModuleId
    work: str

    def __post_init__(self) -> None:
        require_digest(self.work)


# -- of a module, to whoever keeps its chain


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRequest(Request[R_co]):
    """About one module's chain. A receiver that does not know the grant asks the caller for its mandate first."""

    module: ModuleId
    grant: Sealed[Grant] | None = None
    """The caller's newest grant of the module, if it has any."""


@call("module.take", by="peers that own", refuses=(Reason.NOT_LEADER,))
class Take(ChainRequest[Done]):
    """Lead this module: answered once the receiver does."""


@call("module.forward", by=LEADERS, refuses=(Reason.PAYLOAD_MISSING, *ADMISSION))
class Forward(ChainRequest[Receipted]):
    """As `module.contribute`, from anybody who kept the contribution."""

    contribution: Sealed[Contribution]
    sharding: Sealed[Sharding] | None = None


@call("module.commit", by=f"{LEADERS}, {MIRRORS}", refuses=COMMITMENT)
class Commit(Request[Done]):
    """A contribution that its author will hand in once all who may lead its modules have heard of it: copies of it come
    later."""

    contribution: Sealed[Contribution]


@call("mirror.state", refuses=(Reason.WRONG_MODULE,))
class GetBranch(ChainRequest[Branch]):
    """Where the chain ends."""


@call("mirror.chain", refuses=(Reason.WRONG_MODULE,))
class GetChain(ChainRequest[Page[ModuleVersion]]):
    """The versions that follow `after`."""

    after: int = bounded(low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Voted:
    """The owner is for it: its signature, kind `vote` (protocol/expulsion.py)."""

    signature: str


@call("mirror.vote", refuses=(Reason.WRONG_MODULE, Reason.OTHER))
class GetVote(ChainRequest[Voted]):
    """An owner's vote against a forger, for the module's leader, while the coordinator is away."""

    peer: PeerId
    found: int = bounded(low=1)
    """The version that finds it a forger."""
    decrees: int = bounded(low=0, high=DECREES_MAX)

    def __post_init__(self) -> None:
        require_peers(self.peer)


@call("mirror.open", refuses=(Reason.WRONG_MODULE,))
class GetOpen(ChainRequest[Page[Contribution]]):
    """The contributions that are open or not final, by id."""

    after: str = ""
    """Contribution id, empty at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The contribution is on disk."""

    custody: Custody


@call(
    "mirror.contribution",
    by=MIRRORS,
    refuses=(Reason.NOT_LEADER, Reason.PAYLOAD_MISSING, Reason.WRONG_RUN, Reason.WRONG_MODULE, Reason.FULL),
)
class KeepContribution(ChainRequest[Kept]):
    """Have it on disk before there is a receipt."""

    contribution: Sealed[Contribution]
    sharding: Sealed[Sharding] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosigned:
    """The version was made again, and is on the signer's disk."""

    cosignature: str


@call("mirror.version", by=MIRRORS, refuses=(Reason.CONTRIBUTION_MISSING, *ADMISSION))
class KeepVersion(ChainRequest[Cosigned]):
    """Make a new version again, keep it, and cosign it."""

    version: Sealed[ModuleVersion]
    final: int = bounded(low=0)
    """The newest version that is final."""
    final_signature: str = ""
    """The coordinator's cosignature of that one, or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """The newest final version that is known."""

    final: int


@call("mirror.final", refuses=(Reason.WRONG_MODULE,))
class TellFinal(ChainRequest[Final]):
    """What is final."""

    final: int = bounded(low=0)
    final_signature: str = ""
    """As in `mirror.version`."""


@call("mirror.evidence", by=MIRRORS, refuses=(Reason.NOT_LEADER, Reason.WRONG_MODULE))
class KeepEvidence(ChainRequest[Done]):
    """Have on disk what was said against work, by the module's leader, until a version tells of it."""

    appraisals: tuple[Sealed[Appraisal], ...] = bounded(items=APPRAISALS_MAX)


@call("mirror.follow", by="mirrors", refuses=(Reason.NOT_LEADER, Reason.STALE_BASE, Reason.WRONG_MODULE))
class Follow(ChainRequest[Done]):
    """Take the caller's chain over, as a new mirror."""


@call("archive.contributions", by=f"{SEED}, owners, keepers")
class GetContributions(Request[Page[Contribution]]):
    """Those of these contributions that are here, in this order."""

    ids: tuple[str, ...] = bounded(items=IDS_MAX)


@call("archive.evidence", by=SEED, refuses=(Reason.WRONG_MODULE,))
class GetEvidence(ChainRequest[Page[Appraisal]]):
    """What leaders brought with `mirror.evidence` and no version tells of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The asker leads the module in this term."""

    grant: Sealed[Grant]


@call("archive.adopt", by="the coordinator's seed", refuses=(Reason.NOT_LEADER, Reason.WRONG_MODULE, Reason.BANNED))
class Adopt(Request[Granted]):
    """Have a term of a module granted."""

    module: ModuleId
    term: int = bounded(low=0)
    mirrors: tuple[PeerId, ...]
    mandate: tuple[Sealed[Grant], ...] = bounded((), items=1)
    """The newest grant that the caller knows."""

    def __post_init__(self) -> None:
        if len(self.mirrors) > MIRRORS_MAX:
            raise ConfigError(f"`mirrors` are {len(self.mirrors)} peers, limit {MIRRORS_MAX}")
        require_peers(*self.mirrors)


# -- of keepers


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """What only who has the bytes can say: `proof` of protocol/keeping.py, with the answering peer's own id."""

    proof: str

    def __post_init__(self) -> None:
        require_digest(self.proof)


@call("keep.prove", by="keepers", refuses=(Reason.MISSING,))
class Prove(Request[Proven]):
    """Show that a part of a blob is here, without sending it."""

    digest: str
    offset: int = bounded(low=0, high=COUNT_MAX)
    length: int = bounded(low=1, high=PROOF_BYTES_MAX)
    nonce: str

    def __post_init__(self) -> None:
        require_digest(self.digest)
        if len(self.nonce) != NONCE_CHARS or not self.nonce.isalnum():
            raise ConfigError(f"`nonce` is no {NONCE_CHARS} letters and digits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What the coordinator has signed of keepers; left out before it has challenged any."""

    count: Sealed[KeepersCount] | None = None


@call("run.keepers", by="the coordinator's seed")
class GetKeepers(Request[Counted]):
    """What the coordinator's challenges of keepers came to."""
