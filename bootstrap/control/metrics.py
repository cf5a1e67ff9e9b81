"""A running coordinator as metrics for Prometheus: what `status` and `modules` say, under names that stay.

The leaderboard has metrics too, of the run as anybody sees it. These are the coordinator's own, and begin otherwise, so
that both can be scraped.

Served at `GET /metrics` over plain HTTP. Off unless asked for, and on this machine only unless an address is named: the
figures are no secret, but whoever may fetch them may also keep the coordinator busy.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from dipaco_p2p.program.metrics import CONTENT_TYPE, Metric, counter, exposition, gauge, one

from ..runfile import METRICS_HINT, Place

PREFIX = "coordinator_"


def metrics_text(status: Mapping[str, Any], modules: Sequence[Mapping[str, Any]]) -> str:
    """All that is known now."""
    return exposition([*_of_status(status), *_of_modules(modules)])


def _of_status(status: Mapping[str, Any]) -> Iterator[Metric]:
    info = {name: str(status[name] or "") for name in ("run", "run_id", "stage", "version", "state")}
    yield gauge(f"{PREFIX}info", "The run, its open stage and its state; always 1.", [(1, info)])
    for key, name, about in GAUGES:
        yield one(PREFIX + name, about, status[key])
    for key, name, about in COUNTERS:
        yield counter(PREFIX + name, about, [(status[key], {})])


def _of_modules(modules: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    leaderless = sum(row["leader"] is None for row in modules)
    yield one(f"{PREFIX}modules_leaderless", "Modules that nobody leads.", leaderless)
    for key, name, about in OF_A_MODULE:
        yield gauge(PREFIX + name, about, [(row[key], {"module": row["module"]}) for row in modules])


GAUGES = (
    ("running_s", "uptime_seconds", "Since this process began."),
    ("volunteers_alive", "volunteers_alive", "Volunteers that said lately that they are alive."),
    ("volunteers_training", "volunteers_training", "Volunteers that are alive and claim a path."),
    ("seeds_alive", "seeds_alive", "Seed nodes that said lately that they are alive."),
    ("tokens_per_s", "tokens_per_second", "Training speed of all volunteers together, by their own word."),
    ("paths", "paths", "Paths of the open stage."),
    ("paths_covered", "paths_covered", "Paths that a live volunteer claims."),
    ("modules", "modules", "Modules of the open stage."),
    ("round", "round", "The version that every module of the open stage has."),
    ("rounds", "rounds", "Rounds of the open stage."),
    ("round_age_s", "round_age_seconds", "Since every module had that version."),
    ("judged_round", "judged_round", "The newest round that was judged."),
    ("judged_loss", "judged_loss_nats", "Validation loss of that round, per token."),
    ("judged_perplexity", "judged_perplexity", "Validation perplexity of that round."),
    ("contributions_open", "contributions_open", "Contributions in the archive that no version counts yet."),
    ("versions_archived", "versions_archived", "Versions of all modules of the open stage in the archive."),
    ("disk_used_bytes", "disk_used_bytes", "What the run's folder takes."),
    ("disk_free_bytes", "disk_free_bytes", "What is free on its disk."),
)
COUNTERS = (
    ("contributions_counted", "contributions_counted_total", "Contributions that versions of the open stage count."),
    ("bytes_up", "sent_bytes_total", "Bytes of calls that left this machine."),
    ("bytes_down", "received_bytes_total", "Bytes of calls that came to this machine."),
)
OF_A_MODULE = (
    ("newest", "module_newest_version", "The newest version that the module's leader or the archive has."),
    ("final", "module_final_version", "The newest version that the coordinator has signed."),
    ("behind", "module_behind_versions", "How many versions the furthest module is ahead of this one."),
    ("leaderless_s", "module_leaderless_seconds", "How long nobody has led the module; 0 while somebody does."),
)


@asynccontextmanager
async def metrics_served(place: Place | None, text: Callable[[], Awaitable[str]]) -> AsyncIterator[str]:
    """Serve `text` while the block runs; its address, empty for no place. Raises EnvironmentUnfit for a place that
    cannot be had."""
    if place is None:
        yield ""
        return
    from dipaco_p2p.program.web import listening, page_served  # a web framework: only if asked for

    hint = f"end what uses it, or choose another: {METRICS_HINT}"
    with listening(*place, refused=f"cannot serve metrics at {place}", hint=hint) as listener:
        async with page_served(listener, "/metrics", text, content_type=CONTENT_TYPE):
            yield f"http://{Place(place.host, listener.getsockname()[1])}/metrics"
