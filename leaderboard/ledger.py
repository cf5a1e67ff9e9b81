"""What is known of one stage of a run: its chains and what belongs to them, as taken in and checked.

`Stage` holds it in memory, and every change leaves a `Write` for the database (database.py), which in turn is read
through the same door: a database that somebody has changed shows nothing that was not signed. The collector and a
rebuild call the same methods, so that both make the same tables.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node.authority import Decrees
from dipaco_p2p.node.run import Run
from dipaco_p2p.owner.rejections import OF_ROUND_MAX
from dipaco_p2p.protocol.decrees import Decree
from dipaco_p2p.protocol.documents import (
    Contribution,
    Grant,
    ModuleVersion,
    Receipt,
    Rejection,
    Sealed,
    Share,
    document_id,
    is_cosigned,
    is_signed,
    rejected,
)
from dipaco_p2p.protocol.judgement import IN_ALL_MAX, OF_PATH_MAX, Check, Judgement
from dipaco_p2p.protocol.manifest import STAGES
from dipaco_p2p.protocol.signing import VALUES_MAX, PeerId
from dipaco_p2p.topology import ModuleId, PathId
from leaderboard.chains import Reason, Refusals

from .chains import Chain, Published

RECEIPTS_MAX = 100_000
"""Per stage. The module that has most forgets the older half of its own: a leader signs as many as it likes."""
REJECTIONS_MAX = 20_000
"""The same of what leaders say that they refused."""

S = TypeVar("S", Receipt, Rejection)

Write = tuple[str, tuple[Any, ...]]
"""The name of a statement of database.py, and its values; a sealed document stands for its text."""


class Stage:
    """One stage, as far as it was taken in."""

    def __init__(self, run: Run, refusals: Refusals, decrees: Decrees | None = None) -> None:
        """`decrees` are those of the whole run, which its stages share; without, none is known yet."""
        self.run = run
        self.refusals = refusals
        self.decrees = Decrees(run) if decrees is None else decrees
        self.decrees.tell(run)
        if run.id == run.origin:  # one stage writes them down for all
            self.decrees.listen(self._keep_decree)
        self.chains = {module: Chain(run, module) for module in run.topology.modules()}
        self.contributions: dict[str, Contribution] = {}
        """Those that a chain counts, and those that a receipt names, by id."""
        self.judgements: dict[int, Sealed[Judgement]] = {}
        self.recorded: set[str] = set()
        """Ids of the contributions that a chain counts and that are here."""
        self.receipts: dict[str, Receipt] = {}
        """The newest that was seen, by contribution."""
        self.checks: dict[tuple[int, PathId], dict[PeerId, Check]] = {}
        """By round and path, then by author: what others than the coordinator measured."""
        self._checks_count = 0
        self.rejections: dict[str, Rejection] = {}
        """By contribution: leaders' notes on what they refused. Their word."""
        self._rejected_of: dict[tuple[ModuleId, int], int] = {}
        self.grants: dict[str, Grant] = {}
        """By id; only such as a mandate holds."""
        self.first_seen: dict[str, float] = {}
        """Of versions, by id; Unix time."""
        self.changes = 0
        """Grows with every change: rows that were made before are still good while it stays."""
        self._writes: list[Write] = []
        self._keep("record", "manifest", run.id, "", STAGES.index(run.manifest.stage), run.sealed)

    def copy(self) -> Stage:
        """This stage as it is now, for a thread to read while it goes on."""
        other = copy.copy(self)
        other.chains = {module: chain.copy() for module, chain in self.chains.items()}
        for name in ("contributions", "judgements", "receipts", "checks", "rejections", "grants", "first_seen"):
            setattr(other, name, dict(getattr(self, name)))
        return other

    def drain(self) -> list[Write]:
        """What is to be written since the last call."""
        writes, self._writes = self._writes, []
        return [(name, tuple(text_of(v) if isinstance(v, Sealed) else v for v in values)) for name, values in writes]

    def forget_writes(self) -> None:
        """All of that is written down."""
        self._writes = []

    def take_decrees(self, found: Iterable[Sealed[Decree]]) -> None:
        """The coordinator's decrees, one after the other; of the whole run."""
        for sealed in found:
            try:
                self.decrees.learn(sealed)
            except IntegrityError:
                self.refusals.note(Reason.SUCCESSOR, sealed.id)

    def take_grants(self, module: ModuleId, grants: Iterable[Sealed[Grant]]) -> None:
        """Grants of mandates that were checked."""
        for sealed in grants:
            if sealed.id not in self.grants:
                self.grants[sealed.id] = sealed.document
                self._keep("witness", "grant", sealed.id, module, sealed.document.term, sealed)

    def take_versions(self, module: ModuleId, found: Sequence[Sealed[ModuleVersion]], *, now_s: float) -> None:
        """Versions of `module` that follow each other, as somebody told them."""
        sound = self._of_this_run(found, module)
        chain = self.chains[module]
        before = list(chain.versions)
        counted = set(chain.counted)
        for reason, id_ in chain.take(sound, self.grants):
            self.refusals.note(reason, id_)
        self._note_versions(module, before, chain.versions, now_s)
        for id_ in counted - chain.counted.keys():  # a branch that was given up
            self.contributions.pop(id_, None)
            self.recorded.discard(id_)
            self._write(("drop", ("contribution", id_)))

    def take_judgements(self, found: Iterable[Sealed[Judgement]]) -> None:
        """The coordinator's losses of rounds; of two for one round the later one is kept."""
        for sealed in found:
            judgement = sealed.document
            if judgement.author != self.run.manifest.author:
                self.refusals.note(Reason.AUTHOR, sealed.id)
            elif judgement.run != self.run.id:
                self.refusals.note(Reason.RUN, sealed.id)
            elif not self._fits_grid(judgement):
                self.refusals.note(Reason.MODULE, sealed.id)
            elif not all(0.0 <= loss <= VALUES_MAX for loss in _losses(judgement)):  # no page could draw it
                self.refusals.note(Reason.MALFORMED, sealed.id)
            elif self._is_news(sealed):
                self.judgements[judgement.version] = sealed
                self._keep("record", "judgement", sealed.id, "", judgement.version, sealed)

    def take_contributions(self, found: Iterable[Sealed[Contribution]]) -> None:
        """Contributions by id: those that a version or a receipt names, and as it names them."""
        for sealed in found:
            document, id_ = sealed.document, sealed.id  # which costs a digest each time
            share = self._share(document.module, id_)
            if document.run != self.run.id:
                self.refusals.note(Reason.RUN, id_)
            elif share is not None and _is_share(document, share):
                self.contributions[id_] = document
                self.recorded.add(id_)
                self._keep("record", "contribution", id_, document.module, document.base_version, sealed)
            elif share is None and self._is_receipted(id_, document):
                self.contributions[id_] = document
                self._keep("witness", "contribution", id_, document.module, document.base_version, sealed)
            else:
                self.refusals.note(Reason.IDENTITY, id_)

    def take_receipts(self, module: ModuleId, found: Iterable[Sealed[Receipt]]) -> None:
        """Receipts for contributions to `module`. Whether their author led is looked at when they are shown."""
        for sealed in found:
            receipt = sealed.document
            if receipt.run != self.run.id:
                self.refusals.note(Reason.RUN, sealed.id)
            elif receipt.module != module:
                self.refusals.note(Reason.MODULE, sealed.id)
            else:
                self._take_receipt(sealed)

    def take_checks(self, found: Iterable[Sealed[Check]]) -> None:
        """What others than the coordinator measured, the first word of each. Whether it is about what was judged is
        looked at when it is shown."""
        for sealed in found:
            check = sealed.document
            known = self.checks.get((check.version, check.path), {})
            if check.run != self.run.id:
                self.refusals.note(Reason.RUN, sealed.id)
            elif check.author == self.run.manifest.author:
                self.refusals.note(Reason.AUTHOR, sealed.id)
            elif check.path not in self.run.topology or check.version > self.run.rounds:
                self.refusals.note(Reason.MODULE, sealed.id)
            elif check.author in known:
                if known[check.author] != check:
                    self.refusals.note(Reason.AGAIN, sealed.id)
            elif len(known) >= OF_PATH_MAX or self._checks_count >= IN_ALL_MAX:
                self.refusals.note(Reason.TOO_MANY, sealed.id)
            else:
                self.checks[check.version, check.path] = known | {check.author: check}
                self._checks_count += 1
                self._keep("witness", "check", sealed.id, "", check.version, sealed)

    def take_rejections(self, module: ModuleId, found: Iterable[Sealed[Rejection]]) -> None:
        """Leaders' notes on contributions to `module`; only of who led in that term, and with the author's signature
        under the contribution."""
        for sealed in found:
            note = sealed.document
            reason = self._wrong(module, note)
            if reason is not None:
                self.refusals.note(reason, sealed.id)
                continue
            id_ = rejected(note).id
            if id_ not in self.rejections:
                count = self._rejected_of.get((module, note.round), 0)
                if count >= OF_ROUND_MAX:
                    self.refusals.note(Reason.TOO_MANY, sealed.id)
                    continue
                self._rejected_of[module, note.round] = count + 1
                self.rejections[id_] = note
                self._keep("witness", "rejection", sealed.id, module, note.round, sealed)
                if len(self.rejections) > REJECTIONS_MAX:
                    self._forget_rejections()

    def _wrong(self, module: ModuleId, note: Rejection) -> Reason | None:
        """Why a note is not believed to be a leader's."""
        document = note.contribution
        if document.run != self.run.id:
            return Reason.RUN
        is_ours = document.module == module and document.path in self.run.topology
        if not is_ours or note.round > self.run.rounds:
            return Reason.MODULE
        if note.author not in self.leaders(module).get(note.term, set()):
            return Reason.LEADER
        return None if is_signed(rejected(note)) else Reason.SIGNATURE

    def has(self, contribution: str) -> bool:
        """Whether a contribution is not missing."""
        is_counted = any(contribution in chain.counted for chain in self.chains.values())
        return contribution in (self.recorded if is_counted else self.contributions)

    def missing(self) -> list[str]:
        """Ids of contributions that were not seen: of those that a chain counts, and of those that it should count."""
        counted = [id_ for chain in self.chains.values() for id_ in chain.counted if id_ not in self.recorded]
        return counted + [id_ for id_ in self.overdue() if id_ not in self.contributions]

    def overdue(self) -> list[str]:
        """Ids of contributions that have a receipt, and that no version counts though it would be too late now."""
        late = self.run.config.rounds.staleness + 1
        return [
            id_
            for id_, receipt in self.receipts.items()
            if id_ not in (chain := self.chains[receipt.module]).counted
            and (chain.head.version > receipt.round + late or chain.is_settled)
        ]

    @property
    def is_settled(self) -> bool:
        """Whether all there will ever be is here."""
        return (
            all(chain.is_settled for chain in self.chains.values())
            and len(self.judgements) == self.run.rounds + 1
            and not any(id_ not in self.recorded for chain in self.chains.values() for id_ in chain.counted)
        )

    def leaders(self, module: ModuleId) -> dict[int, set[PeerId]]:
        """Who may have led `module` in each term, by a mandate or by a version that is final."""
        found: dict[int, set[PeerId]] = {}
        for grant in self.grants.values():
            if grant.module == module:
                found.setdefault(grant.term, set()).add(grant.leader)
        for published in self.chains[module].versions:
            if published.is_final:
                found.setdefault(published.version.term, set()).add(published.version.author)
        return found

    def _of_this_run(self, found: Sequence[Sealed[ModuleVersion]], module: ModuleId) -> list[Sealed[ModuleVersion]]:
        """`found` up to the first that is of something else: nothing can follow on that."""
        for place, sealed in enumerate(found):
            if sealed.document.run != self.run.id or sealed.document.module != module:
                reason = Reason.RUN if sealed.document.run != self.run.id else Reason.MODULE
                self.refusals.note(reason, sealed.id)
                return list(found[:place])
        return list(found)

    def _note_versions(
        self, module: ModuleId, before: Sequence[Published], after: Sequence[Published], now_s: float
    ) -> None:
        """Write down how the chain has changed."""
        known = {published.id for published in before}
        for published in before[len(after) :]:
            self._write(("drop", ("version", published.id)))
        for place, published in enumerate(after):
            if place < len(before) and before[place] is published:
                continue
            if published.id not in known:
                self._see(published, now_s)
            recorded = self._as_recorded(published.sealed)
            self._keep("record", "version", published.id, module, published.version.version, recorded)
            self._note_cosignatures(module, published)

    def _note_cosignatures(self, module: ModuleId, published: Published) -> None:
        for peer, signature in published.sealed.cosignatures.items():
            if peer != self.run.manifest.author:
                text = json.dumps({"version": published.id, "peer": peer, "signature": signature})
                self._keep("witness", "cosignature", f"{published.id} {peer}", module, published.version.version, text)

    def cosign(self, module: ModuleId, number: int, said: Mapping[str, Any]) -> None:
        """A cosignature as it was written down."""
        versions, peer, signature = self.chains[module].versions, said.get("peer"), said.get("signature")
        published = versions[number - 1] if 0 < number <= len(versions) else None
        if published is not None and published.id == said.get("version") and isinstance(peer, str):
            if is_cosigned(published.sealed, PeerId(peer), signature):
                sealed = replace(published.sealed, cosignatures={PeerId(peer): str(signature)})
                self.chains[module].take([sealed], self.grants)

    def _as_recorded(self, sealed: Sealed[ModuleVersion]) -> Sealed[ModuleVersion]:
        """With the coordinator's cosignature only: who else signed when is not the same wherever it is looked up."""
        author = self.run.manifest.author
        final = {peer: text for peer, text in sealed.cosignatures.items() if peer == author}
        return replace(sealed, cosignatures=final)

    def _see(self, published: Published, now_s: float) -> None:
        if published.id not in self.first_seen:
            self.first_seen[published.id] = now_s
            self._write(("seen", (published.id, now_s)))

    def _is_news(self, sealed: Sealed[Judgement]) -> bool:
        known = self.judgements.get(sealed.document.version)
        return known is None or (known.document.at_s, known.id) < (sealed.document.at_s, sealed.id)

    def _fits_grid(self, judgement: Judgement) -> bool:
        modules = [found.module for found in judgement.modules]
        paths = [found.path for found in judgement.paths]
        return (
            len(set(modules)) == len(modules)
            and len(set(paths)) == len(paths)
            and all(name in self.run.topology for name in (*modules, *paths))
            and judgement.version <= self.run.rounds
        )

    def _share(self, module: ModuleId, contribution: str) -> Share | None:
        """What the chain of `module` says of a contribution."""
        chain = self.chains.get(module)
        number = chain.counted.get(contribution) if chain is not None else None
        if chain is None or number is None:
            return None
        shares = chain.versions[number - 1].version.shares
        return next(share for share in shares if share.contribution == contribution)

    def _is_receipted(self, id_: str, document: Contribution) -> bool:
        receipt = self.receipts.get(id_)
        return receipt is not None and receipt.module == document.module and document.path in self.run.topology

    def _take_receipt(self, sealed: Sealed[Receipt]) -> None:
        receipt = sealed.document
        known = self.receipts.get(receipt.contribution)
        if known is not None and (known.round, known.term) >= (receipt.round, receipt.term):
            return
        if receipt.round > self.run.rounds:
            self.refusals.note(Reason.SUCCESSOR, sealed.id)
            return
        if known is not None:
            self._forget(known)
        self.receipts[receipt.contribution] = receipt
        self._keep("witness", "receipt", sealed.id, receipt.module, receipt.round, sealed)
        if len(self.receipts) > RECEIPTS_MAX:
            for one in _surplus(self.receipts.values(), lambda receipt: receipt.module):
                self._forget(one)

    def _forget_rejections(self) -> None:
        for note in _surplus(self.rejections.values(), lambda note: note.contribution.module):
            self._rejected_of[note.contribution.module, note.round] -= 1
            del self.rejections[rejected(note).id]
            self._write(("forget", ("rejection", document_id(note))))

    def _forget(self, receipt: Receipt) -> None:
        del self.receipts[receipt.contribution]
        self._write(("forget", ("receipt", document_id(receipt))))

    def _keep_decree(self) -> None:
        """The newest one."""
        sealed = self.decrees.log[-1]
        self._keep("record", "decree", sealed.id, "", sealed.document.number, sealed)

    def _keep(
        self, table: str, kind: str, id_: str, module: ModuleId | str, number: int, text: str | Sealed[Any]
    ) -> None:
        """As a `record`, or as something that was witnessed."""
        self._write((table, (kind, id_, self.run.id, str(module), number, text)))

    def _write(self, write: Write) -> None:
        self.changes += 1
        self._writes.append(write)


def _surplus(found: Collection[S], module: Callable[[S], ModuleId]) -> list[S]:
    """Of the module that has most the older half: its leader may have made all of it up."""
    of = Counter(map(module, found))
    most = max(of, key=lambda one: of[one])
    own = sorted((one for one in found if module(one) == most), key=lambda one: one.round)
    return own[: -(-len(own) // 2)]


def _losses(judgement: Judgement) -> Iterator[float]:
    yield judgement.loss
    yield from (found.loss for found in judgement.modules)
    yield from (loss for found in judgement.paths for loss in (found.loss, found.holdout_loss) if loss is not None)


def _is_share(document: Contribution, share: Share) -> bool:
    """Whether a version names this contribution as it is. Of work that several handed in, fewer tokens count."""
    said = (share.path, share.peer, share.base_version)
    is_named = said == (document.path, document.author, document.base_version)
    return is_named and share.tokens <= document.tokens


def text_of(sealed: Sealed[Any]) -> str:
    """A sealed document as it is stored: canonical JSON."""
    return canonical_bytes(sealed.to_dict()).decode()
