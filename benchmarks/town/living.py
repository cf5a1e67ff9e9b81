"""One run in a town, through the public commands: homes join, faults happen, and what is left is checked."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import REPO, end_with_parent, memory_bytes, spent
from benchmarks.report import MB
from benchmarks.swarm_faults.check import check
from benchmarks.swarm_faults.evidence import Event, gather, read_events
from benchmarks.town.network import Machine
from bootstrap.control.requests import Request as OfCoordinator
from bootstrap.processes import command_of
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.program.control.client import ask
from peers.control.control import Request

MODULES = ("L0.M0", "L0.M1", "L1.M0", "L1.M1")
PORT = 31337
WITHIN_S = 240.0
LOOK_S = 0.2
RUN = """\
[run]
name = "town"
[warmup]
rounds = 0
[routing]
reshard_rounds = [{rounds}]
[model]
vocab_size = 300
width = 32
ffn_width = 64
context = 72
[[model.levels]]
modules = 2
embedding = true
head = true
[[model.levels]]
modules = 2
blocks = 1
[inner]
steps = 8
batch = 8
warmup_steps = 1
[rounds]
rounds = {rounds}
min_paths = 2
deadline_s = 6.0
grace_s = 0.5
[liveness]
heartbeat_ttl_s = 5.0
settle_s = 0.3
[corpus]
source = {corpus}
[leaderboard]
serve = false
[node]
host = "{host}"
port = {port}
relay = {relay}
"""


@dataclass(slots=True)
class Program:
    """A command that runs on one machine; `began_s` is Unix time."""

    home: Path
    process: subprocess.Popen[bytes]
    began_s: float

    def events(self, name: str) -> list[Event]:
        paths = [self.home / "grid/history.jsonl", *self.home.glob("runs/*/history.jsonl")]
        return [event for event in read_events(paths) if event.ev == name]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def start(machine: Machine, home: Path, entry: str, *words: str | Path) -> Program:
    """Start a program's command there; what it says goes to `home`.log."""
    with home.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            [*machine.inside, *command_of(entry, *map(str, words))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=REPO,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    return Program(home, process, time.time())


def live(
    seed: Machine, machines: Mapping[str, Machine], out: Path, *, rounds: int, is_relaying: bool, has_faults: bool
) -> dict[str, Any]:
    """What came of it. Raises DipacoError when something does not happen in time."""
    out.mkdir(parents=True)
    (out / "corpus.jsonl").write_text(_corpus())
    places = {"host": seed.address, "port": PORT, "corpus": json.dumps(str(out / "corpus.jsonl"))}
    (out / "run.toml").write_text(RUN.format(rounds=rounds, relay=str(is_relaying).lower(), **places))
    folder, volunteers = out / "coordinator", dict[str, Program]()

    def begin() -> Program:
        return start(seed, folder, "bootstrap.cli", "start", out / "run.toml", "--dir", folder)

    def versions() -> dict[str, int]:
        return {event["module"]: event["version"] for event in coordinator.events("archived")}

    def reach(version: int) -> None:
        _until(lambda: all(versions().get(module, 0) >= version for module in MODULES), f"version {version}", out)

    coordinator = begin()
    happened, relayed_bytes = [], 0
    try:
        _until(lambda: (folder / "address.json").exists(), "the run's ticket", out)
        ticket = json.loads((folder / "address.json").read_text())["ticket"]
        for name, machine in machines.items():
            volunteers[name] = start(machine, out / name, "peers.cli", "join", ticket, "--home", out / name)
        began_s = time.time()
        _until(lambda: all(one.events("receipt") for one in volunteers.values()), "a receipt of everybody", out)
        reach(1)
        if has_faults:
            reach(2)
            victim = _leaders(volunteers)["L1.M0"]
            volunteers[victim].kill()
            happened.append(f"{victim}, leader of L1.M0, killed: {_timed(lambda: reach(max(versions().values()) + 1))}")
            boxed = next(n for n, m in machines.items() if m.box is not None and n != victim)
            box = machines[boxed].box
            assert box is not None
            box.restart()
            happened.append(f"router of {boxed} restarted: {_timed(lambda: reach(max(versions().values()) + 1))}")
            relayed_bytes += ask(folder, OfCoordinator(ask="status"), timeout_s=10).body["relay_bytes"]
            coordinator.kill()
            killed_s = time.time()
            coordinator = begin()
            _until(lambda: _answers(coordinator, killed_s), "the relay's return", out)
            back_s = time.time() - killed_s
            words = _timed(lambda: reach(max(versions().values()) + 1))
            happened.append(f"relay killed, back after {back_s:.0f} s: {words}")
        told = {name: _status(one) for name, one in volunteers.items()}
        reach(rounds)
        leads = _leaders({"seed": coordinator, **volunteers})
        living = [one for one in volunteers.values() if one.process.poll() is None or one.process.returncode == 0]
        _until(lambda: all(one.process.poll() == 0 for one in living), "end of the volunteers", out)
        took_s = time.time() - began_s
        seen = ask(folder, OfCoordinator(ask="status"), timeout_s=10).body
        used, memory = spent(coordinator.process.pid), memory_bytes(coordinator.process.pid, "VmRSS")
    finally:
        for one in (*volunteers.values(), coordinator):
            one.end()
    evidence = gather(folder, {name: out / name for name in volunteers}, done=(), ended_s=time.time())
    rows = []
    for name, one in volunteers.items():
        status = told[name]
        led = ", ".join(module for module, leader in leads.items() if leader == name) or "-"
        by_relay, in_all = status.get("bytes_relayed", 0), status.get("bytes_up", 0) + status.get("bytes_down", 0)
        joined_s = one.events("joined")[0].t_s - one.began_s
        receipts, made = len(one.events("receipt")), len(one.events("version"))
        moved = f"{by_relay / MB:.2f}", f"{in_all / MB:.2f}"
        rows.append((name, f"{joined_s:.1f}", status.get("reached", "killed"), led, made, receipts, *moved))
    facts = {
        "seconds": round(took_s, 1),
        "led by the seed": ", ".join(module for module, leader in leads.items() if leader == "seed") or "nothing",
        "versions made by the seed": len(coordinator.events("version")),
        "relayed by the seed, MB": round((relayed_bytes + seen["relay_bytes"]) / MB, 2),
        "the seed's program and daemon, processor seconds": f"{used.programs_s:.1f}, {used.daemons_s:.1f}",
        "the seed's program, MB": round(memory / MB),
        "events": happened,
        "breaches": list(map(str, check(evidence))),
    }
    return {"volunteers": rows, "facts": facts}


def _leaders(programs: Mapping[str, Program]) -> dict[str, str]:
    """Who was the last to begin to lead each module."""
    events = [(event["term"], event["module"], name) for name, one in programs.items() for event in one.events("leads")]
    return {module: name for _, module, name in sorted(events)}


def _status(volunteer: Program) -> dict[str, Any]:
    try:
        return dict(ask(volunteer.home, Request(ask="status"), timeout_s=10).body)
    except DipacoError:
        return {}


def _answers(coordinator: Program, since_s: float) -> bool:
    try:
        ask(coordinator.home, OfCoordinator(ask="status"), timeout_s=5)
    except DipacoError:
        return False
    return (coordinator.home / "address.json").stat().st_mtime > since_s


def _timed(work: Callable[[], None]) -> str:
    began_s = time.time()
    work()
    return f"next version of every module after {time.time() - began_s:.1f} s"


def _until(holds: Callable[[], bool], what: str, out: Path) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not holds():
        if time.monotonic() > end_s:
            raise DipacoError(f"no {what} within {WITHIN_S:g} s", hint=f"see {out}")
        time.sleep(LOOK_S)


def _corpus() -> str:
    chance = random.Random(1)
    words = ["".join(chance.choices("bcdfglmnprstaeiou", k=4)) for _ in range(400)]
    texts = (" ".join(chance.choices(words[number % 4 * 100 :][:100], k=260)) for number in range(160))
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)
