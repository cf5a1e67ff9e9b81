"""The layers of the preferences. Precedence, highest first: flag, environment variable, file, default. Each value is
checked where it stands, so that an error names the flag, variable or file that is wrong.

file         --config, else $DIPACO_CONFIG, else config.toml in $DIPACO_HOME, else in the user's folder for settings
environment  DIPACO_UP_MBIT=20 and so on; an empty variable counts as none

`config init` and `config show` print what the keys and the layers say.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dipaco_p2p import strict
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.program.curves import read_targets
from dipaco_p2p.protocol.names import read_name
from dipaco_p2p.swarm.blobs.bandwidth import Line

from .keys import GONE, SETTINGS, TABLES, Preferences, Setting, flag_of, variable_of
from .schedule import parse_spans

DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
GPU = re.compile(r"auto|none|\d{1,3}|(GPU|MIG)-[0-9A-Za-z/-]{1,80}")
PROGRAM_CHARS_MAX = 100


def check_value(name: str, value: Any, *, where: str) -> None:
    """Raises ConfigError, which names `where`, for a value that this key cannot have; other types pass."""
    try:
        if name == "device" and isinstance(value, str):
            _check_form(DEVICE, value, "device", "use auto, cpu, cuda or cuda:1")
        if name == "gpu" and isinstance(value, str):
            _check_form(GPU, value, "GPU", "use its number or UUID as `nvidia-smi -L` lists them, none, or auto")
        if name == "gpu_programs" and isinstance(value, (list, tuple)):
            for program in value:
                _check_program(program)
        if name in ("name", "team") and isinstance(value, str):
            read_name(value, what=name)
        if name == "log" and isinstance(value, (list, tuple)):
            read_targets([text for text in value if isinstance(text, str)])
        if name in ("up_mbit", "down_mbit") and type(value) in (int, float):
            Line(up_mbit=value) if name == "up_mbit" else Line(down_mbit=value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", hint=error.hint) from None


def check_pair(preferences: Preferences) -> None:
    """Raises ConfigError for keys that cannot hold together."""
    training, limits, when = preferences.training, preferences.limits, preferences.when
    if when.gpu_yield == "listed" and not when.gpu_programs:
        hint = 'name some, as `gpu_programs = ["eldenring.exe"]`, or use any or off'
        raise ConfigError('`gpu_yield = "listed"`, but `gpu_programs` lists none', hint=hint)
    if limits.gpu == "none" and training.device.startswith("cuda"):
        raise ConfigError(f'`gpu = "none"`, but `device = "{training.device}"`', hint="leave one of them out")
    if limits.gpu not in ("auto", "none") and training.device not in ("auto", "cuda", "cuda:0"):
        message = f'`gpu = "{limits.gpu}"` is the only GPU that is seen then, but `device = "{training.device}"`'
        raise ConfigError(message, hint="leave one of them out")


def _check_program(name: object) -> None:
    if isinstance(name, str) and (not name.strip() or "/" in name or "\\" in name or len(name) > PROGRAM_CHARS_MAX):
        hint = "write its name as `nvidia-smi` shows it, without the folder: eldenring.exe"
        raise ConfigError(f"`{name[:PROGRAM_CHARS_MAX]}` is not a program's name", hint=hint)


def _check_form(form: re.Pattern[str], value: str, what: str, hint: str) -> None:
    if not form.fullmatch(value):
        raise ConfigError(f"`{value}` is not a valid {what}", hint=hint)


FILE_NAME = "config.toml"
FILE_BYTES_MAX = 1 << 20
OURS = ("DIPACO_CONFIG", "DIPACO_TICKET", "DIPACO_KEY")
"""Variables that are no keys."""
YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
UNSET = ("auto", "none", "")
TOML_HINT = "texts need quotes, tables look like `[limits]`; `dipaco-peer config init` writes a commented file"


class Origin(StrEnum):
    """Where a value comes from."""

    FLAG = "flag"
    ENVIRONMENT = "env"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where one value comes from, and how it is called there."""

    origin: Origin
    where: str
    """`--up-mbit`, `DIPACO_UP_MBIT`, the file's path, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What holds, and why."""

    preferences: Preferences
    sources: Mapping[str, Source]
    """By the key's name."""
    file: Path
    is_there: bool
    """Whether the file exists."""

    def value(self, name: str) -> Any:
        """Of the key with this name."""
        return getattr(getattr(self.preferences, SETTINGS[name].table), name)


def resolve(
    flags: Mapping[str, Any], *, config: Path | None = None, environment: Mapping[str, str] = os.environ
) -> Resolved:
    """What holds on this machine; a flag that is None was not given. Raises ConfigError."""
    path = config_path(config, environment)
    is_wanted = config is not None or bool(environment.get("DIPACO_CONFIG"))
    tables = _read(path, is_wanted=is_wanted)
    for name in GONE:
        _check_gone(name, flags.get(name), where=flag_of(name))
        _check_gone(name, environment.get(variable_of(name)) or None, where=variable_of(name))
    found: dict[str, tuple[Any, Source]] = {}
    for name, setting in SETTINGS.items():
        if name in tables.get(setting.table, {}):
            value = tables[setting.table][name]
            found[name] = (value, Source(origin=Origin.FILE, where=str(path)))
        if text := environment.get(setting.variable, ""):
            value = _parsed(text, setting, setting.variable)
            found[name] = (value, Source(origin=Origin.ENVIRONMENT, where=setting.variable))
        if flags.get(name) not in (None, []):  # of a flag that may be repeated and was not given, click makes a list
            value = _from_flag(flags[name], setting)
            found[name] = (value, Source(origin=Origin.FLAG, where=setting.flag))
    return _joined(found, path, is_there=path.exists())


def config_path(given: Path | None = None, environment: Mapping[str, str] = os.environ) -> Path:
    """Where the file of preferences is, or would be."""
    if given is not None:
        return given
    if named := environment.get("DIPACO_CONFIG"):
        return Path(named).expanduser()
    if home := environment.get("DIPACO_HOME"):
        return Path(home).expanduser() / FILE_NAME
    import platformdirs

    return platformdirs.user_config_path("dipaco-p2p") / FILE_NAME


def home_in_file() -> str:
    """The home that the file names, if it can be read; for commands that take no other preference."""
    try:
        return str(_read(config_path(), is_wanted=False).get("peer", {}).get("home", ""))
    except ConfigError:
        return ""


def unknown_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that look like ours but are not, each with the nearest that is, or nothing."""
    known = [*OURS, *map(variable_of, [*SETTINGS, *GONE])]
    names = [name for name in environment if name.startswith("DIPACO_") and name not in known]
    return {name: next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.7)), "") for name in names}


# -- one layer


def _read(path: Path, *, is_wanted: bool) -> dict[str, dict[str, Any]]:
    """The file's tables, every value checked; none if nobody named the file and it is not there."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        if not is_wanted:
            return {}
        hint = "`dipaco-peer config init` writes a commented one"
        raise ConfigError(f"there is no file of preferences `{path}`", hint=hint) from None
    except OSError as error:
        raise ConfigError(f"preferences `{path}` cannot be read: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"`{path}` has {len(data)} bytes; preferences have at most {FILE_BYTES_MAX}")
    try:
        tables = tomllib.loads(data.decode())
    except UnicodeDecodeError:
        raise ConfigError(f"`{path}` is not UTF-8 text", hint=TOML_HINT) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"`{path}` is not valid TOML: {error}", hint=TOML_HINT) from None
    except RecursionError:
        raise ConfigError(f"`{path}` is nested too deeply", hint=TOML_HINT) from None
    try:
        _check_places(tables, path)
        for table, values in tables.items():
            for name, value in values.items() if isinstance(values, dict) else ():
                check_value(name, value, where=f"`{name}` in [{table}] of {path}")
        strict.load(Preferences, tables, where=str(path))
    except ConfigError as error:
        message = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise ConfigError(message, hint=error.hint) from None
    return tables


def _check_places(tables: Mapping[str, Any], path: Path) -> None:
    """A key that stands in another table than its own is told where it belongs; raises ConfigError."""
    for table, values in tables.items():
        names = values if isinstance(values, dict) and table in TABLES else {table: values}
        for name, value in names.items():
            _check_gone(name, value, where=f"`{name}` in {path}")
            known = SETTINGS.get(name)
            if known is not None and known.table != table and name not in TABLES:
                stands = f"in [{table}]" if table in TABLES else "outside any table"
                raise ConfigError(f"`{name}` stands {stands} of {path}", hint=f"move it to [{known.table}]")


def _check_gone(name: str, value: Any, *, where: str) -> None:
    """Raises ConfigError for a value of a key that there was."""
    if name in GONE and value is not None:
        problem, _, hint = GONE[name].partition("; ")
        raise ConfigError(f"{where} {problem}", hint=hint)


def _from_flag(value: Any, setting: Setting) -> Any:
    """A flag is typed already, but for what TOML writes as a list; a path is a text."""
    if isinstance(value, str) and setting.is_list:
        return _parsed(value, setting, setting.flag)
    return _checked(str(value) if isinstance(value, Path) else value, setting, setting.flag)


def _parsed(text: str, setting: Setting, where: str) -> Any:
    """The value of a text; raises ConfigError."""
    words, kinds = text.strip().lower(), (setting.kind, *typing.get_args(setting.kind))
    if setting.name == "schedule":
        return _checked([str(span) for span in _spans(text, where)], setting, where)
    if setting.is_list:
        return _checked([part for part in map(str.strip, text.split(",")) if part], setting, where)
    if type(None) in kinds and words in UNSET:
        return None
    if bool in kinds:
        if words not in YES + NO:
            raise ConfigError(f"`{text}` in {where} is neither yes nor no", hint=f"use {YES[1]} or {NO[1]}")
        return words in YES
    for kind in (int, float):
        if kind in kinds:
            return _checked(_number(text, kind, where), setting, where)
    return _checked(text, setting, where)


def _spans(text: str, where: str) -> Any:
    try:
        return parse_spans(text)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", hint=error.hint) from None


def _number(text: str, kind: type[int] | type[float], where: str) -> float:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"`{text}` in {where} is not a {'whole ' if kind is int else ''}number") from None


def _checked(value: Any, setting: Setting, where: str) -> Any:
    """`value`, which the key may have; raises ConfigError."""
    check_value(setting.name, value, where=where)
    try:
        strict.load(TABLES[setting.table], {setting.name: value}, where=where)
    except ConfigError as error:  # a flag or a variable is named as it was typed, and only so
        raise ConfigError(str(error).replace(f"`{setting.name}` in {where}", f"`{where}`"), hint=error.hint) from None
    return value


# -- all of them


def _joined(found: Mapping[str, tuple[Any, Source]], path: Path, *, is_there: bool) -> Resolved:
    mapping: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    for name, (value, _) in found.items():
        mapping[SETTINGS[name].table][name] = value
    preferences = strict.load(Preferences, mapping, where="the preferences")
    default = Source(origin=Origin.DEFAULT, where="")
    sources = {name: found[name][1] if name in found else default for name in SETTINGS}
    check_pair(preferences)
    return Resolved(preferences=preferences, sources=sources, file=path, is_there=is_there)


HEAD = """\
# Preferences of dipaco-peer on this machine. To set a key, remove the # before it. The value that stands there is its
# default, or an example if it has none.
# Precedence, highest first: a flag of `dipaco-peer join`, DIPACO_<KEY> in the environment, this file, the default.
# `dipaco-peer config check` checks this file; `dipaco-peer config show` says which values hold, and why.
"""
COMMENT_COLUMN = 34


def template() -> str:
    """The whole file."""
    parts = [HEAD]
    for table, kind in TABLES.items():
        settings = [setting for setting in SETTINGS.values() if setting.table == table]
        title = " ".join((inspect.getdoc(kind) or "").split())
        parts.append("\n".join([f"# {title}", f"[{table}]", *map(_line, settings), ""]))
    return "\n".join(parts)


def write_template(path: Path) -> None:
    """Write it to `path`; raises ConfigError rather than replace a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(template())
    except FileExistsError:
        hint = "edit that one, or name another with --config"
        raise ConfigError(f"`{path}` already exists", hint=hint) from None
    except OSError as error:
        raise ConfigError(f"cannot write `{path}`: {error.strerror}", hint="name another with --config") from None


def in_toml(value: object) -> str:
    """A value as TOML has it; `auto`-like nothing has no form there."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(in_toml(str(item)) for item in value)}]"
    if isinstance(value, (bool, str)):  # which JSON writes the same way
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _line(setting: Setting) -> str:
    value = setting.example or in_toml(setting.default)
    return f"# {setting.name} = {value}".ljust(COMMENT_COLUMN) + f"  # {setting.text}"


SCHEMA = "dipaco.config/1"
NOTHING = "-"


def as_json(found: Resolved) -> str:
    """One document; keys are only ever added to it."""
    keys = [
        {
            "key": setting.path,
            "value": strict.plain(found.value(name)),
            "origin": str(found.sources[name].origin),
            "where": found.sources[name].where,
        }
        for name, setting in SETTINGS.items()
    ]
    document = {"schema": SCHEMA, "file": str(found.file), "file_exists": found.is_there, "keys": keys}
    return json.dumps(document, indent=2, ensure_ascii=False)


def as_text(found: Resolved) -> str:
    """The tables of the file with all values, each with its origin behind it; plain, so that it can be searched."""
    is_read = "" if found.is_there else "  (not there)"
    lines = [f"# file: {found.file}{is_read}"]
    width = max(len(_assigned(name, found.value(name))) for name in SETTINGS)
    for table in TABLES:
        lines += ["", f"[{table}]"]
        lines += [
            f"{_assigned(name, found.value(name)):<{min(width, 44)}}  # {_origin(found, name)}"
            for name, setting in SETTINGS.items()
            if setting.table == table
        ]
    return "\n".join(lines)


def _assigned(name: str, value: Any) -> str:
    return f"{name} = {NOTHING if value is None else in_toml(strict.plain(value))}"


def _origin(found: Resolved, name: str) -> str:
    source = found.sources[name]
    if source.origin is Origin.FILE:
        return "file"
    return f"{source.origin} {source.where}".strip()
