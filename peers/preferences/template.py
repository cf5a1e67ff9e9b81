"""The commented file that `dipaco-peer config init` writes, made from the keys: as it is, it changes nothing."""

from __future__ import annotations

import inspect
from pathlib import Path

from dipaco_p2p.errors import ConfigError

from .keys import SETTINGS, TABLES, Setting

HEAD = """\
# Preferences of dipaco-peer on this machine. Take the # before a key away to set it: what stands there is its default,
# or an example for one that has none.
# A flag of `dipaco-peer join` goes before DIPACO_<KEY> in the environment, and that before this file.
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
