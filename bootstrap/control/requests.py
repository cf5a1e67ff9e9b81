"""What a running coordinator may be asked for: verbs with a name, and what they are about.

What only looks is answered from the start (view.py); whatever changes something is added with `Control.on`, by the part
of the program that does it.
"""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from dipaco_p2p.errors import ConfigError
from dipaco_p2p.program.control.messages import Program
from dipaco_p2p.strict import bounded

SCHEMA = "dipaco.coordinator/1"
COORDINATOR = Program(
    noun="coordinator",
    schema=SCHEMA,
    start_hint="start it with `dipaco-bootstrap start`, or name the folder of its run",
    upgrade_hint="the program there is not a coordinator, or has another version than this command: restart it",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing that a running coordinator is asked for."""

    program: ClassVar[Program] = COORDINATOR

    schema: str = SCHEMA
    ask: str = bounded()
    """The verb; of a decree, the act."""
    reason: str = ""
    """Of a decree, as what follows (decrees.py)."""
    peer: str = ""
    """Its id, or how that ends."""
    module: str = ""
    version: int = 0
    undo: bool = False
    """Of a ban: whether every module is rebuilt without the peer's work, or goes back to before it."""
    levels: tuple[int, ...] = ()
    """Of a growth: the modules of each level; `version` is then the round that is the last one, 0: the soonest."""
    corpus: str = ""
    """Of a growth: where the text lies that comes with it, as `source` of [corpus] says it; once that was read, its
    digest."""


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
