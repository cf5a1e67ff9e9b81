"""Figures as both programs write them for people."""

from __future__ import annotations

UNITS = ("B", "kB", "MB", "GB", "TB")
BINARY_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def size(count: int) -> str:
    """`512 B`, `1.2 MB`."""
    value, unit = float(count), 0
    while value >= 1000 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if unit else f"{count} B"


def in_bytes(count: int) -> str:
    """`1.5 GiB`, `20 MiB`, `700 B`."""
    for unit, size in BINARY_UNITS:
        if count >= size:
            return f"{count / size:,.1f} {unit}" if count < 10 * size else f"{count / size:,.0f} {unit}"
    return f"{count} B"


def duration(seconds: float | None) -> str:
    """`1 h 05 min`, `3 min 20 s`, `12 s`; `-` for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
