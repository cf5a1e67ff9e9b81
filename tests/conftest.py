"""What every test runs under: virtual time, one thread, repeatable hypothesis examples, no sync, nothing left behind,
and a collector of garbage that leaves alone what was imported.

`make test` runs two tests at a time (pytest-xdist, each worker takes the next one when it is through). Those that start
real peers come last, two at a time as well: none may count what belongs to the machine, or wait by a tight clock.

After the last test the machine must be as it was before the first: no process that a test started, directly or through
another (all carry the session's mark in their environment, so one whose parent is gone is found too), no hivemind
socket, no shared memory of torch. What is left after a grace time is listed and fails the session. Linux only: it
reads /proc. Not seen: a fork of pytest itself, without exec, whose own parent is gone. Of the workers of one run each
looks for its own processes. What lies in folders has no owner any more when its maker was killed, perhaps by a test
that another worker is in the middle of, so only the last worker looks there.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import inspect
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import hypothesis
import pytest

# Before anything imports torch: the tests' models are too small to gain from threads, and machines are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# And too short to repay a compiler: runs without an end would choose one.
os.environ.setdefault("DIPACO_ENGINE", "exact")
# Nor are the wishes of whoever runs the tests theirs.
os.environ.setdefault("DIPACO_CONFIG", os.devnull)
os.environ.pop("DIPACO_TICKET", None)

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")

# Importing and collecting makes no garbage, and looking for some took a quarter of the time.
gc.disable()

MARK = "DIPACO_TEST_SESSION"
POLL_S = 0.05
LIMIT_S = 7200.0
"""The virtual time of one test."""
SIGNATURES = 1024
"""Of each peer, that are remembered."""
PROC = Path("/proc")
PLAYED_ONCE = ("made", "finished")
"""Fixtures that play a whole run for the tests of several files, which only read it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--leftover-grace-s",
        type=float,
        default=5.0,
        help="seconds that processes, sockets and shared memory of the tests get to vanish after the last test",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("libp2p") is not None)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("xdist_group") is None:
            _keep_together(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """All is imported and collected by now, also where others run the tests."""
    gc.freeze()
    gc.enable()


def _keep_together(item: pytest.Function) -> None:
    """Give tests that share a fixture to one worker: else each plays the run that the fixture plays."""
    fixtures = item._fixtureinfo.name2fixturedefs
    if played := next((name for name in PLAYED_ONCE if name in fixtures), None):
        item.add_marker(pytest.mark.xdist_group(played))
    elif any(found[-1].scope == "module" for name, found in fixtures.items() if name != "rounds_take_time"):
        item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An `async def` test plays in virtual time (tests/swarm has a rule of its own)."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    from virtual_time import play

    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    play(partial(pyfuncitem.obj, **arguments), limit_s=LIMIT_S)
    return True


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up before and torn down after every other fixture of the session, as it is the first one of the root."""
    # A session inside a test extends the mark of the outer one, which so recognises what the inner one left.
    outer = os.environ.get(MARK)
    mark = f"{outer}/{uuid.uuid4().hex}" if outer else uuid.uuid4().hex
    os.environ[MARK] = mark
    before, crew = files(), join_crew(getattr(request.config, "workerinput", {}).get("testrunuid"))
    yield
    grace_s, is_last = request.config.getoption("--leftover-grace-s"), leave_crew(crew)

    def found() -> list[str]:
        made = sorted(files() - before) if is_last else []
        return processes(mark) + [str(path) for path in made if not is_of_others(path, mark)]

    left = wait_until_empty(found, grace_s)
    if outer is None:
        del os.environ[MARK]
    else:
        os.environ[MARK] = outer
    if left:
        pytest.fail(f"left by the tests {grace_s:g} s after the last one:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def forge_ends(nothing_is_left: None) -> Iterator[None]:
    """What starts the programs (tests/e2e/forge.py) ends after all that it started."""
    yield
    if harness := sys.modules.get("e2e_harness"):
        harness.close_forge()


@pytest.fixture(scope="session", autouse=True)
def no_sync() -> Iterator[None]:
    """No test cuts the power, and a disk takes milliseconds to sync: a third of the time of runs in one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def signatures_are_checked_once() -> Iterator[None]:
    """Every peer of a run in one process checks the same records. What is not a signature raises each time."""
    from dipaco_p2p.protocol import signing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signing, "_key_of", functools.lru_cache(_Checked))
        yield


class _Checked:
    """A peer's key that remembers what it found to be signed by it."""

    def __init__(self, peer: Any) -> None:
        from dipaco_p2p.protocol.signing import Ed25519PublicKey, public_key_of

        self.verify = functools.lru_cache(SIGNATURES)(Ed25519PublicKey.from_public_bytes(public_key_of(peer)).verify)


def join_crew(run: str | None) -> IO[bytes] | None:
    """Be one of the workers of this run of pytest-xdist, until `leave_crew`; None for a session that is alone."""
    if run is None:
        return None
    crew = (Path(tempfile.gettempdir()) / f"dipaco-tests-{run}.lock").open("wb")
    fcntl.flock(crew, fcntl.LOCK_SH)
    return crew


def leave_crew(crew: IO[bytes] | None) -> bool:
    """Whether no other worker is left. Who asks has given its own place up, so that of two at once the second is."""
    if crew is None:
        return True
    with crew:
        fcntl.flock(crew, fcntl.LOCK_UN)
        try:
            fcntl.flock(crew, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(crew.name)
        return True


def wait_until_empty(look: Callable[[], list[str]], grace_s: float) -> list[str]:
    """The first empty answer of `look`, or its last one after `grace_s`."""
    deadline_s = time.monotonic() + grace_s
    while (left := look()) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return left


def processes(mark: str) -> list[str]:
    """Live processes that the session `mark` started, this one left out."""
    found, family = [], {os.getpid()}
    # In order of ids parents come before children, save when ids wrap around: then the mark still finds the child.
    for pid in pids():
        state, parent = status(pid)
        if pid == os.getpid() or state in {"", "Z"} or not (parent in family or carries(pid, mark)):
            continue
        family.add(pid)
        command = read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
        # Python's own helper of `multiprocessing` ends with this process, by design.
        if "multiprocessing.resource_tracker" not in command:
            found.append(f"process {pid}: {command[:200]}")
    return found


def files() -> set[Path]:
    """Where hivemind puts its sockets, whatever TMPDIR says, and torch its shared memory."""
    return {*Path("/tmp").glob("hivemind*.sock"), *Path("/dev/shm").glob("torch_*")}


def is_of_others(path: Path, mark: str) -> bool:
    """Whether a living process outside this session made `path`: somebody else may use this machine."""
    if path.name.startswith("torch_"):  # torch_PID_...
        makers = [int(number) for number in path.name.split("_")[1:2] if number.isdigit()]
    else:  # hivemind-p2pd-TOKEN.sock, and p2pd has the token in its command line; a token may hold hyphens
        token = path.stem.split("-", 2)[-1].encode()
        makers = [pid for pid in pids() if token in read(pid, "cmdline")]
    return any(status(pid)[0] and pid != os.getpid() and not carries(pid, mark) for pid in makers)


def pids() -> list[int]:
    return sorted(int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())


def status(pid: int) -> tuple[str, int]:
    """State letter and parent of a process; an empty letter for one that has gone."""
    # The command name before the last parenthesis may hold spaces and parentheses itself.
    fields = read(pid, "stat").rpartition(b")")[2].split()
    return (fields[0].decode(), int(fields[1])) if len(fields) > 1 else ("", 0)


def carries(pid: int, mark: str) -> bool:
    entries = read(pid, "environ").decode(errors="replace").split("\0")
    return any(f"{entry}/".startswith(f"{MARK}={mark}/") for entry in entries)


def read(pid: int, name: str) -> bytes:
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""
