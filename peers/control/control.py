"""What the commands may ask of a running volunteer, and what it does then."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

from dipaco_p2p.clock import Clock
from dipaco_p2p.errors import Unreachable
from dipaco_p2p.strict import plain

from ..config import PeerConfig
from .report import report
from .requests import Request

if TYPE_CHECKING:
    from ..tour import Tour

USER = "user"
"""The reason of a pause that a command asked for."""
ANSWER_S = 0.1
"""For the answer to be on its way before the program leaves at once."""
CONFIG_SCHEMA = "dipaco.config/1"


class Control:
    """Of one running program; `tour` is there as soon as its run is found."""

    def __init__(self, config: PeerConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._began_s = clock.now_s()
        self.tour: Tour | None = None

    def answer(self, request: Request) -> dict[str, Any]:
        """Do what is asked, and say how it stands then. Raises Unreachable for what can only be done in a run."""
        if request.ask == "config":
            return self._plain_config()
        if request.ask == "stop":
            self._stop(is_now=request.now)
        elif request.ask != "status":
            self._act(request)
        now_s = self._clock.now_s()
        return report(self.tour, home=self._config.home, began_s=self._began_s, now_s=now_s)

    def _act(self, request: Request) -> None:
        if self.tour is None:
            raise Unreachable("the volunteer is still looking for its run", hint="try again in some seconds")
        if request.ask == "pause":
            until_s = None if request.for_s is None else self._clock.now_s() + request.for_s
            self.tour.pause(USER, until_s=until_s)
        elif request.ask == "resume":
            self.tour.resume(USER)
        else:
            self.tour.finish()

    def _stop(self, *, is_now: bool) -> None:
        """As a signal would; at once, as a second one would."""
        if is_now:
            asyncio.get_running_loop().call_later(ANSWER_S, _leave_now)
        elif self.tour is None:
            signal.raise_signal(signal.SIGTERM)
        else:
            self.tour.stop()

    def _plain_config(self) -> dict[str, Any]:
        return {"schema": CONFIG_SCHEMA, **plain(self._config), "home": str(self._config.home)}


def _leave_now() -> None:
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
