"""Whose word counts, as this peer knows it: the coordinator's decrees, and the mandates of the modules' leaders.

    documents/decree-00000001.json     a sealed decree; the coordinator's own lie in its folder `decrees`
    documents/mandate-L1.M0.json       the mandate of a module's latest term: a list of sealed grants
    documents/followed-L1.M0.json      the one to follow, while that is another: the latest is of somebody banned, or
                                       the coordinator has granted the module since its group went on by itself

Every heartbeat says how many decrees its peer has (protocol/liveness.py). So all learn of a new one with the next
refresh of their watch, from anybody who has it: also while the coordinator is away, and after it was restored from a
backup. A peer that signs a grant writes it down before using it, so that it never signs two for one term.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..canonical import canonical_bytes
from ..errors import ConfigError, IntegrityError
from ..protocol.decrees import DECREES_MAX, Decree, Decreed, check_next
from ..protocol.documents import Grant, ModuleVersion, Sealed, is_signed, seal, unseal
from ..protocol.grants import Mandate, Seniority, check_mandate, extended, seniority
from ..protocol.liveness import Head
from ..protocol.signing import PeerId, Signer
from ..protocol.versions import is_final
from ..topology import ModuleId
from .run import Run
from .store import Store

log = logging.getLogger(__name__)

PREFIX = "decree-"
FORKED_HINT = "its decrees were signed on two machines: go on with the folder that most volunteers know"


class Decrees:
    """The chain from decree 1 on, of one run with all its stages; each is on disk before it holds."""

    def __init__(self, run: Run, store: Store | None = None, *, must_be_whole: bool = False) -> None:
        """`run` is any stage of it, which is told when it ends early. Without a `store` for a peer that only reads, and
        forgets. What was damaged on disk is asked for again; `must_be_whole` raises IntegrityError instead: the
        coordinator must not sign a number twice."""
        self._run = run.origin
        self.coordinator = run.manifest.author
        """Who signs them."""
        self._store = store
        self._listeners: list[Callable[[], None]] = []
        self.log: list[Sealed[Decree]] = []
        """The oldest first."""
        self.state = Decreed()
        """What holds."""
        self._told = [run]
        self._load(must_be_whole=must_be_whole)

    @property
    def count(self) -> int:
        """How many there are: the number of the newest."""
        return len(self.log)

    @property
    def is_frozen(self) -> bool:
        return self.state.frozen is not None

    def tell(self, run: Run) -> None:
        """Let this stage of the run know when it ends early, now and by decrees to come."""
        if all(run is not other for other in self._told):
            self._told.append(run)
        if (number := self.state.growths.get(run.id)) is not None:
            run.end_early(self.log[number - 1])

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
        check_next(decree, number=self.count, previous=previous, run=self._run, coordinator=self.coordinator)

    def _add(self, sealed: Sealed[Decree]) -> None:
        self.log.append(sealed)
        self.state = self.state.after(sealed.document)
        for run in self._told:
            self.tell(run)

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


LATEST, FOLLOWED = "mandate-{}", "followed-{}"
KNOWN_MAX = 16
"""Mandates per module that are remembered besides the newest."""

Rank = tuple[bool, Seniority]
"""Whether who granted the last term is not banned, then seniority."""


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
        return max(self._known[module], key=self._rank, default=())

    def shown(self, module: ModuleId) -> Sealed[Grant] | None:
        """The newest grant, as it is shown to others."""
        mandate = self.newest(module)
        return mandate[-1] if mandate else None

    def grant(self, module: ModuleId) -> Grant | None:
        """The newest grant."""
        shown = self.shown(module)
        return shown.document if shown else None

    def leader(self, module: ModuleId) -> PeerId:
        """By the newest grant; the coordinator before anybody ever led."""
        grant = self.grant(module)
        return grant.leader if grant else self._coordinator

    def term(self, module: ModuleId) -> int:
        """The term of the leader to follow, 0 at first."""
        grant = self.grant(module)
        return grant.term if grant else 0

    def best_head(self, module: ModuleId, heads: Mapping[PeerId, Head]) -> tuple[PeerId, Head] | None:
        """The most senior leader among heads that are believed. Whoever led before the coordinator's last grant leads
        no more, though nobody else may do so yet; unless it was granted to the same leader, in another group."""
        known, newest = sorted(self._known[module], key=self._rank), self.newest(module)
        leader = newest[-1].document.leader if newest else None
        places = {
            mandate[-1].signature: place
            for place, mandate in enumerate(known)
            if mandate[:1] == newest[:1] or mandate[-1].document.leader == leader
        }
        shown = [item for item in heads.items() if item[1].grant in places]
        return max(shown, key=lambda item: places[item[1].grant], default=None)

    def peers(self, module: ModuleId) -> set[PeerId]:
        """All that are known to have owned the module, and the coordinator."""
        grants = (sealed.document for mandate in self._known[module] for sealed in mandate)
        return {self._coordinator}.union(*(grant.group for grant in grants))

    def all_peers(self) -> set[PeerId]:
        """The same, of any module."""
        return set().union(*map(self.peers, self._known))

    def grants(self, module: ModuleId) -> list[Sealed[Grant]]:
        """All grants that are known, those of former terms too, each once."""
        return list({sealed.signature: sealed for mandate in self._known[module] for sealed in mandate}.values())

    def is_vouched(self, sealed: Sealed[ModuleVersion]) -> bool:
        """Whether another owner than its author has made a version again, in a term that was granted, as far as owners
        and terms are known here; or it is final."""
        version, others = sealed.document, sealed.cosignatures.keys() - {sealed.document.author}
        is_made = version.term <= self._latest(version.module) and bool(others & self.peers(version.module))
        return is_made or is_final(sealed, coordinator=self._coordinator)

    def is_vouched_from_outside(self, sealed: Sealed[ModuleVersion]) -> bool:
        """Whether one has that its leader did not choose: the coordinator, or the first mirror of a grant of its."""
        version, coordinator = sealed.document, self._coordinator
        if is_final(sealed, coordinator=coordinator):
            return True
        named = (each.document for each in self.grants(version.module) if each.id == version.grant)
        of_it = [grant for grant in named if (grant.leader, grant.term) == (version.author, version.term)]
        chosen = {peer for grant in of_it if grant.author == coordinator for peer in grant.mirrors[:1]}
        return bool(chosen & sealed.cosignatures.keys())

    def require_granted(self, version: ModuleVersion) -> None:
        """Raise IntegrityError for a version of a later term than any that was granted, as far as is known here: terms
        do not fall along a chain, so nobody could lead after it."""
        if version.term > (latest := self._latest(version.module)):
            name = f"version {version.version} of {version.module}"
            raise IntegrityError(f"{name} is of term {version.term}, and the latest that was granted is {latest}")

    def has_quorum(self, sealed: Sealed[ModuleVersion]) -> bool:
        """Whether more than half of a version's group has made it, with its leader and the mirror that the coordinator
        chose. A grant by anyone else names no mirror of the coordinator's choice: then there is no quorum."""
        version, known = sealed.document, self.grants(sealed.document.module)
        if any(each.document.leader == version.author and each.document.term > version.term for each in known):
            return False  # it got other mirrors since, and may have a friend among those of before
        named = (each.document for each in known if each.id == version.grant)
        for grant in (grant for grant in named if grant.term == version.term):
            made = {peer for peer in grant.mirrors if peer in sealed.cosignatures and not self._is_banned(peer)}
            is_chosen = grant.author == self._coordinator and bool(made.intersection(grant.mirrors[:1]))
            if is_chosen and grant.leader == version.author and 2 * (1 + len(made)) > len(grant.group):
                return True
        return False

    def learn(self, module: ModuleId, grants: Sequence[Sealed[Grant]]) -> None:
        """What a peer shows for itself; raises IntegrityError for what is no mandate."""
        self._add(module, check_mandate(grants, run=self._run.id, module=module, coordinator=self._coordinator))

    def believes(self, module: ModuleId, sealed: Sealed[Grant]) -> bool:
        """Whether a grant counts, by itself or by what is known already. The coordinator signed grants in other stages
        too, which anybody may show: their modules have the same names."""
        if (sealed.document.run, sealed.document.module) != (self._run.id, module):
            return False
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
        grant = Grant(
            run=self._run.id,
            module=module,
            term=(self._latest(module) if is_coordinator else self.term(module)) + 1,
            leader=leader,
            mirrors=mirrors,
            after=0 if is_coordinator else self.term(module),
            author=signer.peer,
        )
        self._add(module, extended(self.newest(module), seal(signer, grant), coordinator=self._coordinator))

    def _latest(self, module: ModuleId) -> int:
        """The greatest term that anybody was granted, though it may not be the one to follow: by a banned member, or
        before the coordinator's last word. Its leader may have made versions."""
        return max((mandate[-1].document.term for mandate in self._known[module]), default=0)

    def _add(self, module: ModuleId, mandate: Mandate) -> None:
        known = self._known[module]
        if mandate in known:
            return
        known.append(mandate)
        known.sort(key=self._rank)
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
        latest = max(known, key=lambda mandate: (mandate[-1].document.term, self._rank(mandate)))
        followed, kept = self.newest(module), {LATEST.format(module): latest}
        return kept if followed == latest else kept | {FOLLOWED.format(module): followed}

    def _load(self, module: ModuleId) -> None:
        for name in (LATEST.format(module), FOLLOWED.format(module)):
            data = self._store.read_document(name) if self._store is not None else None
            try:
                if data is not None:
                    self.learn(module, [unseal(Grant, item) for item in json.loads(data)])
            except (ValueError, TypeError, IntegrityError) as error:  # heads in the DHT say it again
                log.warning("the mandate for %s was damaged on disk: %s", module, error)

    def _rank(self, mandate: Mandate) -> Rank:
        return not self._is_banned(mandate[-1].document.author), seniority(mandate)


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
