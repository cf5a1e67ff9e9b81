"""What the machine says of itself: room on its disks, and what tools of the system print."""

from __future__ import annotations

import shutil
import subprocess
from importlib import metadata
from pathlib import Path


def output_of(*command: str, timeout_s: float = 10.0) -> str | None:
    """What a command prints; None if it is not here, fails, or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def is_clock_synchronised() -> bool | None:
    """Whether the system's clock is in step with a time server; None where systemd does not say."""
    said = output_of("timedatectl", "show", "--property=NTPSynchronized", "--value")
    return {"yes": True, "no": False}.get((said or "").strip())


def installed_version(package: str) -> str | None:
    """None for a package that is not here."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def existing(folder: Path) -> Path:
    """`folder`, or the nearest one above it that is there."""
    return next((each for each in (folder, *folder.absolute().parents) if each.is_dir()), Path("/"))


def free_disk(folder: Path) -> int:
    """Bytes that may be written where `folder` is, or would be made."""
    return shutil.disk_usage(existing(folder)).free
