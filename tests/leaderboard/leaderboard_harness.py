"""Records made by hand, honest and otherwise, and a stage that takes them in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny_run import SEED_NUMBER, contribution_of, gradient_bytes, granted, make_run, signer, tiny_config, version_of

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.version import Made
from dipaco_p2p.protocol.documents import Contribution, ModuleVersion, Receipt, Sealed, cosign, seal
from dipaco_p2p.protocol.judgement import Judgement, ModuleLoss, PathLoss
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.topology import ModuleId, PathId
from leaderboard.chains import Refusals
from leaderboard.database import Database
from leaderboard.ledger import Stage
from leaderboard.model import Snapshot, VersionRow
from leaderboard.rows import StageRows, stage_rows
from leaderboard.snapshot import take_snapshot

NOW_S = 1_000_000.0
COORDINATOR, LEADER, MIRROR, WORKER, STRANGER = (signer(number) for number in (SEED_NUMBER, 1, 2, 3, 9))
MODULE = ModuleId(1, 0)
PATH, OTHER_PATH = PathId((0, 0, 0)), PathId((0, 0, 1))
TERM = 1


class Bench:
    """One stage of a tiny run, the chain of one module that an honest leader made, and what takes it in."""

    def __init__(self, folder: Path, *, rounds: int = 6, **changes: Any) -> None:
        self.run: Run = make_run(Store(folder), replace(tiny_config(rounds=rounds), **changes))
        self.refusals = Refusals()
        self.stage = Stage(self.run, self.refusals)
        self.grant = granted(self.run, MODULE, term=TERM, leader=LEADER.peer, mirrors=(MIRROR.peer,))
        self.stage.take_grants(MODULE, [self.grant])
        self.contributions: list[Sealed[Contribution]] = []

    def work(self, base: Made | None, *, author: Signer = WORKER, seed: int = 0) -> Any:
        payload = gradient_bytes(self.run, MODULE, seed=seed)
        changes: dict[str, Any] = {}
        if base is not None:
            changes = {"base_version": base.version.version, "base_digest": base.version.digest}
        document = contribution_of(self.run, author, payload, module=MODULE, path=PATH, **changes)
        return seal(author, document), payload

    def make(self, after: Made | None = None, *, leader: Signer = LEADER, seed: int = 0) -> Any:
        """The next version, of one contribution: sealed, and what was made."""
        admitted = [self.work(after, seed=seed)]
        self.contributions += [sealed for sealed, _ in admitted]
        sealed, made = version_of(self.run, leader, admitted, term=TERM, after=after)
        if leader is LEADER:  # of the group that has a mirror
            sealed = seal(leader, replace(sealed.document, grant=self.grant.id))
        return sealed, made

    def chain(
        self, count: int, *, seed: int = 0, after: Made | None = None
    ) -> tuple[list[Sealed[ModuleVersion]], Made]:
        """`count` versions one after the other."""
        found, made = [], after
        for number in range(count):
            sealed, made = self.make(made, seed=seed + number)
            found.append(sealed)
        assert made is not None
        return found, made

    def take(self, *found: Sealed[ModuleVersion], now_s: float = NOW_S) -> None:
        self.stage.take_versions(MODULE, list(found), now_s=now_s)

    def receipt(self, contribution: str, *, author: Signer = LEADER, round_: int = 0, **changes: Any) -> Any:
        document = Receipt(
            run=self.run.id,
            contribution=contribution,
            module=MODULE,
            round=round_,
            term=TERM,
            custody=(),
            author=author.peer,
        )
        return seal(author, replace(document, **changes))

    def judgement(
        self, version: int, digest: str, *, loss: float = 3.0, author: Signer = COORDINATOR, **changes: Any
    ) -> Any:
        document = Judgement(
            run=self.run.id,
            version=version,
            sharding=0,
            loss=loss,
            tokens=10,
            modules=(ModuleLoss(module=MODULE, digest=digest, loss=loss, tokens=10),),
            paths=(PathLoss(path=PATH, loss=loss, holdout_loss=loss),),
            at_s=NOW_S + version,
            author=author.peer,
        )
        return seal(author, replace(document, **changes))

    @property
    def refused(self) -> dict[str, int]:
        return dict(self.refusals.counts)

    @property
    def digests(self) -> list[str]:
        return [published.version.digest for published in self.stage.chains[MODULE].versions]

    def rows(self) -> StageRows:
        return stage_rows(self.stage)

    def snapshot(self) -> Snapshot:
        return take_snapshot((self.stage,), refused=self.refused, now_s=NOW_S)

    def row(self, version: int) -> VersionRow:
        [row] = [row for row in self.rows().versions if (row.module, row.version) == (MODULE, version)]
        return row


def signed_by(sealed: Sealed[ModuleVersion], *signers: Signer) -> Sealed[ModuleVersion]:
    return sealed.cosigned({one.peer: cosign(one, sealed) for one in signers})


def dump(database: Database, table: str) -> list[tuple[Any, ...]]:
    """All rows of a table, sorted: two databases with the same rows give equal lists."""
    return sorted(database._connection.execute(f"SELECT * FROM {table}"))


def page(*items: Any) -> bytes:
    """An answer with these: documents, or anything else."""
    return canonical_bytes([item.to_dict() if isinstance(item, Sealed) else item for item in items])


def changed(sealed: Sealed[Any], **values: Any) -> dict[str, Any]:
    """The same signature over something else."""
    plain: dict[str, Any] = json.loads(json.dumps(sealed.to_dict()))
    plain["document"].update(values)
    return plain
