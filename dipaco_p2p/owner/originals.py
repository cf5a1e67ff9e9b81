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
"""Commitments of unknown authors: keys are free, and must not cost memory. Of further ones the arrival counts."""


@dataclass(slots=True)
class _Work:
    """What is remembered of one contribution."""

    document: Contribution
    place: int
    sketch: Compressed | None = None
    """None until it has come."""


class Originals:
    """Of one module, at a peer that leads it or may lead it next."""

    def __init__(self, run: Run, module: ModuleId) -> None:
        self._every = max(1, run.layout(module).size // SKETCH_VALUES)
        self._first = secrets.randbelow(self._every)
        self._works: dict[str, _Work] = {}
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
        """Its author will hand it in; `is_known`: the chain counts work of it. Of several for one path and base the
        first counts, so that nobody keeps many places."""
        waiting = [_key(work.document) for work in self._works.values() if work.sketch is None]
        if (is_known or len(waiting) < COMMITTED_MAX) and _key(sealed.document) not in waiting:
            self._work(sealed)

    def add(self, sealed: Sealed[Contribution], sketch: Compressed, *, has_receipt: bool = False) -> None:
        """It was handed in, and may count; `has_receipt`: of a former leader."""
        self._work(sealed, place=self._taken_over if has_receipt else None).sketch = sketch

    def copies(self, ids: Collection[str]) -> list[str]:
        """Those of these that repeat what another author did before on the same path, also what a version counts."""
        return [id_ for id_ in ids if id_ in self._works and self._is_copy(self._works[id_])]

    def drop(self, id_: str) -> None:
        """It does not count."""
        self._works.pop(id_, None)

    def forget(self, *, oldest_base: int) -> None:
        """Nothing more will come that began before this version."""
        oldest = oldest_base - REMEMBERED
        self._works = {id_: work for id_, work in self._works.items() if work.document.base_version >= oldest}

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


def _key(document: Contribution) -> tuple[PeerId, PathId, int]:
    """For each an author has one contribution."""
    return document.author, document.path, document.base_version
