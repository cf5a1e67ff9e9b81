"""Is this machine fit? Each probe asks one thing and changes nothing; each judgement turns facts into a finding."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import resource
import signal
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dipaco_p2p.config import PACKAGE
from dipaco_p2p.errors import ConfigError, DipacoError, EnvironmentUnfit
from dipaco_p2p.node.sizes import Needs
from dipaco_p2p.program.examination import DAMAGED, Finding, failure, fine, warning
from dipaco_p2p.program.files import OPEN_FILES, free_disk, installed_version, output_of, why_unwritable
from dipaco_p2p.program.text import in_bytes
from dipaco_p2p.swarm.addresses import read_place
from dipaco_p2p.swarm.hivemind.daemon import SOCKET_FOLDER, stale_sockets, wait_port_free
from dipaco_p2p.swarm.identity import KEY_NAME, load_or_create

from ..config import PeerConfig, torch_device
from ..joining.preview import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """Graphics cards, as the driver and torch see them."""

    driver: str | None
    """Its version, from nvidia-smi; None: no NVIDIA driver here."""
    torch_cuda: str | None
    """The CUDA version that this torch was built for; None: a CPU build."""
    devices: tuple[str, ...] = ()
    """Names of those that torch can use."""
    unsupported: tuple[str, ...] = ()
    """Of these, the ones that this torch has no code for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeFacts:
    """The folder that a volunteer lives in."""

    path: Path
    problem: str | None
    """Why nothing can be written there."""
    free_bytes: int
    key_mode: int | None
    """Of the identity file; None: there is none yet."""
    key_problem: str | None = None
    """What is wrong with its content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What dead processes of ours have left."""

    sockets: tuple[Path, ...] = ()
    segments: tuple[Path, ...] = ()
    """Shared memory."""
    daemons: tuple[int, ...] = ()
    """Process ids of libp2p daemons whose program is gone."""

    @property
    def count(self) -> int:
        return len(self.sockets) + len(self.segments) + len(self.daemons)


PROC, SHM = Path("/proc"), Path("/dev/shm")
DAEMON = "p2pd"
_SEGMENT = re.compile(r"torch_(\d+)_\d+_\d+")


def find_leftovers(*, proc: Path = PROC, shm: Path = SHM, sockets: Path = SOCKET_FOLDER) -> Leftovers:
    """All of them, of the user who asks."""
    return Leftovers(
        sockets=tuple(sorted(stale_sockets(sockets))),
        segments=tuple(sorted(_dead_segments(proc, shm))),
        daemons=tuple(sorted(_orphans(proc))),
    )


def remove(left: Leftovers) -> Leftovers:
    """Remove them; what could be removed."""
    return Leftovers(
        sockets=tuple(path for path in left.sockets if _is_done(path.unlink)),
        segments=tuple(path for path in left.segments if _is_done(path.unlink)),
        daemons=tuple(pid for pid in left.daemons if _is_done(partial(os.kill, pid, signal.SIGTERM))),
    )


def _is_done(work: Callable[[], None]) -> bool:
    with contextlib.suppress(OSError):
        work()
        return True
    return False


def _dead_segments(proc: Path, shm: Path) -> Iterator[Path]:
    found = {path: name for path in shm.glob("torch_*") if (name := _SEGMENT.fullmatch(path.name))}
    dead = [path for path, name in found.items() if _is_mine(path) and not (proc / name[1]).exists()]
    if dead:
        mapped = "\n".join(_text(maps) for maps in proc.glob("[0-9]*/maps"))
        yield from (path for path in dead if path.name not in mapped)


def _orphans(proc: Path) -> Iterator[int]:
    for folder in proc.glob("[0-9]*"):
        command = _text(folder / "cmdline").split("\0")
        if Path(command[0]).name == DAEMON and _is_mine(folder) and any(KEY_NAME in word for word in command):
            parent = _parent(folder)
            if parent is not None and "python" not in _program(proc / str(parent)):
                yield int(folder.name)


def _parent(folder: Path) -> int | None:
    """The process id of the parent; None for a process that has just ended."""
    fields = _text(folder / "stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 and fields[0] != "Z" else None


def _program(folder: Path) -> str:
    """What a process runs, in a word; Python if that cannot be read, so that nothing is ended by mistake."""
    return (_text(folder / "cmdline").split("\0")[0] or _text(folder / "comm") or "python").lower()


def _is_mine(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_uid == os.getuid()
    return False


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


PINS: Mapping[str, tuple[str, str]] = {
    "hivemind": ("1.1.12", "1.2"),
    "torch": ("2.4", "3"),
    "numpy": ("1.26", "2.4"),
    "bitsandbytes": ("0.44", "1"),
    "safetensors": ("0.4.3", "1"),
}
"""From the first version on, below the second; the reasons are in pyproject.toml."""
FILES_MIN, FILES_WELL = 256, 4096
"""Calls of strangers alone may be a thousand, and circuits through a relay five hundred."""
DISK_WELL = 2**30
MEMORY_WELL = 2**30
"""What a machine should have free while nothing is known of a run."""


def judge_packages(versions: Mapping[str, str | None]) -> Finding:
    """`versions` of what `PINS` names; one finding for all."""
    wrong = [name for name, found in versions.items() if found is None or not _is_within(found, PINS[name])]
    if wrong:
        found = ", ".join(f"{name} {versions[name] or 'is missing'}" for name in wrong)
        wanted = " ".join(f"'{name}>={PINS[name][0]},<{PINS[name][1]}'" for name in wrong)
        return failure("packages", found, f"pip install {wanted}, in the environment of {PACKAGE}")
    found = ", ".join(f"{name} {found}" for name, found in versions.items())
    return fine("packages", f"Python {platform.python_version()}, {found}")


def _is_within(found: str, pin: tuple[str, str]) -> bool:
    return _numbers(pin[0]) <= _numbers(found) < _numbers(pin[1])


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0); what follows the numbers plays no part."""
    plain = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, plain[0].split("."))) if plain else ()


def judge_gpu(facts: GpuFacts, *, is_wanted: bool = False) -> Finding:
    """`is_wanted`: the user asks for a GPU, so that training on the CPU is no way out."""
    worse = failure if is_wanted else warning
    if facts.unsupported:
        names = ", ".join(facts.unsupported)
        return worse("gpu", f"this torch has no code for {names}", "install a build of torch for it: constraints.txt")
    if facts.devices:
        return fine("gpu", f"{', '.join(facts.devices)}; driver {facts.driver}, CUDA {facts.torch_cuda}")
    if facts.driver is None:
        if is_wanted:
            return failure("gpu", "no NVIDIA driver is installed", "install it, or use --device cpu")
        return fine("gpu", "no NVIDIA GPU: training uses the CPU")
    if facts.torch_cuda is None:
        found = f"there is a GPU (driver {facts.driver}), but torch is built for CPUs"
        return worse("gpu", found, "install the CUDA build of the pinned torch: constraints.txt says how")
    found = f"torch for CUDA {facts.torch_cuda} cannot use the GPU with driver {facts.driver}"
    return worse("gpu", found, "update the driver, or install torch for an older CUDA")


def judge_memory(machine: Machine, needs: Needs | None) -> Finding:
    free = machine.memory_bytes
    if free is None:
        return fine("memory", "the system does not say how much is free")
    if needs is None:
        if free < MEMORY_WELL:
            return warning("memory", f"{in_bytes(free)} free", "close other programs before joining")
        return fine("memory", f"{in_bytes(free)} free")
    least = needs.least_memory(is_cpu=machine.is_cpu)
    words = f"at least {in_bytes(least)} needed on {machine.device}, {in_bytes(free)} free"
    if least > free:
        return failure("memory", words, "close other programs, or join a run with smaller paths")
    return fine("memory", words)


def judge_disk(home: HomeFacts, needs: Needs | None) -> Finding:
    """Rights and room of the home folder."""
    if home.problem is not None:
        remedy = "choose a folder that you may write to: --home or DIPACO_HOME"
        return failure("disk", f"cannot write to {home.path}: {home.problem}", remedy)
    wanted = DISK_WELL if needs is None else needs.disk
    words = f"{in_bytes(home.free_bytes)} free in {home.path}"
    if needs is None:
        return fine("disk", words) if home.free_bytes >= wanted else warning("disk", words, "free some space")
    words = f"up to {in_bytes(wanted)} needed, {words}"
    return (
        failure("disk", words, "free some space, or choose another --home")
        if wanted > home.free_bytes
        else fine("disk", words)
    )


def judge_identity(home: HomeFacts) -> Finding:
    key = home.path / KEY_NAME
    if home.key_mode is None:
        return fine("identity", "none yet: the first join creates one")
    if home.key_mode & 0o077:
        return failure("identity", f"{key} is open to others (mode {home.key_mode:03o})", f"chmod 600 {key}")
    if home.key_problem is not None:
        remedy = "restore it, or move it away: the next join then creates a new one"
        return failure("identity", home.key_problem, remedy, code=DAMAGED)
    return fine("identity", f"{key}, which only its owner can read")


def judge_files(hard: int) -> Finding:
    """Open files: every call of a peer is one. A program raises its own limit to the `hard` one."""
    words = f"{min(hard, OPEN_FILES)} open files are allowed"
    if hard >= FILES_WELL:
        return fine("files", words)
    remedy = "raise `LimitNOFILE` of the systemd unit, or `nofile` in /etc/security/limits.conf"
    return (failure if hard < FILES_MIN else warning)("files", words, remedy)


def judge_port(place: str, problem: str | None, hint: str = "") -> Finding:
    """Whether this machine may listen at `place`, a multiaddr."""
    if problem is not None:
        return failure("port", f"{place}: {problem}", hint or "choose another --listen, or --no-listen")
    return fine("port", f"can listen at {place}")


def judge_leftovers(left: Leftovers, *, is_fixed: bool = False) -> Finding:
    parts = (("sockets", left.sockets), ("shared memory segments", left.segments), ("libp2p daemons", left.daemons))
    words = ", ".join(f"{len(found)} {name}" for name, found in parts if found)
    if not words:
        return fine("leftovers", "dead processes left nothing")
    if is_fixed:
        return fine("leftovers", f"removed {words} of dead processes")
    return warning("leftovers", f"{words} of dead processes", "dipaco-peer doctor --fix removes them")


async def probe_gpu() -> GpuFacts:
    """What the driver and torch say of graphics cards."""
    import torch

    said = await asyncio.to_thread(output_of, "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    drivers = (said or "").split()
    names, unsupported = [], []
    if torch.cuda.is_available():
        built_for = torch.cuda.get_arch_list()
        for number in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(number)
            names.append(torch.cuda.get_device_name(number))
            if not _is_built_for(built_for, major, minor):
                unsupported.append(f"{names[-1]} (sm_{major}{minor})")
    return GpuFacts(
        driver=drivers[0] if drivers else None,
        torch_cuda=torch.version.cuda,
        devices=tuple(names),
        unsupported=tuple(unsupported),
    )


def _is_built_for(architectures: list[str], major: int, minor: int) -> bool:
    """Code for `sm_XY` runs on every later minor of the same major, and `compute_XY` on everything later."""
    for name in architectures:
        kind, _, digits = name.partition("_")
        digits = "".join(char for char in digits if char.isdigit())
        if not digits:
            continue
        built = int(digits[:-1]), int(digits[-1])
        if built <= (major, minor) and (kind == "compute" or built[0] == major):
            return True
    return not architectures


def probe_home(home: Path) -> HomeFacts:
    """The home folder; it is not made if it is not there."""
    key, key_mode, key_problem = home / KEY_NAME, None, None
    with contextlib.suppress(OSError):
        key_mode = stat.S_IMODE(key.stat().st_mode)
    if key_mode is not None and not key_mode & 0o077:
        try:
            load_or_create(key)
        except (DipacoError, OSError) as error:
            key_problem = str(error)
    return HomeFacts(
        path=home,
        problem=why_unwritable(home),
        free_bytes=free_disk(home),
        key_mode=key_mode,
        key_problem=key_problem,
    )


async def port_finding(listen: str) -> Finding:
    """Whether we may listen where the user wants to."""
    try:
        await wait_port_free(*read_place(listen))
    except (ConfigError, EnvironmentUnfit) as error:
        return judge_port(listen, str(error), error.hint)
    return judge_port(listen, None)


def machine_findings(home: HomeFacts, gpu: GpuFacts, config: PeerConfig) -> list[Finding]:
    """What needs neither a network nor a run."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        judge_packages({name: installed_version(name) for name in PINS}),
        judge_gpu(gpu, is_wanted=config.device.startswith("cuda")),
        judge_identity(home),
        judge_files(hard if hard > 0 else os.sysconf("SC_OPEN_MAX")),
    ]


def chosen_device(config: PeerConfig) -> tuple[str, Finding | None]:
    """The device to train on; if the one that was asked for is not there, the CPU and the reason."""
    try:
        return torch_device(config.device), None
    except EnvironmentUnfit as error:
        return "cpu", failure("device", str(error), error.hint)
