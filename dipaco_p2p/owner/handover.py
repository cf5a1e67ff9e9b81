"""How long an owner keeps what final versions count, so that keepers find it (keeper.py).

A full archive has all of it. Where the archive is light, and somebody who has worked keeps, only those have it who led
or mirrored the module then, a light archive among them. They keep it for as many versions as they keep parameters of;
and whatever became final in the last LIVES lifetimes of a heartbeat, or rounds shorter than a keeper's look would leave
nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable

from ..node.ledger import Ledger
from ..node.node import Member
from ..node.reading import has_full_archive
from ..protocol.signing import PeerId

LIVES = 4.0
"""A keeper looks once in each, and hears of the versions and their owners once in each as well."""


class Handover:
    """Of one module at this peer."""

    def __init__(self, node: Member, *, is_proven: Callable[[PeerId], bool]) -> None:
        """`is_proven` says whether a peer has ever worked."""
        self._node = node
        self._is_proven = is_proven
        self._finals: list[tuple[int, float]] = [(0, node.clock.now_s())]
        """Which version was the last final one, and since when; from the last that was so LIVES ago."""

    def until(self, ledger: Ledger) -> int:
        """Up to which version an owner may forget what `ledger` counts: of all final ones if nobody keeps."""
        config, now_s = self._node.run.config, self._node.clock.now_s()
        wait_s, keep = LIVES * config.liveness.heartbeat_ttl_s, config.rounds.versions_kept
        if self._finals[-1][0] < ledger.final:
            self._finals.append((ledger.final, now_s))
        while len(self._finals) > 1 and now_s - self._finals[1][1] >= wait_s:
            del self._finals[0]
        version, since_s = self._finals[0]
        handed_over = version if now_s - since_s >= wait_s else 0
        return min(ledger.final, ledger.head.version - keep, handed_over) if self._is_wanted() else ledger.final

    def _is_wanted(self) -> bool:
        """In a large swarm we do not see all who keep."""
        beats, is_all = self._node.watch.heartbeats, self._node.watch.neighbourhood.is_all
        is_kept = not is_all or any(beat.keeps and self._is_proven(peer) for peer, beat in beats.items())
        return is_kept and not has_full_archive(self._node)
