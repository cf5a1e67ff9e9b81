"""`dipaco-peer service`: install, uninstall, status, show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dipaco_p2p.errors import NotRunning

from ..preferences.flags import ConfigFile
from .manager import State
from .unit import DEFAULT_NAME, Service

service_app = typer.Typer(no_args_is_help=True, help="Let systemd run the volunteer: at every boot, with restarts.")
NOT_RUNNING = NotRunning.exit_code
STATUS_SCHEMA = "dipaco.service/1"
LINGER = "loginctl enable-linger"
NOTE_LINGER = f"""\
It runs while you are logged in. For it to start at boot and go on after you log out, run once:
  {LINGER}"""
NOTES = """\
Follow it with:   journalctl --user -u {name} -f
Preferences:      {config} (`dipaco-peer config init` writes it; restart: systemctl --user restart {name})"""

Name = Annotated[str, typer.Option(help="Of the unit; another one for each further volunteer on this machine.")]
Ticket = Annotated[str, typer.Argument(help="The ticket, or an address, as for `join`.")]
RunId = Annotated[str | None, typer.Option(help="The run's id, or its start: refuse any other run.")]
Home = Annotated[Path | None, typer.Option(help="The volunteer's folder, as for `join`.")]
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

    It is started again when it fails, with pauses that grow to an hour; not after a wrong flag, for another run or
    version, or when it is refused. Limits and schedule are read from the preferences.
    """
    from dipaco_p2p.program.console import run_program

    async def main() -> None:
        from .manager import install as install_unit
        from .manager import lingers

        path = install_unit(_service(ticket, run, home, config, name, is_sandboxed=sandbox), is_started=start)
        typer.echo(f"{'started' if start else 'installed'} {name}: {path}")
        typer.echo(NOTES.format(name=name, config=_config_file(config)))
        if lingers() is not True:
            typer.echo(NOTE_LINGER)

    raise typer.Exit(run_program(main))


@service_app.command(epilog=f"Example: dipaco-peer service uninstall. {CODES}")
def uninstall(name: Name = DEFAULT_NAME) -> None:
    """Stop the service as Ctrl-C would, and remove its unit; identity, receipts and state stay."""
    from dipaco_p2p.program.console import run_program

    async def main() -> None:
        from .manager import uninstall as uninstall_unit

        typer.echo(f"stopped and removed {uninstall_unit(name)}; the volunteer's folder stays")

    raise typer.Exit(run_program(main))


@service_app.command(
    epilog="Example: dipaco-peer service status --json. Exit codes: 0 it runs; 3 it does not; 5 no systemd manager."
)
def status(
    name: Name = DEFAULT_NAME,
    is_json: Annotated[bool, typer.Option("--json", help="As one JSON document.")] = False,
) -> None:
    """Say whether the service is installed and runs, how it ended last, and whether it lives without a login."""
    from dipaco_p2p.program.console import run_program

    found: list[State] = []

    async def main() -> None:
        from .manager import state

        found.append(state(name))
        typer.echo(_as_json(name, found[0]) if is_json else as_text(name, found[0]))

    code = run_program(main)
    raise typer.Exit(code or (0 if found[0].active == "active" else NOT_RUNNING))


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
    from dipaco_p2p.program.console import run_program

    async def main() -> None:
        from .unit import unit

        typer.echo(unit(_service(ticket, run, home, config, name, is_sandboxed=sandbox)), nl=False)

    raise typer.Exit(run_program(main))


def as_text(name: str, state: State) -> str:
    """A line for each thing that matters, with what to do about it."""
    if not state.is_installed:
        return f"{name} is not installed; `dipaco-peer service install ...` does that"
    lines = [f"{name}: {state.active}, {state.enabled}, restarted {state.restarts} times"]
    if state.result not in ("", "success"):
        lines.append(f"ended last with {state.result}, exit code {state.exit_code}: journalctl --user -u {name} -e")
    if state.exit_code in (217, 226):
        lines.append("this kernel gives users no namespaces: install it again with --no-sandbox")
    if state.lingers is False:
        lines.append(NOTE_LINGER)
    return "\n".join(lines)


def _as_json(name: str, state: State) -> str:
    values = {field: getattr(state, field) for field in State.__dataclass_fields__}
    return json.dumps({"schema": STATUS_SCHEMA, "name": name, **values}, indent=2)


def _service(
    ticket: str, run: str | None, home: Path | None, config: Path | None, name: str, *, is_sandboxed: bool
) -> Service:
    """What the unit is made from; the same mistakes are refused as by `join`."""
    from dipaco_p2p.node.entry import read_entry

    from ..config import PeerConfig
    from ..preferences.layers import resolve
    from .manager import program

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


def _config_file(given: Path | None) -> Path:
    from ..preferences.layers import config_path

    return config_path(given)
