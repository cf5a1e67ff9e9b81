"""What one volunteer keeps of old versions for others, within the room that its owner gives (protocol/keeping.py).

    keep/documents/version-....json contribution-....json    the chains of all modules; what counts in kept versions
    keep/blobs/                                              what makes the versions of its ranges again

The folder is an archive in small: whoever has all ranges can verify the run from it. It has a store of its own, so that
nothing that the peer itself drops is missing there, and that its size is known.

At every look the keeper follows the chains as far as they are final, sees for which ranges it is a keeper, and brings
what it lacks of these, one blob at a time: from the archive while that has it, from the owners where the archive is
light (they keep the newest versions for this), and from other keepers. When a keeper is gone for GONE_LIVES, the next
one finds itself among the first and does the same. A range that is kept here though others should keep it by now stays
until its room is needed.

Without room for a range the keeper gives up the ones in which its lot is least, and offers so much less from then on.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import EnvironmentUnfit, IntegrityError, Refused
from ..node.calls import Prove, Proven
from ..node.node import Member
from ..node.reading import has_full_archive
from ..node.store import Store
from ..program.files import folder_bytes
from ..protocol.documents import BlobRef, ModuleVersion, Sealed
from ..protocol.keeping import SHARES, Range, lot, proof, ranges_up_to, share_without
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId
from ..topology import ModuleId
from .archive import SeedArchive
from .ranges import Gathering, Offers, refs_of_version

log = logging.getLogger(__name__)

LOOK_LIVES = 4
"""Between two looks, in lifetimes of a heartbeat; one, where owners alone have contributions, for a few versions."""
FREE_BYTES_MIN = 10**9
"""What is left free on the disk, whatever was offered."""
ROOMY = 0.6
"""Below this part of its room a keeper offers more again, a little at each look."""
MORE = SHARES // 10
FULL_LIVES = 240
"""How long after it gave a range up it does not, so that it does not take and give up the same one in turn."""
FOLDER = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """How a keeper stands."""

    room_bytes: int = 0
    """What was offered."""
    used_bytes: int = 0
    ranges: int = 0
    """That are whole here."""
    lacking: int = 0
    """Those that should be here, and are not yet."""
    proofs: int = 0
    """Challenges of the coordinator that were answered since the start."""


class Keeper:
    """Keeps ranges in a folder, and answers for them."""

    def __init__(
        self,
        node: Member,
        folder: Path,
        *,
        room_bytes: int,
        on_change: Callable[[Kept], None] = lambda kept: None,
    ) -> None:
        self.store = Store(folder)
        self.archive = SeedArchive(node.run, self.store, must_be_whole=False)
        self._node = replace(node, store=self.store)
        self._offers = Offers(node, lambda: self.archive.ledgers.values())
        self._gathering = Gathering(self._node, self.archive)
        self._room_bytes = room_bytes
        self._on_change = on_change
        self._refs: dict[Range, dict[int, tuple[BlobRef, ...]]] = defaultdict(dict)
        """What belongs to the versions of which anything is here."""
        self._whole: dict[Range, set[int]] = defaultdict(set)
        self._used_bytes = 0
        self._full_s = 0.0
        """When it gave a range up last."""
        self._is_read = False
        self._scrubbed = 0
        self.share = SHARES
        """Of our lots, as we offer it."""
        self.kept = Kept(room_bytes=room_bytes)

    def serve(self) -> None:
        """Answer from now on. The blobs are given away by whoever serves this store."""
        Prove.serve(self._node.swarm, self._on_prove)

    def versions(self, module: ModuleId) -> list[Sealed[ModuleVersion]]:
        """The chain of a module, as far as it is here."""
        return self.archive.ledgers[module].versions

    async def run(self) -> None:
        """Keep until cancelled."""
        await self._node.presence.say(keeps=self.share)
        while True:
            await self.look()
            lives = LOOK_LIVES if has_full_archive(self._node) else min(LOOK_LIVES, 1)
            await self._node.clock.sleep(lives * self._node.run.config.liveness.heartbeat_ttl_s)

    async def look(self) -> None:
        """See what should be here, and bring it."""
        if not self._is_read:
            await asyncio.to_thread(self._read)
        await self._follow()
        await self._offers.learn_count()
        self._offers.look(own=self.share)
        self._used_bytes = await asyncio.to_thread(folder_bytes, self.store.folder)
        await self._scrub()
        self._make_room(0)
        self._offer_more()
        wanted = self.wanted()
        for each in wanted:
            if not await self._keep(each):
                break
        self._say(wanted)

    def wanted(self) -> list[Range]:
        """The ranges whose keeper we are, our greatest lot first."""
        ledgers = self.archive.ledgers
        ranges = (each for module in ledgers for each in ranges_up_to(module, ledgers[module].head.version))
        ours = [each for each in ranges if self._node.peer in self._offers.keepers(each)]
        return sorted(ours, key=self._lot, reverse=True)

    def is_whole(self, wanted: Range) -> bool:
        """Whether all of a range that there is yet is here."""
        versions = wanted.versions(self.archive.ledgers[wanted.module].head.version)
        return bool(versions) and self._whole[wanted].issuperset(versions)

    # -- looking

    async def _follow(self) -> None:
        watch = self._node.watch
        for module in self._node.run.topology.modules():
            told = max((head.final for head in watch.heads.get(module, {}).values()), default=None)
            if told is None or told > self.archive.ledgers[module].head.version:
                await self._gathering.follow(module, self._offers.tellers(module))

    def _read(self) -> None:
        """What an earlier process left; blobs that belong to nothing are dropped."""
        for module, ledger in self.archive.ledgers.items():
            for each in ranges_up_to(module, ledger.head.version):
                for version in each.versions(ledger.head.version):
                    refs = refs_of_version(self.archive, module, version) or ()
                    if any(map(self._gathering.has, refs)):
                        self._refs[each][version] = refs
                        if all(map(self._gathering.has, refs)):
                            self._whole[each].add(version)
        named = self._named()
        for path in (self.store.folder / "blobs").glob("*/*"):
            if path.name not in named:
                self.store.drop(path.name)
        self._is_read = True

    async def _scrub(self) -> None:
        """Read one version's blobs whole: what a disk has changed is fetched again before a challenge finds it."""
        versions = [(each, version) for each in sorted(self._whole) for version in sorted(self._whole[each])]
        if not versions:
            return
        self._scrubbed += 1
        each, version = versions[self._scrubbed % len(versions)]
        for ref in self._refs[each][version]:
            try:
                is_here = await asyncio.to_thread(self.store.get, ref.digest) is not None
            except IntegrityError as error:
                log.warning("%s", error)
                is_here = False
            if not is_here:
                self._whole[each].discard(version)

    # -- keeping

    async def _keep(self, wanted: Range) -> bool:
        """Bring what is missing of a range, as far as others give it; False without room for it."""
        module, holders = wanted.module, self._offers.holders(wanted)
        for version in wanted.versions(self.archive.ledgers[module].head.version):
            if version in self._whole[wanted]:
                continue
            refs = await self._gathering.learn(module, version, holders)
            if refs is None:
                continue
            self._refs[wanted][version] = refs
            lacking = [ref for ref in refs if not self._gathering.has(ref)]
            if not self._make_room(sum(ref.size for ref in lacking), wanted=wanted):
                return False
            try:
                brought = [await self._bring(ref, holders) for ref in lacking]
            except EnvironmentUnfit as error:  # the disk is fuller than it said
                log.warning("no more is kept: %s", error)
                self._give_up(wanted)
                return False
            if all(brought):
                self._whole[wanted].add(version)
        return True

    async def _bring(self, ref: BlobRef, holders: list[PeerId]) -> bool:
        is_here = await self._gathering.bring(ref, holders)
        self._used_bytes += ref.size if is_here else 0
        return is_here

    def _make_room(self, need_bytes: int, *, wanted: Range | None = None) -> bool:
        """Give up what is not ours to keep, then our least lots, until `need_bytes` fit; False if `wanted` would be
        the next to go."""
        if self._used_bytes + need_bytes <= self._room():
            return True
        ours = set(self.wanted())
        while self._used_bytes + need_bytes > self._room():
            held = [each for each in self._refs if each != wanted and self._refs[each]]
            victim = min(held, key=lambda each: (each in ours, self._lot(each)), default=None)
            if victim is None or (wanted is not None and victim in ours and self._lot(victim) > self._lot(wanted)):
                if wanted is not None:
                    self._give_up(wanted)
                return False
            if victim in ours:
                self._offer_less(victim)
            self._drop(victim)
        return True

    def _give_up(self, wanted: Range) -> None:
        self._offer_less(wanted)
        self._drop(wanted)

    def _offer_less(self, gone: Range) -> None:
        self.share = min(self.share, share_without(self._lot(gone)))
        self._full_s = self._node.clock.now_s()

    def _drop(self, gone: Range) -> None:
        """Keep a range no longer; the chain stays, for it is small and says who has worked."""
        refs = self._refs.pop(gone, {})
        self._whole.pop(gone, None)
        named = self._named()
        for ref in {ref for found in refs.values() for ref in found}:
            if ref.digest not in named and self.store.size(ref.digest) is not None:
                self.store.drop(ref.digest)
                self._used_bytes -= ref.size
        for version in refs:
            for share in self.archive.ledgers[gone.module].at(version).shares:
                self.archive.drop(share.contribution)
        log.info("%s is kept here no more", gone)

    def _named(self) -> set[str]:
        return {ref.digest for versions in self._refs.values() for refs in versions.values() for ref in refs}

    def _offer_more(self) -> None:
        full_s = FULL_LIVES * self._node.run.config.liveness.heartbeat_ttl_s
        is_roomy = self._used_bytes < ROOMY * self._room() and self._node.clock.now_s() - self._full_s > full_s
        if self.share < SHARES and is_roomy:
            self.share = min(SHARES, self.share + MORE)

    def _room(self) -> int:
        """What was offered, but never the last of the disk."""
        free_bytes = shutil.disk_usage(self.store.folder).free
        return min(self._room_bytes, max(0, self._used_bytes + free_bytes - FREE_BYTES_MIN))

    def _lot(self, wanted: Range) -> int:
        return lot(self._node.run.id, wanted, self._node.peer)

    def _say(self, wanted: list[Range]) -> None:
        self._node.presence.note(keeps=self.share)
        whole = sum(map(self.is_whole, list(self._refs)))
        lacking = sum(not self.is_whole(each) for each in wanted)
        self.kept = replace(self.kept, used_bytes=self._used_bytes, ranges=whole, lacking=lacking)
        self._on_change(self.kept)

    # -- answering

    async def _on_prove(self, sender: PeerId, request: Prove) -> Proven:
        part = await asyncio.to_thread(self.store.read_range, request.digest, request.offset, request.length)
        if part is None or len(part) != request.length:
            raise Refused(f"that part of blob {request.digest[:8]} is not kept here", reason=Reason.MISSING)
        if sender == self._node.run.manifest.author:
            self.kept = replace(self.kept, proofs=self.kept.proofs + 1)
            self._on_change(self.kept)
        return Proven(proof=proof(request.nonce, self._node.peer, part))
