"""From a stage to the rows that are shown: the same records always give the same rows.

Losses come from the coordinator's judgements, and only where these name the digest that the chain has. Credit is
protocol/credit.py.

A loss is `receipted` while only the coordinator has signed it, and `verified` once an independent peer has measured the
same (protocol/judgement.py); the loss of a module or of the whole grid, once that holds for every path in it.
Disagreement is counted and shown, whatever the mark. Credit does not depend on any of this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dipaco_p2p.protocol.audits import Audit
from dipaco_p2p.protocol.credit import share_credit
from dipaco_p2p.protocol.decrees import (
    ADMIT,
    APPOINT,
    BAN,
    DISMISS,
    FREEZE,
    GROW,
    HIDE_NAME,
    ROLLBACK,
    SHOW_NAME,
    UNFREEZE,
    Decree,
)
from dipaco_p2p.protocol.documents import ModuleVersion, Sealed, Share
from dipaco_p2p.protocol.judgement import Judgement, ModuleLoss, PathLoss, agrees, is_about
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.standing import Findings, Standing, Standings
from dipaco_p2p.topology import ModuleId, PathId

from .chains import Published
from .ledger import Stage
from .model import AuditRow, CheckRow, DecreeRow, LossChecks, LossRow, Mark, RollbackRow, RoundRow, ShareRow, VersionRow

UNKNOWN = PeerId("")
RECEIPTED = LossChecks(mark=Mark.RECEIPTED)

PeersStandings = Mapping[PeerId, tuple[tuple[ModuleId, str], ...]]
"""In words, by module; the gravest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """All that was measured again of one stage."""

    paths: Mapping[tuple[int, PathId], LossChecks]
    modules: Mapping[tuple[int, ModuleId], LossChecks]
    rounds: Mapping[int, LossChecks]
    rows: tuple[CheckRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRows:
    """All that is shown of one stage, but for who is there now."""

    versions: tuple[VersionRow, ...]
    rounds: tuple[RoundRow, ...]
    losses: tuple[LossRow, ...]
    checked: Checked
    standings: PeersStandings


def stage_rows(stage: Stage) -> StageRows:
    """The rows of one stage, which must not change meanwhile (`Stage.copy`)."""
    rows = _Rows(stage)
    return StageRows(
        versions=tuple(row for module in stage.chains for row in rows.versions(module)),
        rounds=tuple(rows.rounds()),
        losses=(*rows.lost(), *rows.rejected()),
        checked=rows.checked,
        standings=standing_words(
            {module: chain.standings for module, chain in stage.chains.items()}, audited=stage.run.config.audited
        ),
    )


def mark_of(published: Published, *, coordinator: PeerId) -> Mark:
    """Who stands for a version; its cosignatures are those of its group, and the coordinator's."""
    if published.is_final:
        return Mark.VERIFIED
    others = published.sealed.cosignatures.keys() - {published.version.author, coordinator}
    return Mark.RECEIPTED if others else Mark.CLAIMED


class _Rows:
    """A stage, and what its rows are looked up in."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._judgements = {number: sealed.document for number, sealed in sorted(stage.judgements.items())}
        self._losses = {
            (number, found.module): (found, judgement.at_s)
            for number, judgement in self._judgements.items()
            for found in judgement.modules
        }
        self._leaders = {module: stage.leaders(module) for module in stage.chains}
        self._earned = {
            (module, version, audit)
            for module, chain in stage.chains.items()
            for version, audit in chain.standings.earned(stage.run.config.audited)
        }
        self.checked = checked(stage, self._judgements)

    def versions(self, module: ModuleId) -> Iterable[VersionRow]:
        """From the genesis on."""
        chain, coordinator = self._stage.chains[module], self._stage.run.manifest.author
        yield self._row(chain.genesis, Mark.VERIFIED, (), None)
        for published in chain.versions:
            mark, seen_s = mark_of(published, coordinator=coordinator), self._stage.first_seen.get(published.id)
            yield self._row(published.version, mark, published.sealed.cosignatures, seen_s)

    def _row(self, version: ModuleVersion, mark: Mark, cosigners: Iterable[PeerId], seen_s: float | None) -> VersionRow:
        """`seen_s` is when it was first seen here."""
        loss, judged_s = self._judged(version.version, version.module, version.digest)
        checks = self.checked.modules.get((version.version, version.module), RECEIPTED)
        return VersionRow(
            stage=self._stage.run.id,
            module=version.module,
            version=version.version,
            digest=version.digest,
            parent=version.parent,
            mark=mark,
            author=version.author,
            cosigners=tuple(sorted(cosigners)),
            term=version.term,
            snapshot_bytes=version.snapshot.size,
            update_bytes=version.update.size if version.update is not None else 0,
            lr=version.lr,
            momentum=version.momentum,
            clip_norm=version.clip_norm,
            is_fresh=version.is_fresh,
            loss_before=self._judged(version.version - 1, version.module, version.parent)[0],
            loss_after=loss,
            made_s=seen_s if judged_s is None else judged_s,
            shares=tuple(self._share_row(version, share) for share in version.shares),
            loss_checks=checks if loss is not None else None,
            rollback=_rollback(version.rollback.decree) if version.rollback is not None else None,
            findings=version.findings or Findings(),
            audits=tuple(self._audit_row(version, audit) for audit in version.audits),
        )

    def _judged(self, number: int, module: ModuleId, digest: str) -> tuple[float | None, float | None]:
        """The loss of a version and when it was judged, if the judgement is about these parameters."""
        found = self._losses.get((number, module))
        return (found[0].loss, found[1]) if found is not None and found[0].digest == digest else (None, None)

    def _audit_row(self, version: ModuleVersion, audit: Audit) -> AuditRow:
        run, is_earned = self._stage.run, (version.module, version.version, audit) in self._earned
        credit = share_credit(audit.tokens, tokens_full=run.tokens_full, levels=len(run.config.model.levels))
        return AuditRow(work=audit.work, peer=audit.by, tokens=audit.tokens, credit=credit if is_earned else 0.0)

    def _share_row(self, version: ModuleVersion, share: Share) -> ShareRow:
        known = self._stage.contributions.get(share.contribution)
        tokens_full = self._stage.run.tokens_full
        return ShareRow(
            contribution=share.contribution,
            peer=share.peer,
            path=share.path,
            base_version=share.base_version,
            weight=share.weight,
            tokens=share.tokens,
            credit=share_credit(share.tokens, tokens_full=tokens_full, levels=len(share.path.indices)),
            loss=share.loss,
            bytes=known.payload.size if known is not None else None,
            steps=known.steps if known is not None else None,
            has_receipt=self._has_receipt(version.module, share.contribution),
        )

    def _has_receipt(self, module: ModuleId, contribution: str) -> bool:
        """Whether a peer that led in that term has signed a receipt for it."""
        receipt = self._stage.receipts.get(contribution)
        if receipt is None or receipt.module != module:
            return False
        return receipt.author in self._leaders[module].get(receipt.term, set())

    def rounds(self) -> Iterable[RoundRow]:
        """Judgements of which every module is as the chain has it."""
        for number, judgement in self._judgements.items():
            if judgement.modules and all(self._is_on_chain(number, found) for found in judgement.modules):
                yield RoundRow(
                    stage=self._stage.run.id,
                    version=number,
                    sharding=judgement.sharding,
                    loss=judgement.loss,
                    tokens=judgement.tokens,
                    at_s=judgement.at_s,
                    checks=self.checked.rounds.get(number, RECEIPTED),
                )

    def _is_on_chain(self, number: int, found: ModuleLoss) -> bool:
        chain = self._stage.chains[found.module]
        if number > len(chain.versions):
            return False
        version = chain.versions[number - 1].version if number else chain.genesis
        return version.digest == found.digest

    def lost(self) -> Iterable[LossRow]:
        """Contributions with a leader's receipt that the chain has not counted, and cannot any more."""
        for id_ in self._stage.overdue():
            receipt, known = self._stage.receipts[id_], self._stage.contributions.get(id_)
            note = self._stage.rejections.get(id_)
            said = f"; its leader says: {note.reason}" if note is not None else ""
            if self._has_receipt(receipt.module, id_):
                yield LossRow(
                    stage=self._stage.run.id,
                    module=receipt.module,
                    round=receipt.round,
                    contribution=id_,
                    peer=known.author if known is not None else UNKNOWN,
                    kind="lost",
                    reason=f"a receipt was signed, and no version counts it{said}",
                    claimed_by=note.author if note is not None else UNKNOWN,
                )

    def rejected(self) -> Iterable[LossRow]:
        """Contributions that leaders say they refused, and that no chain counts."""
        counted = {id_ for chain in self._stage.chains.values() for id_ in chain.counted}
        left_out = counted | set(self._stage.overdue())
        for id_, note in sorted(self._stage.rejections.items(), key=lambda item: (item[1].round, item[0])):
            if id_ not in left_out:
                yield LossRow(
                    stage=self._stage.run.id,
                    module=note.contribution.module,
                    round=note.round,
                    contribution=id_,
                    peer=note.contribution.author,
                    kind="rejected",
                    reason=note.reason,
                    claimed_by=note.author,
                )


# -- standings


def standing_words(chains: Mapping[ModuleId, Standings], *, audited: int) -> PeersStandings:
    """How peers stand on these chains, as ContributorRow says it."""
    found: dict[PeerId, list[tuple[ModuleId, Standing]]] = defaultdict(list)
    for module, standings in chains.items():
        for peer in standings.peers:
            found[peer].append((module, standings.of(peer)))
    for of_peer in found.values():
        of_peer.sort(key=lambda one: (one[1].rank(audited), one[0]))
    return {
        peer: tuple((module, standing.describe(audited)) for module, standing in of_peer)
        for peer, of_peer in found.items()
    }


# -- decrees

BEGINS = {ADMIT: BAN, UNFREEZE: FREEZE, DISMISS: APPOINT, SHOW_NAME: HIDE_NAME}
"""What an act undoes."""


def decree_rows(log: Sequence[Sealed[Decree]], versions: Iterable[VersionRow]) -> tuple[DecreeRow, ...]:
    """The coordinator's decrees, the oldest first, and what became of each."""
    carried_out = {row.rollback.decree: row.version for row in versions if row.rollback is not None}
    newest: dict[object, int] = {}
    rows: list[DecreeRow] = []
    for decree in (sealed.document for sealed in reversed(log)):
        about = BEGINS.get(decree.act, decree.act), decree.peer, decree.stage, decree.module
        rows.append(_decree_row(decree, version=carried_out.get(decree.number), ended_by=newest.get(about)))
        newest[about] = decree.number
    return tuple(reversed(rows))


def _decree_row(decree: Decree, *, version: int | None, ended_by: int | None) -> DecreeRow:
    return DecreeRow(
        number=decree.number,
        at_s=decree.at_s,
        act=decree.act,
        reason=decree.reason,
        peer=decree.peer,
        stage=decree.stage,
        module=decree.module,
        to=decree.to if decree.act in (ROLLBACK, GROW) else None,
        version=version,
        ended_by=ended_by,
        levels="x".join(map(str, decree.levels)),
        corpus=decree.corpus,
        without=_without(decree),
    )


def _rollback(decree: Decree) -> RollbackRow:
    return RollbackRow(
        decree=decree.number, to=decree.to, reason=decree.reason, at_s=decree.at_s, without=_without(decree)
    )


def _without(decree: Decree) -> tuple[PeerId, ...]:
    return () if decree.rebuilt is None else decree.rebuilt.without


# -- losses that others measured again


def checked(stage: Stage, judgements: Mapping[int, Judgement]) -> Checked:
    """What the checks of a stage say of its judgements; those that are about something else are passed over."""
    begun = _begun(stage) if stage.checks else {}
    paths: dict[tuple[int, PathId], LossChecks] = {}
    modules: dict[tuple[int, ModuleId], LossChecks] = {}
    rounds: dict[int, LossChecks] = {}
    rows: list[CheckRow] = []
    for version in sorted({version for version, _ in stage.checks} & judgements.keys()):
        judgement = judgements[version]
        found = {one.path: _check_rows(stage, judgement, one, begun) for one in judgement.paths if one.loss is not None}
        for path, measured in found.items():
            paths[version, path] = _verdict(measured, is_verified=_sure(measured) is not None)
            rows += measured
        for module in judgement.modules:
            inside = [measured for path, measured in found.items() if module.module in path.modules()]
            modules[version, module.module] = _whole(inside, module.loss)
        rounds[version] = _whole(list(found.values()), judgement.loss)
    return Checked(paths=paths, modules=modules, rounds=rounds, rows=tuple(rows))


def _begun(stage: Stage) -> dict[tuple[PathId, PeerId], int]:
    """The first version that counts work of a peer on a path."""
    begun: dict[tuple[PathId, PeerId], int] = {}
    for version in (published.version for chain in stage.chains.values() for published in chain.versions):
        for share in version.shares:
            key = share.path, share.peer
            begun[key] = min(version.version, begun.get(key, version.version))
    return begun


def _check_rows(
    stage: Stage, judgement: Judgement, published: PathLoss, begun: Mapping[tuple[PathId, PeerId], int]
) -> list[CheckRow]:
    """Who has measured the loss of a path again, at one round. Whoever had trained the path is not independent."""
    assert published.loss is not None
    version, path, validation = judgement.version, published.path, stage.run.manifest.validation.digest
    return [
        CheckRow(
            stage=stage.run.id,
            version=version,
            path=path,
            peer=peer,
            loss=check.loss,
            tokens=check.tokens,
            published=published.loss,
            agrees=agrees(check.loss, published.loss),
            is_independent=begun.get((path, peer), version + 1) > version,
            at_s=check.at_s,
        )
        for peer, check in sorted(stage.checks.get((version, path), {}).items())
        if is_about(check, judgement, validation=validation)
    ]


def _sure(rows: Sequence[CheckRow]) -> CheckRow | None:
    """A measurement that verifies the path's loss."""
    return next((row for row in rows if row.agrees and row.is_independent), None)


def _whole(places: Sequence[Sequence[CheckRow]], loss: float) -> LossChecks:
    """Of a loss that is the mean over several paths: each of them must be verified, and the mean must be theirs."""
    rows = [row for place in places for row in place]
    sure = [row for place in places if (row := _sure(place)) is not None]
    if not places or len(sure) < len(places):
        return _verdict(rows, is_verified=False)
    mean = sum(row.loss * row.tokens for row in sure) / sum(row.tokens for row in sure)
    is_theirs = agrees(mean, loss)
    found = _verdict(rows, is_verified=is_theirs)
    return found if is_theirs else replace(found, differ=found.differ + 1)


def _verdict(rows: Sequence[CheckRow], *, is_verified: bool) -> LossChecks:
    agree = sum(row.agrees for row in rows)
    mark = Mark.VERIFIED if is_verified else Mark.RECEIPTED
    return LossChecks(mark=mark, agree=agree, differ=len(rows) - agree)
