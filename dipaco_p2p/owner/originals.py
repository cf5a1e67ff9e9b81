"""Whose work was first: of outer gradients of a path that are all but equal, the first one counts, and no copy of it.

Content does not tell an original from its copy, since steps are deterministic. So an author **commits** before anybody
can read what it made: it tells all who lead the modules of its path, or may lead them next, of its contributions, whose
payloads are named by their digests, and only then sends these. A copier commits later, whatever line it has. Work that
came without a commitment has the place of its arrival. A new leader knows from its time as a mirror or an archive who
committed when; of what it takes over besides nobody is first, and copies count once, in equal parts
(core/outer/copies.py).

Known limit: this is one leader's memory, and its word. It does not know what was counted before it led.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import secrets
from collections.abc import Collection
from dataclasses import dataclass

from ..core.outer import copies
from ..core.outer.codec import Compressed
from ..node.run import Run
from ..protocol.documents import Contribution, Sealed
from ..protocol.signing import PeerId
from ..topology import ModuleId, PathId

SKETCH_VALUES = 1 << 15
"""Of an outer gradient, about: which ones nobody else knows, or noise in these alone would hide a copy."""
REMEMBERED = 2
"""Versions for which work is compared after it can come late no more: a copy may say that it began from a later one."""
COMMITTED_MAX = 4096
"""Commitments of unknown authors: keys are free, and must not cost memory. Beyond this, who has most gives way, so one
key takes no place from those with fewer, and among equals a lot decides that nobody foresees: neither who comes first
nor who comes most often. Of a crowd with n keys and its victims each is remembered with a chance of 4096 / n; work of
whoever is not has the place of its arrival."""

Slot = tuple[PathId, int]
"""A path and the version that the work began from: for each an author has one contribution."""
Waiting = dict[PeerId, dict[Slot, str]]
"""The contributions that have not come yet, by author."""


@dataclass(slots=True)
class _Work:
    """What is remembered of one contribution."""

    document: Contribution
    place: int
    waits_in: Waiting | None = None
    """Where it waits or waited if its author told of it before it came."""
    sketch: Compressed | None = None
    """None until it has come."""


class Originals:
    """Of one module, at a peer that leads it or may lead it next."""

    def __init__(self, run: Run, module: ModuleId) -> None:
        self._every = max(1, run.layout(module).size // SKETCH_VALUES)
        self._first = secrets.randbelow(self._every)
        self._works: dict[str, _Work] = {}
        self._known: Waiting = {}
        """Of authors with counted work: of each no more than the paths through the module, times the versions that are
        remembered."""
        self._unknown: Waiting = {}
        """Of all others."""
        self._lot = functools.lru_cache(2 * COMMITTED_MAX)(functools.partial(_lot, secrets.token_bytes(32)))
        self._places = itertools.count()
        self._taken_over = next(self._places)
        """The place of what a former leader gave receipts for, and nobody committed to here."""

    def sketch(self, gradient: Compressed) -> Compressed:
        """The part of an outer gradient that is compared."""
        return gradient.thinned(self._every, self._first)

    def take_over(self) -> None:
        """This peer begins to lead: what comes from now on comes after all that has a receipt."""
        self._taken_over = next(self._places)

    def commit(self, sealed: Sealed[Contribution], *, is_known: bool) -> None:
        """Its author will hand it in; `is_known`: it has worked, for any module. Of several for one path and base the
        first counts, so that nobody keeps many places."""
        author, slot = sealed.document.author, _slot(sealed.document)
        if sealed.id in self._works or any(slot in side.get(author, {}) for side in (self._known, self._unknown)):
            return
        if is_known or self._has_room(author):
            side = self._known if is_known else self._unknown
            side.setdefault(author, {})[slot] = sealed.id
            self._work(sealed).waits_in = side

    def add(self, sealed: Sealed[Contribution], sketch: Compressed, *, has_receipt: bool = False) -> None:
        """It was handed in, and may count; `has_receipt`: of a former leader."""
        self._work(sealed, place=self._taken_over if has_receipt else None).sketch = sketch
        self._wait_no_more(sealed.id)

    def copies(self, ids: Collection[str]) -> list[str]:
        """Those of these that repeat what another author did before on the same path, also what a version counts."""
        return [id_ for id_ in ids if id_ in self._works and self._is_copy(self._works[id_])]

    def drop(self, id_: str) -> None:
        """It does not count."""
        self._wait_no_more(id_)
        self._works.pop(id_, None)

    def take_back(self, id_: str) -> None:
        """It was handed in and not admitted, and may come once more: a commitment keeps its place until then."""
        work = self._works.get(id_)
        if work is not None and work.waits_in is not None:
            work.sketch = None
            work.waits_in.setdefault(work.document.author, {}).setdefault(_slot(work.document), id_)
        else:
            self.drop(id_)

    def forget(self, *, oldest_base: int) -> None:
        """Nothing more will come that began before this version."""
        oldest = oldest_base - REMEMBERED
        for id_ in [id_ for id_, work in self._works.items() if work.document.base_version < oldest]:
            self.drop(id_)

    def _has_room(self, author: PeerId) -> bool:
        """Whether one more of an unknown author is remembered; the latest of whoever has most makes room for it."""
        if sum(map(len, self._unknown.values())) < COMMITTED_MAX:
            return True
        worst = max(self._unknown, key=lambda other: (len(self._unknown[other]), self._lot(other)))
        most = self._unknown[worst]
        # In its place: else two would take each other's places for ever.
        if (len(most), self._lot(worst)) <= (len(self._unknown.get(author, {})) + 1, self._lot(author)):
            return False
        self.drop(next(reversed(most.values())))
        return True

    def _wait_no_more(self, id_: str) -> None:
        """It has come, or will not."""
        if id_ not in self._works:
            return
        document = self._works[id_].document
        for side in (self._known, self._unknown):
            own = side.get(document.author, {})
            if own.get(_slot(document)) == id_:
                del own[_slot(document)]
                if not own:
                    del side[document.author]

    def _work(self, sealed: Sealed[Contribution], *, place: int | None = None) -> _Work:
        if sealed.id not in self._works:
            self._works[sealed.id] = _Work(sealed.document, next(self._places) if place is None else place)
        return self._works[sealed.id]

    def _is_copy(self, work: _Work) -> bool:
        return any(_repeats(work, other) for other in self._works.values() if other.place < work.place)


def _repeats(work: _Work, other: _Work) -> bool:
    if work.sketch is None or other.sketch is None:
        return False
    ours, theirs = work.document, other.document
    return ours.path == theirs.path and ours.author != theirs.author and copies.are_alike(work.sketch, other.sketch)


def _lot(secret: bytes, author: PeerId) -> bytes:
    return hashlib.blake2b(author.encode(), key=secret, digest_size=8).digest()


def _slot(document: Contribution) -> Slot:
    return document.path, document.base_version
