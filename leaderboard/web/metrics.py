"""The run as metrics for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from dipaco_p2p.program.metrics import Metric, exposition
from dipaco_p2p.program.metrics import counter as plain_counter
from dipaco_p2p.program.metrics import gauge as plain_gauge
from dipaco_p2p.program.metrics import one as _one

from ..model import Mark
from .book import Book
from .text import word


def metrics_text(book: Book) -> str:
    """All metrics; those without a value are left out."""
    return exposition(metrics(book))


def metrics(book: Book) -> Iterator[Metric]:
    """What is told of the run."""
    snapshot, stage = book.snapshot, book.snapshot.run.stage
    info = {"run": snapshot.run.origin, "name": snapshot.run.name, "stage": stage.id, "stage_name": stage.name}
    yield _gauge("run_info", "The run and its open stage; always 1.", [(1, info)])
    yield _one("snapshot_timestamp_seconds", "When the figures were taken, Unix time.", snapshot.taken_s)
    yield _one("swarm_heard_timestamp_seconds", "When the swarm last answered, Unix time.", snapshot.heard_s)
    yield _one("peers_alive", "Peers that said lately that they are alive.", snapshot.peers_alive)
    yield _one("peers_training", "Peers that train.", snapshot.peers_training)
    yield _one("paths", "Paths of the open stage.", stage.paths)
    yield _one("paths_covered", "Paths that a live peer claims.", snapshot.paths_covered)
    yield _one("rounds", "Rounds of the open stage.", stage.rounds)
    yield _one("round", "The version that every module of the open stage has.", book.round)
    yield _one("loss_nats", "Loss of the newest judged round.", snapshot.rounds[-1].loss if snapshot.rounds else None)
    yield _one("best_loss_nats", "Loss of the best round.", book.best.loss if book.best else None)
    yield _one("contributors", "Peers with a share in a version.", book.workers)
    yield _counter("credit_tokens_total", "Credit of all contributors.", [(snapshot.credit_total, {})])
    marks = Counter(row.mark for row in snapshot.versions)
    yield _gauge("versions", "Module versions, by who stands for them.", [(marks[m], {"mark": m}) for m in Mark])
    lost = Counter(row.kind for row in snapshot.losses)
    uncounted = [(lost[kind], {"kind": kind}) for kind in sorted(lost)]
    yield _gauge("contributions_uncounted", "Contributions that no version counts.", uncounted)
    checks = Counter(row.agrees for row in snapshot.checks)
    said = [(checks[is_same], {"result": name}) for is_same, name in ((True, "agrees"), (False, "differs"))]
    yield _gauge("loss_checks", "Losses measured again by others than the coordinator.", said)
    refused = [(number, {"reason": reason}) for reason, number in sorted(snapshot.refused.items())]
    yield _counter("records_refused_total", "Records that were not believed, by reason.", refused)
    versions = [(float(row.version), {"module": str(row.module)}) for row in snapshot.modules]
    yield _gauge("module_version", "The newest version of a module.", versions)
    losses = [(row.loss, {"module": str(row.module)}) for row in snapshot.modules if row.loss is not None]
    yield _gauge("module_loss_nats", "Loss of a module's newest judged version.", losses)


def _gauge(name: str, about: str, values: Iterable[tuple[float, Mapping[str, str]]]) -> Metric:
    return plain_gauge(name, about, _cleaned(values))


def _counter(name: str, about: str, values: Iterable[tuple[float, Mapping[str, str]]]) -> Metric:
    return plain_counter(name, about, _cleaned(values))


def _cleaned(values: Iterable[tuple[float, Mapping[str, str]]]) -> Iterator[tuple[float, Mapping[str, str]]]:
    """Labels may be words of peers."""
    for value, labels in values:
        yield value, {name: word(text) for name, text in labels.items()}
