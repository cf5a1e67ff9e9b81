"""The systemd manager of the user: asked and told through `systemctl --user`, and `loginctl` for lingering."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from dipaco_p2p.errors import ConfigError, EnvironmentUnfit

from .unit import Service, unit

TIMEOUT_S = 120.0
"""Stopping waits until the volunteer has left."""
NONE_HINT = (
    "where there is no systemd, `dipaco-peer service show ...` prints the unit to translate; "
    "or run `dipaco-peer join ...` in tmux, or in a container"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the manager knows of a unit."""

    is_installed: bool
    active: str
    """active, activating (waiting for a restart too), inactive, failed."""
    enabled: str
    result: str
    """success, exit-code, timeout, ..."""
    exit_code: int
    restarts: int
    lingers: bool | None
    """Whether services of this user run while nobody is logged in; None if nobody says."""


def unit_path(name: str) -> Path:
    """Where systemd looks for a user's own units."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "systemd" / "user" / f"{name}.service"


def require_manager() -> None:
    """Raises EnvironmentUnfit where no systemd manager of this user answers."""
    if shutil.which("systemctl") is None:
        raise EnvironmentUnfit("this machine has no systemd: there is no `systemctl`", hint=NONE_HINT)
    done = _run("systemctl", "--user", "show", "--property=Version", "--value")
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["it says nothing"])[0]
        raise EnvironmentUnfit(f"no systemd manager of this user answers: {said}", hint=NONE_HINT)


def install(service: Service, *, is_started: bool) -> Path:
    """Write the unit, and start it now and at every boot (or login, without lingering). Raises DipacoError."""
    require_manager()
    path = unit_path(service.name)
    if path.exists() and "dipaco-peer service install" not in path.read_text(errors="replace"):
        raise ConfigError(f"`{path}` is there, and not of this program", hint="choose another --name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        service.home.mkdir(parents=True, exist_ok=True)  # what may be written must be there when the sandbox is made
        path.write_text(unit(service), encoding="utf-8")
    except OSError as error:
        raise EnvironmentUnfit(f"cannot write {error.filename or path}: {error.strerror}") from None
    _tell("daemon-reload")
    _tell("enable", service.file_name)
    if is_started:  # also one that runs already, with the old unit
        _tell("restart", service.file_name)
    return path


def uninstall(name: str) -> Path:
    """Stop it, as Ctrl-C would, and remove the unit; the home folder stays. Raises DipacoError."""
    require_manager()
    path = unit_path(name)
    if not path.exists():
        raise ConfigError(f"no service is installed as `{name}`: {path} is not there", hint="choose another --name")
    _tell("disable", "--now", f"{name}.service")
    path.unlink(missing_ok=True)
    _tell("daemon-reload")
    return path


def state(name: str) -> State:
    """Raises EnvironmentUnfit."""
    require_manager()
    properties = ("ActiveState", "UnitFileState", "Result", "ExecMainStatus", "NRestarts")
    done = _run("systemctl", "--user", "show", f"{name}.service", *(f"--property={each}" for each in properties))
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    return State(
        is_installed=unit_path(name).exists(),
        active=found.get("ActiveState", "inactive"),
        enabled=found.get("UnitFileState", "") or "not installed",
        result=found.get("Result", ""),
        exit_code=_number(found.get("ExecMainStatus", "")),
        restarts=_number(found.get("NRestarts", "")),
        lingers=lingers(),
    )


def lingers() -> bool | None:
    """Whether this user's services run without a login."""
    try:
        done = _run("loginctl", "show-user", getpass.getuser(), "--property=Linger", "--value")
    except (EnvironmentUnfit, OSError, KeyError):
        return None
    return {"yes": True, "no": False}.get(done.stdout.strip()) if done.returncode == 0 else None


def program() -> list[str]:
    """How this very program is started: the script beside this Python, or the Python with its entry point."""
    script = Path(sys.executable).with_name("dipaco-peer")
    if script.exists():
        return [str(script)]
    return [sys.executable, "-c", "from peers.cli import main; main()"]


def _tell(*words: str) -> None:
    done = _run("systemctl", "--user", *words)
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise EnvironmentUnfit(f"`systemctl --user {' '.join(words)}` failed: {said}")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise EnvironmentUnfit(f"`{command[0]}` is not there", hint=NONE_HINT) from None
    except subprocess.TimeoutExpired:
        raise EnvironmentUnfit(f"`{' '.join(command)}` did not answer within {TIMEOUT_S:g} s") from None


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
