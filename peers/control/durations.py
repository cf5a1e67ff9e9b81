"""Lengths of time as a user types them: `90s`, `30m`, `2h`, `1d`."""

from __future__ import annotations

import re

from dipaco_p2p.errors import ConfigError

from .requests import PAUSE_S_MAX

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PATTERN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhd])")
HINT = "a number and its unit: 90s, 30m, 2h or 1d"


def read_duration(text: str) -> float:
    """Seconds; raises ConfigError for anything else, for nothing, and for more than a year."""
    found = _PATTERN.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"`{text[:40]}` is no length of time", hint=HINT)
    seconds = float(found[1]) * UNITS_S[found[2]]
    if not 0.0 < seconds <= PAUSE_S_MAX:
        raise ConfigError(f"`{text[:40]}` is not between a moment and {PAUSE_S_MAX / 86_400:g} days", hint=HINT)
    return seconds
