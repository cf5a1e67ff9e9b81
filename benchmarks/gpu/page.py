"""What is known, as a section for docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .case import Figures, Part

SMALL = "Small sizes, for trying: that it works is all that these figures say."


def page(
    parts: Sequence[Part],
    found: Mapping[str, Mapping[str, Figures]],
    failed: Mapping[str, Mapping[str, str]],
    *,
    is_small: bool,
) -> str:
    """Markdown."""
    lines = ["## On a GPU", "", *([SMALL, ""] if is_small else [])]
    for part in parts:
        own, why = found.get(part.name, {}), failed.get(part.name, {})
        lines += [f"### {part.about}", ""]
        if own:
            lines += part.rows(own)
        asked = [case.name for case in part.cases if case.is_small_too or not is_small]
        lines += [f"- {name} failed: {reason}" for name, reason in why.items()]
        missing = [name for name in asked if name not in own and name not in why]
        lines += [f"- Not asked yet: {', '.join(missing)}."] if missing else []
        lines += [""] if why or missing else []
    return "\n".join(lines).rstrip() + "\n"
