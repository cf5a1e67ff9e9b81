"""What a running coordinator says of its run, as plain JSON values: the same keys always, null for what is not known.

Who lives, claims and leads is what the coordinator sees of the swarm (node/watch.py): hints. Versions that are final
and what was counted are its archive's. Lists are bounded, and say how many they leave out: identities cost nothing.

The same figures are metrics for Prometheus, under names that stay, served at `GET /metrics` over plain HTTP. The
leaderboard has metrics too, of the run as anybody sees it; the coordinator's begin otherwise, so that both can be
scraped. Off unless asked for, and on this machine only unless an address is named: the figures are no secret, but
whoever may fetch them may also keep the coordinator busy.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dipaco_p2p import __version__
from dipaco_p2p.clock import Clock
from dipaco_p2p.node.authority import Decrees, Mandates
from dipaco_p2p.program.files import folder_bytes
from dipaco_p2p.program.metrics import CONTENT_TYPE, Metric, counter, exposition, gauge, one
from dipaco_p2p.protocol.keeping import SHARES, Conduct
from dipaco_p2p.protocol.liveness import Heartbeat, shown_names
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId, PathId

from ..runfile import METRICS_HINT, Place
from .requests import Control, Request

if TYPE_CHECKING:
    from dipaco_p2p.node.ledger import Ledger
    from dipaco_p2p.node.run import Run
    from dipaco_p2p.node.watch import Watch
    from dipaco_p2p.owner.retention import Thinned
    from dipaco_p2p.swarm.api import SwarmStatistics

STATUS, PEERS, PATHS, MODULES = (f"dipaco.coordinator.{name}/1" for name in ("status", "peers", "paths", "modules"))
PEERS_SHOWN_MAX = 2000
CLAIMANTS_SHOWN_MAX = 16
"""Of one path."""
TOKENS_PER_S_MAX = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The open stage, now."""

    run: Run
    watch: Watch
    mandates: Mandates
    decrees: Decrees
    ledgers: Mapping[ModuleId, Ledger]
    judged: Mapping[str, Any] | None
    """The newest row of the evaluator."""
    round: int
    """The version that every module has, in the archive."""
    round_age_s: float
    """Since that version was complete, or the stage was opened."""
    line: SwarmStatistics
    now_s: float
    thinned: Callable[[ModuleId], Thinned]
    """What its archive has dropped of a module."""
    is_catching_up: bool = False
    """Whether it came out of a backup, and learns first what it has signed since."""
    keepers: Mapping[PeerId, Conduct] = field(default_factory=dict)
    """What the challenges of those who offer to keep came to."""


class View:
    """Of one running coordinator; `stage` tells of the stage that is open, as soon as one is."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._began_s = clock.now_s()
        self.stage: Callable[[], Seen | None] = lambda: None

    def add_verbs(self, control: Control) -> None:
        """Answer to `status`, `peers`, `paths` and `modules`."""
        control.on("status", lambda request: self.status())
        control.on("peers", self._list(PEERS, "peers", list_peers))
        control.on("paths", self._list(PATHS, "paths", list_paths))
        control.on("modules", self._list(MODULES, "modules", list_modules))

    async def status(self) -> dict[str, Any]:
        """The answer to `status`; the disk is looked at in a thread."""
        used, free = await asyncio.to_thread(_disk, self._folder)
        return {
            "schema": STATUS,
            "version": __version__,
            "pid": os.getpid(),
            "folder": str(self._folder.absolute()),
            "running_s": round(self._clock.now_s() - self._began_s, 1),
            **summary(self.stage()),
            "disk_used_bytes": used,
            "disk_free_bytes": free,
        }

    async def metrics(self) -> str:
        """The same for Prometheus."""
        seen = self.stage()
        return metrics_text(await self.status(), [] if seen is None else list_modules(seen)["modules"])

    def _list(self, schema: str, name: str, make: Callable[[Seen], dict[str, Any]]) -> Callable[[Request], Any]:
        def answer(request: Request) -> dict[str, Any]:
            seen = self.stage()
            found = {name: [], "left_out": 0} if seen is None else make(seen)
            return {"schema": schema, **_run(seen), **found}

        return answer


def summary(seen: Seen | None) -> dict[str, Any]:
    """The stage in figures."""
    return {"state": _state(seen), **_run(seen), **_rounds(seen), **_swarm(seen), **_archive(seen)}


def _state(seen: Seen | None) -> str:
    """In one word: `preparing` (no stage is open), `catching-up` (out of a backup), `complete`, `frozen` (by decree),
    `waiting` (nobody trains) or `training`."""
    if seen is None:
        return "preparing"
    if seen.is_catching_up:
        return "catching-up"
    if seen.run.is_last_stage and seen.round >= seen.run.rounds:
        return "complete"
    if seen.decrees.is_frozen:
        return "frozen"
    return "training" if any(_training(seen).values()) else "waiting"


def _run(seen: Seen | None) -> dict[str, Any]:
    return {
        "run": None if seen is None else seen.run.name,
        "run_id": None if seen is None else seen.run.origin,
        "stage": None if seen is None else seen.run.manifest.stage,
    }


def _rounds(seen: Seen | None) -> dict[str, Any]:
    judged = None if seen is None else seen.judged
    return {
        "round": None if seen is None else seen.round,
        "rounds": None if seen is None else seen.run.rounds,
        "round_age_s": None if seen is None else round(seen.round_age_s, 1),
        "judged_round": None if judged is None else judged["version"],
        "judged_loss": None if judged is None else _finite(judged["loss"]),
        "judged_perplexity": None if judged is None else _finite(judged["perplexity"]),
        "judged_texts": [] if judged is None else [_finite(text["perplexity"]) for text in judged.get("texts", ())],
        "rounds_after": None if seen is None else seen.run.rounds_after,
        "grows_to": None if seen is None or seen.run.growth is None else list(seen.run.growth.levels),
    }


def _swarm(seen: Seen | None) -> dict[str, Any]:
    beats = {} if seen is None else seen.watch.heartbeats
    volunteers = [beat for beat in beats.values() if beat.role == "volunteer"]
    training = {} if seen is None else _training(seen)
    return {
        "volunteers_alive": 0 if seen is None else seen.watch.volunteers_alive,
        "volunteers_training": sum(training.values()),
        "seeds_alive": 0 if seen is None else len(seen.watch.seeds()),
        "tokens_per_s": round(sum(map(_pace, volunteers)), 1),
        "paths": 0 if seen is None else seen.run.topology.path_count,
        "paths_covered": sum(map(bool, training.values())),
        "bytes_up": 0 if seen is None else seen.line.bytes_sent,
        "bytes_down": 0 if seen is None else seen.line.bytes_received,
        "volunteers_direct": sum(bool(beat.addresses) and not beat.is_relayed for beat in volunteers),
        "volunteers_relayed": sum(beat.is_relayed for beat in volunteers),
        "relay_slots": 0 if seen is None else seen.line.relay_slots,
        "relay_circuits": 0 if seen is None else seen.line.relay_circuits,
        "relay_bytes": 0 if seen is None else seen.line.relay_bytes,
    }


def _archive(seen: Seen | None) -> dict[str, Any]:
    modules = [] if seen is None else list(seen.ledgers)
    led = [] if seen is None else [module for module in modules if seen.watch.leader(module) is not None]
    ledgers = [] if seen is None else list(seen.ledgers.values())
    return {
        "modules": len(modules),
        "modules_led": len(led),
        "versions_archived": sum(ledger.head.version for ledger in ledgers),
        "contributions_counted": sum(len(ledger.counted) for ledger in ledgers),
        "contributions_open": sum(len(ledger.open) for ledger in ledgers),
    }


def list_peers(seen: Seen) -> dict[str, Any]:
    """Volunteers before seed nodes; those who claim a path first."""
    watch = seen.watch
    claimed = {peer: path for path, claims in watch.claims.items() for peer in claims}
    leads: dict[PeerId, list[str]] = {}
    for module in watch.heads:
        if (leader := watch.leader(module)) is not None:
            leads.setdefault(leader, []).append(str(module))
    beats = watch.heartbeats
    order = sorted(beats, key=lambda peer: (beats[peer].role == "seed", peer not in claimed, peer))
    shown = [_peer(seen, peer, claimed.get(peer), leads.get(peer, [])) for peer in order[:PEERS_SHOWN_MAX]]
    return {"peers": shown, "left_out": len(order) - len(shown)}


def _peer(seen: Seen, peer: PeerId, path: PathId | None, leads: list[str]) -> dict[str, Any]:
    beat, beaten_s = seen.watch.heartbeats[peer], seen.watch.beaten_s(peer)
    name, team = shown_names(peer, beat, seen.decrees.state)
    tested = seen.keepers.get(peer, Conduct())
    return {
        "peer": peer,
        "role": beat.role,
        "doing": beat.doing,
        "path": None if path is None else str(path),
        "round": beat.round,
        "tokens_per_s": round(_pace(beat), 1),
        "heartbeat_age_s": None if beaten_s is None else round(seen.now_s - beaten_s, 1),
        "is_reachable": bool(beat.addresses),
        "is_relayed": beat.is_relayed,
        "leads": leads,
        "name": name,
        "team": team,
        "keeps": round(beat.keeps / SHARES, 3),
        "keeping_proofs": tested.proofs,
        "is_barred_keeper": tested.is_barred(seen.now_s),
    }


def list_paths(seen: Seen) -> dict[str, Any]:
    return {"paths": [_path(seen, path, training) for path, training in _training(seen).items()], "left_out": 0}


def _path(seen: Seen, path: PathId, training: int) -> dict[str, Any]:
    claims = seen.watch.claims[path]
    order = sorted(claims, key=lambda peer: (claims[peer].since_s, peer))[:CLAIMANTS_SHOWN_MAX]
    losses = {} if seen.judged is None else seen.judged.get("paths", {})
    return {
        "path": str(path),
        "round": min(seen.watch.reached(module) for module in path.modules()),
        "is_covered": bool(training),
        "claimants": [
            {
                "peer": peer,
                "round": claims[peer].round,
                "since_s": claims[peer].since_s,
                "is_alive": peer in seen.watch.heartbeats,
            }
            for peer in order
        ],
        "claimants_left_out": len(claims) - len(order),
        "judged_loss": _finite(losses.get(str(path), {}).get("loss")),
    }


def list_modules(seen: Seen) -> dict[str, Any]:
    newest = {module: max(seen.watch.reached(module), ledger.head.version) for module, ledger in seen.ledgers.items()}
    furthest = max(newest.values())
    return {"modules": [_module(seen, module, newest[module], furthest) for module in newest], "left_out": 0}


def _module(seen: Seen, module: ModuleId, newest: int, furthest: int) -> dict[str, Any]:
    watch, ledger = seen.watch, seen.ledgers[module]
    leader, grant = watch.leader(module), seen.mandates.grant(module)
    head = None if leader is None else watch.heads[module][leader]
    return {
        "module": str(module),
        "leader": leader,
        "term": seen.mandates.term(module) if head is None else head.term,
        "mirrors": list(head.mirrors if head else grant.mirrors if grant else ()),
        "newest": newest,
        "final": ledger.final,
        "behind": furthest - newest,
        "leaderless_s": 0.0 if head else round(seen.now_s - watch.led_s[module], 1),
        "contributions_counted": len(ledger.counted),
        "paths": len(seen.run.topology.paths_through(module)),
    }


def _training(seen: Seen) -> dict[PathId, int]:
    """How many train each path: those whose claims we read and who live, or else as the leaders of its modules tell."""
    told, alive = seen.watch.paths.told(), seen.watch.heartbeats.keys()
    return {path: told.get(path, 0) or len(claims.keys() & alive) for path, claims in seen.watch.claims.items()}


def _pace(beat: Heartbeat) -> float:
    """Anybody may say anything of itself; a sum of it must stay a number."""
    return min(beat.tokens_per_s, TOKENS_PER_S_MAX)


def _finite(value: float | None) -> float | None:
    """What JSON can say."""
    return value if value is not None and math.isfinite(value) else None


def _disk(folder: Path) -> tuple[int, int]:
    """Bytes of all files of the run, and those that are free."""
    return folder_bytes(folder), shutil.disk_usage(folder).free


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
    ("volunteers_direct", "volunteers_direct", "Volunteers that are dialled directly."),
    ("volunteers_relayed", "volunteers_relayed", "Volunteers that are dialled through relays."),
    ("relay_slots", "relay_slots", "Volunteers that have a slot at this machine's relay."),
    ("relay_circuits", "relay_circuits", "Connections that this machine passes on."),
    ("disk_used_bytes", "disk_used_bytes", "What the run's folder takes."),
    ("disk_free_bytes", "disk_free_bytes", "What is free on its disk."),
)
COUNTERS = (
    ("contributions_counted", "contributions_counted_total", "Contributions that versions of the open stage count."),
    ("bytes_up", "sent_bytes_total", "Bytes of calls that left this machine."),
    ("bytes_down", "received_bytes_total", "Bytes of calls that came to this machine."),
    ("relay_bytes", "relayed_bytes_total", "Bytes that this machine passed on between volunteers."),
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
