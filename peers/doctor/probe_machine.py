"""Looking at this machine: each probe asks one thing, changes nothing, and takes a missing tool for no answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import stat
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from dipaco_p2p.errors import ConfigError, DipacoError, EnvironmentUnfit
from dipaco_p2p.program.examination import Finding, failure
from dipaco_p2p.program.system import existing, free_disk, output_of
from dipaco_p2p.swarm.addresses import read_place
from dipaco_p2p.swarm.hivemind.daemon import wait_port_free
from dipaco_p2p.swarm.identity import load_or_create

from ..config import PeerConfig, torch_device
from .facts import GpuFacts, HomeFacts
from .judge_machine import PINS, judge_files, judge_gpu, judge_identity, judge_packages, judge_port, judge_python


async def ask_command(*command: str) -> str | None:
    """What a command of the system prints, without the space around it; None if it is not here, fails, or hangs."""
    said = await asyncio.to_thread(output_of, *command)
    return None if said is None else said.strip()


async def probe_ntp() -> bool | None:
    """Whether the system's clock is in step with a time server; None where systemd does not say."""
    said = await ask_command("timedatectl", "show", "--property=NTPSynchronized", "--value")
    return {"yes": True, "no": False}.get(said or "")


async def probe_gpu() -> GpuFacts:
    """What the driver and torch say of graphics cards."""
    import torch

    driver = await ask_command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    names, unsupported = [], []
    if torch.cuda.is_available():
        built_for = torch.cuda.get_arch_list()
        for number in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(number)
            names.append(torch.cuda.get_device_name(number))
            if not _is_built_for(built_for, major, minor):
                unsupported.append(f"{names[-1]} (sm_{major}{minor})")
    return GpuFacts(
        driver=driver.splitlines()[0] if driver else None,
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


def probe_packages() -> dict[str, str | None]:
    """The versions of the packages that are known to matter."""
    found: dict[str, str | None] = {}
    for name in PINS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def probe_home(home: Path) -> HomeFacts:
    """The home folder; it is not made if it is not there."""
    folder, problem = existing(home), None
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".dipaco-doctor-"):
            pass
    except OSError as error:
        problem = error.strerror or str(error)
    key, key_mode, key_problem = home / "identity.key", None, None
    with contextlib.suppress(OSError):
        key_mode = stat.S_IMODE(key.stat().st_mode)
    if key_mode is not None and not key_mode & 0o077:
        try:
            load_or_create(key)
        except (DipacoError, OSError) as error:
            key_problem = str(error)
    return HomeFacts(path=home, problem=problem, free_bytes=free_disk(home), key_mode=key_mode, key_problem=key_problem)


async def port_finding(listen: str) -> Finding:
    """Whether we may listen where the user wants to."""
    try:
        await wait_port_free(*read_place(listen))
    except (ConfigError, EnvironmentUnfit) as error:
        return judge_port(listen, str(error), error.hint)
    return judge_port(listen, None)


def machine_findings(home: HomeFacts, gpu: GpuFacts, config: PeerConfig) -> list[Finding]:
    """What needs neither a network nor a run."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        judge_python(sys.version_info[:3]),
        judge_packages(probe_packages()),
        judge_gpu(gpu, is_wanted=config.device.startswith("cuda")),
        judge_identity(home),
        judge_files(soft, hard if hard > 0 else os.sysconf("SC_OPEN_MAX")),
    ]


def chosen_device(config: PeerConfig) -> tuple[str, Finding | None]:
    """The device to train on; if the one that was asked for is not there, the CPU and the reason."""
    try:
        return torch_device(config.device), None
    except EnvironmentUnfit as error:
        return "cpu", failure("device", str(error), error.hint)
