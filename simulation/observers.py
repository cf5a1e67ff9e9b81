"""What is heard of the programs while they run: every event of their histories, and what they log."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

from dipaco_p2p.errors import DipacoError
from dipaco_p2p.owner.chain import ModuleChain
from dipaco_p2p.program.history import History
from dipaco_p2p.protocol.documents import Contribution, Sealed
from dipaco_p2p.protocol.signing import PeerId

from .virtual_time import WHO

if TYPE_CHECKING:
    from .world import World


@contextlib.contextmanager
def observed(world: World) -> Iterator[None]:
    add = History.add

    def noted(self: History, ev: str, **values: Any) -> None:
        world.observe(ev, values)
        add(self, ev, **values)

    with mock.patch.object(History, "add", noted), _confirmations(world):
        yield


@contextlib.contextmanager
def _confirmations(world: World) -> Iterator[None]:
    """Notes for whom a mirror keeps something, and who leads as far as it knows."""
    keep = ModuleChain.keep_contribution

    def noted(self: ModuleChain, sender: PeerId, sealed: Sealed[Contribution]) -> None:
        module = sealed.document.module
        grant = self.node.mandates.grant(module)
        keep(self, sender, sealed)
        world.observe(
            "confirmed", {"module": str(module), "id": sealed.id, "to": sender, "leader": grant and grant.leader}
        )

    with mock.patch.object(ModuleChain, "keep_contribution", noted):
        yield


class _Log(logging.Handler):
    """Finds exceptions that a program caught and logged, and that are no errors of the world around it."""

    def __init__(self, world: World, level: int) -> None:
        super().__init__(level)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        process = WHO.get()
        if self.level < logging.ERROR and process is not None and not process.is_dead:
            self._world.note(process.name, "log", text=record.getMessage())
        if error is not None and not isinstance(error, DipacoError) and process is not None and not process.is_dead:
            self._world.bugs.append(f"{process.name}: {record.getMessage()}: {error!r}")
            self._world.tracebacks.append("".join(traceback.format_exception(error)))


@contextlib.contextmanager
def logged(world: World, level: int) -> Iterator[None]:
    handler = _Log(world, level)
    loggers = [logging.getLogger(name) for name in ("dipaco_p2p", "peers", "bootstrap")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True
            logger.setLevel(logging.NOTSET)
