"""The verbs that a running coordinator knows. What only looks is in here from the start (view.py); whatever changes
something is added with `on`, by the part of the program that does it.
"""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable
from typing import Any

from dipaco_p2p.errors import ConfigError

from .requests import Request

Verb = Callable[[Request], dict[str, Any] | Awaitable[dict[str, Any]]]
"""Does what its name says and answers; what takes time returns something to be awaited. Raises DipacoError."""
ASK_CHARS_SHOWN = 40


class Control:
    """Of one running program; verbs may come when the run is open."""

    def __init__(self) -> None:
        self._verbs: dict[str, Verb] = {}

    def on(self, ask: str, verb: Verb) -> None:
        """Answer to this name from now on."""
        assert ask not in self._verbs, f"`{ask}` is answered already"
        self._verbs[ask] = verb

    def answer(self, request: Request) -> dict[str, Any] | Awaitable[dict[str, Any]]:
        """What the verb says; raises ConfigError for one that nobody answers."""
        verb = self._verbs.get(request.ask)
        if verb is None:
            near = difflib.get_close_matches(request.ask, self._verbs, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"it knows {', '.join(sorted(self._verbs))}"
            raise ConfigError(f"the coordinator cannot `{request.ask[:ASK_CHARS_SHOWN]}`", hint=hint)
        return verb(request)
