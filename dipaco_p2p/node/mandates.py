"""The mandates that this peer believes: of each module the newest, on disk, and a few others while branches compete.

    documents/mandate-L1.M0.json     the most senior mandate of a module: a list of sealed grants
    documents/followed-L1.M0.json    the one to follow, while that is another: the senior one is of somebody banned

Who signs a grant writes it down before it uses it, so that it never signs two for one term.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence

from ..canonical import canonical_bytes
from ..errors import IntegrityError
from ..protocol.documents import Grant, Sealed, is_signed, seal, unseal
from ..protocol.grants import Mandate, Seniority, check_mandate, extended, seniority
from ..protocol.liveness import Head
from ..protocol.signing import PeerId, Signer
from ..topology import ModuleId
from .run import Run
from .store import Store

log = logging.getLogger(__name__)

SENIOR, FOLLOWED = "mandate-{}", "followed-{}"
KNOWN_MAX = 16
"""Mandates per module that are remembered besides the newest."""


class Mandates:
    """What is known of who may lead; only what goes back to the coordinator is ever in here."""

    def __init__(
        self, run: Run, store: Store | None = None, *, is_banned: Callable[[PeerId], bool] = lambda peer: False
    ) -> None:
        """Without a `store` for a peer that only reads, and forgets.

        `is_banned` says it by the coordinator's decrees: what a banned member granted counts while there is nothing
        else. A term that the coordinator granted to a peer that it banned since stays the newest: nobody leads in it,
        and none before it.
        """
        self._run = run
        self._store = store
        self._coordinator = run.manifest.author
        self._is_banned = is_banned
        self._on_disk: dict[str, Mandate] = {}
        """By name of its document."""
        self._known: dict[ModuleId, list[Mandate]] = {module: [] for module in run.topology.modules()}
        for module in self._known:
            self._load(module)

    def newest(self, module: ModuleId) -> Mandate:
        """The mandate of the leader to follow; empty before anybody ever led."""
        return max(self._known[module], key=self._precedence, default=())

    def grant(self, module: ModuleId) -> Grant | None:
        """The newest grant."""
        mandate = self.newest(module)
        return mandate[-1].document if mandate else None

    def term(self, module: ModuleId) -> int:
        """The newest term, 0 at first."""
        grant = self.grant(module)
        return grant.term if grant else 0

    def peers(self, module: ModuleId) -> set[PeerId]:
        """All that are known to have owned the module, and the coordinator."""
        grants = (sealed.document for mandate in self._known[module] for sealed in mandate)
        return {self._coordinator}.union(*(grant.group for grant in grants))

    def grants(self, module: ModuleId) -> list[Sealed[Grant]]:
        """All grants that are known, those of former terms too, each once."""
        return list({sealed.signature: sealed for mandate in self._known[module] for sealed in mandate}.values())

    def learn(self, module: ModuleId, grants: Sequence[Sealed[Grant]]) -> None:
        """What a peer shows for itself; raises IntegrityError for what is no mandate."""
        self._add(module, check_mandate(grants, run=self._run.id, module=module, coordinator=self._coordinator))

    def believes(self, module: ModuleId, sealed: Sealed[Grant]) -> bool:
        """Whether a grant counts, by itself or by what is known already."""
        if any(sealed == mandate[-1] for mandate in self._known[module]):
            return True
        if not is_signed(sealed):
            return False
        for mandate in [(), *self._known[module]]:
            try:
                self._add(module, extended(mandate, sealed, coordinator=self._coordinator))
                return True
            except IntegrityError:
                continue
        return False

    def grant_next(self, signer: Signer, module: ModuleId, *, leader: PeerId, mirrors: tuple[PeerId, ...]) -> None:
        """Grant the next term, as the coordinator or as a member of the last group; it is on disk before it is used.

        Raises IntegrityError if `signer` is neither.
        """
        is_coordinator = signer.peer == self._coordinator
        # Also above those that banned members granted: one of these may have got as far.
        last = max((mandate[-1].document.term for mandate in self._known[module]), default=0)
        grant = Grant(
            run=self._run.id,
            module=module,
            term=(last if is_coordinator else self.term(module)) + 1,
            leader=leader,
            mirrors=mirrors,
            after=0 if is_coordinator else self.term(module),
            author=signer.peer,
        )
        self._add(module, extended(self.newest(module), seal(signer, grant), coordinator=self._coordinator))

    def _add(self, module: ModuleId, mandate: Mandate) -> None:
        known = self._known[module]
        if mandate in known:
            return
        known.append(mandate)
        known.sort(key=self._precedence)
        del known[: max(0, len(known) - KNOWN_MAX)]
        if self._store is not None:
            for name, kept in self._kept(module).items():
                if self._on_disk.get(name) != kept:
                    self._store.write_document(name, canonical_bytes([sealed.to_dict() for sealed in kept]))
                    self._on_disk[name] = kept

    def _kept(self, module: ModuleId) -> dict[str, Mandate]:
        """What belongs on disk, by the names of documents."""
        known = self._known[module]
        if not known:
            return {}
        senior, followed = max(known, key=self._seniority), self.newest(module)
        kept = {SENIOR.format(module): senior}
        return kept if followed == senior else kept | {FOLLOWED.format(module): followed}

    def _load(self, module: ModuleId) -> None:
        for name in (SENIOR.format(module), FOLLOWED.format(module)):
            data = self._store.read_document(name) if self._store is not None else None
            try:
                if data is not None:
                    self.learn(module, [unseal(Grant, item) for item in json.loads(data)])
            except (ValueError, TypeError, IntegrityError) as error:  # heads in the DHT say it again
                log.warning("the mandate for %s was damaged on disk: %s", module, error)

    def _precedence(self, mandate: Mandate) -> tuple[bool, Seniority]:
        return not self._is_banned(mandate[-1].document.author), self._seniority(mandate)

    def _seniority(self, mandate: Mandate) -> Seniority:
        grant = mandate[-1].document
        return seniority(grant.leader, term=grant.term, author=grant.author, coordinator=self._coordinator)


def grant_of(head: Head, *, run: str, module: ModuleId, leader: PeerId) -> Sealed[Grant]:
    """The grant that a head shows, its signature not checked yet."""
    grant = Grant(
        run=run,
        module=module,
        term=max(head.term, 1),
        leader=leader,
        mirrors=head.mirrors,
        after=head.after,
        author=head.granted_by,
    )
    return Sealed(grant, head.grant)
