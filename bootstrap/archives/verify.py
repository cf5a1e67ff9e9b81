"""Verifying a run: every chain of its archive made again from its contributions, to the bit.

Of an archive that keeps the last rounds alone (owner/retention.py) this proves less of the versions before them: that
they are one chain, each signed by its maker and by the coordinator, who made it again before, or had the word of a
quorum (owner/archive.py), and that the parameters which are kept have their digests. That those follow from their
contributions is then the coordinator's word.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from dipaco_p2p.core.outer.outer_step import OuterState
from dipaco_p2p.errors import ConfigError, DipacoError, IntegrityError
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.owner.retention import read_thinned
from dipaco_p2p.owner.rollback import brought, make_rollback_again
from dipaco_p2p.owner.version import make_again, stored
from dipaco_p2p.protocol.documents import ModuleVersion
from dipaco_p2p.protocol.norms import NORM_VERSIONS, Norms
from dipaco_p2p.protocol.standing import Standings
from dipaco_p2p.protocol.versions import Tally, check_chain, genesis_version, is_final
from dipaco_p2p.topology import ModuleId
from dipaco_p2p.use.folder import RunFolder

from ..progress import stage
from ..text.added import find_text, held_out
from .rebuild import check_rebuilt


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainReport:
    """What verifying one module's chain showed; `problem` is empty when everything held."""

    stage: str
    module: ModuleId
    versions: int
    contributions: int
    signed: int = 0
    """The versions up to this one are not made again: their contributions were dropped, as the run file says."""
    unshown: int = 0
    """So many final versions follow, and nobody alive has what made them."""
    decreed: int = 0
    """So many versions were rebuilt from contributions that were dropped."""
    problem: str = ""

    @property
    def words(self) -> str:
        """What was shown, for people."""
        if self.problem:
            return self.problem
        said = f"; {self.unshown} newer as the coordinator signed them" if self.unshown else ""
        said += f"; {self.decreed} rebuilt as the coordinator decreed" if self.decreed else ""
        if not self.signed:
            return f"to the bit{said}"
        after = f"to the bit from version {self.signed + 1} on" if self.versions > self.signed else "not made again"
        return f"{after}; up to {self.signed} as the coordinator signed them{said}"


def verify_run(
    run: Run, store: Store, archive: SeedArchive, *, on_progress: Callable[[int], None] = lambda done: None
) -> list[ChainReport]:
    """Verify all modules; never raises for what it finds, and says it in the report."""
    reports = []
    done = itertools.count(1)
    for module in archive.ledgers:
        report = _verify_chain(run, store, archive, module, on_version=lambda: on_progress(next(done)))
        # A coordinator at work drops what was to be read here: then its chain is read once more.
        while report.problem and read_thinned(store, module) != archive.thinning.of(module):
            archive = SeedArchive(run, store)
            report = _verify_chain(run, store, archive, module, on_version=lambda: None)
        reports.append(report)
    return reports


def _verify_chain(
    run: Run, store: Store, archive: SeedArchive, module: ModuleId, *, on_version: Callable[[], None]
) -> ChainReport:
    ledger, counted, signed, decreed, problem = archive.ledgers[module], 0, 0, 0, ""
    try:
        check_chain(ledger.versions, run.manifest, module)
        versions, tally = [sealed.document for sealed in ledger.versions], Tally()
        signed = check_signed(run, archive, ledger)
        for version in versions[:signed]:
            tally.add(version)
            on_version()
        parent, state = ledger.at(signed), None
        rebuilt = {one.version: to for one in versions if (to := _rebuilt_from(one)) is not None}
        states: dict[int, OuterState] = {}
        for place, version in enumerate(versions[signed:], start=signed):
            norms = run.norms(module, versions[max(0, place - NORM_VERSIONS) : place])
            state = archive.state(module, signed) if state is None else state
            if place in rebuilt.values():
                states[place] = state
            if (to := rebuilt.get(version.version)) in states:
                check_rebuilt(run, store, archive, versions, version, states[to])
            else:
                decreed += to is not None
            state = recompute(run, store, archive, parent, state, version, norms=norms, standings=tally.standings)
            parent = version
            tally.add(version)
            counted += len(parent.shares)
            on_version()
    except DipacoError as error:
        problem = str(error)
    return ChainReport(
        stage=run.manifest.stage,
        module=module,
        versions=len(ledger.versions),
        contributions=counted,
        signed=signed,
        decreed=decreed,
        problem=problem,
    )


def _rebuilt_from(version: ModuleVersion) -> int | None:
    """The version that this one was rebuilt from, if it was."""
    decree = None if version.rollback is None else version.rollback.decree
    return None if decree is None or decree.rebuilt is None else decree.to


def check_signed(run: Run, archive: SeedArchive, ledger: Ledger) -> int:
    """Up to which version contributions were dropped; 0: none was. Raises IntegrityError unless all these bear the
    coordinator's signature, and what is kept of them is whole."""
    thinned = archive.thinning.of(ledger.module)
    for sealed in ledger.versions[: thinned.contributions]:
        number = sealed.document.version
        if not is_final(sealed, coordinator=run.manifest.author):
            raise IntegrityError(f"version {number} was dropped, and the coordinator did not sign it")
        if not thinned.lacks(number):
            archive.blob(sealed.document.digest)
    return min(thinned.contributions, ledger.head.version)


def verify_fork(after: Run, archive: SeedArchive, before: Run) -> list[ChainReport]:
    """The modules of a stage that do not begin as their parents ended in the stage before, parameters and, where the
    grid grew, outer state as well, or whose manifest names workers that did not work; empty when all is well. `archive`
    is of the stage before."""
    ended, spent = before.manifest, after.manifest.spent
    last = spent - ended.spent if spent else before.rounds
    is_whole, named = archive.complete_version >= last, set(after.manifest.workers)
    unknown = named - archive.workers().keys() if is_whole else set()
    reports = []
    for module in after.topology.modules():
        parent, begin = after.topology.parent(module, before.topology), genesis_version(after.manifest, module)
        ledger, problem = archive.ledgers[parent], ""
        if after.manifest.before != before.id:
            problem = f"its stage does not follow from the {ended.stage}"
        elif ledger.head.version < last:
            problem = f"it begins as {parent} ended with version {last}, which is not in the {ended.stage}'s archive"
        elif begin.digest != (end := ledger.at(last)).digest:
            problem = f"its version 0 is {begin.digest[:8]}, but {parent} ended with {end.digest[:8]}"
        elif spent and begin.state != end.state:
            problem = f"its outer state is not the one with which {parent} ended"
        elif unknown:
            problem = f"its manifest says that {len(unknown)} peers worked of whom the {ended.stage} counts nothing"
        if problem:
            reports.append(ChainReport(stage="fork", module=module, versions=0, contributions=0, problem=problem))
    return reports


def verify_held_out(folder: RunFolder, after: Run, before: Run) -> list[ChainReport]:
    """What is held out of a stage that grew must be what was held out before, and behind it that of the text which was
    decreed with the growth, if the folder has it (further seed nodes do not); empty when it is."""
    growth = before.growth
    if not after.manifest.is_grown or growth is None:
        return []
    added = find_text(folder.root, growth.corpus, after.config.model) if growth.corpus else None
    reports = []
    for name, part in (("validation", "validation"), ("holdout", "holdout"), ("router_split", "router")):
        old, new = (held_out(folder, run, getattr(run.manifest, name)).tokens for run in (before, after))
        whole = not growth.corpus or added is not None
        due = old if added is None else np.concatenate([old, getattr(added, part).tokens])
        if not np.array_equal(new if whole else new[: len(due)], due):
            problem = f"its {part} sequences are not those of the {before.manifest.stage} and of the decreed text"
            module = after.topology.modules()[0]
            reports.append(ChainReport(stage="fork", module=module, versions=0, contributions=0, problem=problem))
    return reports


def recompute(
    run: Run,
    store: Store,
    archive: SeedArchive,
    parent: ModuleVersion,
    state: OuterState,
    version: ModuleVersion,
    *,
    norms: Norms,
    standings: Standings,
) -> OuterState:
    """Make `version` again from its parent; raises IntegrityError if anything about it comes out differently, or it
    counts what may not count by the `norms` and the `standings` of the chain up to there."""
    if version.rollback is not None:  # of which version, the chain was checked for
        blobs = [archive.blob(ref.digest) for ref in brought(version)]
        return make_rollback_again(run, parent, blobs, version).state
    contributions = [archive.contribution(share.contribution) for share in version.shares]
    for number in {sealed.document.sharding for sealed in contributions}:
        if number and run.sharding(number) is None:
            raise IntegrityError(f"sharding {number} is not in the archive")
    admitted = [stored(run, store, version.module, sealed) for sealed in contributions]
    said = b"" if version.appraisals is None else archive.blob(version.appraisals.digest)
    made = make_again(run, parent, state, admitted, version, norms=norms, standings=standings, appraisals=said)
    return made.state


def verify_folder(folder: Path) -> list[ChainReport]:
    """Verify the run that `folder` holds, as far as it is now if its coordinator is at work; raises ConfigError when it
    holds none."""
    if not folder.is_dir():
        raise ConfigError(f"`{folder}` holds no run", hint="give the folder that `start --dir` was given")
    files = RunFolder(folder, is_read_only=True)
    files.require()
    return verify_stages(files)


def verify_stages(folder: RunFolder) -> list[ChainReport]:
    """Verify all stages that there are, and that each begins where the one before ended."""
    reports: list[ChainReport] = []
    before: Run | None = None
    for run in folder.stages():
        store = folder.store(run.manifest.stage)
        archive = SeedArchive(run, store)
        total = sum(len(ledger.versions) for ledger in archive.ledgers.values())
        with stage(f"Verifying the {run.manifest.stage}'s chains", total=total) as advance:
            reports += verify_run(run, store, archive, on_progress=advance)
        if before is not None:
            reports += verify_fork(run, SeedArchive(before, folder.store(before.manifest.stage)), before)
            reports += verify_held_out(folder, run, before)
        before = run
    return reports


def print_chains(reports: list[ChainReport]) -> None:
    """Print the reports; raises IntegrityError if any chain did not verify."""
    table = Table("stage", "module", "versions", "contributions", "verified")
    for report in reports:
        table.add_row(
            report.stage,
            str(report.module),
            str(report.versions),
            str(report.contributions),
            report.words,
        )
    Console().print(table, markup=False)  # a problem may quote what others signed
    bad = [report for report in reports if report.problem]
    if bad:
        raise IntegrityError(f"{len(bad)} of {len(reports)} chains do not verify", hint="the first: " + bad[0].problem)
