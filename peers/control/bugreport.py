"""One file to hand to whoever is asked for help: versions, settings, what the volunteer does, its last log lines.

Every text goes through `Redactor` before it is written. What is in it: README.txt in the archive says it again.

    about.json      versions of this program, Python and the libraries; the machine's kind, cores and memory
    status.json     what `dipaco-peer status` says, or why it says nothing
    config.json     the settings of the running volunteer, likewise
    peer.log        the end of its log
    history.jsonl   the end of its history
"""

from __future__ import annotations

import base64
import getpass
import io
import ipaddress
import json
import os
import platform
import re
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dipaco_p2p import __version__
from dipaco_p2p.errors import ConfigError, DipacoError, EnvironmentUnfit
from dipaco_p2p.program.control.client import ask
from dipaco_p2p.program.files import installed_version
from dipaco_p2p.program.history import HISTORY_NAME
from dipaco_p2p.swarm.identity import KEY_NAME, private_file

from .control import Request
from .home import LOG_NAME, last_lines, newest_log, secrets_of

WORD_CHARS_MIN = 3
"""A user or machine with a shorter name is only looked for in paths: it would be in every second word."""
_SECRET_KEYS = re.compile(r"\bhf_[A-Za-z0-9]{8,}|\bAKIA[A-Z0-9]{12,}|-----BEGIN[^-]*KEY-----[\s\S]*?-----END[^-]*-----")
_USER_FOLDER = re.compile(r"(?<![\w.])/(?:home|Users)/[^/\s\"':,]+")
_DNS = re.compile(r"/(dns[46]?|dnsaddr)/[^/\s\"']+")
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*://)[^/\s\"'<>]+")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_IP4 = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.]*\d)")
_IP6 = re.compile(r"(?<![\w:])[0-9a-fA-F:.]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*(?:%\w+)?")
_PROGRAM = re.compile(r"(yielding the GPU to )(?!another program)[\w.+? -]+")
_PEER = re.compile(r"\b(?:12D3KooW|Qm)[1-9A-HJ-NP-Za-km-z]{32,50}([1-9A-HJ-NP-Za-km-z]{6})\b")


class Redactor:
    """Replaces what must not be shown by a word for it in brackets."""

    def __init__(self, home: Path, *, secrets: Sequence[bytes] = (), names: Iterable[str] = ()) -> None:
        """`secrets` are bytes that may stand in a text as hexadecimal digits or base64; `names` are words."""
        folders = {home, home.absolute(), home.resolve()}
        self._literal = [(text, "[key]") for secret in secrets if secret for text in _spellings(secret)]
        self._literal += [(str(folder), "[home]") for folder in sorted(folders, key=lambda f: -len(str(f)))]
        self._literal += [(str(folder), "[user folder]") for folder in {Path.home(), Path.home().resolve()}]
        self._literal = [
            (spelling, word) for text, word in self._literal if text.strip("/. ") for spelling in (text, _escaped(text))
        ]
        self._names = sorted({name for name in [*_own_names(), *names] if len(name) >= WORD_CHARS_MIN}, key=len)[::-1]

    def __call__(self, text: str) -> str:
        """`text` without any of it."""
        for secret, word in self._literal:
            text = text.replace(secret, word)
        text = _SECRET_KEYS.sub("[key]", text)
        text = _USER_FOLDER.sub("[user folder]", text)
        text = _DNS.sub(r"/\1/[host]", text)
        text = _URL.sub(r"\1[host]", text)
        text = _MAIL.sub("[mail]", text)
        text = _PROGRAM.sub(r"\1[program]", text)
        text = _PEER.sub(r"...\1", text)
        text = _IP4.sub("[ip]", text)
        text = _IP6.sub(_without_ip6, text)
        for name in self._names:
            for spelling in {name, _escaped(name)}:
                text = re.sub(rf"(?i)(?<!\w){re.escape(spelling)}(?!\w)", "[name]", text)
        return text


def _own_names() -> list[str]:
    """Of the user and of the machine."""
    found = [platform.node(), platform.node().partition(".")[0], *_user_names()]
    return [name for name in found if name not in ("localhost", "")]


def _user_names() -> list[str]:
    try:
        import pwd

        entry = pwd.getpwuid(os.getuid())
        return [entry.pw_name, entry.pw_gecos.partition(",")[0], getpass.getuser()]
    except (ImportError, KeyError, OSError):
        return []


def _escaped(text: str) -> str:
    """As it stands in JSON."""
    return json.dumps(text)[1:-1]


def _spellings(secret: bytes) -> list[str]:
    codes = [base64.b64encode(secret), base64.urlsafe_b64encode(secret)]
    plain = [code.decode().rstrip("=") for code in codes]
    return [*plain, secret.hex(), secret.hex().upper()]


def _without_ip6(found: re.Match[str]) -> str:
    text = found[0].rstrip(".:") if not found[0].endswith("::") else found[0]
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return found[0]
    return "[ip]" + found[0][len(text) :]


SCHEMA = "dipaco.bugreport/1"
LINES = 500
"""Of the log, and of the history."""
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
NAME_KEYS = ("name", "team", "mail", "contact")
"""A setting whose name holds one of these says who its user is."""
EXPLANATION = """\
Made by `dipaco-peer bugreport`. Keys, addresses, names and folders were removed; look through it before you send it.
"""


def write_report(home: Path, target: Path) -> list[str]:
    """Write the archive, readable by its owner only; the names in it. Raises ConfigError where there is a file."""
    texts = redacted(home, collect(home))
    data = _archive(texts)
    try:
        with private_file(target) as file:
            file.write(data)
    except FileExistsError:
        raise ConfigError(f"`{target}` already exists", hint="choose another with --to") from None
    except OSError as error:
        raise EnvironmentUnfit(f"cannot write {target}: {error.strerror}", hint="choose another with --to") from None
    return list(texts)


def collect(home: Path) -> dict[str, str]:
    """The texts, as they are on this machine."""
    return {
        "README.txt": EXPLANATION,
        "about.json": _json(about()),
        "status.json": _json(_asked(home, "status")),
        "config.json": _json(_asked(home, "config")),
        **{name: _end_of(home, name) for name in (LOG_NAME, HISTORY_NAME)},
    }


def redacted(home: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """The same without what must not be shown."""
    config = json.loads(texts["config.json"])
    names = [str(value) for key, value in config.items() if value and any(word in key for word in NAME_KEYS)]
    names += config.get("when", {}).get("gpu_programs", ())  # which games somebody plays
    names += [text.partition(":")[2] for text in config.get("log", ())]  # folders, and the name of a project
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
        "libraries": {name: installed_version(name) for name in LIBRARIES},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "written_s": round(time.time()),
    }


def _asked(home: Path, what: str) -> dict[str, Any]:
    try:
        return ask(home, Request(ask=what)).body
    except DipacoError as error:
        return {"unknown": str(error)}


def _end_of(home: Path, name: str) -> str:
    """The last lines of a file beside the newest log, or why there are none."""
    try:
        return "".join(f"{line}\n" for line in last_lines(newest_log(home).with_name(name), LINES)[0])
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
