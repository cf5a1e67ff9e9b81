"""Rounds of these tests take time, as those of volunteers do."""

from __future__ import annotations

from pace import corpus, rounds_take_time

__all__ = ["corpus", "rounds_take_time"]
