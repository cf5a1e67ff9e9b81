"""`dipaco-peer service`: install, uninstall, status, show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dipaco_p2p.errors import NotRunning
from dipaco_p2p.program.control.options import Json, end

from ..preferences.commands import ConfigFile, Home, RunId
from .unit import DEFAULT_NAME, Service

service_app = typer.Typer(no_args_is_help=True, help="Let systemd run the volunteer: at every boot, with restarts.")
STATUS_SCHEMA = "dipaco.service/1"
NOTE_LINGER = """\
It runs while you are logged in. For it to start at boot and go on after you log out, run once:
  loginctl enable-linger"""
NOTES = """\
Follow it with:   journalctl --user -u {name} -f
Preferences:      {config} (`dipaco-peer config init` writes it; restart: systemctl --user restart {name})"""

Name = Annotated[str, typer.Option(help="Of the unit; another one for each further volunteer on this machine.")]
Ticket = Annotated[str, typer.Argument(help="The ticket, or an address, as for `join`.")]
Sandbox = Annotated[bool, typer.Option("--sandbox/--no-sandbox", help="Without it where user namespaces are off.")]
CODES = "Exit codes: 0 done; 2 a wrong flag or name; 5 no systemd manager of this user answers."


@service_app.command(epilog=f"Example: dipaco-peer service install dipaco1... {CODES}")
def install(
    ticket: Ticket,
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
    from ..preferences.layers import config_path
    from . import unit

    def work() -> None:
        path = unit.install(_service(ticket, run, home, config, name, is_sandboxed=sandbox), is_started=start)
        typer.echo(f"{'started' if start else 'installed'} {name}: {path}")
        typer.echo(NOTES.format(name=name, config=config_path(config)))
        if unit.lingers() is not True:
            typer.echo(NOTE_LINGER)

    end(work)


@service_app.command(epilog=f"Example: dipaco-peer service uninstall. {CODES}")
def uninstall(name: Name = DEFAULT_NAME) -> None:
    """Stop the service as Ctrl-C would, and remove its unit; identity, receipts and state stay."""
    from . import unit

    end(lambda: typer.echo(f"stopped and removed {unit.uninstall(name)}; the volunteer's folder stays"))


@service_app.command(
    epilog="Example: dipaco-peer service status --json. Exit codes: 0 it runs; 3 it does not; 5 no systemd manager."
)
def status(name: Name = DEFAULT_NAME, is_json: Json = False) -> None:
    """Say whether the service is installed and runs, how it ended last, and whether it lives without a login."""
    from dipaco_p2p.program.console import run_command

    from . import unit

    found: dict[str, Any] = {}

    def work() -> None:
        found.update(unit.state(name))
        document = {"schema": STATUS_SCHEMA, "name": name, **found}
        typer.echo(json.dumps(document, indent=2) if is_json else as_text(name, found))

    code = run_command(work)
    raise typer.Exit(code or (0 if found["active"] == "active" else NotRunning.exit_code))


@service_app.command(epilog="Example: dipaco-peer service show dipaco1... > my.service")
def show(
    ticket: Ticket,
    run: RunId = None,
    home: Home = None,
    config: ConfigFile = None,
    name: Name = DEFAULT_NAME,
    sandbox: Sandbox = True,
) -> None:
    """Print the unit that `install` would write, and change nothing; works without systemd."""
    from .unit import unit

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
    ticket: str, run: str | None, home: Path | None, config: Path | None, name: str, *, is_sandboxed: bool
) -> Service:
    """What the unit is made from; the same mistakes are refused as by `join`."""
    from dipaco_p2p.node.entry import read_entry

    from ..config import PeerConfig
    from ..preferences.layers import resolve
    from .unit import program

    read_entry(ticket, run=run)
    found = resolve({"home": home}, config=config)
    wishes = PeerConfig.of(found.preferences)
    place = wishes.home.absolute()
    words = [*program(), "join", ticket, "--home", str(place)]
    words += [] if run is None else ["--run", run]
    words += ["--config", str(found.file.absolute())] if found.is_there else []  # a service sees no shell's variables
    return Service(
        name=name,
        command=words,
        home=place,
        grace_s=wishes.grace_s,
        ram_gb=wishes.limits.ram_gb,
        is_sandboxed=is_sandboxed,
    )
