"""What `dipaco-peer config show` prints: every key, its value, and where that comes from."""

from __future__ import annotations

import json
from typing import Any

from dipaco_p2p import strict

from .keys import SETTINGS, TABLES
from .layers import Origin, Resolved
from .template import in_toml

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
