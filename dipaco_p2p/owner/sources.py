"""Whom a trainer asks for the bytes of a new version, and when.

In turn (protocol/fan_out.py): it waits until one of the tier before it has the update, and fetches it from there; if
the update is small, all turn to the owners at once. What a peer of that tier can cost is bounded:

- one that says that it has nothing is waited for as long as a chain of thin lines would take, PATIENCE_S and the update
  at THIN_BYTES_S for each tier before us; then others, and the owners;
- one that trickles has the same time once; what it sent is kept, and the next goes on from there;
- if more than one brings wrong bytes, the owners are asked, and what they bring shows who lied;
- whoever was asked in vain is not asked for the next FORGIVEN_AFTER versions, and who sent wrong bytes comes last for
  as long as we run.

The archives are asked when all others failed: the coordinator's line carries no versions as long as a trainer, a mirror
or the leader does. A peer behind a relay is not asked while others can be, since its bytes would take the relay's line.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ..errors import DipacoError, IntegrityError, Refused, SwarmError
from ..node.node import CONTROL_TIMEOUT_S, Member, ask, fetch
from ..node.reading import trainers_of
from ..program.tasks import done_or_later, in_time
from ..protocol import fan_out
from ..protocol.documents import BlobRef, ModuleVersion
from ..protocol.fan_out import Place
from ..protocol.signing import PeerId
from ..swarm.blobs.blobs import pace_of
from ..swarm.blobs.fetch import Ranges
from ..swarm.calls import ReadBlob
from ..topology import ModuleId

log = logging.getLogger(__name__)

TRAINERS_MAX = 3
"""Of those that train from a version, so many are asked for its blobs; who has not got them costs a call."""
ARCHIVES_MAX = 2
SMALL_BYTES = 1_000_000
"""Of an update that takes a thin line a second: to wait for turns would take longer."""
PATIENCE_S = 2.0
THIN_BYTES_S = 1_000_000
"""A line with less holds nobody up for longer: 8 Mbit/s."""
PAUSE_S = 0.5
"""Between two questions whether a peer has the update by now."""
OTHERS_S, OTHERS_SHARE = 1.0, 0.1
"""When one has it, the others of its tier are waited for so long, or for this share of our patience: who has to fetch
all from one fetches more from the owners."""
FORGIVEN_AFTER = 8
"""Versions."""
ASKED_OF_A_TIER = 2
"""So that one that is slow or silent does not hold up those behind it."""
LOOKED_FOR = 2 * ASKED_OF_A_TIER
"""Of each tier so many are looked up in a large swarm, of which some are gone."""


def is_relayed(node: Member, peer: PeerId) -> bool:
    """Whether `peer`, by its heartbeat, can be dialled through a relay only: its bytes take the relay's line."""
    beat = node.watch.heartbeats.get(peer)
    return beat is not None and beat.is_relayed


class Sources:
    """Of one module, for one peer that trains it."""

    def __init__(self, node: Member, module: ModuleId) -> None:
        self._node = node
        self._module = module
        self._in_vain: dict[PeerId, int] = {}
        """Who was asked in vain, and up to which version it is not asked."""

    async def update(self, version: ModuleVersion, *, keep: bool) -> bytes:
        """The update to `version`; with `keep` it is in our store, where others find it. Raises as `fetch`."""
        node, ref = self._node, version.update
        assert ref is not None
        if node.store.size(ref.digest) is not None or ref.size <= SMALL_BYTES:
            return await fetch(node, ref, holders=self.holders(version))
        turn, tries = await self._turn(version), Tries(node, ref, is_kept=keep)
        data = await self._in_turn(version, ref, turn, tries)
        if data is None:
            data = await tries.fetch(self.holders(version))
        tries.convict(data)
        if tries.brought:
            self._note(version, turn, tries)
        return data

    def holders(self, version: ModuleVersion) -> list[PeerId]:
        """All who should have this version's blobs, for who comes late: its leader, the present one with its mirrors,
        some who train from it, and the archives: named last, since all turn to them."""
        watch, coordinator = self._node.watch, self._node.run.manifest.author
        grant, present = self._node.mandates.grant(self._module), watch.leader(self._module)
        archives = sorted(watch.seeds(), key=lambda peer: peer != coordinator)[:ARCHIVES_MAX]
        alive = watch.heartbeats.keys() - archives
        mirrors = [peer for peer in (grant.group if grant else ()) if peer in alive]
        owners = [version.author, *([present] if present else []), *mirrors]
        return list(dict.fromkeys([*owners, *self._trainers(version), *archives]))

    def _trainers(self, version: ModuleVersion) -> list[PeerId]:
        """Some of them that can be dialled; each of us begins with another one, so that they share the work."""
        watch, me = self._node.watch, self._node.peer
        reachable = {peer for peer, beat in watch.heartbeats.items() if beat.addresses and peer != me}
        found = trainers_of(self._node, self._module, version.version) & reachable
        return sorted(found, key=lambda peer: (peer < me, peer))[:TRAINERS_MAX]

    # -- our turn

    async def _in_turn(self, version: ModuleVersion, ref: BlobRef, turn: Turn, tries: Tries) -> bytes | None:
        """The update from those before us, then from other trainers and the owners; None if none of these gives it."""
        node, patience_s, place, owners = self._node, PATIENCE_S + ref.size / THIN_BYTES_S, turn.place, turn.owners
        if node.peer in owners:
            await self._made_here(ref, patience_s)
            return await tries.once(owners, patience_s)
        newer, older = (self._askable(version, peers, owners) for peers in (place.newer, place.older))
        asked = list(dict.fromkeys([*newer, *older]))  # the owners, where they are older, have least to give yet
        waits = place.tier or int(version.author in node.watch.seeds())  # mirrors may still be at it then
        if asked and (not waits or await self._has_come(ref, newer or older, waits * patience_s)):
            if (data := await tries.once(asked, patience_s)) is not None:
                return data
        fair = ref.size / (2 * max(1, len(asked)))
        self._blame([peer for peer in asked if peer not in owners and tries.brought[peer] < fair], version)
        begin = place.at % len(owners)
        wider = [*owners[begin:], *owners[:begin]]
        if tries.brought.total() < ref.size:  # else somebody lied, and it is not known who
            others = self._askable(version, fan_out.order(node.peer, turn.members), owners)
            wider = list(dict.fromkeys([*wider, *others, *asked]))
        return await tries.once(wider, 2 * patience_s)  # they may have many to give it to by now

    async def _turn(self, version: ModuleVersion) -> Turn:
        """Where we stand; in a large swarm those are looked up whom we may ask."""
        node, owners = self._node, self._owners(version)
        authors = {share.peer for share in version.shares} - set(owners) - {node.run.manifest.author}
        relayed = {peer for peer in authors if is_relayed(node, peer)}
        members = fan_out.order(version.digest, authors, relayed=relayed)
        found = fan_out.place(node.peer, members, owners=owners, version=version.digest)
        if not node.watch.neighbourhood.is_all:
            await node.watch.find(*found.newer[:LOOKED_FOR], *found.older[:LOOKED_FOR])
        return Turn(owners=owners, members=members, place=found)

    def _owners(self, version: ModuleVersion) -> list[PeerId]:
        """Who has the version without fetching it, those first who need no relay; an archive only if nobody else."""
        watch, grant = self._node.watch, self._node.mandates.grant(self._module)
        leader = watch.leader(self._module)
        known = [version.author, *([leader] if leader else []), *(grant.group if grant else ())]
        alive = [peer for peer in dict.fromkeys(known) if peer in watch.heartbeats or peer == self._node.peer]
        seeds = watch.seeds()
        found = [peer for peer in alive if peer not in seeds] or alive or [version.author]
        return sorted(found, key=partial(is_relayed, self._node))

    def _askable(self, version: ModuleVersion, peers: Iterable[PeerId], owners: Sequence[PeerId]) -> list[PeerId]:
        """The owners among them as they are; of the others the first few that live, can be dialled directly, train the
        module as far as they say, and were not asked in vain."""
        found = [peer for peer in peers if peer in owners or self._is_promising(peer, version)]
        return found if set(owners).issuperset(found) else found[:ASKED_OF_A_TIER]

    def _is_promising(self, peer: PeerId, version: ModuleVersion) -> bool:
        beat = self._node.watch.heartbeats.get(peer)
        if peer == self._node.peer or beat is None or not beat.addresses or beat.is_relayed:
            return False
        is_here = beat.path is None or self._module in beat.path.modules()
        is_bad = self._in_vain.get(peer, 0) >= version.version or pace_of(self._node.swarm).has_lied(peer)
        return is_here and not is_bad

    async def _has_come(self, ref: BlobRef, peers: Sequence[PeerId], limit_s: float) -> bool:
        """Wait until one of them has the blob, `limit_s` at most, and a moment for the others; whether one has."""
        asking = [asyncio.create_task(self._will_have(ref, peer)) for peer in peers]
        first = asyncio.ensure_future(_any_true(asking))
        try:
            await done_or_later(first, self._node.clock, limit_s)
            if not first.done() or not first.result():
                return False
            others = asyncio.ensure_future(asyncio.wait(asking))
            await done_or_later(others, self._node.clock, min(OTHERS_S, OTHERS_SHARE * limit_s))
            others.cancel()
            return True
        finally:
            for task in [first, *asking]:
                task.cancel()

    async def _will_have(self, ref: BlobRef, peer: PeerId) -> bool:
        """Ask again and again; False for one that does not answer."""
        while True:
            try:
                request = ReadBlob(digest=ref.digest, offset=0, length=0)
                found = await ask(self._node, peer, request, timeout_s=CONTROL_TIMEOUT_S)
                return found.size == ref.size
            except Refused:
                await self._node.clock.sleep(PAUSE_S)
            except DipacoError as error:
                log.info("%s: ...%s says nothing of a new version: %s", self._module, peer[-6:], error)
                return False

    async def _made_here(self, ref: BlobRef, limit_s: float) -> None:
        """We are an owner, and make the version ourselves to cosign it: wait for that, `limit_s` at most."""
        node, begun_s = self._node, self._node.clock.now_s()
        while node.store.size(ref.digest) is None and node.clock.now_s() < begun_s + limit_s:
            await node.clock.sleep(PAUSE_S)

    def _blame(self, peers: Sequence[PeerId], version: ModuleVersion) -> None:
        """They had their turn, and nothing came of it."""
        self._in_vain = {peer: until for peer, until in self._in_vain.items() if until > version.version}
        self._in_vain |= dict.fromkeys(peers, version.version + FORGIVEN_AFTER)

    def _note(self, version: ModuleVersion, turn: Turn, tries: Tries) -> None:
        brought, owners, seeds = tries.brought, set(turn.owners), set(self._node.watch.seeds())
        from_owners = sum(count for peer, count in brought.items() if peer in owners)
        from_seeds = sum(count for peer, count in brought.items() if peer in seeds - owners)
        self._node.history.add(
            "fetched",
            module=str(self._module),
            version=version.version,
            digest=version.digest,
            author=version.author,
            owners=sorted(owners),
            tier=turn.place.tier,
            is_counted=self._node.peer in turn.members,
            seconds=self._node.clock.now_s() - tries.began_s,
            from_owners=from_owners,
            from_trainers=brought.total() - from_owners - from_seeds,
            from_seeds=from_seeds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """How one version is handed on, as we see it when we begin to fetch it."""

    owners: Sequence[PeerId]
    members: Sequence[PeerId]
    """Whose work it counts, in order, without those who have it anyway."""
    place: Place
    """Ours."""


class Tries:
    """To fetch one blob, of some peers after the other; with `is_kept` it is in our store then."""

    def __init__(self, node: Member, ref: BlobRef, *, is_kept: bool) -> None:
        self._node, self._ref, self._is_kept = node, ref, is_kept
        self.began_s = node.clock.now_s()
        self.brought = Counter[PeerId]()
        """Bytes, right or wrong, by who brought them."""
        self.wrong: list[Ranges] = []
        """What came in tries in which more than one lied."""

    async def once(self, peers: Sequence[PeerId], limit_s: float) -> bytes | None:
        """The blob from `peers` within `limit_s`; None without it, and what came is kept for the next try."""
        fetching = self.fetch(peers, wrong=self.wrong)
        try:
            return await in_time(fetching, self._node.clock, limit_s, what=f"the blob {self._ref.digest[:8]}")
        except (SwarmError, IntegrityError) as error:
            log.info("%s", error)
            return None

    async def fetch(self, peers: Sequence[PeerId], *, wrong: list[Ranges] | None = None) -> bytes:
        """The blob from `peers`, as long as it takes. Raises as `fetch` of a node."""
        return await fetch(self._node, self._ref, holders=peers, keep=self._is_kept, brought=self.brought, wrong=wrong)

    def convict(self, data: bytes) -> None:
        """Now that the blob is here, remember who brought something else."""
        for ranges in self.wrong:
            for peer in ranges.liars(data):
                pace_of(self._node.swarm).lied(peer)


async def _any_true(tasks: Iterable[asyncio.Task[bool]]) -> bool:
    """Whether any says so, as soon as one does."""
    pending = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if any(task.result() for task in done):
            return True
    return False
