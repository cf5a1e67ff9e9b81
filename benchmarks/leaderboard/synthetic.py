"""Snapshots of runs that never were, each from one seed: what the pages are tested and measured with."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dipaco_p2p.canonical import digest
from dipaco_p2p.protocol.signing import PeerId, peer_of, public_key_of
from dipaco_p2p.protocol.standing import Findings, Standings
from dipaco_p2p.ticket import SeedPlace, Ticket, write_ticket
from dipaco_p2p.topology import ModuleId, PathId, Topology
from leaderboard.model import (
    AuditRow,
    CheckRow,
    ContributorRow,
    DecreeRow,
    LossChecks,
    LossRow,
    Mark,
    ModuleRow,
    PathRow,
    PathState,
    RollbackRow,
    RoundRow,
    RunInfo,
    ShareRow,
    Snapshot,
    StageInfo,
    VersionRow,
)
from leaderboard.rows import PeersStandings, standing_words
from leaderboard.words import ROUNDS_KEPT, Sample, Words

BEGAN_S = 1_790_000_000.0
"""Unix time of the run's start, in 2026."""
ROUND_S = 600.0
TOKENS = 65_536
BACK = 3
"""How many versions a rollback undoes."""
ROLLBACK = 4
"""The number of its decree."""
NAMES = {1: ("Ada", "The Analysts"), 3: ("Zoë नमस्ते", ""), 4: ("", "The Analysts"), 6: ("שלום 🇳🇱", "O'Neill & <Sons>")}
"""What some contributors call themselves, and their teams."""
AUDITED = 2
"""First works of each contributor that are repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large a run is."""

    widths: tuple[int, ...] = (1, 2, 2)
    warmup_rounds: int = 7
    rounds: int = 16
    rounds_done: int = 12
    contributors: int = 9
    shares: int = 4
    """Contributions of a version, at most."""


SMALL = Shape()
LARGE = Shape(widths=(16, 16), rounds=400, rounds_done=313, contributors=1_000)
"""10,023 versions of 32 modules and 256 paths."""


def snapshot_of(seed: int = 0, shape: Shape = SMALL) -> Snapshot:
    """One moment of the run that `seed` stands for."""
    return _Maker(seed, shape).snapshot()


class _Maker:
    def __init__(self, seed: int, shape: Shape) -> None:
        self._chance = random.Random(seed)
        self._other = random.Random(seed + 1)  # for what came later, so that the rest stays as it was
        self._shape = shape
        self._peers = [peer_of(self._chance.randbytes(32)) for _ in range(shape.contributors + 1)]
        self._grid = Topology(shape.widths)
        self._warmup = Topology((1,) * len(shape.widths))
        self._stages = (
            self._stage("warmup", self._warmup, shape.warmup_rounds),
            self._stage("grid", self._grid, shape.rounds),
        )
        self._heads: dict[int, str] = {}
        """By level, what the warm-up ended with."""

    def snapshot(self) -> Snapshot:
        shape, end_s = self._shape, BEGAN_S + (self._shape.warmup_rounds + self._shape.rounds_done) * ROUND_S
        versions = [*self._chains(0, self._warmup, shape.warmup_rounds)]
        self._heads = {row.module.level: row.digest for row in versions}
        versions += self._rolled_back(self._chains(1, self._grid, shape.rounds_done))
        losses = tuple(self._losses(versions))
        contributors = self._contributors(versions, losses, end_s)
        paths = tuple(self._paths(end_s))
        return Snapshot(
            run=self._run(),
            taken_s=end_s + 130.0,
            heard_s=end_s + 126.0,
            state="training",
            peers_alive=sum(row.is_alive for row in contributors),
            peers_training=sum(row.is_alive for row in contributors),
            paths_covered=sum(bool(row.peers) for row in paths),
            credit_total=sum(row.credit for row in contributors),
            refused={"bad-signature": 3, "malformed": 12},
            modules=tuple(self._modules(versions)),
            paths=paths,
            rounds=tuple(self._rounds()),
            versions=tuple(versions),
            losses=losses,
            checks=tuple(self._checks()),
            contributors=contributors,
            join=f"dipaco-peer join {self._ticket()}",
            decrees=self._decrees(),
            words=Words(
                about="A model of Dutch law, for everybody who wants to ask it something.", samples=self._samples()
            ),
        )

    def _samples(self) -> tuple[Sample, ...]:
        """One prompt, after each judged round; the words get better."""
        rounds = [(stage, row) for stage in (0, 1) for row in range(self._done(stage) + 1)][-ROUNDS_KEPT:]
        texts = (
            "the of of, and the the",
            "keep the law in the law of the house.",
            "read the contract, and to ask who signed it.",
        )
        return tuple(
            Sample(
                stage=self._stages[stage].id,
                round=number,
                path=str(self._grid.path(0) if stage else self._warmup.path(0)),
                prompt="The first thing to do is",
                text=texts[place * len(texts) // len(rounds)],
            )
            for place, (stage, number) in enumerate(rounds)
        )

    def _done(self, stage: int) -> int:
        return self._shape.rounds_done if stage else self._shape.warmup_rounds

    def _ticket(self) -> str:
        key = public_key_of(self._peers[0])
        seed = SeedPlace(place="/ip4/203.0.113.7/tcp/31337", key=key)
        run = self._run()
        return write_ticket(Ticket(run=run.origin, coordinator=key, seeds=(seed,), name=run.name))

    def _stage(self, name: str, grid: Topology, rounds: int) -> StageInfo:
        return StageInfo(
            id=self._digest(),
            name=name,
            grid=str(grid),
            modules=len(grid.modules()),
            paths=grid.path_count,
            rounds=rounds,
            steps=30,
            parameters=412_000 * len(grid.modules()),
        )

    def _run(self) -> RunInfo:
        settings = (("model.width", "128"), ("outer.lr", "0.7"), ("inner.steps", "30"), ("rounds.deadline_s", "60.0"))
        name = "synthetic-" + "x".join(map(str, self._shape.widths))
        origin = self._stages[0].id
        return RunInfo(name=name, origin=origin, coordinator=self._peers[0], stages=self._stages, settings=settings)

    def _chains(self, stage: int, grid: Topology, done: int) -> Sequence[VersionRow]:
        rows: list[VersionRow] = []
        for module in grid.modules():
            parent = self._heads.get(module.level) or self._digest()
            rows.append(self._version(stage, module, 0, parent, ""))
            for version in range(1, done + 1):
                row = self._version(stage, module, version, self._digest(), parent)
                rows.append(replace(row, findings=self._findings(row), audits=self._audits(row)))
                parent = row.digest
        return rows

    def _rolled_back(self, rows: Sequence[VersionRow]) -> Sequence[VersionRow]:
        """One version of the last module brings an earlier one back: `BACK` rounds ago, and as many before that."""
        version, module = self._shape.rounds_done - BACK, self._grid.modules()[-1]
        by_number = {row.version: row for row in rows if row.module == module}
        digest, why = by_number[version - BACK].digest, self._decrees()[ROLLBACK - 1]
        back = RollbackRow(decree=why.number, to=version - BACK, reason=why.reason, at_s=why.at_s)
        changed: dict[VersionRow, dict[str, Any]] = {
            by_number[version]: {
                "digest": digest,
                "shares": (),
                "update_bytes": 0,
                "clip_norm": None,
                "findings": Findings(),
                "audits": (),
                "rollback": back,
            },
            by_number[version + 1]: {"parent": digest},
        }
        return [replace(row, **changed.get(row, {})) for row in rows]

    def _decrees(self) -> tuple[DecreeRow, ...]:
        version, module = self._shape.rounds_done - BACK, self._grid.modules()[-1]
        at_s = BEGAN_S + (self._shape.warmup_rounds + version) * ROUND_S - 300.0
        peer, other = self._peers[1:3]
        acts: Sequence[dict[str, Any]] = (
            {"act": "appoint", "reason": "", "peer": other},
            {"act": "ban", "reason": "contributions of noise", "peer": peer, "ended_by": 7},
            {"act": "freeze", "reason": "the loss of one module diverged", "ended_by": 5},
            {
                "act": "rollback",
                "reason": "diverged after a bad shard",
                "stage": self._stages[1].id,
                "module": module,
                "to": version - BACK,
                "version": version,
            },
            {"act": "unfreeze", "reason": ""},
            {"act": "ban", "reason": "its clock and its work are of another run", "peer": self._peers[3]},
            {"act": "admit", "reason": "", "peer": peer},
        )
        return tuple(DecreeRow(number=n, at_s=at_s + 60 * n, **act) for n, act in enumerate(acts, start=1))

    def _version(self, stage: int, module: ModuleId, version: int, digest: str, parent: str) -> VersionRow:
        is_newest = version == self._shape.rounds_done and stage == 1
        mark = self._chance.choice((Mark.RECEIPTED, Mark.CLAIMED)) if is_newest else Mark.VERIFIED
        round_ = version + stage * self._shape.warmup_rounds
        return VersionRow(
            stage=self._stages[stage].id,
            module=module,
            version=version,
            digest=digest,
            parent=parent,
            mark=mark,
            author=self._chance.choice(self._peers),
            cosigners=tuple(self._chance.sample(self._peers, 2)),
            term=1 + version // 9,
            snapshot_bytes=1_648_000,
            update_bytes=412_800 if version else 0,
            lr=0.7,
            momentum=0.9,
            clip_norm=0.013 if version else None,
            is_fresh=version == 5 and module.index == 1,
            loss_before=self._loss(round_ - 1) if version and not is_newest else None,
            loss_after=self._loss(round_) if not is_newest else None,
            made_s=BEGAN_S + round_ * ROUND_S if version else None,
            shares=self._shares(stage, module, version) if version else (),
            loss_checks=self._verdict() if not is_newest else None,
        )

    def _findings(self, row: VersionRow) -> Findings:
        """Of its first work always, of the others now and then; near the end of one module one of each kind."""
        authors = [share.peer for share in row.shares]
        repeated = sorted(authors[:1] + authors[1 + row.version % 3 :: 3])
        if (row.module, row.version) != (self._grid.modules()[0], self._shape.rounds_done - 2):
            return Findings(repeated=tuple(repeated))
        forger = next(peer for peer in self._peers[1:] if peer not in authors)
        return Findings(
            forged=(forger,),
            withheld=(authors[-1],),
            failed=(authors[-2],) * 2,
            contradicted=(authors[0],),
            repeated=tuple(repeated),
        )

    def _audits(self, row: VersionRow) -> tuple[AuditRow, ...]:
        """Of a work of every third version, by somebody who has none in it."""
        authors = {share.peer for share in row.shares}
        auditors = [peer for peer in self._peers[1:] if peer not in authors]
        if row.version % 3 or not auditors:
            return ()
        first, place = row.shares[0], row.version % len(auditors)
        work = digest(first.contribution.encode())
        return (AuditRow(work=work, peer=auditors[place], tokens=first.tokens, credit=first.credit),)

    def _standings(self, versions: Sequence[VersionRow]) -> PeersStandings:
        chains = {module: Standings() for module in self._grid.modules()}
        for row in versions:
            if row.stage == self._stages[1].id and row.version:
                authors = [share.peer for share in row.shares]
                chains[row.module].add(row.version, authors=authors, findings=row.findings)
        return standing_words(chains, audited=AUDITED)

    def _shares(self, stage: int, module: ModuleId, version: int) -> tuple[ShareRow, ...]:
        grid = self._grid if stage else self._warmup
        paths = grid.paths_through(module)
        peers = self._chance.sample(self._peers[1:], min(self._shape.shares, self._shape.contributors))
        return tuple(self._share(peer, self._chance.choice(paths), version, len(peers)) for peer in peers)

    def _share(self, peer: PeerId, path: PathId, version: int, count: int) -> ShareRow:
        tokens = TOKENS - self._chance.choice((0, 0, 0, 4_096))
        return ShareRow(
            contribution=self._digest(),
            peer=peer,
            path=path,
            base_version=version - 1,
            weight=1 / count,
            tokens=tokens,
            credit=tokens / len(path.indices),
            loss=self._loss(version),
            bytes=206_400,
            steps=30,
            has_receipt=self._chance.random() < 0.97,
        )

    def _modules(self, versions: Sequence[VersionRow]) -> Sequence[ModuleRow]:
        heads = {row.module: row for row in versions if row.stage == self._stages[1].id}
        judged = {row.module: row.loss_after for row in versions if row.loss_after is not None}
        return [
            ModuleRow(
                module=module,
                version=row.version,
                digest=row.digest,
                loss=judged.get(module),
                leader=row.author if self._chance.random() < 0.9 else None,
                mirrors=row.cosigners,
                term=row.term,
                paths=len(self._grid.paths_through(module)),
                open_contributions=self._chance.randrange(5),
            )
            for module, row in heads.items()
        ]

    def _paths(self, end_s: float) -> Sequence[PathRow]:
        rows = []
        for path in self._grid.paths():
            state = self._chance.choices((PathState.TRAINING, PathState.FREE, PathState.DONE), (8, 1, 1))[0]
            peers = self._chance.sample(self._peers[1:], self._chance.choice((1, 1, 1, 2)))
            rows.append(
                PathRow(
                    path=path,
                    state=state,
                    round=self._shape.rounds_done,
                    peers=tuple(peers) if state is PathState.TRAINING else (),
                    loss=self._loss(self._shape.rounds_done + self._shape.warmup_rounds),
                    best_round=self._shape.rounds_done - 1,
                    covered_s=end_s - self._chance.randrange(7_200),
                    checks=self._verdict(),
                )
            )
        return rows

    def _rounds(self) -> Sequence[RoundRow]:
        done = ((0, self._shape.warmup_rounds), (1, self._shape.rounds_done - 1))
        return [
            RoundRow(
                stage=self._stages[stage].id,
                version=version,
                sharding=0,
                loss=self._loss(version + stage * self._shape.warmup_rounds),
                tokens=131_072,
                at_s=BEGAN_S + (version + stage * self._shape.warmup_rounds) * ROUND_S,
            )
            for stage, rounds in done
            for version in range(rounds + 1)
        ]

    def _losses(self, versions: Sequence[VersionRow]) -> Sequence[LossRow]:
        picked = self._chance.sample([row for row in versions if row.shares], len(versions) // 20)
        kinds = (("lost", "in no version"), ("rejected", "stale base"))
        return [
            LossRow(
                stage=row.stage,
                module=row.module,
                round=row.version,
                contribution=self._digest(),
                peer=self._chance.choice(self._peers[1:]),
                kind=kind,
                reason=reason,
                claimed_by=row.author if kind == "rejected" else PeerId(""),
            )
            for row in sorted(picked, key=lambda row: (row.stage, row.module, row.version))
            for kind, reason in [self._chance.choice(kinds)]
        ]

    def _contributors(
        self, versions: Sequence[VersionRow], losses: Sequence[LossRow], end_s: float
    ) -> tuple[ContributorRow, ...]:
        shares: dict[PeerId, list[tuple[VersionRow, ShareRow]]] = {peer: [] for peer in self._peers[1:]}
        for row in versions:
            for share in row.shares:
                shares[share.peer].append((row, share))
        repeated = Counter(peer for row in versions for peer in row.findings.repeated)
        forged = Counter(peer for row in versions for peer in row.findings.forged)
        standings = self._standings(versions)
        audits = [audit for row in versions for audit in row.audits]
        rows = [
            self._contributor(peer, found, losses, end_s, audits=[audit for audit in audits if audit.peer == peer])
            | {"repeated": repeated[peer], "forged": forged[peer], "standings": standings.get(peer, ())}
            | dict(zip(("name", "team"), NAMES.get(place, ("", "")), strict=True))
            for place, (peer, found) in enumerate(shares.items())
        ]
        rows.sort(key=lambda row: -row["recent"])
        return tuple(ContributorRow(rank=rank, **row) for rank, row in enumerate(rows, start=1))

    def _contributor(
        self,
        peer: PeerId,
        found: Sequence[tuple[VersionRow, ShareRow]],
        losses: Sequence[LossRow],
        end_s: float,
        *,
        audits: Sequence[AuditRow],
    ) -> dict[str, Any]:
        is_alive = self._chance.random() < 0.7
        credit, for_audits = math.fsum(share.credit for _, share in found), math.fsum(one.credit for one in audits)
        return {
            "peer": peer,
            "credit": credit + for_audits,
            "audits": len(audits),
            "audit_credit": for_audits,
            "recent": credit * self._chance.uniform(0.2, 0.9),
            "tokens": sum(share.tokens for _, share in found),
            "contributions": len(found),
            "lost": sum(loss.peer == peer for loss in losses),
            "versions": len({row.digest for row, _ in found}),
            "paths": tuple(sorted({share.path for _, share in found})),
            "last_s": end_s - (0 if is_alive else self._chance.randrange(90_000)),
            "is_alive": is_alive,
            "doing": "training" if is_alive else "",
        }

    def _verdict(self) -> LossChecks:
        agree, differ = self._other.choice(((0, 0), (1, 0), (3, 0), (2, 1), (0, 1)))
        return LossChecks(mark=Mark.VERIFIED if agree else Mark.RECEIPTED, agree=agree, differ=differ)

    def _checks(self) -> Sequence[CheckRow]:
        """Of the newest judged round, three of each path."""
        version = self._shape.rounds_done - 1
        return [
            CheckRow(
                stage=self._stages[1].id,
                version=version,
                path=path,
                peer=peer,
                loss=3.0 + (0.2 if place == 2 else 1e-5),
                tokens=8_192,
                published=3.0,
                agrees=place != 2,
                is_independent=place != 1,
                at_s=BEGAN_S,
            )
            for path in self._grid.paths()
            for place, peer in enumerate(self._other.sample(self._peers[1:], 3))
        ]

    def _loss(self, round_: int) -> float:
        return 2.9 + 3.6 * math.exp(-max(round_, 0) / (3 + self._shape.rounds / 8)) + self._chance.uniform(-0.04, 0.04)

    def _digest(self) -> str:
        return self._chance.randbytes(32).hex()
