"""A state machine is a table; what the table does not list is refused and changes nothing.

docs/protocol.md shows these very tables on the site, so a table is the whole truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class IllegalTransition(AssertionError):
    """Our own bug: an event that cannot happen in this state. Never caused by what a peer sends."""


def follow(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """The state after `event`; raises IllegalTransition for a pair that is not in the table."""
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"`{event}` cannot happen while `{state}`") from None
