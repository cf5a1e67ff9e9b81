"""The coordinator's decrees as this peer knows them: on disk, told to whoever asks, and asked of whoever has more.

    documents/decree-00000001.json     a sealed decree; the coordinator's own lie in its folder `decrees`

Every heartbeat says how many its peer has (protocol/liveness.py). So all learn of a new one with the next refresh of
their watch, from anybody who has it: also while the coordinator is away, and after it was restored from a backup.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from ..canonical import canonical_bytes
from ..errors import ConfigError, IntegrityError
from ..protocol.decrees import DECREES_MAX, Decree, Decreed, check_next
from ..protocol.documents import Sealed, seal, unseal
from ..protocol.signing import PeerId, Signer
from ..topology import ModuleId
from .run import Run
from .store import Store

log = logging.getLogger(__name__)

PREFIX = "decree-"
FORKED_HINT = "its decrees were signed on two machines: go on with the folder that most volunteers know"


class Decrees:
    """The chain from decree 1 on, of one run with all its stages; each is on disk before it holds."""

    def __init__(self, run: Run, store: Store | None = None, *, must_be_whole: bool = False) -> None:
        """Without a `store` for a peer that only reads, and forgets. What was damaged on disk is asked for again;
        `must_be_whole` raises IntegrityError instead: the coordinator must not sign a number twice."""
        self._run = run.origin
        self._coordinator = run.manifest.author
        self._store = store
        self._listeners: list[Callable[[], None]] = []
        self.log: list[Sealed[Decree]] = []
        """The oldest first."""
        self.state = Decreed()
        """What holds."""
        self._load(must_be_whole=must_be_whole)

    @property
    def count(self) -> int:
        """How many there are: the number of the newest."""
        return len(self.log)

    @property
    def is_frozen(self) -> bool:
        return self.state.frozen is not None

    def listen(self, listener: Callable[[], None]) -> None:
        """Tell it of every further decree, after it holds."""
        self._listeners.append(listener)

    def is_banned(self, peer: PeerId) -> bool:
        return peer in self.state.banned

    def reason(self, peer: PeerId) -> str | None:
        """Why `peer` is banned; None if it is not."""
        return self.state.banned.get(peer)

    def rollback(self, stage: str, module: ModuleId) -> Sealed[Decree] | None:
        """The newest that there is of a module."""
        number = self.state.rollbacks.get((stage, module))
        return None if number is None else self.log[number - 1]

    def learn(self, sealed: Sealed[Decree]) -> None:
        """One more; nothing to do for one that is known. Raises IntegrityError for what is not the coordinator's next,
        and EnvironmentUnfit when the disk does not take it."""
        number = sealed.document.number
        if 0 < number <= self.count:
            if self.log[number - 1].document != sealed.document:
                raise IntegrityError(f"the coordinator signed two decrees with the number {number}", hint=FORKED_HINT)
            return
        self._check(sealed.document)
        if self._store is not None:
            self._store.write_document(f"{PREFIX}{number:08d}", canonical_bytes(sealed.to_dict()))
        self._add(sealed)
        for listener in self._listeners:
            listener()

    def learn_all(self, decrees: Sequence[Sealed[Decree]]) -> None:
        """As `learn`, of several."""
        for sealed in decrees:
            self.learn(sealed)

    def issue(self, signer: Signer, act: str, *, at_s: float, **values: Any) -> Sealed[Decree]:
        """The coordinator's next; raises ConfigError for what is no decree, or one too many."""
        if self.count >= DECREES_MAX:
            raise ConfigError(f"this run has {DECREES_MAX} decrees, and there can be no more")
        sealed = seal(
            signer,
            Decree(
                run=self._run,
                number=self.count + 1,
                previous=self.log[-1].id if self.log else "",
                at_s=at_s,
                act=act,
                author=signer.peer,
                **values,
            ),
        )
        self.learn(sealed)
        return sealed

    def _check(self, decree: Decree) -> None:
        previous = self.log[-1].id if self.log else ""
        check_next(decree, number=self.count, previous=previous, run=self._run, coordinator=self._coordinator)

    def _add(self, sealed: Sealed[Decree]) -> None:
        self.log.append(sealed)
        self.state = self.state.after(sealed.document)

    def _load(self, *, must_be_whole: bool) -> None:
        if self._store is None:
            return
        for name in self._store.documents(PREFIX):
            try:
                sealed = unseal(Decree, json.loads(self._store.read_document(name) or b""))
                self._check(sealed.document)
                self._add(sealed)
            except (ValueError, IntegrityError) as error:
                message = f"{name}.json was damaged on disk: {error}"
                if must_be_whole:
                    raise IntegrityError(message, hint="bring back a copy of this folder's decrees") from None
                log.warning("decrees are asked for again from number %d on: %s", self.count + 1, message)
                return
