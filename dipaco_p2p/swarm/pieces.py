"""A blob on its way, in parts: which are here and who brought them, and which are still to be asked for. No I/O.

Parts are given out from the start on and not far ahead of what is whole, since what is kept for a later fetch is the
beginning without holes. What comes back unfilled is given out again first.
"""

from __future__ import annotations

import bisect
import io
from collections import Counter
from collections.abc import Sequence

from ..protocol.signing import PeerId
from .pace import RANGE_BYTES

AHEAD_BYTES_MAX = 16 * RANGE_BYTES


class Pieces:
    """The parts of a blob of `size` bytes, of which the first are `kept`."""

    def __init__(self, size: int, kept: bytes = b"") -> None:
        self.size = size
        self.whole = 0
        """So many bytes from the start on are here."""
        self._bytes = io.BytesIO()  # its value is taken without a copy
        self._brought: list[tuple[range, PeerId | None]] = []
        self._ends: dict[int, int] = {}
        """Of what is here beyond `whole`: where it begins, and where it ends."""
        self._missing = [range(len(kept), size)] if len(kept) < size else []
        self.put(0, kept, None)

    @property
    def is_whole(self) -> bool:
        return self.whole == self.size

    @property
    def here(self) -> int:
        """How many bytes are here, with those beyond a hole."""
        return self.whole + sum(end - start for start, end in self._ends.items())

    def take(self, length: int) -> range | None:
        """The next part to ask for, at most `length` long; None if all the others are asked for, or too far ahead."""
        if not self._missing or self._missing[0].start >= self.whole + AHEAD_BYTES_MAX:
            return None
        part, rest = self._missing[0][:length], self._missing[0][length:]
        self._missing[:1] = [rest] if rest else []
        return part

    def give_back(self, part: range) -> None:
        """Nobody is asked for `part` any more."""
        if part:
            bisect.insort(self._missing, part, key=lambda missing: missing.start)

    def put(self, start: int, data: bytes, peer: PeerId | None) -> None:
        """What `peer` brought, or nobody did but a file, is here: a part that was taken, or its beginning."""
        if not data:
            return
        self._bytes.seek(start)
        self._bytes.write(data)
        self._brought.append((range(start, start + len(data)), peer))
        self._ends[start] = start + len(data)
        self._join()

    def sources(self) -> Sequence[PeerId | None]:
        """Whoever brought some of it, who brought least first."""
        shares = Counter[PeerId | None]()
        for part, peer in self._brought:
            shares[peer] += len(part)
        return sorted(shares, key=lambda peer: shares[peer])

    def forget(self, suspect: PeerId | None) -> Sequence[tuple[range, bytes]]:
        """What `suspect` brought is missing again, and is what comes back; the rest stays."""
        lost = [(part, self.read(part.start, part.stop)) for part, peer in self._brought if peer == suspect]
        for part, _ in lost:
            self.give_back(part)
        self._brought = [(part, peer) for part, peer in self._brought if peer != suspect]
        self._ends = {part.start: part.stop for part, _ in self._brought}
        self.whole = 0
        self._join()
        return lost

    def restore(self, lost: Sequence[tuple[range, bytes]], peer: PeerId | None) -> None:
        """What others have brought in place of what `forget` gave was no better."""
        for part, data in lost:
            self._brought = [(other, by) for other, by in self._brought if other.start not in part]
            self._brought.append((part, peer))
            self._bytes.seek(part.start)
            self._bytes.write(data)

    def read(self, start: int, stop: int) -> bytes:
        self._bytes.seek(start)
        return self._bytes.read(stop - start)

    def value(self) -> bytes:
        """All the bytes; nothing may be missing."""
        assert self.is_whole, f"{self.size - self.here} bytes are missing"
        return self._bytes.getvalue()

    def _join(self) -> None:
        while self.whole in self._ends:
            self.whole = self._ends.pop(self.whole)
