"""Asking the tools of the system, such as nvidia-smi and loginctl: none of them need be there."""

from __future__ import annotations

import subprocess


def output_of(*command: str, timeout_s: float = 10.0) -> str | None:
    """What a command prints; None if it is not here, fails, or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
