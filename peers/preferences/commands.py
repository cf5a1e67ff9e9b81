"""`dipaco-peer config`: show, path, init, check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .flags import ConfigFile, preference_flags

config_app = typer.Typer(no_args_is_help=True, help="What you wish of the program on this machine: preferences.")
SHOW_EPILOG = """Example: dipaco-peer config show --cpu 0.5

Takes the flags of `join`, to see what they change. Exit codes: 0 shown; 2 a wrong flag, variable or file."""


@config_app.command(epilog=SHOW_EPILOG)
@preference_flags
def show(
    config: ConfigFile = None,
    is_json: Annotated[bool, typer.Option("--json", help="As one JSON document.")] = False,
    **flags: Any,
) -> None:
    """Show every preference, and where its value comes from: flag, environment, file or default."""
    from dipaco_p2p.program.console import run_program

    from .layers import resolve
    from .report import as_json, as_text

    async def main() -> None:
        found = resolve(flags, config=config)
        typer.echo(as_json(found) if is_json else as_text(found))

    raise typer.Exit(run_program(main))


@config_app.command(epilog="Example: $EDITOR $(dipaco-peer config path)")
def path(config: ConfigFile = None) -> None:
    """Print where the file of preferences is, or would be."""
    from .layers import config_path

    typer.echo(config_path(config))


@config_app.command(epilog="Example: dipaco-peer config init. Exit codes: 0 written; 2 it is there already.")
def init(config: ConfigFile = None) -> None:
    """Write a commented file of preferences, in which every key is at its default."""
    from dipaco_p2p.program.console import run_program

    from .layers import config_path
    from .template import write_template

    async def main() -> None:
        target = config_path(config)
        write_template(target)
        typer.echo(f"wrote {target}: every key is commented out; `dipaco-peer config check` reads it")

    raise typer.Exit(run_program(main))


@config_app.command(epilog="Example: dipaco-peer config check my.toml. Exit codes: 0 it is right; 2 it is not.")
def check(
    file: Annotated[Path | None, typer.Argument(help="Default: what `join` would read.")] = None,
) -> None:
    """Check the file of preferences and the environment; the first mistake is said in one line."""
    from dipaco_p2p.program.console import run_program

    from .layers import Origin, resolve, unknown_variables

    async def main() -> None:
        found = resolve({}, config=file)
        origins = [source.origin for source in found.sources.values()]
        for name, near in unknown_variables().items():
            typer.echo(f"note: {name} is no preference" + (f"; did you mean {near}?" if near else ""), err=True)
        is_there = "" if found.is_there else ", which is not there"
        counts = f"{origins.count(Origin.FILE)} from {found.file}{is_there}, {origins.count(Origin.ENVIRONMENT)}"
        typer.echo(f"all is right: {counts} from the environment, the others at their defaults")

    raise typer.Exit(run_program(main))
