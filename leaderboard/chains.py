"""One module's chain as it is shown: which versions are taken, which branch goes on, and which are final.

- A version is taken if it follows its parent (protocol/versions.py) and names paths of the grid and peers.
- It must be final (signed by the coordinator), or come before one that is, or be signed by a leader that a mandate
  names: anybody can make a chain, and a seed node is one by its own word only.
- Of two branches the better one goes on (protocol/versions.py); what is final is never replaced.

A record that is not believed, of a chain or any other, is counted by its reason (`Refusals`), and is neither stored nor
shown. The same record again is not counted again, as far as it is remembered: a peer that repeats a forgery with every
answer does not make the figure meaningless.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from dipaco_p2p import strict
from dipaco_p2p.canonical import canonical_bytes, digest
from dipaco_p2p.errors import ConfigError, IntegrityError
from dipaco_p2p.node.run import Run
from dipaco_p2p.protocol.decrees import Decree
from dipaco_p2p.protocol.documents import (
    DOCUMENT_BYTES_MAX,
    Contribution,
    Grant,
    ModuleVersion,
    Receipt,
    Rejection,
    Sealed,
    require_peers,
    unseal,
)
from dipaco_p2p.protocol.judgement import Check, Judgement
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.standing import Standings
from dipaco_p2p.protocol.versions import Branch, Tally, check_successor, genesis_version, is_final
from dipaco_p2p.topology import ModuleId

REMEMBERED_MAX = 4096
PAGE_ITEMS_MAX = 8192
"""Of one answer: far more than the smallest documents that fit into a body."""

D = TypeVar("D", Check, Contribution, Decree, Grant, Judgement, ModuleVersion, Receipt, Rejection)


class Reason(StrEnum):
    """Why a record was refused."""

    OVERSIZED = "oversized"
    MALFORMED = "malformed"
    SIGNATURE = "bad-signature"
    RUN = "another-run"
    MODULE = "another-module"
    AUTHOR = "wrong-author"
    """Signed by a peer that may not say this."""
    SUCCESSOR = "does-not-follow"
    """A version or decree that does not follow the one before it; a version that counts what must not count."""
    FINAL = "contradicts-final"
    """A version in place of one that the coordinator has signed."""
    LEADER = "unknown-leader"
    """A version, not final, by a peer that no mandate names."""
    IDENTITY = "not-the-one-named"
    """A contribution that no version names, or not as the version says."""
    AGAIN = "said-otherwise-before"
    """A second measurement of a path and round by the same peer."""
    TOO_MANY = "too-many"
    """More notes or measurements of one round than there may be."""


class Refusals:
    """Counts by reason."""

    def __init__(self, counts: dict[str, int] | None = None) -> None:
        self.counts: Counter[str] = Counter(counts or {})
        self._seen: OrderedDict[str, None] = OrderedDict()

    def note(self, reason: Reason, record: object) -> None:
        """Count it, unless this very record was counted lately; `record` may be anything."""
        key = f"{reason} {_print_of(record)}"
        if key not in self._seen:
            self.counts[reason] += 1
            self._seen[key] = None
            if len(self._seen) > REMEMBERED_MAX:
                self._seen.popitem(last=False)

    async def read_page(self, kind: type[D], body: bytes) -> list[Sealed[D]]:
        """The sound documents of an answer; the others are counted. Others run meanwhile, as in `read_items`."""
        try:
            items = json.loads(body)
        except (ValueError, RecursionError):
            items = None
        if not isinstance(items, list) or len(items) > PAGE_ITEMS_MAX:
            self.note(Reason.MALFORMED, body)
            return []
        found: list[Sealed[D]] = []
        for item in items:
            await asyncio.sleep(0)
            if (sealed := self.read(kind, item)) is not None:
                found.append(sealed)
        return found

    def read(self, kind: type[D], item: object) -> Sealed[D] | None:
        """One document; None for anything else, which is counted."""
        try:
            return unseal(kind, item)
        except IntegrityError:
            self.note(_reason(kind, item), item)
            return None


def _reason(kind: type[D], item: object) -> Reason:
    """What is wrong with something that `unseal` refused."""
    document = item.get("document") if isinstance(item, dict) else None
    try:
        if len(canonical_bytes(document)) > DOCUMENT_BYTES_MAX:
            return Reason.OVERSIZED
        strict.load(kind, document, where="this record")
    except (ConfigError, ValueError, TypeError, RecursionError):
        return Reason.MALFORMED
    return Reason.SIGNATURE


def _print_of(record: object) -> str:
    if isinstance(record, bytes):
        return digest(record)
    try:
        return digest(canonical_bytes(record))
    except (ValueError, TypeError, RecursionError):
        return "not even JSON"


Grants = Mapping[str, Grant]
"""By id; only grants that go back to the coordinator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A version on the chain."""

    id: str
    sealed: Sealed[ModuleVersion]
    """With the cosignatures of the coordinator and of its group; others are left out."""
    is_final: bool

    @property
    def version(self) -> ModuleVersion:
        return self.sealed.document


class Chain:
    """From version 1 on."""

    def __init__(self, run: Run, module: ModuleId) -> None:
        self.module = module
        self._run = run
        self._coordinator = run.manifest.author
        self.genesis = genesis_version(run.manifest, module)
        self.versions: list[Published] = []
        self.final = 0
        """The newest version that the coordinator has signed."""
        self._tally = Tally()

    @property
    def head(self) -> ModuleVersion:
        return self.versions[-1].version if self.versions else self.genesis

    @property
    def branch(self) -> Branch:
        head = self.head
        return Branch(final=self.final, version=head.version, weight=head.weight, digest=head.digest)

    @property
    def is_settled(self) -> bool:
        """Whether nothing can change any more."""
        return self.final == self._run.rounds

    @property
    def counted(self) -> Mapping[str, int]:
        """Contribution id to the version that counts it."""
        return self._tally.counted

    @property
    def standings(self) -> Standings:
        """Of those whose work the versions count or judge; changes with them."""
        return self._tally.standings

    def take(self, found: Sequence[Sealed[ModuleVersion]], grants: Grants) -> list[tuple[Reason, str]]:
        """Versions that follow each other, as somebody told them; what was refused, with its id.

        Nothing changes if the branch that they end is not better than this chain.
        """
        known = self._note_cosignatures(found, grants)
        tail = found[known:]
        if not tail:
            return []
        base = tail[0].document.version - 1
        if not 0 <= base <= len(self.versions):
            return [(Reason.SUCCESSOR, tail[0].id)]
        if base < self.final:
            return [(Reason.FINAL, tail[0].id)]
        other = self if base == len(self.versions) else self._fork(base)
        refused = other._extend(tail, grants)
        if other is not self and other.branch.is_better(self.branch):
            self.versions, self.final, self._tally = other.versions, other.final, other._tally
        return refused

    def copy(self) -> Chain:
        """This chain as it is now."""
        other = copy.copy(self)
        other.versions, other._tally = list(self.versions), self._tally.copy()
        return other

    def _note_cosignatures(self, found: Sequence[Sealed[ModuleVersion]], grants: Grants) -> int:
        """Learn who has signed versions that are here; how many of `found`, from the first on, those are."""
        for count, sealed in enumerate(found):
            place = sealed.document.version - 1
            ours = self.versions[place] if 0 <= place < len(self.versions) else None
            if ours is None or ours.version != sealed.document:
                return count
            merged = self._published(ours.sealed.cosigned(sealed.cosignatures), grants, known=ours)
            if merged != ours:
                self.versions[place] = merged
                self.final = max(self.final, merged.version.version) if merged.is_final else self.final
        return len(found)

    def _fork(self, base: int) -> Chain:
        """This chain up to version `base`."""
        other = Chain(self._run, self.module)
        for published in self.versions[:base]:
            other._append(published)
        return other

    def _extend(self, tail: Sequence[Sealed[ModuleVersion]], grants: Grants) -> list[tuple[Reason, str]]:
        sound, refused = self._sound(tail)
        final = max(
            (n for n, sealed in enumerate(sound) if is_final(sealed, coordinator=self._coordinator)), default=-1
        )
        for number, sealed in enumerate(sound):
            if number > final and not _is_led(sealed.document, grants):
                return [(Reason.LEADER, sealed.id)]
            self._append(self._published(sealed, grants))
        return refused

    def _sound(
        self, tail: Sequence[Sealed[ModuleVersion]]
    ) -> tuple[list[Sealed[ModuleVersion]], list[tuple[Reason, str]]]:
        """Those that follow, from the first on, and the one that does not."""
        sound: list[Sealed[ModuleVersion]] = []
        tally, parent = self._tally.copy(), self.head
        for sealed in tail:
            try:
                if sealed.document.version > self._run.rounds:
                    raise IntegrityError(f"{self.module} ends with version {self._run.rounds}: its grid grows")
                check_successor(parent, sealed.document, self._run.manifest)
                tally.check(sealed.document)
                self._check_names(sealed.document)
            except (IntegrityError, ConfigError):
                return sound, [(Reason.SUCCESSOR, sealed.id)]
            tally.add(sealed.document)
            sound.append(sealed)
            parent = sealed.document
        return sound, []

    def _check_names(self, version: ModuleVersion) -> None:
        """Raise an error unless the shares are of paths through the module, and of peers: a leader wrote them."""
        require_peers(*(share.peer for share in version.shares))
        for share in version.shares:
            if share.path not in self._run.topology or self.module not in share.path.modules():
                raise IntegrityError(f"{share.path} does not go through {self.module}")

    def _append(self, published: Published) -> None:
        self.versions.append(published)
        self._tally.add(published.version)
        self.final = published.version.version if published.is_final else self.final

    def _published(self, sealed: Sealed[ModuleVersion], grants: Grants, known: Published | None = None) -> Published:
        grant = grants.get(sealed.document.grant)
        group: set[PeerId] = {self._coordinator, *(grant.group if grant is not None else ())}
        group |= set(known.sealed.cosignatures) if known is not None else set()
        cosignatures = {peer: text for peer, text in sorted(sealed.cosignatures.items()) if peer in group}
        return Published(
            id=known.id if known is not None else sealed.id,
            sealed=replace(sealed, cosignatures=cosignatures),
            is_final=is_final(sealed, coordinator=self._coordinator),
        )


def _is_led(version: ModuleVersion, grants: Grants) -> bool:
    """Whether a mandate says that its author led in its term."""
    grant = grants.get(version.grant)
    return grant is not None and (grant.leader, grant.term) == (version.author, version.term)
