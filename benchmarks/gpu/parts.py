"""All parts, in order of importance; each is imported when it is asked for, since they need different libraries."""

from __future__ import annotations

from .case import Part

NAMES = ("right", "fast", "cards", "beside", "swarm", "method")


def part(name: str) -> Part:
    """The part of that name."""
    match name:
        case "right":
            from .right import PART
        case "fast":
            from .fast import PART
        case "cards":
            from .cards import PART
        case "beside":
            from .beside import PART
        case "swarm":
            from .swarm import PART
        case "method":
            from .method import PART
    return PART
