"""Room on disks, and numbers of bytes for people."""

from __future__ import annotations

import shutil
from pathlib import Path

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def existing(folder: Path) -> Path:
    """`folder`, or the nearest one above it that is there."""
    return next((each for each in (folder, *folder.absolute().parents) if each.is_dir()), Path("/"))


def free_disk(folder: Path) -> int:
    """Bytes that may be written where `folder` is, or would be made."""
    return shutil.disk_usage(existing(folder)).free


def in_bytes(count: int) -> str:
    """`1.5 GiB`, `20 MiB`, `700 B`."""
    for unit, size in UNITS:
        if count >= size:
            return f"{count / size:,.1f} {unit}" if count < 10 * size else f"{count / size:,.0f} {unit}"
    return f"{count} B"
