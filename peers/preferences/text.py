"""What `dipaco-peer config init` writes and `config show` prints, made from the keys."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from dipaco_p2p import strict
from dipaco_p2p.errors import ConfigError

from .keys import SETTINGS, TABLES, Setting
from .layers import Origin, Resolved

HEAD = """\
# Preferences of dipaco-peer on this machine. Take the # before a key away to set it: what stands there is its default,
# or an example for one that has none.
# Precedence, highest first: a flag of `dipaco-peer join`, DIPACO_<KEY> in the environment, this file, the default.
# `dipaco-peer config check` reads it, `dipaco-peer config show` says what holds and why.
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
        raise ConfigError(f"`{path}` is there already", hint=hint) from None
    except OSError as error:
        raise ConfigError(f"cannot write `{path}`: {error.strerror}", hint="name another with --config") from None


def in_toml(value: object) -> str:
    """A value as TOML has it; `auto`-like nothing has no form there."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(in_toml(str(item)) for item in value)}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
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
