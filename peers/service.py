"""`dipaco-peer service`: the volunteer as a systemd user unit, from the unit's text to the commands that install it.

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

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dipaco_p2p.errors import ConfigError, EnvironmentUnfit, NotRunning
from dipaco_p2p.program.control.options import Json, end
from dipaco_p2p.program.files import OPEN_FILES, output_of

from .preferences.commands import ConfigFile, Home, RunId
from .preferences.keys import GB

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
# Written by `dipaco-peer service install`, which overwrites it; `systemctl --user edit {name}` keeps changes apart.
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
LimitNOFILE={files}
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
        files=OPEN_FILES,
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


def install_unit(service: Service, *, is_started: bool) -> Path:
    """Write the unit, and start it now and at every boot (or login, without lingering). Raises DipacoError."""
    _require_manager()
    path = unit_path(service.name)
    if path.exists() and "dipaco-peer service install" not in path.read_text(errors="replace"):
        raise ConfigError(f"`{path}` was not written by this program", hint="choose another --name")
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


def uninstall_unit(name: str) -> Path:
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


service_app = typer.Typer(
    no_args_is_help=True, help="Let systemd start the volunteer at login or boot, and restart it after failures."
)
STATUS_SCHEMA = "dipaco.service/1"
NOTE_LINGER = """\
It runs while you are logged in. For it to start at boot and go on after you log out, run once:
  loginctl enable-linger"""
NOTES = """\
Follow it with:   journalctl --user -u {name} -f
Preferences:      {config} (`dipaco-peer config init` writes it; restart: systemctl --user restart {name})"""

Name = Annotated[str, typer.Option(help="The unit's name. Each further volunteer on this machine needs its own.")]
Ticket = Annotated[str | None, typer.Argument(help="The ticket or address, with the same default as for `join`.")]
Sandbox = Annotated[
    bool, typer.Option("--sandbox/--no-sandbox", help="Use --no-sandbox where users cannot make namespaces.")
]
CODES = "Exit codes: 0 done; 2 a wrong flag or name; 5 no systemd manager of this user answers."


@service_app.command(epilog=f"Example: dipaco-peer service install dipaco1...\n\n{CODES}")
def install(
    ticket: Ticket = None,
    run: RunId = None,
    home: Home = None,
    config: ConfigFile = None,
    name: Name = DEFAULT_NAME,
    sandbox: Sandbox = True,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Start it now.")] = True,
) -> None:
    """Install the volunteer as a systemd unit of this user, and start it.

    After a failure systemd starts it again, with pauses that grow to an hour; but not after a wrong flag, for another
    run or version, or when the run refuses it. Limits and schedule are read from the preferences.
    """
    from .preferences.layers import config_path

    def work() -> None:
        path = install_unit(_service(ticket, run, home, config, name, is_sandboxed=sandbox), is_started=start)
        typer.echo(f"{'started' if start else 'installed'} {name}: {path}")
        typer.echo(NOTES.format(name=name, config=config_path(config)))
        if lingers() is not True:
            typer.echo(NOTE_LINGER)

    end(work)


@service_app.command(epilog=f"Example: dipaco-peer service uninstall\n\n{CODES}")
def uninstall(name: Name = DEFAULT_NAME) -> None:
    """Stop the service as Ctrl-C would, and remove its unit; identity, receipts and state stay."""
    end(lambda: typer.echo(f"stopped and removed {uninstall_unit(name)}; the volunteer's folder stays"))


@service_app.command(
    epilog="Example: dipaco-peer service status --json\n\nExit codes: 0 it runs; 3 it does not; 5 no systemd manager."
)
def status(name: Name = DEFAULT_NAME, is_json: Json = False) -> None:
    """Say whether the service is installed and runs, how it ended last, and whether it lives without a login."""

    def work() -> int:
        found = state(name)
        document = {"schema": STATUS_SCHEMA, "name": name, **found}
        typer.echo(json.dumps(document, indent=2) if is_json else as_text(name, found))
        return 0 if found["active"] == "active" else NotRunning.exit_code

    end(work)


@service_app.command(epilog="Example: dipaco-peer service show dipaco1... > my.service")
def show(
    ticket: Ticket = None,
    run: RunId = None,
    home: Home = None,
    config: ConfigFile = None,
    name: Name = DEFAULT_NAME,
    sandbox: Sandbox = True,
) -> None:
    """Print the unit that `install` would write, and change nothing; works without systemd."""
    end(lambda: typer.echo(unit(_service(ticket, run, home, config, name, is_sandboxed=sandbox)), nl=False))


def as_text(name: str, state: dict[str, Any]) -> str:
    """A line for each thing that matters, with what to do about it."""
    if not state["is_installed"]:
        return f"{name} is not installed; `dipaco-peer service install ...` does that"
    lines = [f"{name}: {state['active']}, {state['enabled']}, restarted {state['restarts']} times"]
    if state["result"] not in ("", "success"):
        ended = f"ended last with {state['result']}, exit code {state['exit_code']}"
        lines.append(f"{ended}: journalctl --user -u {name} -e")
    if state["exit_code"] in (217, 226):
        lines.append("this kernel gives users no namespaces: install it again with --no-sandbox")
    if state["lingers"] is False:
        lines.append(NOTE_LINGER)
    return "\n".join(lines)


def _service(
    ticket: str | None, run: str | None, home: Path | None, config: Path | None, name: str, *, is_sandboxed: bool
) -> Service:
    """What the unit is made from; the same mistakes are refused as by `join`."""
    from .config import PeerConfig
    from .joining.choice import choose, tell
    from .preferences.layers import resolve

    found = resolve({"home": home}, config=config)
    wishes = PeerConfig.of(found.preferences)
    place = wishes.home.absolute()
    choice = choose(ticket, place, run=run)
    tell(choice)
    # The ticket itself: a service sees no shell's variables or folder, and stays with its run if another is joined.
    words = [*program(), "join", choice.bare, "--home", str(place)]
    words += [] if choice.run is None else ["--run", choice.run]
    words += ["--config", str(found.file.absolute())] if found.is_there else []  # a service sees no shell's variables
    return Service(
        name=name,
        command=words,
        home=place,
        grace_s=wishes.grace_s,
        ram_gb=wishes.limits.ram_gb,
        is_sandboxed=is_sandboxed,
    )
