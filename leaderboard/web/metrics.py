"""The run as metrics for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dipaco_p2p.program.metrics import Metric, counter, exposition, gauge, one

from ..model import Mark
from .book import Book
from .text import word


def metrics_text(book: Book) -> str:
    """All metrics; those without a value are left out. Labels may be words of peers."""
    return exposition(metrics(book), clean=word)


def metrics(book: Book) -> Iterator[Metric]:
    """What is told of the run."""
    snapshot, stage = book.snapshot, book.snapshot.run.stage
    info = {"run": snapshot.run.origin, "name": snapshot.run.name, "stage": stage.id, "stage_name": stage.name}
    yield gauge("run_info", "The run and its open stage; always 1.", [(1, info)])
    yield one("snapshot_timestamp_seconds", "When the figures were taken, Unix time.", snapshot.taken_s)
    yield one("swarm_heard_timestamp_seconds", "When the swarm last answered, Unix time.", snapshot.heard_s)
    yield one("peers_alive", "Peers that said lately that they are alive.", snapshot.peers_alive)
    yield one("peers_training", "Peers that train.", snapshot.peers_training)
    yield one("paths", "Paths of the open stage.", stage.paths)
    yield one("paths_covered", "Paths that a live peer claims.", snapshot.paths_covered)
    yield one("rounds", "Rounds of the open stage.", stage.rounds)
    yield one("round", "The version that every module of the open stage has.", book.round)
    yield one("loss_nats", "Loss of the newest judged round.", snapshot.rounds[-1].loss if snapshot.rounds else None)
    yield one("best_loss_nats", "Loss of the best round.", book.best.loss if book.best else None)
    yield one("contributors", "Peers with a share in a version.", book.workers)
    yield counter("credit_tokens_total", "Credit of all contributors.", [(snapshot.credit_total, {})])
    marks = Counter(row.mark for row in snapshot.versions)
    yield gauge("versions", "Module versions, by who stands for them.", [(marks[m], {"mark": m}) for m in Mark])
    lost = Counter(row.kind for row in snapshot.losses)
    uncounted = [(lost[kind], {"kind": kind}) for kind in sorted(lost)]
    yield gauge("contributions_uncounted", "Contributions that no version counts.", uncounted)
    checks = Counter(row.agrees for row in snapshot.checks)
    said = [(checks[is_same], {"result": name}) for is_same, name in ((True, "agrees"), (False, "differs"))]
    yield gauge("loss_checks", "Losses measured again by others than the coordinator.", said)
    refused = [(number, {"reason": reason}) for reason, number in sorted(snapshot.refused.items())]
    yield counter("records_refused_total", "Records that were not believed, by reason.", refused)
    versions = [(float(row.version), {"module": str(row.module)}) for row in snapshot.modules]
    yield gauge("module_version", "The newest version of a module.", versions)
    losses = [(row.loss, {"module": str(row.module)}) for row in snapshot.modules if row.loss is not None]
    yield gauge("module_loss_nats", "Loss of a module's newest judged version.", losses)
