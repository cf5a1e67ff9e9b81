"""Losses that others have measured again: which mark a published loss has, and who disagrees.

A loss is `receipted` while only the coordinator has signed it, and `verified` once a peer that is independent of it has
measured the same (protocol/judgement.py); of a module or of the whole grid, once that holds for every path in it. Who
disagrees is counted and shown, whatever the mark. Credit does not look at any of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dipaco_p2p.node.run import Run
from dipaco_p2p.protocol.judgement import Agreement, Check, Judgement, agreement, agrees, is_about
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId, PathId

from .chains import Published
from .model import CheckRow, LossChecks, Mark

RECEIPTED = LossChecks(mark=Mark.RECEIPTED)

ByPlace = Mapping[tuple[int, PathId], Mapping[PeerId, Check]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """All that was measured again of one stage."""

    paths: Mapping[tuple[int, PathId], LossChecks] = field(default_factory=dict)
    modules: Mapping[tuple[int, ModuleId], LossChecks] = field(default_factory=dict)
    rounds: Mapping[int, LossChecks] = field(default_factory=dict)
    rows: tuple[CheckRow, ...] = ()

    def of_path(self, version: int, path: PathId) -> LossChecks:
        return self.paths.get((version, path), RECEIPTED)

    def of_module(self, version: int, module: ModuleId) -> LossChecks:
        return self.modules.get((version, module), RECEIPTED)

    def of_round(self, version: int) -> LossChecks:
        return self.rounds.get(version, RECEIPTED)


def checked(
    run: Run,
    chains: Mapping[ModuleId, Sequence[Published]],
    judgements: Mapping[int, Judgement],
    checks: ByPlace,
) -> Checked:
    """What `checks` say of `judgements`; those that are about something else are passed over."""
    if not checks:
        return Checked()
    begun = _begun(chains)
    paths: dict[tuple[int, PathId], LossChecks] = {}
    modules: dict[tuple[int, ModuleId], LossChecks] = {}
    rounds: dict[int, LossChecks] = {}
    rows: list[CheckRow] = []
    for version in sorted({version for version, _ in checks} & judgements.keys()):
        judgement = judgements[version]
        places = {
            found.path: _Place.of(run, judgement, found.path, found.loss, checks, begun)
            for found in judgement.paths
            if found.loss is not None
        }
        for path, place in places.items():
            paths[version, path] = place.verdict
            rows += place.rows
        for one in judgement.modules:
            inside = [place for path, place in places.items() if one.module in path.modules()]
            modules[version, one.module] = _whole(inside, one.loss)
        rounds[version] = _whole(list(places.values()), judgement.loss)
    return Checked(paths=paths, modules=modules, rounds=rounds, rows=tuple(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """One path at one round."""

    found: Agreement
    rows: tuple[CheckRow, ...]

    @classmethod
    def of(
        cls,
        run: Run,
        judgement: Judgement,
        path: PathId,
        loss: float,
        checks: ByPlace,
        begun: Mapping[tuple[PathId, PeerId], int],
    ) -> _Place:
        version, set_ = judgement.version, run.manifest.validation.digest
        said = checks.get((version, path), {})
        sound = [check for _, check in sorted(said.items()) if is_about(check, judgement, validation=set_)]
        partial = {check.author for check in sound if begun.get((path, check.author), version + 1) <= version}
        rows = tuple(
            CheckRow(
                stage=run.id,
                version=version,
                path=path,
                peer=check.author,
                loss=check.loss,
                tokens=check.tokens,
                published=loss,
                agrees=agrees(check.loss, loss),
                is_independent=check.author not in partial,
                at_s=check.at_s,
            )
            for check in sound
        )
        return cls(found=agreement(loss, sound, partial=partial), rows=rows)

    @property
    def verdict(self) -> LossChecks:
        return _verdict(self.found, is_verified=self.found.independent > 0)

    @property
    def sure(self) -> CheckRow | None:
        """A measurement that verifies the path's loss."""
        return next((row for row in self.rows if row.agrees and row.is_independent), None)


def _whole(places: Sequence[_Place], loss: float) -> LossChecks:
    """Of a loss that is the mean over several paths: each of them must be verified, and the mean be theirs."""
    found = sum((place.found for place in places), Agreement())
    sure = [row for place in places if (row := place.sure) is not None]
    if not places or len(sure) < len(places):
        return _verdict(found, is_verified=False)
    mean = sum(row.loss * row.tokens for row in sure) / sum(row.tokens for row in sure)
    if not agrees(mean, loss):  # its paths are right, and it is not
        return _verdict(found + Agreement(0, 1, 0), is_verified=False)
    return _verdict(found, is_verified=True)


def _verdict(found: Agreement, *, is_verified: bool) -> LossChecks:
    mark = Mark.VERIFIED if is_verified else Mark.RECEIPTED
    return LossChecks(mark=mark, agree=found.agree, differ=found.differ)


def _begun(chains: Mapping[ModuleId, Iterable[Published]]) -> dict[tuple[PathId, PeerId], int]:
    """The first version that counts work of a peer on a path."""
    begun: dict[tuple[PathId, PeerId], int] = {}
    for chain in chains.values():
        for published in chain:
            for share in published.version.shares:
                key = share.path, share.peer
                begun[key] = min(published.version.version, begun.get(key, published.version.version))
    return begun
