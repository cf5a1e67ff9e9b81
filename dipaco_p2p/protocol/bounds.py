"""Bounds and forms that all signed documents share."""

from __future__ import annotations

from ..canonical import is_digest
from ..errors import ConfigError

VALUES_MAX = 2**40
"""Of counts, sizes and numbers of versions: more than any run needs, and exact in every JSON reader."""


def require_digest(*texts: str) -> None:
    """Raise ConfigError for what has not the form of a digest."""
    for text in texts:
        if not is_digest(text):
            raise ConfigError(f"`{text[:80]}` is no digest")
