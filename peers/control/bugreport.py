"""One file to hand to whoever is asked for help: versions, settings, what the volunteer does, its last log lines.

Every text goes through redact.py before it is written. What is in it: README.txt in the archive says it again.

    about.json      versions of this program, Python and the libraries; the machine's kind, cores and memory
    status.json     what `dipaco-peer status` says, or why it says nothing
    config.json     the settings of the running volunteer, likewise
    peer.log        the end of its log
    history.jsonl   the end of its history
"""

from __future__ import annotations

import io
import json
import os
import platform
import tarfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from dipaco_p2p import __version__
from dipaco_p2p.errors import ConfigError, DipacoError, EnvironmentUnfit
from dipaco_p2p.program.control.client import ask

from .keys import KEY_NAME, secrets_of
from .logs import last_lines, newest_log
from .redact import Redactor
from .requests import Request

SCHEMA = "dipaco.bugreport/1"
LOG_LINES = 500
HISTORY_LINES = 500
LIBRARIES = (
    "hivemind",
    "torch",
    "numpy",
    "bitsandbytes",
    "datasets",
    "tokenizers",
    "safetensors",
    "cryptography",
    "typer",
    "rich",
    "platformdirs",
)
NAME_KEYS = ("name", "mail", "contact")
"""A setting whose name holds one of these says who its user is."""
EXPLANATION = (
    "Made by `dipaco-peer bugreport`. Keys, addresses, names and folders were taken out; look before you send.\n"
)


def write_report(home: Path, target: Path) -> list[str]:
    """Write the archive, readable by its owner only; the names in it. Raises ConfigError where there is a file."""
    texts = redacted(home, collect(home))
    data = _archive(texts)
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"`{target}` is there already", hint="choose another with --to") from None
    except OSError as error:
        raise EnvironmentUnfit(f"cannot write {target}: {error.strerror}", hint="choose another with --to") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    return list(texts)


def collect(home: Path) -> dict[str, str]:
    """The texts, as they are on this machine."""
    return {
        "README.txt": EXPLANATION,
        "about.json": _json(about()),
        "status.json": _json(_asked(home, "status")),
        "config.json": _json(_asked(home, "config")),
        "peer.log": _log(home),
        "history.jsonl": _history(home),
    }


def redacted(home: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """The same without what must not be shown."""
    config = json.loads(texts["config.json"])
    names = [str(value) for key, value in config.items() if value and any(word in key for word in NAME_KEYS)]
    names += config.get("when", {}).get("gpu_programs", ())  # which games somebody plays
    secrets = [secret for path in sorted(home.glob("identity*.key")) for secret in secrets_of(path)]
    clean = Redactor(home, secrets=secrets or secrets_of(home / KEY_NAME), names=names)
    return {name: clean(text) for name, text in texts.items()}


def about() -> dict[str, Any]:
    """Versions and the machine, by what changes how the program behaves."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "schema": SCHEMA,
        "dipaco-p2p": __version__,
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "written_s": round(time.time()),
    }


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _asked(home: Path, what: str) -> dict[str, Any]:
    try:
        return ask(home, Request(ask=what)).body
    except DipacoError as error:
        return {"unknown": str(error)}


def _log(home: Path) -> str:
    try:
        return "".join(f"{line}\n" for line in last_lines(newest_log(home), LOG_LINES)[0])
    except (ConfigError, OSError) as error:
        return f"{error}\n"


def _history(home: Path) -> str:
    try:
        path = newest_log(home).with_name("history.jsonl")
        return "".join(f"{line}\n" for line in last_lines(path, HISTORY_LINES)[0])
    except (ConfigError, OSError) as error:
        return f"{error}\n"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _archive(texts: Mapping[str, str]) -> bytes:
    """Without the name, the user and the group that archives usually carry."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, text in texts.items():
            data = text.encode()
            entry = tarfile.TarInfo(f"dipaco-bugreport/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
    return made.getvalue()
