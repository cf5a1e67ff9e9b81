"""What the machine says of its owner: whether it runs on battery, and since when nobody touched it.

Battery: /sys/class/power_supply. A machine without a battery is never on battery.
Idle: `loginctl` knows for each session whether it is idle and since when. For a terminal that is the time of its last
input, to the second. For a desktop it is what the desktop says, and most say it only some minutes after the last input
(the time until the screen goes dark), some never: then such a session counts as in use. Where there is no logind, the
terminals in /dev/pts and the consoles are asked directly, as `w` does. Where there are none of these either, nobody
knows. The keyboard itself is not read: /dev/input is for root, and would show what is typed.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from pathlib import Path

from dipaco_p2p.program.system import output_of

SUPPLIES = Path("/sys/class/power_supply")
TERMINALS = ("pts/[0-9]*", "tty[1-9]*")
TIMEOUT_S = 5.0
PROPERTIES = ("Class", "Type", "State", "IdleHint", "IdleSinceHint", "TTY")
NEVER_MIN = float("inf")
"""Nobody is logged in."""


def on_battery(folder: Path = SUPPLIES) -> bool:
    """Whether a battery of the machine itself is giving power, and nothing else does."""
    is_discharging = False
    for supply in sorted(folder.glob("*")):
        kind, scope = _word(supply / "type"), _word(supply / "scope")
        if kind == "Battery" and scope != "Device":  # of a mouse or a headset
            is_discharging = is_discharging or _word(supply / "status") == "Discharging"
        elif kind != "Battery" and _word(supply / "online") == "1" and scope != "Device":
            return False
    return is_discharging


def idle_min(*, now_s: float | None = None, devices: Path = Path("/dev")) -> float | None:
    """Minutes since anybody touched this machine; without end if nobody is logged in, None if nobody knows."""
    now_s = time.time() if now_s is None else now_s
    sessions = _sessions()
    if sessions is not None:
        return idle_of_sessions(sessions, now_s)
    return idle_of_terminals(devices, now_s)


def idle_of_sessions(sessions: Iterable[dict[str, str]], now_s: float) -> float:
    """The least of the sessions of users, from what `loginctl show-session` says of each."""
    found = [NEVER_MIN]
    for session in sessions:
        if session.get("Class") != "user" or session.get("State") == "closing":
            continue
        if session.get("IdleHint") != "yes":
            return 0.0
        since_us = int(session.get("IdleSinceHint") or 0)
        found.append(max(0.0, now_s - since_us / 1e6) / 60)
    return min(found)


def idle_of_terminals(devices: Path, now_s: float) -> float | None:
    """The least of the terminals that somebody has: when one was read from, the kernel notes it as its access."""
    times = []
    for pattern in TERMINALS:
        for path in devices.glob(pattern):
            with contextlib.suppress(OSError):
                status = path.stat()
                if pattern.startswith("pts") or status.st_uid != 0:  # a console that nobody uses is root's
                    times.append(status.st_atime)
    return max(0.0, now_s - max(times)) / 60 if times else None


def _sessions() -> list[dict[str, str]] | None:
    """What logind says of every session; None where it does not answer."""
    listed = output_of("loginctl", "list-sessions", "--output=json", timeout_s=TIMEOUT_S)
    try:
        names = None if listed is None else [str(entry["session"]) for entry in json.loads(listed or "[]")]
    except (ValueError, TypeError, KeyError):
        return None
    if names is None:
        return None
    wanted = [f"--property={name}" for name in PROPERTIES]
    shown = [output_of("loginctl", "show-session", name, *wanted, timeout_s=TIMEOUT_S) for name in names]
    return [_pairs(text) for text in shown if text is not None]


def _pairs(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (line.partition("=") for line in text.splitlines())}


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
