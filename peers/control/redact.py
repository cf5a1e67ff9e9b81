"""Takes out of a text what its author would not show to strangers: keys, addresses, names, folders, games.

What is known (the key, the home, the user, the machine) is looked for literally, what is not by its form. A version
number of four parts may go with the addresses: rather one too many.
"""

from __future__ import annotations

import base64
import getpass
import ipaddress
import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

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
