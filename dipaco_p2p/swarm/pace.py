"""How much of a blob to ask for at once, so that what else has to be said never waits long behind it.

A blob that is on its way fills the buffers between two peers, and a heartbeat or a receipt of the same peers queues
behind it. So a range is as long as the link carries in about a second: a slow range halves the next one, a fast one
doubles it, as with TCP's window. Several transfers at once share the link, each finds its own part of it, and together
they keep it filled no further ahead. On a fast link all ranges have the full length.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict

from ..protocol.signing import PeerId
from .api import Swarm

RANGE_BYTES = 1024 * 1024
RANGE_BYTES_MIN = 16 * 1024
SLOW_S = 2.0
FAST_S = 0.5
PEERS_MAX = 1024


class Pace:
    """The length of the next range from or to each peer; remembered, since a range that never arrived says most."""

    def __init__(self) -> None:
        self._lengths: OrderedDict[PeerId, int] = OrderedDict()

    def range_bytes(self, peer: PeerId) -> int:
        """How long the next range is to be, at most."""
        return self._lengths.get(peer, RANGE_BYTES)

    def took(self, peer: PeerId, length: int, elapsed_s: float) -> None:
        """A range of `length` bytes took `elapsed_s`."""
        self.failed(peer, length, elapsed_s)
        if elapsed_s < FAST_S and length >= self.range_bytes(peer):  # a short last range says little
            self._set(peer, 2 * length)

    def failed(self, peer: PeerId, length: int, elapsed_s: float) -> None:
        """A range was given up after `elapsed_s`: a link may be too slow for its length, or the peer not there."""
        if elapsed_s > SLOW_S:
            self._set(peer, min(self.range_bytes(peer), length) // 2)

    def _set(self, peer: PeerId, length: int) -> None:
        self._lengths.pop(peer, None)
        if length < RANGE_BYTES:
            self._lengths[peer] = max(RANGE_BYTES_MIN, length)
        if len(self._lengths) > PEERS_MAX:
            self._lengths.popitem(last=False)


_paces: weakref.WeakKeyDictionary[Swarm, Pace] = weakref.WeakKeyDictionary()


def pace_of(swarm: Swarm) -> Pace:
    """The pace of all transfers over `swarm`."""
    return _paces.setdefault(swarm, Pace())
