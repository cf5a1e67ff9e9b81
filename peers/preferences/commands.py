"""`dipaco-peer config`: show, path, init, check; and a flag for every key, which a decorator gives to other commands.

No flag is required, and None says that it was not given.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from dipaco_p2p.program.control.options import Json, end

from .keys import GONE, SETTINGS, Setting, flag_of

Command = TypeVar("Command", bound=Callable[..., Any])

NO = {"listening": "--no-listen"}
REPEATABLE = ("log",)
"""Lists that are one flag for each item; the others are one text, with commas."""
SHORT_HELP = {"home": "Folder for identity, state and history. Default: $DIPACO_HOME, else the user's data folder."}
CONFIG_HELP = "A file of preferences. Default: $DIPACO_CONFIG, else `dipaco-peer config path`."


def preference_flags(command: Command) -> Command:
    """`command`, which takes them as `config: Path | None` and `**flags`, with one option for each key."""
    signature = inspect.signature(command)
    hints = typing.get_type_hints(command, include_extras=True)
    own = [
        each.replace(annotation=hints[each.name])
        for each in signature.parameters.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    options = [*(_parameter(setting) for setting in SETTINGS.values()), *map(_gone, GONE)]
    every: Any = command
    every.__signature__ = signature.replace(parameters=[*own, *options], return_annotation=None)
    every.__annotations__ = {each.name: each.annotation for each in [*own, *options]}
    return command


ConfigFile = Annotated[Path | None, typer.Option("--config", help=CONFIG_HELP)]
Home = Annotated[
    Path | None, typer.Option(help="The volunteer's folder. Default: $DIPACO_HOME, else the user's data folder.")
]
RunId = Annotated[str | None, typer.Option(help="The run's id, or the start of it; any other run is refused.")]


def _parameter(setting: Setting) -> inspect.Parameter:
    declared = [setting.flag]
    if setting.is_switch:
        declared = [f"{setting.flag}/{NO.get(setting.name, '--no-' + setting.flag[2:])}"]
    text = SHORT_HELP.get(setting.name, setting.text)
    if setting.default not in (None, "", ()) and not setting.is_switch:
        text += f" [default: {setting.default}]"
    panel = f"{setting.table}: {TITLES[setting.table]}"
    option = typer.Option(*declared, help=text, rich_help_panel=panel, show_default=False)
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[_kind(setting), option]
    )


def _gone(name: str) -> inspect.Parameter:
    """A flag that nobody is shown, so that who still gives it hears why it is gone (layers.py)."""
    kind = Annotated[str | None, typer.Option(flag_of(name), hidden=True)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _kind(setting: Setting) -> Any:
    """Of the flag: a number or a switch as in the file, everything else a text, or texts where it may be repeated."""
    if setting.name in REPEATABLE:
        return list[str] | None
    kinds = (setting.kind, *typing.get_args(setting.kind))
    found = next((each for each in (bool, int, float) if each in kinds), str)
    return (Path if setting.name == "home" else found) | None


TITLES = {
    "peer": "the program",
    "training": "how steps are computed",
    "network": "how others reach it",
    "public": "what others are told",
    "when": "when it trains",
    "limits": "what it may take",
}


config_app = typer.Typer(no_args_is_help=True, help="Your preferences for the volunteer on this machine.")
SHOW_EPILOG = """Example: dipaco-peer config show --cpu 0.5

Takes the flags of `join`, to see what they change.

Exit codes: 0 shown; 2 a wrong flag, variable or file."""


@config_app.command(epilog=SHOW_EPILOG)
@preference_flags
def show(config: ConfigFile = None, is_json: Json = False, **flags: Any) -> None:
    """Show every preference, and where its value comes from: flag, environment, file or default."""
    from .layers import as_json, as_text, resolve

    def work() -> None:
        found = resolve(flags, config=config)
        typer.echo(as_json(found) if is_json else as_text(found))

    end(work)


@config_app.command(epilog="Example: $EDITOR $(dipaco-peer config path)")
def path(config: ConfigFile = None) -> None:
    """Print where the file of preferences is, or would be."""
    from .layers import config_path

    typer.echo(config_path(config))


@config_app.command(epilog="Example: dipaco-peer config init\n\nExit codes: 0 written; 2 it already exists.")
def init(config: ConfigFile = None) -> None:
    """Write a commented file of preferences, in which every key is at its default."""
    from .layers import config_path, write_template

    def work() -> None:
        target = config_path(config)
        write_template(target)
        typer.echo(f"wrote {target}: every key is commented out; `dipaco-peer config check` reads it")

    end(work)


@config_app.command(epilog="Example: dipaco-peer config check my.toml\n\nExit codes: 0 valid; 2 not valid.")
def check(
    file: Annotated[Path | None, typer.Argument(help="Default: what `join` would read.")] = None,
) -> None:
    """Check the file of preferences and the environment; print the first mistake in one line."""
    from .layers import Origin, resolve, unknown_variables

    def work() -> None:
        found = resolve({}, config=file)
        origins = [source.origin for source in found.sources.values()]
        for name, near in unknown_variables().items():
            typer.echo(f"note: {name} is not a preference" + (f"; did you mean {near}?" if near else ""), err=True)
        is_there = "" if found.is_there else ", which does not exist"
        counts = f"{origins.count(Origin.FILE)} from {found.file}{is_there}, {origins.count(Origin.ENVIRONMENT)}"
        typer.echo(f"configuration is valid: {counts} from the environment, the others at their defaults")

    end(work)
