"""Named points between two effects, where a crash would hurt most. A program passes them; a simulation listens.

`reach("write: before rename")` costs a comparison in production. A listener may raise there what ends the peer, so that
every order of "on disk", "told" and "known" is tried. Names are literals: `simulation.faults` reads them from the
sources, and its tests see to it that each one is visited.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Listener = Callable[[str], None]

_listener: Listener | None = None


def reach(name: str) -> None:
    """Pass the fault point `name`; raises whatever the listener raises, and nothing without one."""
    if _listener is not None:
        _listener(name)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` at every fault point of this process while the block runs."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
