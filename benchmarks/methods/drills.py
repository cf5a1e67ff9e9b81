"""Who does the work must not matter: the same rounds by fewer workers, and by one that is killed, digest by digest.

A few rounds of a small job, by the functions of the swarm: peers/path/trainer.py trains the paths, from the modules
that owner/version.py makes of the contributions; states and snapshots are blobs. Every drill also runs a control
that must come out otherwise: the same without handing over the paths' inner states.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.manifests import sealed_manifest
from dipaco_p2p.config import CompressionConfig, OuterConfig, RoundsConfig, RunConfig, WarmupConfig
from dipaco_p2p.core.codec import encode_module
from dipaco_p2p.core.layout import module_layout
from dipaco_p2p.core.outer import OuterState
from dipaco_p2p.core.shards import Shard, encode_shard
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.version import Admitted, made_and_kept, make_version
from dipaco_p2p.protocol.documents import (
    BlobRef,
    Contribution,
    GenesisRef,
    ModuleVersion,
    ShardRef,
    seal,
)
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.topology import ModuleId, PathId

from .grid import WarmStart
from .jobs import WARMUP_STEPS, Job
from .volunteers import Done, Turn, Volunteer, VolunteerProcess, publish

FEWER = 2
"""Workers that rotate over all paths."""
OWNER = Signer(bytes([99]) * 32)

Digests = Mapping[ModuleId, tuple[str, str, str]]
"""Of each module's newest snapshot, update and outer state."""


class Setting:
    """A run, the disk that everybody fetches from, and the newest version of every module."""

    def __init__(self, job: Job, start: WarmStart, shards: Sequence[Shard], folder: Path) -> None:
        self.folder = folder
        self.published = Store(folder / "published")
        self.run = _run(job, start, shards, self.published)
        publish(self.run, self.published)
        self.states: dict[PathId, BlobRef] = {}
        self.volunteers: list[Volunteer] = []
        self.process: VolunteerProcess | None = None
        self.stack = ExitStack()
        self._disks = [self.published]
        self._versions: dict[ModuleId, tuple[ModuleVersion, OuterState]] = {}
        flats = start.flats(job.model)
        for module in self.run.topology.modules():
            state = OuterState.fresh(flats[module.level])
            self._versions[module] = (genesis_version(self.run.manifest, module), state)

    def join(self) -> None:
        """One more volunteer, with an empty disk that all others can fetch from."""
        home = Store(self.folder / f"volunteer{len(self.volunteers)}")
        self._disks.append(home)
        self.volunteers.append(Volunteer(self.run, home, self._disks))

    def start(self) -> VolunteerProcess:
        """A process that does what the first volunteer did, with its disk."""
        home = self.volunteers[0].home.folder
        return self.stack.enter_context(VolunteerProcess(home, self.published.folder))

    def turn(self, path: PathId, number: int, *, has_state: bool = True) -> Turn:
        """What whoever trains the path in this round is told."""
        known = self.states.get(path)
        state = known.digest if known is not None and has_state else None
        modules = tuple(self._versions[module][0].snapshot.digest for module in path.modules())
        return Turn(path=path, round_number=number, modules=modules, state=state)

    def contributed(self, path: PathId, done: Done, author: int) -> list[Admitted]:
        """The contributions of a turn, as their author signs them."""
        self.states[path], home = done.state, self.volunteers[author].home
        signer, made = Signer(bytes([author + 1]) * 32), []
        for module, payload in zip(path.modules(), done.payloads, strict=True):
            base = self._versions[module][0]
            document = Contribution(
                run=self.run.id,
                module=module,
                path=path,
                base_version=base.version,
                base_digest=base.digest,
                payload=payload,
                state=done.state,
                steps=done.steps,
                tokens=done.tokens,
                loss=done.loss,
                author=signer.peer,
            )
            read = partial(self.run.read_contribution, home.get(payload.digest) or b"", module)
            made.append(Admitted(seal(signer, document), read))
        return made

    def step(self, admitted: Sequence[Admitted]) -> None:
        """The next version of every module."""
        for module, (parent, state) in self._versions.items():
            items = [item for item in admitted if item.sealed.document.module == module]
            make = partial(
                make_version,
                self.run,
                parent,
                state,
                items,
                clip_norm=None,
                term=1,
                grant=self.run.id,
                author=OWNER.peer,
            )
            made = asyncio.run(made_and_kept(make, self.published))
            self._versions[module] = (made.version, made.state)

    def digests(self) -> Digests:
        """After one round at least."""
        found = {}
        for module, (version, _) in self._versions.items():
            assert version.update is not None and version.state is not None, module
            found[module] = (version.snapshot.digest, version.update.digest, version.state.digest)
        return found


Play = Callable[[Setting, int], list[Admitted]]
"""All paths' turns in a round."""


def rotation(job: Job, start: WarmStart, shards: Sequence[Shard]) -> dict[str, Any]:
    """A worker for each path, against `FEWER` that take turns, so that every path changes hands in every round."""
    began_s, count = time.perf_counter(), job.model.path_count
    whole = played(job, start, shards, by_workers(count))
    fewer = played(job, start, shards, by_workers(FEWER))
    forgetful = played(job, start, shards, by_workers(FEWER, has_state=False))
    return {
        "workers": [count, FEWER],
        "busiest_steps": [-(-count // workers) * job.rounds * job.round_steps for workers in (count, FEWER)],
        **_compared(job, whole, fewer, forgetful),
        "wall_s": time.perf_counter() - began_s,
    }


def restart(job: Job, start: WarmStart, shards: Sequence[Shard]) -> dict[str, Any]:
    """Nobody killed, against a worker that is killed in the middle of each round but the first, and started again."""
    began_s, cut = time.perf_counter(), max(1, job.round_steps // 2)
    whole = played(job, start, shards, by_workers(job.model.path_count))
    killed = played(job, start, shards, partial(_with_a_kill, cut=cut, has_state=True))
    forgetful = played(job, start, shards, partial(_with_a_kill, cut=cut, has_state=False))
    return {
        "killed_after": cut,
        "kills": job.rounds - 1,
        **_compared(job, whole, killed, forgetful),
        "wall_s": time.perf_counter() - began_s,
    }


def played(job: Job, start: WarmStart, shards: Sequence[Shard], play: Play) -> Digests:
    """What the modules are after all rounds."""
    with _setting(job, start, shards) as setting:
        for number in range(job.rounds):
            setting.step(play(setting, number))
        return setting.digests()


def by_workers(workers: int, *, has_state: bool = True) -> Play:
    """Path p of round r is trained by worker (p + r) modulo their number; with as many as paths each keeps its own."""

    def play(setting: Setting, number: int) -> list[Admitted]:
        paths = list(setting.run.topology.paths())
        while len(setting.volunteers) < workers:
            setting.join()
        admitted = []
        for place, path in enumerate(paths):
            author = place if workers == len(paths) else (place + number) % workers
            done = setting.volunteers[author].take(setting.turn(path, number, has_state=has_state))
            admitted += setting.contributed(path, done, author)
        return admitted

    return play


def _with_a_kill(setting: Setting, number: int, *, cut: int, has_state: bool) -> list[Admitted]:
    """As a worker for each path; but the first path's is a process, from the second round on killed after `cut` steps,
    and another process takes its place, with the same disk."""
    first, *others = setting.run.topology.paths()
    while len(setting.volunteers) <= len(others):
        setting.join()
    turn, process = setting.turn(first, number, has_state=has_state), setting.process or setting.start()
    if number > 0:
        status = process.take_until(turn, cut)
        assert status == -signal.SIGKILL, status
        process = setting.start()
    setting.process = process
    admitted = setting.contributed(first, process.take(turn), 0)
    for author, path in enumerate(others, start=1):
        done = setting.volunteers[author].take(setting.turn(path, number))
        admitted += setting.contributed(path, done, author)
    return admitted


def _compared(job: Job, whole: Digests, other: Digests, forgetful: Digests) -> dict[str, int]:
    return {
        "rounds": job.rounds,
        "round_steps": job.round_steps,
        "modules": len(whole),
        "same": sum(whole[module] == other[module] for module in whole),
        "same_without_state": sum(whole[module] == forgetful[module] for module in whole),
    }


@contextmanager
def _setting(job: Job, start: WarmStart, shards: Sequence[Shard]) -> Iterator[Setting]:
    with tempfile.TemporaryDirectory(prefix="dipaco-drill-") as folder:
        setting = Setting(job, start, shards, Path(folder))
        with setting.stack:
            yield setting


def _run(job: Job, start: WarmStart, shards: Sequence[Shard], store: Store) -> Run:
    """A run of the job's model, seed, text and settings, at its place after the warm-up in the schedule."""
    assert WARMUP_STEPS % job.round_steps == 0, job
    config = RunConfig(
        name="drill",
        seed=job.seed,
        model=job.model,
        inner=job.inner,
        outer=OuterConfig(lr=job.lr, momentum=job.momentum, norm_rule=job.rule),
        compression=CompressionConfig(uplink=job.codec, downlink=job.down),
        warmup=WarmupConfig(rounds=WARMUP_STEPS // job.round_steps),
        rounds=RoundsConfig(rounds=job.rounds, min_paths=job.model.path_count),
    )
    layouts = [module_layout(job.model, level) for level in range(len(job.model.levels))]
    modules = zip(start.flats(job.model), layouts, strict=True)
    blobs = [store.put(encode_module(flat, layout)) for flat, layout in modules]
    return Run(
        sealed_manifest(
            OWNER,
            config,
            optimizer=store.put(start.optimizer),
            shards=[
                ShardRef(path=path, blob=store.put(encode_shard(shard)), sequences=len(shard.tokens))
                for path, shard in zip(config.topology.paths(), shards, strict=True)
            ],
            genesis=[GenesisRef(module=m, blob=blobs[m.level]) for m in config.topology.modules()],
        )
    )
