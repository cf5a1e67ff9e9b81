"""This machine, as the kernel and logind describe it: what this program takes, who else is here, and what is left."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dipaco_p2p.core.model.microbatch import MicroBatch
from dipaco_p2p.program.files import LOCK_NAME, output_of
from dipaco_p2p.swarm.identity import KEY_NAME

from ..config import PeerConfig
from ..preferences.keys import GB, Limits

PROC = Path("/proc")
KIB = 1024
TICKS = os.sysconf("SC_CLK_TCK")
RESET_PEAK = "5"
"""What forgets the peak, written into clear_refs (proc_pid_clear_refs(5))."""
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that are in memory."""

    now: int
    peak: int
    """The most since `forget_peak`, or since the process began where that cannot be forgotten."""


def cores(*, cpu_max: Path = CPU_MAX) -> float:
    """How many cores this program may use: those it is bound to, fewer in a container that has a quota (cgroup v2)."""
    bound = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):  # `max` is no number, and no limit
        quota, period = map(float, cpu_max.read_text().split())
        return min(bound, quota / period)
    return bound


def cpu_s() -> float:
    """Processor time so far, in seconds, of all threads and daemons."""
    return time.process_time() + sum(map(cpu_of, descendants(os.getpid())))


def memory() -> Memory:
    """Of this process and its daemons; memory that several of them share is counted once for each."""
    own = _lines(os.getpid())
    others = sum(_lines(pid).get("VmRSS", 0) for pid in descendants(os.getpid()))
    now = own.get("VmRSS", 0)
    return Memory(now=now + others, peak=max(now, own.get("VmHWM", 0)) + others)


def forget_peak() -> None:
    """Let `peak` begin anew; where the kernel will not, it stays the most there ever was."""
    with contextlib.suppress(OSError):
        (PROC / "self" / "clear_refs").write_text(RESET_PEAK)


def descendants(pid: int) -> Iterator[int]:
    """The processes that `pid` started, and those that they did."""
    for thread in _entries(PROC / str(pid) / "task"):
        with contextlib.suppress(OSError, ValueError):
            for child in map(int, (thread / "children").read_text().split()):
                yield child
                yield from descendants(child)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def cpu_of(pid: int) -> float:
    """Processor time of one process alone so far, in seconds; 0 when it is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name before the last parenthesis may hold anything; user and system time are fields 14 and 15 of proc(5).
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    return 0.0


def _lines(pid: int) -> dict[str, int]:
    """The lines of a process's status that are sizes, in bytes."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM"):
                found[name] = int(value.split()[0]) * KIB
    return found


NAME_CHARS_MAX = 40
COMM_CHARS_MAX = 15
"""The kernel keeps no more of a name in `comm`."""
_ODD = re.compile(r"[^\w.+ -]")
"""A program may call itself anything; what is shown and logged are these letters."""


def ours(pid: int | None = None) -> frozenset[int]:
    """This process and those that it started."""
    pid = os.getpid() if pid is None else pid
    return frozenset([pid, *descendants(pid)])


def name_of(pid: int) -> str:
    """What people call it: `eldenring.exe`; `process 1234` where nobody says."""
    name = _called(pid) or _comm(pid)
    return _ODD.sub("?", name)[:NAME_CHARS_MAX].strip() or f"process {pid}"


def is_named(pid: int, names: frozenset[str]) -> bool:
    """Whether it goes by one of `names`, in small letters: its command, its program file, or what the kernel shows."""
    executable = ""
    with contextlib.suppress(OSError):
        executable = _last_part(os.readlink(PROC / str(pid) / "exe"))
    found = {_called(pid).lower(), executable.lower(), _comm(pid).lower()} - {""}
    return bool(found & (names | {name[:COMM_CHARS_MAX] for name in names}))


def is_volunteer(pid: int) -> bool:
    """Whether it holds the lock of a volunteer's home."""
    with contextlib.suppress(OSError):
        return any(_locks_home(pid, opened) for opened in (PROC / str(pid) / "fd").iterdir())
    return False


def _locks_home(pid: int, opened: Path) -> bool:
    with contextlib.suppress(OSError):
        target = Path(os.readlink(opened))
        if target.name == LOCK_NAME and (target.parent / KEY_NAME).is_file():
            return "\nlock:" in (PROC / str(pid) / "fdinfo" / opened.name).read_text()
    return False


def _called(pid: int) -> str:
    """The last part of the path that it was started with, in the style of Linux or, under Wine, of Windows."""
    with contextlib.suppress(OSError):
        return _last_part((PROC / str(pid) / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace"))
    return ""


def _comm(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "comm").read_text(errors="replace").strip()
    return ""


def _last_part(path: str) -> str:
    return re.split(r"[/\\]", path)[-1]


SUPPLIES = Path("/sys/class/power_supply")
TERMINALS = ("pts/[0-9]*", "tty[1-9]*")
TIMEOUT_S = 5.0
PROPERTIES = ("Class", "Type", "State", "IdleHint", "IdleSinceHint", "TTY")
NEVER_MIN = float("inf")
"""Nobody is logged in."""


def on_battery(folder: Path = SUPPLIES) -> bool:
    """Whether a battery of the machine itself is giving power, and nothing else does."""
    is_discharging = False
    for supply in sorted(folder.glob("*")):
        kind, scope = _word(supply / "type"), _word(supply / "scope")
        if kind == "Battery" and scope != "Device":  # of a mouse or a headset
            is_discharging = is_discharging or _word(supply / "status") == "Discharging"
        elif kind != "Battery" and _word(supply / "online") == "1" and scope != "Device":
            return False
    return is_discharging


def idle_min(*, now_s: float | None = None, devices: Path = Path("/dev")) -> float | None:
    """Minutes since anybody touched this machine; without end if nobody is logged in, None if nobody knows."""
    now_s = time.time() if now_s is None else now_s
    sessions = _sessions()
    if sessions is not None:
        return idle_of_sessions(sessions, now_s)
    return idle_of_terminals(devices, now_s)


def idle_of_sessions(sessions: Iterable[dict[str, str]], now_s: float) -> float:
    """The least of the sessions of users, from what `loginctl show-session` says of each."""
    found = [NEVER_MIN]
    for session in sessions:
        if session.get("Class") != "user" or session.get("State") == "closing":
            continue
        if session.get("IdleHint") != "yes":
            return 0.0
        since_us = int(session.get("IdleSinceHint") or 0)
        found.append(max(0.0, now_s - since_us / 1e6) / 60)
    return min(found)


def idle_of_terminals(devices: Path, now_s: float) -> float | None:
    """The least of the terminals that somebody has: when one was read from, the kernel notes it as its access."""
    times = []
    for pattern in TERMINALS:
        for path in devices.glob(pattern):
            with contextlib.suppress(OSError):
                status = path.stat()
                if pattern.startswith("pts") or status.st_uid != 0:  # a console that nobody uses is root's
                    times.append(status.st_atime)
    return max(0.0, now_s - max(times)) / 60 if times else None


def _sessions() -> list[dict[str, str]] | None:
    """What logind says of every session; None where it does not answer."""
    listed = output_of("loginctl", "list-sessions", "--output=json", timeout_s=TIMEOUT_S)
    try:
        names = None if listed is None else [str(entry["session"]) for entry in json.loads(listed or "[]")]
    except (ValueError, TypeError, KeyError):
        return None
    if names is None:
        return None
    wanted = [f"--property={name}" for name in PROPERTIES]
    shown = [output_of("loginctl", "show-session", name, *wanted, timeout_s=TIMEOUT_S) for name in names]
    return [_pairs(text) for text in shown if text is not None]


def _pairs(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (line.partition("=") for line in text.splitlines())}


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def training_threads(wanted: int, *, offered: int, cores: int) -> int:
    """CPU threads for training: `wanted`, or if that is 0 what torch offers; but of more than two cores one is left to
    the network and to the modules that are led here."""
    if wanted:
        return wanted
    return offered - 1 if offered >= cores > 2 else offered


def use_threads(wanted: int) -> None:
    """Give torch as many threads as `training_threads` says."""
    import torch

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(training_threads(wanted, offered=torch.get_num_threads(), cores=cores))


def give_memory_back() -> None:
    """Of a graphics card, what torch keeps there for later: others may want it while we rest."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def trainer_settings(config: PeerConfig) -> dict[str, Any]:
    """What every `PathTrainer` of this process gets; made once, since what is found by trying stays with it."""
    micro = MicroBatch(size=config.micro_batch, checkpoint=config.checkpoint, memory_bytes=memory_left(config.limits))
    return {"micro": micro, "eight_bit": config.eight_bit}


def memory_left(limits: Limits) -> int | None:
    """What training may still take: what programs may, and no more than the owner's limit leaves."""
    free = free_bytes()
    if limits.ram_gb is None:
        return free
    left = max(0, int(limits.ram_gb * GB) - memory().now)
    return left if free is None else min(free, left)


def free_bytes(*, meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Memory that programs may still take, of the machine and of its container; None where nobody says."""
    known = [value for value in (_available(meminfo), _left(cgroup)) if value is not None]
    return min(known, default=None)


def _available(meminfo: Path) -> int | None:
    with contextlib.suppress(OSError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * KIB
    return None


def _left(cgroup: Path) -> int | None:
    """Of a container's limit (cgroup v2); None without one. What it keeps of files is free: it would give way."""
    with contextlib.suppress(OSError, ValueError):  # `max` is no number, and no limit
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        files = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(limit - used + int(files.get("inactive_file", 0)), 0)
    return None
