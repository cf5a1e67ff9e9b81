"""The signed documents: contribution, receipt, rejection, version, sharding, scores; one canonical form each.

Manifests are in manifest.py; judgements, and checks of them, in judgement.py; decrees in decrees.py; the coordinator's
count of keepers in keeping.py; invitations.py.

- A document's `id` is the digest of its canonical bytes; the signature is over the same bytes, under its `KIND`.
- `unseal` is the only door for a document from outside: schema, bounds, then signature. What comes out is safe to use.
- Nothing here says whether a document is *wanted*: that is admission.py and versions.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

from .. import strict
from ..canonical import canonical_bytes, digest
from ..config import LEVELS_MAX, SHARES_MAX
from ..errors import ConfigError, IntegrityError
from ..strict import bounded
from ..topology import ModuleId, PathId
from .audits import AUDITS_MAX, Audit
from .decrees import Decree, ShownDecree
from .expulsion import Expulsion
from .gate import Appraisal
from .invitations import Invitation
from .judgement import Check, Judgement
from .keeping import KeepersCount
from .manifest import Manifest as Manifest
from .references import BlobRef as BlobRef
from .references import GenesisRef as GenesisRef
from .references import Part as Part
from .references import Recipe as Recipe
from .references import ShardRef as ShardRef
from .signing import VALUES_MAX, PeerId, Signer, require_digest, short, verify
from .signing import require_peers as require_peers
from .standing import Findings

REASON_CHARS_MAX = 32
"""Of a rejection's reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One path's outer gradient for one module: the claim that `payload` came from training on `base`."""

    KIND: ClassVar[str] = "contribution"
    run: str
    module: ModuleId
    path: PathId
    base_version: int = bounded(low=0, high=VALUES_MAX)
    """The version of the module that the training started from."""
    base_digest: str
    sharding: int = bounded(0, low=0, high=VALUES_MAX)
    """The sharding whose shard was trained on; the size of that shard weighs in the average."""
    payload: BlobRef
    """The compressed outer gradient."""
    state: BlobRef | None = None
    """The path's inner state after these steps, which its author holds: who trains the path next goes on from it."""
    steps: int = bounded(low=1, high=VALUES_MAX)
    tokens: int = bounded(low=1, high=VALUES_MAX)
    """Tokens trained to make this; weighs in the average up to a full round's worth."""
    loss: float
    """Mean training loss over the steps, in nats per token; said by the trainer, used for display only."""
    others: tuple[Part, ...] = strict.added(())
    """The parts of the path's other modules, from the first level on: what judges need to measure the work (gate.py).
    Their payloads are the author's to give."""
    recipe: Recipe | None = strict.added(None)
    """What auditors need besides to repeat it."""
    author: PeerId

    def __post_init__(self) -> None:
        require_digest(self.run, self.base_digest)
        if len(self.others) >= LEVELS_MAX:
            raise ConfigError(f"`others` are the parts of {len(self.others)} modules, limit {LEVELS_MAX - 1}")

    @property
    def parts(self) -> tuple[Part, ...]:
        """Of all modules of the path, from the first level on, if it names them."""
        ours = Part(base_digest=self.base_digest, payload=self.payload)
        return (*self.others[: self.module.level], ours, *self.others[self.module.level :])

    @property
    def work(self) -> str:
        """The id of the round's work that this is a part of: of the same one for all modules of the path."""
        named = [self.run, str(self.path), self.sharding, self.tokens, self.author, strict.plain(self.parts)]
        if self.recipe is not None:
            named += [strict.plain(self.recipe), strict.plain(self.state), self.steps]
        return digest(canonical_bytes(named))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A leader's note that it did not take a contribution, or could not count it: its word, and nobody else's. It names
    the whole contribution with its author's signature, so that no leader can invent one."""

    KIND: ClassVar[str] = "rejection"
    contribution: Contribution
    signature: str
    """Of the contribution's author."""
    reason: str
    """As the author was told: one of the reasons of admission, or `payload-lost`."""
    round: int = bounded(low=0, high=VALUES_MAX)
    """The open round; the version it publishes is one greater."""
    term: int = bounded(low=0, high=VALUES_MAX)
    author: PeerId
    """The leader."""

    def __post_init__(self) -> None:
        if len(self.reason) > REASON_CHARS_MAX or not self.reason.isprintable():
            raise ConfigError("a `reason` is one short word")


DOCUMENT_BYTES_MAX = 240 * 1024
"""Of one document as canonical JSON. A version with SHARES_MAX contributions fits, whatever they say."""

MIRRORS_MAX = 8
COSIGNATURES_MAX = MIRRORS_MAX + 2
"""Under one version: of its mirrors, the coordinator and a second seed node."""
CUSTODY_MAX = 4
"""Of one receipt: one is enough."""
COSIGNATURE = "cosignature"
"""The kind under which mirrors sign a version that they made again from its contributions."""
CUSTODY = "custody"
"""The kind under which mirrors and archives sign that they have a contribution on disk."""
PROBLEM_CHARS_MAX = 300
"""Of what is wrong with a document: its sender chose the words, and they go into logs and replies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Custody:
    """The word of one peer that it has a contribution on disk."""

    peer: PeerId
    signature: str
    """Under the contribution's id."""

    @classmethod
    def sign(cls, signer: Signer, contribution: str) -> Custody:
        """Ours, of the contribution with this id."""
        return cls(peer=signer.peer, signature=signer.sign(CUSTODY, contribution.encode()))

    def is_of(self, contribution: str) -> bool:
        """Whether the peer itself has signed this, and for the contribution with this id."""
        return verify(self.peer, CUSTODY, contribution.encode(), self.signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The leader's promise that a contribution is on disk and will be in a version, or be reported as expired."""

    KIND: ClassVar[str] = "receipt"
    run: str
    contribution: str
    """The contribution's id."""
    module: ModuleId
    round: int = bounded(low=0, high=VALUES_MAX)
    """The round that took it: the version this round publishes is one greater."""
    term: int = bounded(low=0, high=VALUES_MAX)
    custody: tuple[Custody, ...]
    """Of the peers that had it on disk when this was signed, besides the leader: no other is named than by its own
    signature."""
    author: PeerId

    def __post_init__(self) -> None:
        require_digest(self.run, self.contribution)
        if len(self.custody) > CUSTODY_MAX:
            raise ConfigError(f"a receipt names {len(self.custody)} holders, limit {CUSTODY_MAX}")
        for custody in self.custody:
            if not custody.is_of(self.contribution):
                raise IntegrityError(f"the receipt says that ...{short(custody.peer)} holds what it has not signed for")

    @property
    def holders(self) -> tuple[PeerId, ...]:
        """The peers that had it on disk when this was signed, the leader first."""
        return self.author, *(custody.peer for custody in self.custody)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one contribution weighs in one version."""

    contribution: str
    path: PathId
    peer: PeerId
    base_version: int = bounded(low=0, high=VALUES_MAX)
    """The version that it was based on: an author counts once per path and base."""
    weight: float = bounded(low=0.0, high=1.0)
    tokens: int = bounded(low=1, high=VALUES_MAX)
    """That count: those of the contribution, or a part of them if others handed in the same work (copies.py)."""
    norm: float = bounded(low=0.0)
    """Of its outer gradient, before it was scaled down: what later ones are measured by (norms.py)."""
    loss: float
    state: BlobRef | None = None
    """The path's inner state after it, as the contribution names it: `peer` had it."""
    work: str = strict.added("")
    """`Contribution.work`, by which audits name it; empty in a run without them."""

    def __post_init__(self) -> None:
        require_digest(self.contribution, *([self.work] if self.work else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Who owns a module in a term: its leader and its mirrors. Who may sign one: grants.py."""

    KIND: ClassVar[str] = "grant"
    run: str
    module: ModuleId
    term: int = bounded(low=1, high=VALUES_MAX)
    leader: PeerId
    mirrors: tuple[PeerId, ...] = ()
    after: int = bounded(0, low=0, high=VALUES_MAX)
    """The term of the grant whose group its author was in; 0 when the author is the coordinator."""
    author: PeerId

    def __post_init__(self) -> None:
        require_digest(self.run)
        require_peers(*self.group, self.author)
        if len(self.mirrors) > MIRRORS_MAX or len(set(self.group)) < len(self.group):
            raise ConfigError(f"a group has up to {MIRRORS_MAX} mirrors, all of them different, and a leader besides")

    @property
    def group(self) -> tuple[PeerId, ...]:
        """The leader, then the mirrors."""
        return (self.leader, *self.mirrors)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleVersion:
    """One version of one module, and everything needed to recompute it from its parent.

    Version 0 has no parent, no update and no shares: it is the genesis that the manifest names.
    """

    KIND: ClassVar[str] = "version"
    run: str
    module: ModuleId
    version: int = bounded(low=0, high=VALUES_MAX)
    parent: str
    """Digest of the parent's parameters; empty for version 0."""
    snapshot: BlobRef
    """The parameters; the digest *is* the version's digest."""
    update: BlobRef | None
    """The quantised outer step: parent minus this gives the snapshot, to the bit."""
    state: BlobRef | None
    """Outer momentum and the residual of the update's quantisation: what the next leader needs."""
    is_fresh: bool = False
    """Made without the parent's outer state, since all who had it were lost: momentum and residual began anew."""
    rollback: ShownDecree | None = None
    """Made by decree, of an earlier version's parameters: no update, no shares, and momentum begins anew."""
    shares: tuple[Share, ...]
    """In the order of the average: by path, then by contribution id."""
    clip_norm: float | None
    """Contributions with a greater norm were scaled down to it."""
    lr: float
    momentum: float
    norm_rule: str
    weight: int = bounded(low=0, high=VALUES_MAX**2)
    """Tokens of all that the chain has counted up to this version: of two branches, more work is the better one."""
    appraisals: BlobRef | None = strict.added(None)
    """What judges and auditors said of works: of what it counts, of what it does not, and of earlier ones (gate.py)."""
    findings: Findings | None = strict.added(None)
    """What follows from that for their authors (standing.py)."""
    audits: tuple[Audit, ...] = strict.added(())
    """Who has repeated works, the same as most who did, and is named for it the first time; in order."""
    expels: Expulsion | None = strict.added(None)
    """A forger of whom nothing counts any more, as the module's owners have voted (expulsion.py)."""
    readmits: ShownDecree | None = strict.added(None)
    """The coordinator's decree that ends an earlier expulsion."""
    term: int = bounded(low=0, high=VALUES_MAX)
    grant: str
    """The id of the Grant under which the author led; empty for version 0."""
    author: PeerId
    """The leader."""

    def __post_init__(self) -> None:
        require_digest(self.run, *([self.parent] if self.version else []))
        if len(self.shares) > SHARES_MAX:
            raise ConfigError(f"a version of {len(self.shares)} contributions, limit {SHARES_MAX}")
        if len(self.audits) > AUDITS_MAX:
            raise ConfigError(f"a version of {len(self.audits)} audits, limit {AUDITS_MAX}")
        if self.clip_norm is not None and self.clip_norm < 0:
            raise ConfigError(f"`clip_norm` is {self.clip_norm}")
        if self.version:
            require_digest(self.grant)
        elif self.parent or self.grant:
            raise ConfigError("version 0 has neither a parent nor a grant")

    @property
    def digest(self) -> str:
        return self.snapshot.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Which sequences each path trains on from a round on, and the routers that say so. Number 0 is the manifest's."""

    KIND: ClassVar[str] = "sharding"
    run: str
    number: int = bounded(low=1, high=VALUES_MAX)
    from_round: int = bounded(low=1, high=VALUES_MAX)
    """Paths whose modules have this version move over; equal to the run's rounds: it only serves."""
    router: BlobRef
    token_router: BlobRef
    """Routes inside a document, at any token (core/routing/features.py `token_features`)."""
    shards: tuple[ShardRef, ...]
    author: PeerId
    """The coordinator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How well one path predicts the router split: what a discriminative router is fitted on."""

    KIND: ClassVar[str] = "scores"
    run: str
    sharding: int = bounded(low=1, high=VALUES_MAX)
    """The sharding that they are for."""
    path: PathId
    modules: tuple[str, ...]
    """Digests of the module versions that were composed, from the first level on."""
    table: BlobRef
    """Nats by sequence and window of 16 tokens (core/routing/evaluate.py)."""
    author: PeerId

    def __post_init__(self) -> None:
        require_digest(self.run, *self.modules)


_Traded = Contribution | Receipt | Grant | ModuleVersion | Sharding | Scores
Document = _Traded | Appraisal | Judgement | Check | KeepersCount | Rejection | Decree | Invitation | Manifest
D = TypeVar("D", bound=Document)


@dataclass(frozen=True, slots=True)
class Sealed(Generic[D]):
    """A document with its author's signature, already checked."""

    document: D
    signature: str
    cosignatures: Mapping[PeerId, str] = field(default_factory=dict)
    """Of a version: signatures of peers that made it again. Checked; but whether they may sign is for the reader."""
    _bytes: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def id(self) -> str:
        return document_id(self.document)

    @classmethod
    def load(cls, kind: type[D], value: object) -> Sealed[D]:
        """As `unseal`."""
        return unseal(kind, value)

    def to_dict(self) -> dict[str, Any]:
        plain = {"document": strict.plain(self.document), "signature": self.signature}
        return plain | ({"cosignatures": dict(self.cosignatures)} if self.cosignatures else {})

    def to_bytes(self) -> bytes:
        """Its canonical bytes, made once and kept: for what anybody may ask us for, as often as it likes."""
        if not self._bytes:
            self._bytes.append(canonical_bytes(self.to_dict()))
        return self._bytes[0]

    def cosigned(self, cosignatures: Mapping[PeerId, str], *, above_all: PeerId | None = None) -> Sealed[D]:
        """The same with these besides; they are checked already, or our own. Anybody can make keys that sign, and
        nobody reads more than COSIGNATURES_MAX: of more the earlier ones give way, that of `above_all` last."""
        found = {**self.cosignatures, **cosignatures}
        latest = sorted(found, key=lambda peer: (peer == above_all, peer in cosignatures))[-COSIGNATURES_MAX:]
        return replace(self, cosignatures={peer: found[peer] for peer in latest})


def document_id(document: Document) -> str:
    """The digest of the canonical bytes."""
    return digest(canonical_bytes(strict.plain(document)))


def run_name(run: str) -> str:
    """How people see a run's id: `run:3f9a21c4`."""
    return f"run:{run[:8]}"


def seal(signer: Signer, document: D) -> Sealed[D]:
    """Sign a document of our own."""
    assert document.author == signer.peer, "only the author can sign"
    return Sealed(document, signer.sign(document.KIND, canonical_bytes(strict.plain(document))))


def is_signed(sealed: Sealed[D]) -> bool:
    """Whether a document that was put together here, not unsealed, has its author's signature."""
    document = sealed.document
    return verify(document.author, document.KIND, canonical_bytes(strict.plain(document)), sealed.signature)


def rejected(rejection: Rejection) -> Sealed[Contribution]:
    """The contribution that a rejection names, not checked yet: `is_signed` says whether its author wrote it."""
    return Sealed(rejection.contribution, rejection.signature)


def decreed_by(shown: ShownDecree) -> Sealed[Decree]:
    """The decree that a version shows, not checked yet: `is_signed` says whether its author wrote it."""
    return Sealed(shown.decree, shown.signature)


def cosign(signer: Signer, sealed: Sealed[ModuleVersion]) -> str:
    """Our signature that this version follows from its parent and its contributions, to the bit."""
    return signer.sign(COSIGNATURE, canonical_bytes(strict.plain(sealed.document)))


def is_cosigned(sealed: Sealed[ModuleVersion], peer: PeerId, signature: object) -> bool:
    """Whether `signature` is the cosignature of `peer` under a version."""
    data = canonical_bytes(strict.plain(sealed.document))
    return isinstance(signature, str) and verify(peer, COSIGNATURE, data, signature)


def unseal(kind: type[D], value: object) -> Sealed[D]:
    """A checked document from what came over the wire; raises IntegrityError with the first thing that is wrong."""
    allowed = {"document", "signature", *(["cosignatures"] if kind is ModuleVersion else [])}
    if not isinstance(value, dict) or not {"document", "signature"} <= set(value) <= allowed:
        raise IntegrityError(f"a {kind.KIND} must be an object with `document` and `signature`")
    try:
        data = canonical_bytes(value["document"])
        if len(data) > DOCUMENT_BYTES_MAX:
            raise IntegrityError(f"a {kind.KIND} of {len(data)} bytes, limit {DOCUMENT_BYTES_MAX}")
        document = strict.load(kind, value["document"], where=f"this {kind.KIND}")
    except (ConfigError, ValueError, TypeError, RecursionError) as error:
        raise IntegrityError(f"malformed {kind.KIND}: {str(error)[:PROBLEM_CHARS_MAX]}") from None
    if canonical_bytes(strict.plain(document)) != data:
        raise IntegrityError(f"a {kind.KIND} that is not in canonical form")
    if not isinstance(value["signature"], str) or not verify(document.author, kind.KIND, data, value["signature"]):
        raise IntegrityError(f"the signature of this {kind.KIND} does not fit its author")
    return Sealed(document, value["signature"], _cosignatures(value.get("cosignatures", {}), data))


def _cosignatures(value: object, data: bytes) -> dict[PeerId, str]:
    if not isinstance(value, dict) or len(value) > COSIGNATURES_MAX:
        raise IntegrityError("the cosignatures of a version must be a small table")
    for peer, signature in value.items():
        if not isinstance(signature, str) or not verify(PeerId(peer), COSIGNATURE, data, signature):
            raise IntegrityError("a cosignature of this version does not fit its peer")
    return dict(value)
