"""`dipaco-bootstrap verify`: the chains of a run's folder, recomputed and shown."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from dipaco_p2p.errors import ConfigError, IntegrityError
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.program.files import folder_lock

from .folder import GRID, WARMUP, RunFolder
from .progress import stage
from .verify import ChainReport, verify_fork, verify_run


def verify_folder(folder: Path) -> list[ChainReport]:
    """Verify the run that `folder` holds; raises ConfigError when it holds none."""
    if not folder.is_dir():
        raise ConfigError(f"`{folder}` holds no run", hint="give the folder that `start --dir` was given")
    with folder_lock(folder, hint="stop the coordinator first; it goes on where it stopped"):
        RunFolder(folder).require()
        return verify_stages(RunFolder(folder))


def verify_stages(folder: RunFolder) -> list[ChainReport]:
    """Verify all stages that there are, and that each begins where the one before ended."""
    reports: list[ChainReport] = []
    warmup, grid = folder.open(WARMUP), folder.open(GRID)
    for run in filter(None, (warmup, grid)):
        store = folder.store(run.manifest.stage)
        archive = SeedArchive(run, store)
        total = sum(len(ledger.versions) for ledger in archive.ledgers.values())
        with stage(f"Verifying the {run.manifest.stage}'s chains", total=total) as advance:
            reports += verify_run(run, store, archive, on_progress=advance)
    if warmup is not None and grid is not None:
        reports += verify_fork(grid, SeedArchive(warmup, folder.store(WARMUP)), warmup)
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
            report.problem or "to the bit",
        )
    Console().print(table)
    bad = [report for report in reports if report.problem]
    if bad:
        raise IntegrityError(f"{len(bad)} of {len(reports)} chains do not verify", hint="the first: " + bad[0].problem)
