"""The programs as a user starts them: real processes, real libp2p on loopback, and what they leave in files.

Nothing waits by sleeping for a guess: every wait polls a file or a process and has a deadline. All processes are
started in a session of their own and ended by their pid, with the daemons that they had.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from forge import Forge, Forged

from dipaco_p2p.swarm.hivemind.daemon import sweep_stale_sockets

REPO = Path(__file__).parents[2]
POLL_S = 0.05
START_S = 60.0
"""Imports alone take seconds, and machines are shared."""
PATIENCE = 3.0
"""Every wait may take this many times its limit: a deadline is there to find what never happens, not what is slow."""
ENTRIES = {"dipaco-peer": "peers.cli", "dipaco-bootstrap": "bootstrap.cli"}
PLAIN = {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "COLUMNS": "120", "HF_HUB_OFFLINE": "1"}
"""In the environment of every program."""
CODE = """
import importlib, sys
sys.argv[0], entry = sys.argv.pop(1), sys.argv.pop(1)
importlib.import_module(entry).main()
"""

_forges: list[Forge] = []


def eventually(look: Callable[[], Any], *, within_s: float = 40.0, what: Callable[[], str] = lambda: "") -> Any:
    """The first true answer of `look`; fails with the words of `what` after PATIENCE times `within_s`."""
    within_s *= PATIENCE
    deadline_s = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what()}"
        time.sleep(POLL_S)
    return found


def children_of(pid: int) -> list[int]:
    """The processes that `pid` started itself."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass(slots=True)
class Program:
    """One program in a process of its own; what it says goes to files."""

    process: subprocess.Popen[bytes] | Forged
    out: Path
    err: Path
    home: Path
    """The `--dir` or `--home` that it was given."""
    daemons: list[int] = field(default_factory=list)

    @property
    def said(self) -> str:
        return self.out.read_text(errors="replace")

    @property
    def complaint(self) -> str:
        return self.err.read_text(errors="replace")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = START_S) -> int:
        """Its exit code."""
        try:
            return self.process.wait(PATIENCE * timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {PATIENCE * timeout_s:g} s: {self.complaint[-2000:]}") from None

    def kill(self) -> list[int]:
        """SIGKILL, without a word to anybody; the daemons that it leaves."""
        daemons = children_of(self.process.pid)
        self.process.kill()
        self.process.wait()
        return daemons

    def end(self) -> int:
        """SIGTERM, as a service manager would; its exit code."""
        if self.process.poll() is None:
            self.send(signal.SIGTERM)
        return self.wait(40)

    def events(self, name: str = "", *, stage: str = "grid") -> list[dict[str, Any]]:
        """What its history says so far of one stage: of a coordinator, or of a volunteer in its one run."""
        found = []
        for path in (self.home / stage / "history.jsonl", *self.home.glob("runs/*/history.jsonl")):
            events = read_events(path)
            if events and events[0].get("stage", stage) == stage:
                found += events
        return [event for event in found if name in ("", event["ev"])]

    def wait_event(self, name: str, *, count: int = 1, within_s: float = START_S, **values: Any) -> dict[str, Any]:
        """Wait for the `count`-th event of this name with these values."""

        def look() -> dict[str, Any] | None:
            wanted = [e for e in self.events(name) if all(e[key] == value for key, value in values.items())]
            ended = self.process.poll() is not None and len(wanted) < count
            assert not ended, f"it ended with {self.process.returncode}: {self.complaint[-2000:]}"
            return wanted[count - 1] if len(wanted) >= count else None

        found: dict[str, Any] = eventually(look, within_s=within_s, what=lambda: f"{name}: {self.complaint[-2000:]}")
        return found

    def wait_address(self) -> dict[str, str]:
        """`address`, `run` and `peer` of a coordinator that is open."""

        def look() -> bool:
            assert self.process.poll() is None, f"it ended: {self.complaint[-2000:]}"
            return "dipaco-peer join" in self.said

        eventually(look, within_s=START_S, what=lambda: self.complaint[-2000:])
        details: dict[str, str] = json.loads((self.home / "address.json").read_text())
        return details


@dataclass(slots=True)
class Programs:
    """Starts programs, and ends all of them."""

    folder: Path
    started: list[Program] = field(default_factory=list)

    def start(
        self, program: str, *arguments: str | Path, home: Path, namespace: str = "", **environment: str
    ) -> Program:
        """Start `dipaco-peer` or `dipaco-bootstrap`, in this network namespace; its streams go to files."""
        if environment:
            assert not namespace, "only the forge knows the way into one"
            return self._start(entry_command(program), *arguments, home=home, **environment)
        out, err = self._files()
        words = [*map(str, arguments)]
        with out.open("wb") as out_file, err.open("wb") as err_file:
            forged = forge().start(program, ENTRIES[program], words, out=out_file, err=err_file, namespace=namespace)
        self.started.append(Program(forged, out, err, home))
        return self.started[-1]

    def script(self, path: Path, *arguments: str | Path, inside: Sequence[str] = ()) -> Program:
        """Start a Python file of the test suite.

        `inside` goes before its command and must become it, as `ip netns exec` does: so its pid is the program's.
        """
        return self._start([*inside, sys.executable, str(path)], *arguments, home=self.folder)

    def _start(self, command: Sequence[str], *arguments: str | Path, home: Path, **environment: str) -> Program:
        out, err = self._files()
        command = [*command, *map(str, arguments)]
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = spawn(command, stdout=out_file, stderr=err_file, **environment)
        self.started.append(Program(process, out, err, home))
        return self.started[-1]

    def _files(self) -> tuple[Path, Path]:
        number = len(self.started)
        return self.folder / f"{number}.out", self.folder / f"{number}.err"

    def run(self, program: str, *arguments: str | Path, timeout_s: float = START_S, **environment: str) -> Program:
        """Start a program and wait for its end."""
        done = self.start(program, *arguments, home=self.folder, **environment)
        done.wait(timeout_s)
        return done

    def status(self, volunteer: Program) -> dict[str, Any]:
        """What `dipaco-peer status --json` says of a volunteer; it must complain of nothing."""
        done = self.run("dipaco-peer", "status", "--json", "--home", volunteer.home)
        assert done.wait() == 0, done.said + done.complaint
        found: dict[str, Any] = json.loads(done.said + done.complaint)
        return found

    def coordinator(self, run_file: Path, home: Path, *more: str, namespace: str = "") -> Program:
        return self.start("dipaco-bootstrap", "start", run_file, "--dir", home, *more, home=home, namespace=namespace)

    def volunteer(self, address: str, name: str, *more: str, namespace: str = "") -> Program:
        home = self.folder / name
        return self.start("dipaco-peer", "join", address, "--home", home, *more, home=home, namespace=namespace)

    def end_all(self) -> None:
        """Kill what is left, wait for the daemons to follow, and remove the sockets that killed ones leave."""
        daemons: list[int] = []
        for program in reversed(self.started):
            if program.process.poll() is None:
                program.send(signal.SIGCONT)
                daemons += program.kill()
        eventually(lambda: not any(map(is_running, daemons)), within_s=10, what=lambda: f"daemons {daemons} live on")
        sweep_stale_sockets()


@contextlib.contextmanager
def programs_in(folder: Path) -> Iterator[Programs]:
    """What the block starts there ends with it."""
    folder.mkdir()
    started = Programs(folder)
    yield started
    started.end_all()


def entry_command(program: str) -> list[str]:
    """What the installed script of this name would run."""
    return [sys.executable, "-c", CODE, program, ENTRIES[program]]


def spawn(
    command: Sequence[str | Path], *, stdout: IO[bytes] | int, stderr: IO[bytes] | int, **environment: str
) -> Any:
    """A process in a session of its own."""
    return subprocess.Popen(
        command,
        stdin=environment.pop("stdin", subprocess.DEVNULL),  # type: ignore[call-overload]
        stdout=stdout,
        stderr=stderr,
        env=os.environ | PLAIN | environment,
        start_new_session=True,
    )


def forge() -> Forge:
    """The one of this session, from its first program on; `close_forge` ends it."""
    if not _forges:
        _forges.append(Forge(os.environ | PLAIN))
    return _forges[0]


def close_forge() -> None:
    """After the last program."""
    while _forges:
        _forges.pop().close()


def refused(program: Program, code: int, *words: str) -> None:
    """The end that bad input must have: a documented code, one line that says what, one with a hint, no traceback."""
    ended = program.wait()
    said = program.complaint
    assert ended == code, said
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, said
    hint = next((line for line in said.splitlines() if line.startswith("hint: ")), "")
    assert len(hint) > 12, f"no useful hint: {said}"
    for word in words:
        assert word in f"{lines[0]}\n{hint}", said


def write_corpus(path: Path, *, documents: int = 160, words: int = 260) -> Path:
    """Documents of four made-up vocabularies, always the same, as JSONL."""
    chance = random.Random(1)

    def word() -> str:
        return "".join(chance.choice("bcdfglmnprst") + chance.choice("aeiou") for _ in range(chance.randint(1, 3)))

    topics = [[word() for _ in range(40)] for _ in range(4)]
    texts = (" ".join(chance.choices(topics[number % 4], k=words)) for number in range(documents))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a history; its last line may be half written."""
    found = []
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def write_run(
    path: Path,
    corpus: Path | str,
    *,
    rounds: int,
    min_paths: int,
    port: int = 0,
    host: str = "127.0.0.1",
    warmup_rounds: int = 0,
    heartbeat_ttl_s: float = 3.0,
    has_page: bool = False,
    keep_rounds: int = 0,
    keep_snapshots: int = 0,
    keepers: int = 0,
    remade: float = 1.0,
    measured: float = 1.0,
) -> Path:
    """A run file whose preparation takes no time: two paths of one tiny block each."""
    path.write_text(f"""\
[run]
name = "{path.stem}"
[warmup]
rounds = {warmup_rounds}
[routing]
reshard_rounds = {sorted({max(1, rounds // 2), rounds})}
[model]
vocab_size = 300
width = 16
ffn_width = 16
context = 72
[[model.levels]]
modules = 1
embedding = true
head = true
[[model.levels]]
modules = 2
blocks = 1
[inner]
steps = 2
batch = 4
warmup_steps = 1
[rounds]
rounds = {rounds}
min_paths = {min_paths}
deadline_s = 3.0
grace_s = 0.3
[liveness]
heartbeat_ttl_s = {heartbeat_ttl_s}
settle_s = 0.3
[corpus]
source = {json.dumps(str(corpus))}
[archive]
rounds = {keep_rounds}
snapshots = {keep_snapshots}
keepers = {keepers}
remade = {remade}
measured = {measured}
[leaderboard]
serve = {str(has_page).lower()}
port = 0
[node]
host = "{host}"
port = {port}
""")
    return path


def free_port() -> int:
    """One that stays free when who had it is killed and comes back: systems give none of these to whoever asks for any
    port, as the other processes of the suite do all the time."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def address_at(volunteer: Program, port: int, *, host: str = "127.0.0.1") -> str:
    """The address of a volunteer that was told to listen at this port."""
    return f"/ip4/{host}/tcp/{port}/p2p/{volunteer.wait_event('joined')['peer']}"


def breaches(folder: Path, *volunteers: Program) -> list[str]:
    """What the offline checker says of a run whose programs have all ended; every volunteer must be named."""
    from benchmarks.swarm_faults.check import check
    from benchmarks.swarm_faults.evidence import gather

    homes = {str(volunteer.home): volunteer.home for volunteer in volunteers}
    return list(map(str, check(gather(folder, homes, done=(), ended_s=time.time()))))


def copy_prepared(source: Path, target: Path) -> Path:
    """The folder of a prepared run that nobody has joined yet; the same run, at a port of its own."""
    ignored = shutil.ignore_patterns("address.json", "history.jsonl", "*.tmp", "control.*")
    shutil.copytree(source, target, ignore=ignored)
    return target


def open_endless(programs: Programs, corpus: Path, prepared: Path, **archive: Any) -> tuple[Path, Program]:
    """The file of a run without an end, with this `[archive]`, and its coordinator, which is ready."""
    file = programs.folder / "endless.toml"
    run_file = write_run(file, corpus, rounds=100_000, min_paths=1, port=free_port(), **archive)
    coordinator = programs.coordinator(run_file, copy_prepared(prepared, programs.folder / "coordinator"))
    coordinator.wait_address()
    return run_file, coordinator


def versions_of(coordinator: Program) -> dict[str, int]:
    """The newest archived version of every module."""
    return {event["module"]: event["version"] for event in coordinator.events("archived")}


@contextlib.contextmanager
def stuck_at(file: Path) -> Iterator[Callable[[], bool]]:
    """Whoever reads `file` while the block runs is stuck there, as on a disk that hangs; given: whether one is."""
    data, writers = file.read_bytes(), list[int]()

    def is_reached() -> bool:
        with contextlib.suppress(OSError):  # ENXIO: nobody has it open for reading
            writers.append(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
        return bool(writers)

    file.unlink()
    os.mkfifo(file)
    try:
        yield is_reached
    finally:
        file.unlink()
        file.write_bytes(data)
        for writer in writers:
            os.close(writer)


@contextlib.contextmanager
def stopped(*programs: Program) -> Iterator[None]:
    """These programs do not answer while the block runs, as on a machine that sleeps."""
    for program in programs:
        program.send(signal.SIGSTOP)
    try:
        yield
    finally:
        for program in programs:
            program.send(signal.SIGCONT)
