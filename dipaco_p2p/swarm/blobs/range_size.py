"""How much of a blob to ask for at once, so that what else has to be said never waits long behind it; and how fast
each peer brought what it was asked for.

A blob that is on its way fills the buffers between two peers, and a heartbeat or a receipt of the same peers queues
behind it. So a range is as long as the link carries in about a second: a slow range halves the next one, a fast one
doubles it, as with TCP's window. Several transfers at once share the link, each finds its own part of it, and together
they keep it filled no further ahead. On a fast link all ranges have the full length. Time that a range waits for a
limit of our own (line.py) is not the link's.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import TypeVar

from ...protocol.signing import PeerId
from ..api import Swarm

V = TypeVar("V", int, float)

RANGE_BYTES = 1024 * 1024
RANGE_BYTES_MIN = 16 * 1024
SLOW_S = 2.0
FAST_S = 0.5
PEERS_MAX = 1024
TIME_MIN_S = 1e-3
"""A range that took less says no more of a peer's speed."""


class Pace:
    """The length of the next range from or to each peer; remembered, since a range that never arrived says most."""

    def __init__(self) -> None:
        self._lengths: OrderedDict[PeerId, int] = OrderedDict()
        self._speeds: OrderedDict[PeerId, float] = OrderedDict()

    def range_bytes(self, peer: PeerId) -> int:
        """How long the next range is to be, at most."""
        return self._lengths.get(peer, RANGE_BYTES)

    def speed(self, peer: PeerId) -> float | None:
        """Bytes per second of one range from `peer`, the newest ones counting most; None if it never brought any."""
        return self._speeds.get(peer)

    def took(self, peer: PeerId, length: int, elapsed_s: float) -> None:
        """A range of `length` bytes took `elapsed_s`."""
        self._note_slow(peer, length, elapsed_s)
        if elapsed_s < FAST_S and length >= self.range_bytes(peer):  # a short last range says little
            self._set(peer, 2 * length)

    def brought(self, peer: PeerId, asked: int, length: int, elapsed_s: float) -> None:
        """Of `asked` bytes `peer` sent `length` in `elapsed_s`; if fewer, that is all that it gives at once."""
        self.took(peer, length, elapsed_s)
        if length < asked:
            self._set(peer, length)
        speed = length / max(elapsed_s, TIME_MIN_S)
        _remember(self._speeds, peer, (self._speeds.get(peer, speed) + speed) / 2)

    def failed(self, peer: PeerId, length: int, elapsed_s: float) -> None:
        """A range was given up after `elapsed_s`: a link may be too slow for its length, or the peer not there."""
        self._note_slow(peer, length, elapsed_s)
        if elapsed_s > SLOW_S and peer in self._speeds:
            self._speeds[peer] /= 2

    def _note_slow(self, peer: PeerId, length: int, elapsed_s: float) -> None:
        if elapsed_s > SLOW_S:
            self._set(peer, min(self.range_bytes(peer), length) // 2)

    def _set(self, peer: PeerId, length: int) -> None:
        self._lengths.pop(peer, None)
        if length < RANGE_BYTES:
            _remember(self._lengths, peer, max(RANGE_BYTES_MIN, length))


def _remember(known: OrderedDict[PeerId, V], peer: PeerId, value: V) -> None:
    """Of many peers the last are remembered."""
    known.pop(peer, None)
    known[peer] = value
    if len(known) > PEERS_MAX:
        known.popitem(last=False)


_paces: weakref.WeakKeyDictionary[Swarm, Pace] = weakref.WeakKeyDictionary()


def pace_of(swarm: Swarm) -> Pace:
    """The pace of all transfers over `swarm`."""
    return _paces.setdefault(swarm, Pace())
