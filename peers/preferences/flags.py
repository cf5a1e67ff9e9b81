"""A flag for every key, given to a command by a decorator: none is required, and None says that it was not given."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from .keys import GONE, SETTINGS, Setting, flag_of

Command = TypeVar("Command", bound=Callable[..., Any])

NO = {"listening": "--no-listen", "eight_bit": "--no-eight-bit"}
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


def _parameter(setting: Setting) -> inspect.Parameter:
    declared = [setting.flag]
    if setting.is_switch:
        declared = [f"{setting.flag}/{NO.get(setting.name, '--no-' + setting.flag[2:])}"]
    text = SHORT_HELP.get(setting.name, setting.text)
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
    """Of the flag: a number or a switch as in the file, everything else a text."""
    kinds = (setting.kind, *typing.get_args(setting.kind))
    found = next((each for each in (bool, int, float) if each in kinds), str)
    return (Path if setting.name == "home" else found) | None


TITLES = {
    "peer": "the program",
    "training": "how steps are computed",
    "network": "how others reach it",
    "when": "when it trains",
    "limits": "what it may take",
}
