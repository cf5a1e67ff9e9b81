"""What `build.py` says about the commands: every command of both programs, however deep, with its options and example.

Names, order and nesting are typer's registry; arguments and options are read from the annotations, as typer reads them.
tests/repo/test_docs.py holds the outcome against what `--help` prints.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer
from parts import table
from typer.models import ArgumentInfo, OptionInfo

EXAMPLE = re.compile(r"\s*\bExample: (.+?)(?=\.? Exit codes:|$)", re.MULTILINE)
"""What shows a command at work, in its docstring or its epilog: to the end of the line."""

WORDS = {str: "TEXT", int: "N", float: "X", Path: "PATH"}
"""What a value is called that an option takes; anything else is a text."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command, or a group of them: what is typed, and what carries it out."""

    title: str
    callback: Callable[..., Any] | None
    epilog: str = ""
    help: str = ""
    """Of a group that has no function of its own."""
    is_group: bool = False


def commands(program: str, app: typer.Typer) -> Iterator[Command]:
    """The program itself, then everything below it in the order of its help; hidden ones are left out."""
    own = app.registered_callback
    text = app.info.help if isinstance(app.info.help, str) else ""
    epilog = app.info.epilog if isinstance(app.info.epilog, str) else ""
    yield Command(title=program, callback=own.callback if own else None, help=text, epilog=epilog, is_group=True)
    for item in app.registered_commands:
        if item.callback is not None and not item.hidden:
            name = item.name or item.callback.__name__.lower().replace("_", "-")
            yield Command(title=f"{program} {name}", callback=item.callback, epilog=item.epilog or "")
    for group in app.registered_groups:
        if group.typer_instance is not None and group.hidden is not True:
            yield from commands(f"{program} {_name_of(group)}", group.typer_instance)


def _name_of(group: Any) -> str:
    """A name is given where a group is added, or where it was made."""
    inner = group.typer_instance.info.name
    return str(group.name if isinstance(group.name, str) else inner)


def command_line(program: str, app: typer.Typer) -> str:
    """Every command as a section: what it does, how it is called, an example, its arguments and options."""
    return "\n\n".join(map(_section, commands(program, app)))


def _section(command: Command) -> str:
    given = list(parameters(command.callback)) if command.callback else []
    usage = " ".join([command.title, "[OPTIONS]", *(item.usage for item in given if item.usage)])
    usage += " COMMAND [ARGS]..." if command.is_group else ""
    text = inspect.cleandoc((command.callback.__doc__ if command.callback else "") or command.help)
    shown = "\n".join([usage, *(f"$ {line}" for line in examples(f"{text}\n{command.epilog}"))])
    text = EXAMPLE.sub("", text).strip()
    parts = [f"### `{command.title}`", text, f"```console\n{shown}\n```"]
    rows = [(item.names, item.help, item.default) for item in given]
    return "\n\n".join(filter(None, [*parts, table(("", "meaning", "default"), rows) if rows else ""]))


def examples(text: str) -> list[str]:
    """The command lines that a docstring and an epilog show, without a full stop."""
    lines = (found.strip() for found in EXAMPLE.findall(text))
    return [line if line.endswith("..") else line.removesuffix(".") for line in lines]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One argument or option of a command, in words."""

    names: str
    usage: str
    """How an argument stands in the usage line; empty for an option."""
    help: str
    default: str


def parameters(callback: Callable[..., Any]) -> Iterator[Parameter]:
    """The parameters of a command, from its annotations, as typer reads them."""
    hints = typing.get_type_hints(callback, include_extras=True)
    for name, parameter in inspect.signature(callback).parameters.items():
        kind, *notes = typing.get_args(hints[name]) or (hints[name],)
        info = next((note for note in notes if isinstance(note, (OptionInfo, ArgumentInfo))), None)
        if info is None or info.hidden:  # typer's context, or what nobody is told of
            continue
        is_option = isinstance(info, OptionInfo)
        yield _option(name, kind, info, parameter) if is_option else _argument(name, kind, info, parameter)


def _option(name: str, kind: Any, info: OptionInfo, parameter: inspect.Parameter) -> Parameter:
    is_flag = bool in (kind, *typing.get_args(kind))
    word = "" if is_flag or info.count else f" {info.metavar or _word(kind)}"
    names = ", ".join(f"`{option}{word}`" for option in _options(name, info))
    return Parameter(names=names, usage="", help=_help(info), default=_default(parameter, is_flag=is_flag))


def _argument(name: str, kind: Any, info: ArgumentInfo, parameter: inspect.Parameter) -> Parameter:
    word = info.metavar or name.upper()
    usage = word if parameter.default is inspect.Parameter.empty else f"[{word}]"
    usage += "..." if typing.get_origin(kind) in (list, tuple) else ""
    return Parameter(names=f"`{word}`", usage=usage, help=_help(info), default=_default(parameter, is_flag=False))


def _default(parameter: inspect.Parameter, *, is_flag: bool) -> str:
    if parameter.default is inspect.Parameter.empty:
        return "must be given"
    value = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
    return "" if value is None or value == "" or is_flag else f"`{value}`"


def _help(info: OptionInfo | ArgumentInfo) -> str:
    variables = [info.envvar] if isinstance(info.envvar, str) else info.envvar or []
    told = f" Also `${variables[0]}`." if variables else ""
    return inspect.cleandoc(info.help or "") + told


def _options(name: str, info: OptionInfo) -> list[str]:
    # In an annotation the first name of an option is where its default would be, and typer moves it.
    words = [text for text in (info.default, *(info.param_decls or ())) if isinstance(text, str) and text[:1] == "-"]
    return [name for text in words for name in text.split("/")] or ["--" + name.replace("_", "-")]


def _word(kind: Any) -> str:
    choices = [each.value for each in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []
    choices = list(typing.get_args(kind)) if typing.get_origin(kind) is typing.Literal else choices
    if choices:
        return "|".join(map(str, choices))
    is_many = typing.get_origin(kind) in (list, tuple, types.UnionType, typing.Union)
    inner = [each for each in typing.get_args(kind) if each is not type(None)] if is_many else [kind]
    return _word(inner[0]) if is_many else WORDS.get(kind, "TEXT")
