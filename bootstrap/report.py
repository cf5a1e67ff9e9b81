"""`dipaco-bootstrap verify`: the chains of a run's folder, recomputed and shown."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from dipaco_p2p.errors import ConfigError, IntegrityError
from dipaco_p2p.runtime.store import Store, folder_lock

from .archive import SeedArchive
from .prepare import open_prepared
from .progress import stage
from .verify import ChainReport, verify_run


def verify_folder(folder: Path) -> list[ChainReport]:
    """Verify the run that `folder` holds; raises ConfigError when it holds none."""
    if not (folder / "documents").is_dir():
        raise ConfigError(f"`{folder}` holds no run", hint="give the folder that `start --dir` was given")
    with folder_lock(folder, hint="stop the coordinator first; it goes on where it stopped"):
        return _verify(folder)


def _verify(folder: Path) -> list[ChainReport]:
    store = Store(folder)
    run = open_prepared(store)
    if run is None:
        raise ConfigError(f"`{folder}` holds no prepared run", hint="run `dipaco-bootstrap start` first")
    archive = SeedArchive(run, store)
    total = sum(len(ledger.versions) for ledger in archive.ledgers.values())
    with stage("Verifying every chain", total=total) as advance:
        return verify_run(run, store, archive, on_progress=advance)


def print_chains(reports: list[ChainReport]) -> None:
    """Print the reports; raises IntegrityError if any chain did not verify."""
    table = Table("module", "versions", "contributions", "verified")
    for report in reports:
        table.add_row(
            str(report.module), str(report.versions), str(report.contributions), report.problem or "to the bit"
        )
    Console().print(table)
    bad = [report for report in reports if report.problem]
    if bad:
        raise IntegrityError(f"{len(bad)} of {len(reports)} chains do not verify", hint="the first: " + bad[0].problem)
