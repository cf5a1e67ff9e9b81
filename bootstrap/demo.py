"""The demo: a real swarm on this machine, through the public commands only, and a volunteer killed on the way.

Read `run_demo` from top to bottom. What it knows of the swarm it reads from the files that every program keeps anyway
(histories, archive, evaluations); nothing in the programs knows that it is a demo.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dipaco_p2p.errors import ConfigError, DipacoError, Interrupted
from dipaco_p2p.program.console import on_signals
from dipaco_p2p.program.history import read_history
from dipaco_p2p.swarm.hivemind.daemon import sweep_stale_sockets
from dipaco_p2p.use.folder import GRID, manifest_path
from leaderboard.places import SAID

from .demo_report import Baseline, DemoResult, Kill, measure, print_result, problems, train_beside
from .processes import Child, Children, pass_on, require_alive
from .progress import stage
from .runfile import load_run_file

T = TypeVar("T")

COORDINATOR = "coordinator"
POLL_S = 0.5
TOLD = ("validation perplexity", "is open", "sharding ", SAID)
"""In the lines of the coordinator that are passed on: what it judged, what it opened, where to look. Not the line after
the last round, which says how to stop it: that is ours to do."""
LEAVE_S = 60.0
"""Volunteers of a complete run leave by themselves, within this."""
STALL_S = 150.0
"""Without any progress for this long, something is broken, and waiting would hide it."""
HEARTBEAT_TTL_S = 10.0
AUDITED = 1
"""Of each volunteer the first work alone is audited for certain: all of them share two processors."""
WARMUP_STEPS = 120
VALIDATION_SHARE, HOLDOUT_SHARE = 0.03, 0.01
"""Half of the defaults: every round of the warm-up and of the grid is judged on them, on the same two processors."""
PATHS_MAX = 64
"""Processes on one machine train them; beyond this the text found on it is too little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What the demo's flags say."""

    peers: int
    grid: str
    rounds: int
    steps: int
    kills: int
    corpus: str
    seed: int
    device: str = "cpu"
    threads: int = 1
    """Of the coordinator; a volunteer trains with one, on the device."""
    path: Mapping[str, int] = field(default_factory=dict)
    """Keys of [model] in the run file, where a path is not the small default one."""
    blocks: int = 4
    """Of a path."""
    bytes_max: int = 12_000_000
    keys: Sequence[str] = ()
    """Further keys of the run file, as in `compression.uplink="int2"`."""


async def run_demo(
    config: DemoConfig, *, folder: Path | None, json_file: Path | None, export: Path | None = None
) -> list[str]:
    """Run the demo and print its table; the promises that did not hold, one line each. Raises DipacoError. The
    leaderboard is left in the folder `export`.

    The first Ctrl-C or SIGTERM ends all programs in good order and raises Interrupted; the second leaves at once, and
    the kernel then ends them.
    """
    require_sense(config)
    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError(f"`{json_file.parent}` is not a folder", hint="name a file in an existing folder for --json")
    if export is not None:  # before the minutes of training, not after
        from leaderboard.web.export import require_replaceable

        require_replaceable(export)
    is_stopped = threading.Event()
    with _work_folder(folder) as work, _stop_ends_task(is_stopped):
        result = await _measured(config, work, is_stopped)
        if export is not None:
            from leaderboard.program import export as export_leaderboard  # a web framework: only when it is needed

            began_s = time.monotonic()
            await export_leaderboard(str(work / COORDINATOR), export, expected=None)
            took = f"in {time.monotonic() - began_s:.0f} s"
            print(f"the leaderboard, as files, written {took}: {export / 'index.html'}", flush=True)
        if json_file is not None:
            json_file.write_text(json.dumps(result.to_dict(), indent=1) + "\n")
        return problems(result)


async def _measured(config: DemoConfig, work: Path, is_stopped: threading.Event) -> DemoResult:
    """Play the demo; its parts in the order of time."""
    run_file = work / "run.toml"
    run_file.write_text(run_text(config))
    load_run_file(run_file)  # here, where a key that is wrong ends in one line
    demo = Demo(config, work, children=Children(threads=config.threads))
    training = asyncio.create_task(demo.train_dense(is_stopped))
    try:
        try:
            await demo.start_coordinator(run_file)
            demo.parts.end("preparing")
            for _ in range(config.peers):
                await demo.start_volunteer()
            await demo.wait_rounds()
        finally:
            await demo.end()
        demo.parts.end("ending the programs")
        dense = await training
        demo.parts.end("waiting for the dense baseline")
        kills = config.kills
        work_done = partial(measure, demo.coordinator_folder, demo.homes, demo.kills, kills_asked=kills, dense=dense)
        result = await _in_thread(work_done, is_stopped)
        demo.parts.end("verifying")
    finally:
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
    print_result(result, parts=demo.parts.seconds, dense_s=dense.seconds)
    return result


async def _in_thread(work: Callable[[], T], is_stopped: threading.Event) -> T:
    """The result of `work`. When this is cancelled, the thread sees it too, and ends before its folder goes."""
    running = asyncio.create_task(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        is_stopped.set()
        await asyncio.gather(running, return_exceptions=True)
        raise


class Parts:
    """How long each part of the demo took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began_s = time.monotonic()

    def end(self, name: str) -> None:
        """The part `name` ends here, and the next one begins."""
        now_s = time.monotonic()
        self.seconds[name] = now_s - self._began_s
        self._began_s = now_s


@contextlib.contextmanager
def _stop_ends_task(is_stopped: threading.Event) -> Iterator[None]:
    """Turn the first signal into Interrupted: in this task where it waits, in threads where they look."""
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        is_stopped.set()
        task.cancel()

    on_signals(stop)
    try:
        yield
    except asyncio.CancelledError:
        raise Interrupted("the demo was stopped", hint="all its programs have ended") from None


def require_sense(config: DemoConfig) -> None:
    """Raise ConfigError for flags that are fine one by one but not together."""
    if config.kills and config.kills >= config.rounds:
        raise ConfigError(
            f"{config.kills} kills do not fit into {config.rounds} rounds",
            hint=f"one round must be over before the first: use --rounds {config.kills + 1} or more",
        )
    paths = math.prod(grid_widths(config.grid))
    if paths > PATHS_MAX:
        raise ConfigError(f"a grid of {paths} paths is too large for a demo", hint=f"at most {PATHS_MAX} paths")


@contextlib.contextmanager
def _work_folder(folder: Path | None) -> Iterator[Path]:
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="dipaco-demo-") as name:
            yield Path(name)
    elif folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"`{folder}` is not empty", hint="name a new folder for --dir")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def run_text(config: DemoConfig) -> str:
    """The demo's run file. Small on purpose: four paths must train in minutes on two CPU cores."""
    widths = grid_widths(config.grid)
    blocks = max(1, config.blocks // len(widths))
    path = "".join(f"{key} = {value}\n" for key, value in config.path.items())
    levels = "".join(f"\n[[model.levels]]\nmodules = {width}\nblocks = {blocks}\n" for width in widths)
    text = f"""\
[run]
name = "demo"
seed = {config.seed}

[model]
{path}
[[model.levels]]
modules = 1
embedding = true
head = true
{levels}
[warmup]
rounds = {warmup_rounds(config)}

[routing]
reshard_rounds = {reshard_rounds(config)}

[inner]
steps = {config.steps}

[rounds]
rounds = {config.rounds}
min_paths = {min(config.peers, math.prod(widths))}
deadline_s = 60.0

[liveness]
heartbeat_ttl_s = {HEARTBEAT_TTL_S}

[judging]
audited = {AUDITED}

[corpus]
source = {json.dumps(str(Path(config.corpus).resolve()) if Path(config.corpus).exists() else config.corpus)}
bytes_max = {config.bytes_max}
validation_share = {VALIDATION_SHARE}
holdout_share = {HOLDOUT_SHARE}

[node]
port = 0

[archive]
rounds = 0
[leaderboard]
port = 0
"""
    return with_keys(text, config.keys)


def with_keys(text: str, keys: Sequence[str]) -> str:
    """A run file with further keys, each as `section.key=value`; raises ConfigError for other words."""
    for each in keys:
        match = re.fullmatch(r"(\w+)\.(\w+)\s*=\s*(\S.*)", each)
        if match is None:
            raise ConfigError(f"`{each}` is not a key of a run file", hint='write it like compression.uplink="int2"')
        section, line = f"[{match[1]}]\n", f"{match[2]} = {match[3]}\n"
        text = text.replace(section, section + line, 1) if section in text else text + section + line
    return text


def warmup_rounds(config: DemoConfig) -> int:
    """About so many steps that the features of the first tokens tell texts apart."""
    return max(1, round(WARMUP_STEPS / config.steps)) if config.rounds > 2 else 1


def reshard_rounds(config: DemoConfig) -> list[int]:
    """Half-way, and at the end for serving."""
    return sorted({max(1, config.rounds // 2), config.rounds})


def grid_widths(grid: str) -> list[int]:
    """Modules per level, from `2x2`; raises ConfigError."""
    parts = grid.split("x")
    if not all(part.isascii() and part.isdigit() and 0 < int(part) <= PATHS_MAX for part in parts):
        raise ConfigError(f"`{grid}` is not a grid", hint="write modules per level, like 2x2 or 2x4")
    return [int(part) for part in parts]


@dataclass(slots=True)
class Demo:
    """The running demo."""

    config: DemoConfig
    work: Path
    address: list[str] = field(default_factory=list)
    children: Children = field(default_factory=lambda: Children(threads=1))
    volunteers: dict[str, Child] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)
    parts: Parts = field(default_factory=Parts)
    _listening: asyncio.Task[None] | None = None

    @property
    def coordinator_folder(self) -> Path:
        return self.work / COORDINATOR

    @property
    def grid_folder(self) -> Path:
        """The stage that the demo is about; the warm-up before it has a folder of its own."""
        return self.coordinator_folder / GRID

    @property
    def homes(self) -> dict[str, Path]:
        return {name: self.work / name for name in self.volunteers}

    async def start_coordinator(self, run_file: Path) -> None:
        """Start the coordinator and wait for the line to join with."""
        arguments = ("start", str(run_file), "--dir", str(self.coordinator_folder))
        pipe = asyncio.subprocess.PIPE
        child = await self.children.start(
            "the coordinator",
            "bootstrap.cli",
            *arguments,
            log=self.work / "coordinator.log",
            output=pipe,
            is_quiet=False,
        )
        assert child.process.stdout is not None
        async for line in child.process.stdout:
            print(line.decode().rstrip(), flush=True)
            words = line.decode().split()
            if words[:2] == ["dipaco-peer", "join"]:
                self.address = words[2:]
                self._listening = asyncio.create_task(
                    pass_on(child.process.stdout, lambda text: any(part in text for part in TOLD))
                )
                return
        raise DipacoError("the coordinator did not open the run", hint="see its message above")

    async def end(self) -> None:
        """End all programs and tidy up after them."""
        await self.children.end_all()
        sweep_stale_sockets()  # a killed program cannot remove its own
        if self._listening is not None:
            await self._listening

    async def train_dense(self, is_stopped: threading.Event) -> Baseline:
        """Train the dense baseline as soon as the grid is open, with what the swarm leaves of the processors."""
        while not manifest_path(self.coordinator_folder, GRID).exists():
            await asyncio.sleep(POLL_S)
        self.parts.end("warming up")
        folder, device = self.coordinator_folder, self.config.device
        return await _in_thread(partial(train_beside, folder, device=device, is_stopped=is_stopped.is_set), is_stopped)

    async def start_volunteer(self) -> str:
        """One more volunteer, as a person would start it; its name."""
        name = f"volunteer-{len(self.volunteers) + 1}"
        arguments = ("join", *self.address, "--home", str(self.work / name), "--device", self.config.device)
        arguments += ("--threads", "1", "--listen", "/ip4/127.0.0.1/tcp/0")
        log = self.work / f"{name}.log"
        # To compile a path takes longer than the demo's few steps gain by it; and the dense baseline is trained on the
        # GPU beside the volunteers, which would leave it to that.
        settings = {"DIPACO_ENGINE": "exact"} if self.config.device == "cpu" else {"DIPACO_GPU_YIELD": "off"}
        self.volunteers[name] = await self.children.start(name, "peers.cli", *arguments, log=log, settings=settings)
        return name

    async def wait_rounds(self) -> None:
        """Watch the rounds go by, kill whom the flags say, and wait for the last evaluation."""
        rounds, chooser = self.config.rounds, random.Random(self.config.seed)
        progressed_s, state = time.monotonic(), None
        with stage("Training in the swarm", total=rounds) as advance:
            while (done := self.rounds_done()) < rounds or not (self.grid_folder / "finished.json").exists():
                if self._is_kill_due(done):
                    await self.kill_one(chooser)
                self._note_reassignment()
                if state != (state := (done, self._events())):
                    progressed_s = time.monotonic()
                if time.monotonic() - progressed_s > STALL_S:
                    raise DipacoError(
                        f"nothing happened for {STALL_S:.0f} s in round {done}",
                        hint="use --dir and read the logs there",
                    )
                if done == rounds and "training" not in self.parts.seconds:
                    self.parts.end("training")
                self._require_all_alive()
                advance(done)
                await asyncio.sleep(POLL_S)
            advance(rounds)
        self.parts.end("judging the finished model")
        with contextlib.suppress(TimeoutError):  # who does not go by itself is told to
            async with asyncio.timeout(LEAVE_S):
                await asyncio.gather(*(child.process.wait() for child in self.volunteers.values()))

    async def kill_one(self, chooser: random.Random) -> None:
        """SIGKILL a volunteer in the middle of its inner steps, and let a new one join."""
        training = sorted(name for name in self._alive() if self._last(name, "doing").get("doing") == "training")
        if not training:
            return
        victim = chooser.choice(training)
        path = self._last(victim, "claimed").get("path", "")
        self.volunteers[victim].kill()
        self.kills.append(Kill(victim=victim, path=path, killed_s=time.time()))
        await self.volunteers[victim].process.wait()
        newcomer = await self.start_volunteer()
        print(f"killed {victim}, which trained {path}, with SIGKILL; {newcomer} joins", flush=True)

    def _note_reassignment(self) -> None:
        for kill in self.kills:
            if kill.claimed_s is None:
                for name in self._alive():
                    for event in self.events(name):
                        if event["ev"] == "claimed" and event["path"] == kill.path and event["t"] > kill.killed_s:
                            kill.claimant, kill.claimed_s = name, event["t"]
                            after = f"{kill.reassigned_after_s:.1f} s after the kill"
                            print(f"{kill.path} has a new claimant, {name}, {after}", flush=True)
                            return

    def _is_kill_due(self, done: int) -> bool:
        """Kills are spread over the rounds, and each waits for the last one's path to be covered again."""
        number = len(self.kills)
        if number >= self.config.kills or any(kill.claimed_s is None for kill in self.kills):
            return False
        return done >= max(1, (number + 1) * self.config.rounds // (self.config.kills + 2))

    def rounds_done(self) -> int:
        """The newest version that every module in the archive has."""
        newest: dict[str, int] = {}
        for event in read_history(self.grid_folder / "history.jsonl"):
            if event["ev"] == "archived":
                newest[event["module"]] = event["version"]
        return min(newest.values()) if len(newest) == 1 + sum(grid_widths(self.config.grid)) else 0

    def events(self, name: str) -> list[dict[str, Any]]:
        """The history of one volunteer, over all stages."""
        events = [event for path in (self.work / name).glob("runs/*/history.jsonl") for event in read_history(path)]
        return sorted(events, key=lambda event: float(event["t"]))

    def _last(self, name: str, ev: str) -> dict[str, Any]:
        return next((event for event in reversed(self.events(name)) if event["ev"] == ev), {})

    def _events(self) -> int:
        return sum(len(self.events(name)) for name in self.volunteers)

    def _alive(self) -> list[str]:
        return [name for name, child in self.volunteers.items() if child.is_alive]

    def _require_all_alive(self) -> None:
        killed = {kill.victim for kill in self.kills}
        require_alive(self.children.children[0], "serving the run")
        if self.rounds_done() < self.config.rounds:
            for name, child in self.volunteers.items():
                if name not in killed and child.process.returncode != 0:  # 0: it saw the end of the run before we do
                    require_alive(child, "training")
