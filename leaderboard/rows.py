"""From the records of a stage to the rows that are shown: the same records always give the same rows.

Losses come from the coordinator's judgements, and only where these name the digest that the chain has. Credit is
protocol/credit.py. What rests on observations (cosigners, receipts, when a version was first seen) is left out with
`with_observations=False`: what remains can be had again by anybody, and a test compares it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dipaco_p2p.node.run import Run
from dipaco_p2p.protocol.credit import Earned, share_credit
from dipaco_p2p.protocol.documents import Contribution, ModuleVersion, Receipt, Rejection, Share
from dipaco_p2p.protocol.judgement import Check, Judgement, ModuleLoss
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId, PathId

from .chains import Published
from .checked import Checked, checked
from .model import LossChecks, LossRow, Mark, RoundRow, ShareRow, VersionRow
from .tables import Stage

UNKNOWN = PeerId("")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecords:
    """One stage at one moment, for a thread to work on while the stage itself goes on."""

    run: Run
    genesis: Mapping[ModuleId, ModuleVersion]
    chains: Mapping[ModuleId, tuple[Published, ...]]
    contributions: Mapping[str, Contribution]
    judgements: Mapping[int, Judgement]
    receipts: Mapping[str, Receipt] = field(default_factory=dict)
    leaders: Mapping[ModuleId, Mapping[int, set[PeerId]]] = field(default_factory=dict)
    first_seen: Mapping[str, float] = field(default_factory=dict)
    overdue: tuple[str, ...] = ()
    checks: Mapping[tuple[int, PathId], Mapping[PeerId, Check]] = field(default_factory=dict)
    rejections: Mapping[str, Rejection] = field(default_factory=dict)
    with_observations: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One share, as its author's account sees it."""

    peer: PeerId
    path: PathId
    round: tuple[str, PathId, int]
    """Stage, path, and the version that it was trained from."""
    version: tuple[str, ModuleId, int]
    contribution: str
    tokens: int
    earned: Earned | None
    """None while nobody can say when."""
    credit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRows:
    """All that is shown of one stage, but for who is there now."""

    versions: tuple[VersionRow, ...]
    rounds: tuple[RoundRow, ...]
    losses: tuple[LossRow, ...]
    work: tuple[Work, ...]
    checked: Checked = Checked()


class KnownRows:
    """Rows of versions that were made before: most do not change from one snapshot to the next."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[object, VersionRow, tuple[Work, ...]]] = {}

    def row(self, id_: str, key: object, make: Callable[[], VersionRow]) -> tuple[VersionRow, tuple[Work, ...]]:
        """The row of version `id_`, which is still good if it was made of the same `key`."""
        known = self._rows.get(id_)
        if known is None or known[0] != key:
            row = make()
            known = self._rows[id_] = key, row, tuple(_work(row))
        return known[1], known[2]

    def keep(self, ids: Iterable[str]) -> None:
        """Forget all others: their branch was given up."""
        self._rows = {id_: self._rows[id_] for id_ in ids}


def records_of(stage: Stage, *, with_observations: bool = True) -> StageRecords:
    """A copy that does not change any more."""
    records = StageRecords(
        run=stage.run,
        genesis={module: chain.genesis for module, chain in stage.chains.items()},
        chains={module: tuple(chain.versions) for module, chain in stage.chains.items()},
        contributions=dict(stage.contributions),
        judgements={number: sealed.document for number, sealed in stage.judgements.items()},
        with_observations=with_observations,
    )
    if not with_observations:
        return records
    return StageRecords(
        run=records.run,
        genesis=records.genesis,
        chains=records.chains,
        contributions=records.contributions,
        judgements=records.judgements,
        receipts=dict(stage.receipts),
        leaders={module: stage.leaders(module) for module in stage.chains},
        first_seen=dict(stage.first_seen),
        overdue=tuple(stage.overdue()),
        checks=dict(stage.checks),
        rejections=dict(stage.rejections),
    )


def stage_rows(records: StageRecords, known: KnownRows | None = None) -> StageRows:
    """The rows of one stage; the same with or without those that are `known` of this stage."""
    known = KnownRows() if known is None else known
    losses = _module_losses(records.judgements)
    measured = checked(records.run, records.chains, records.judgements, records.checks)
    versions: list[VersionRow] = []
    work: list[Work] = []
    for module, chain in records.chains.items():
        versions.append(_genesis_row(records, records.genesis[module], losses, measured))
        for published in chain:
            row, done = _version_row(records, published, losses, measured, known)
            versions.append(row)
            work += done
    known.keep(published.id for chain in records.chains.values() for published in chain)
    return StageRows(
        versions=tuple(versions),
        rounds=tuple(_round_rows(records, measured)),
        losses=(*_loss_rows(records), *_rejection_rows(records)),
        work=tuple(work),
        checked=measured,
    )


Losses = Mapping[tuple[int, ModuleId], tuple[ModuleLoss, float]]
"""By version and module: what was measured, and when."""


def _module_losses(judgements: Mapping[int, Judgement]) -> Losses:
    return {
        (number, found.module): (found, judgement.at_s)
        for number, judgement in judgements.items()
        for found in judgement.modules
    }


def _judged(losses: Losses, number: int, module: ModuleId, digest: str) -> tuple[float | None, float | None]:
    """The loss of a version and when it was judged, if the judgement is about these parameters."""
    found = losses.get((number, module))
    return (found[0].loss, found[1]) if found is not None and found[0].digest == digest else (None, None)


def _genesis_row(records: StageRecords, genesis: ModuleVersion, losses: Losses, measured: Checked) -> VersionRow:
    loss, judged_s = _judged(losses, 0, genesis.module, genesis.digest)
    checks = measured.of_module(0, genesis.module) if loss is not None else None
    return _row(
        records, genesis, mark=Mark.VERIFIED, loss_before=None, loss_after=loss, made_s=judged_s, loss_checks=checks
    )


def _version_row(
    records: StageRecords, published: Published, losses: Losses, measured: Checked, known: KnownRows
) -> tuple[VersionRow, tuple[Work, ...]]:
    version = published.version
    before, _ = _judged(losses, version.version - 1, version.module, version.parent)
    after, judged_s = _judged(losses, version.version, version.module, version.digest)
    made_s = judged_s if judged_s is not None else records.first_seen.get(published.id)
    checks = measured.of_module(version.version, version.module) if after is not None else None
    seen = [
        (share.contribution in records.contributions, _has_receipt(records, version.module, share.contribution))
        for share in version.shares
    ]

    def make() -> VersionRow:
        return _row(
            records,
            version,
            mark=mark_of(published, coordinator=records.run.manifest.author),
            loss_before=before,
            loss_after=after,
            made_s=made_s,
            cosigners=tuple(sorted(published.sealed.cosignatures)) if records.with_observations else (),
            shares=tuple(_share_row(records, version, share) for share in version.shares),
            loss_checks=checks,
        )

    return known.row(published.id, (published.sealed.cosignatures, before, after, made_s, seen, checks), make)


def mark_of(published: Published, *, coordinator: PeerId) -> Mark:
    """Who stands for a version; its cosignatures are those of its group, and the coordinator's."""
    if published.is_final:
        return Mark.VERIFIED
    others = published.sealed.cosignatures.keys() - {published.version.author, coordinator}
    return Mark.RECEIPTED if others else Mark.CLAIMED


def _row(
    records: StageRecords,
    version: ModuleVersion,
    *,
    mark: Mark,
    loss_before: float | None,
    loss_after: float | None,
    made_s: float | None,
    cosigners: tuple[PeerId, ...] = (),
    shares: tuple[ShareRow, ...] = (),
    loss_checks: LossChecks | None = None,
) -> VersionRow:
    return VersionRow(
        stage=records.run.id,
        module=version.module,
        version=version.version,
        digest=version.digest,
        parent=version.parent,
        mark=mark,
        author=version.author,
        cosigners=cosigners,
        term=version.term,
        snapshot_bytes=version.snapshot.size,
        update_bytes=version.update.size if version.update is not None else 0,
        lr=version.lr,
        momentum=version.momentum,
        clip_norm=version.clip_norm,
        is_fresh=version.is_fresh,
        loss_before=loss_before,
        loss_after=loss_after,
        made_s=made_s,
        shares=shares,
        loss_checks=loss_checks,
    )


def _share_row(records: StageRecords, version: ModuleVersion, share: Share) -> ShareRow:
    known = records.contributions.get(share.contribution)
    return ShareRow(
        contribution=share.contribution,
        peer=share.peer,
        path=share.path,
        base_version=share.base_version,
        weight=share.weight,
        tokens=share.tokens,
        credit=share_credit(share.tokens, tokens_full=records.run.tokens_full, levels=len(share.path.indices)),
        loss=share.loss,
        bytes=known.payload.size if known is not None else None,
        steps=known.steps if known is not None else None,
        has_receipt=_has_receipt(records, version.module, share.contribution),
    )


def _has_receipt(records: StageRecords, module: ModuleId, contribution: str) -> bool:
    """Whether a peer that led in that term has signed a receipt for it."""
    receipt = records.receipts.get(contribution)
    if receipt is None or receipt.module != module:
        return False
    return receipt.author in records.leaders.get(module, {}).get(receipt.term, set())


def _work(row: VersionRow) -> Iterable[Work]:
    for share in row.shares:
        yield Work(
            peer=share.peer,
            path=share.path,
            round=(row.stage, share.path, share.base_version),
            version=(row.stage, row.module, row.version),
            contribution=share.contribution,
            tokens=share.tokens,
            earned=Earned(credit=share.credit, at_s=row.made_s) if row.made_s is not None else None,
            credit=share.credit,
        )


def _round_rows(records: StageRecords, measured: Checked) -> Iterable[RoundRow]:
    """Judgements of which every module is as the chain has it."""
    for number, judgement in sorted(records.judgements.items()):
        if judgement.modules and all(_is_on_chain(records, number, found) for found in judgement.modules):
            yield RoundRow(
                stage=records.run.id,
                version=number,
                sharding=judgement.sharding,
                loss=judgement.loss,
                tokens=judgement.tokens,
                at_s=judgement.at_s,
                checks=measured.of_round(number),
            )


def _is_on_chain(records: StageRecords, number: int, found: ModuleLoss) -> bool:
    chain: Sequence[Published] = records.chains[found.module]
    if number == 0:
        return records.genesis[found.module].digest == found.digest
    return number <= len(chain) and chain[number - 1].version.digest == found.digest


def _loss_rows(records: StageRecords) -> Iterable[LossRow]:
    """Contributions with a leader's receipt that the chain has not counted, and cannot any more."""
    for id_ in records.overdue:
        receipt, known = records.receipts[id_], records.contributions.get(id_)
        note = records.rejections.get(id_)
        said = f"; its leader says: {note.reason}" if note is not None else ""
        if _has_receipt(records, receipt.module, id_):
            yield LossRow(
                stage=records.run.id,
                module=receipt.module,
                round=receipt.round,
                contribution=id_,
                peer=known.author if known is not None else UNKNOWN,
                kind="lost",
                reason=f"a receipt was signed, and no version counts it{said}",
                claimed_by=note.author if note is not None else UNKNOWN,
            )


def _rejection_rows(records: StageRecords) -> Iterable[LossRow]:
    """What leaders say that they refused, and no chain counts all the same."""
    if not records.rejections:
        return
    counted = {share.contribution for chain in records.chains.values() for one in chain for share in one.version.shares}
    left_out = counted | set(records.overdue)
    for id_, note in sorted(records.rejections.items(), key=lambda item: (item[1].round, item[0])):
        if id_ not in left_out:
            yield LossRow(
                stage=records.run.id,
                module=note.contribution.module,
                round=note.round,
                contribution=id_,
                peer=note.contribution.author,
                kind="rejected",
                reason=note.reason,
                claimed_by=note.author,
            )
