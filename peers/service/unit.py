"""The systemd user unit of a volunteer: its text, and how `systemctl --user` is told of it.

Hardened as far as CUDA allows. `PrivateDevices` would hide the GPU, `ProtectClock` deny it (it brings a list of what is
allowed), and `MemoryDenyWriteExecute` forbid what CUDA and torch.compile make at run time: none is there.
`NoNewPrivileges` keeps CUDA from loading its kernel module itself: where that is not done at boot (nvidia-persistenced,
or any use of the GPU before), the first start finds no GPU. In a user's own manager most of the sandbox needs a user
namespace, so `PrivateUsers` is asked for; where the kernel refuses those, the unit fails with status 226 or 217, and is
to be installed with `--no-sandbox`.

SIGTERM goes to the program alone (`KillMode=mixed`): it says good-bye through its libp2p daemon, which must live until
then. A wrong flag (2), another run or version (6) and a refusal (7) are not tried again: the same would happen. All
else is, with growing pauses (systemd 254 or newer; an older one waits `RestartSec` each time, and says so in its log).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dipaco_p2p.errors import ConfigError, EnvironmentUnfit
from dipaco_p2p.program.files import output_of

from ..preferences.keys import GB

TIMEOUT_S = 120.0
"""Stopping waits until the volunteer has left."""
PROPERTIES = ("ActiveState", "UnitFileState", "Result", "ExecMainStatus", "NRestarts")
NONE_HINT = (
    "where there is no systemd, `dipaco-peer service show ...` prints the unit to translate; "
    "or run `dipaco-peer join ...` in tmux, or in a container"
)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
DEFAULT_NAME = "dipaco-peer"
NOT_AGAIN = (2, 6, 7)
"""Exit codes (errors.py) after which another start would end the same way."""
FIRST_RESTART_S = 10
RESTARTS_UNTIL_LONGEST = 8
LONGEST_RESTART_S = 3600
LEAVING_S = 60
"""Beyond the grace time for a round: handing over led modules, and ending the daemon."""
RAM_SLACK = 1.1
"""The guard of the program keeps the limit; the kernel enforces this much of it, should the guard fail."""
SANDBOX = """\
# The sandbox. Not PrivateDevices or ProtectClock (they hide the GPU), not MemoryDenyWriteExecute (CUDA makes code).
PrivateUsers=yes
ProtectSystem=strict
ReadWritePaths={writable}
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectHostname=yes
RestrictNamespaces=yes
"""
TEMPLATE = """\
# Written by `dipaco-peer service install`, which writes it anew; `systemctl --user edit {name}` keeps changes apart.
[Unit]
Description=dipaco-p2p volunteer ({name})
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={command}
WorkingDirectory=/
{environment}
Restart=on-failure
RestartPreventExitStatus={not_again}
RestartSec={first_s}
RestartSteps={steps}
RestartMaxDelaySec={longest_s}
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={stop_s}
Nice=10
IOSchedulingClass=idle
OOMScoreAdjust=500
{memory}CacheDirectory=dipaco-p2p

NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
UMask=0077
{sandbox}
[Install]
WantedBy=default.target
"""
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
"""Where compiled code is kept: the usual places are read-only in the sandbox, and /tmp does not last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What a unit is made from."""

    name: str
    command: Sequence[str]
    home: Path
    grace_s: float
    ram_gb: float | None = None
    is_sandboxed: bool = True

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(f"a service cannot be called `{self.name}`", hint="use letters, digits, `-`, `_` and `.`")
        for text in (*self.command, str(self.home)):
            if "\n" in text or "\0" in text:
                raise ConfigError(f"a unit cannot hold {text!r}", hint="take the line break out")

    @property
    def file_name(self) -> str:
        return f"{self.name}.service"


def unit(service: Service) -> str:
    """The text of the unit's file."""
    memory = "" if service.ram_gb is None else f"MemoryMax={int(service.ram_gb * RAM_SLACK * GB)}\n"
    sandbox = SANDBOX.format(writable=quoted(str(service.home))) if service.is_sandboxed else ""
    return TEMPLATE.format(
        name=service.name,
        command=" ".join(map(quoted, service.command)),
        environment="\n".join(f"Environment={name}=%C/dipaco-p2p/{folder}" for name, folder in CACHES.items()),
        not_again=" ".join(map(str, NOT_AGAIN)),
        first_s=FIRST_RESTART_S,
        steps=RESTARTS_UNTIL_LONGEST,
        longest_s=LONGEST_RESTART_S,
        stop_s=int(service.grace_s) + LEAVING_S,
        memory=memory,
        sandbox=sandbox,
    )


def quoted(word: str) -> str:
    """A word of a unit's line as it is meant (systemd.syntax(7), systemd.service(5)): no specifiers, no variables."""
    plain = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return plain if re.fullmatch(r"[\w@%+=:,./$-]+", plain) else f'"{plain}"'


# -- the manager


def unit_path(name: str) -> Path:
    """Where systemd looks for a user's own units."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "systemd" / "user" / f"{name}.service"


def install(service: Service, *, is_started: bool) -> Path:
    """Write the unit, and start it now and at every boot (or login, without lingering). Raises DipacoError."""
    _require_manager()
    path = unit_path(service.name)
    if path.exists() and "dipaco-peer service install" not in path.read_text(errors="replace"):
        raise ConfigError(f"`{path}` is there, and not of this program", hint="choose another --name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        service.home.mkdir(parents=True, exist_ok=True)  # what may be written must be there when the sandbox is made
        path.write_text(unit(service), encoding="utf-8")
    except OSError as error:
        raise EnvironmentUnfit(f"cannot write {error.filename or path}: {error.strerror}") from None
    _systemctl("daemon-reload")
    _systemctl("enable", service.file_name)
    if is_started:  # also one that runs already, with the old unit
        _systemctl("restart", service.file_name)
    return path


def uninstall(name: str) -> Path:
    """Stop it, as Ctrl-C would, and remove the unit; the home folder stays. Raises DipacoError."""
    _require_manager()
    path = unit_path(name)
    if not path.exists():
        raise ConfigError(f"no service is installed as `{name}`: {path} is not there", hint="choose another --name")
    _systemctl("disable", "--now", f"{name}.service")
    path.unlink(missing_ok=True)
    _systemctl("daemon-reload")
    return path


def state(name: str) -> dict[str, Any]:
    """What the manager knows of a unit: `active` is active, activating (also while it waits for a restart), inactive or
    failed; `result` is success, exit-code, timeout, ...; `lingers` as below. Raises EnvironmentUnfit."""
    _require_manager()
    said = _systemctl("show", f"{name}.service", *(f"--property={each}" for each in PROPERTIES))
    found = {key: value for key, _, value in (line.partition("=") for line in said.splitlines())}
    exit_code, restarts = found.get("ExecMainStatus", ""), found.get("NRestarts", "")
    return {
        "is_installed": unit_path(name).exists(),
        "active": found.get("ActiveState", "inactive"),
        "enabled": found.get("UnitFileState") or "not installed",
        "result": found.get("Result", ""),
        "exit_code": int(exit_code) if exit_code.isdigit() else 0,
        "restarts": int(restarts) if restarts.isdigit() else 0,
        "lingers": lingers(),
    }


def lingers() -> bool | None:
    """Whether services of this user run while nobody is logged in; None if logind does not say."""
    said = output_of("loginctl", "show-user", str(os.getuid()), "--property=Linger", "--value")
    return {"yes": True, "no": False}.get((said or "").strip())


def program() -> list[str]:
    """How this very program is started: the script beside this Python, or the Python with its entry point."""
    script = Path(sys.executable).with_name("dipaco-peer")
    return [str(script)] if script.exists() else [sys.executable, "-c", "from peers.cli import main; main()"]


def _require_manager() -> None:
    """Raises EnvironmentUnfit where no systemd manager of this user answers."""
    try:
        _systemctl("show", "--property=Version", "--value")
    except EnvironmentUnfit as error:
        raise EnvironmentUnfit(f"no systemd manager of this user answers: {error}", hint=NONE_HINT) from None


def _systemctl(*words: str) -> str:
    """What `systemctl --user` prints; raises EnvironmentUnfit when it fails."""
    command = ["systemctl", "--user", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise EnvironmentUnfit("this machine has no `systemctl`", hint=NONE_HINT) from None
    except subprocess.TimeoutExpired:
        raise EnvironmentUnfit(f"`{' '.join(command)}` did not answer within {TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise EnvironmentUnfit(f"`{' '.join(command)}` failed: {said}")
    return done.stdout
