"""Challenges of keepers: the coordinator finds out who has what it offers to keep, and says so with its signature.

- **At random**: at every look each keeper is asked for a part of a blob of a range that it should keep.
- **Before the archive forgets** a version, as many keepers as its owner wants must have proved every blob of it. So a
  version leaves the archive only when others have it, and with fewer keepers the archive keeps it.

Before the archive forgets a blob of several parts, it takes down the digest of each part that a challenge may name:

    documents/parts-<digest>.json     "47DEQpj8HBSa..."

Base64 of one behind the other: as hexadecimal text each would name a blob (Store.drop_unnamed). They take less than a
thousandth of the blob, and a blob of one part has that part's digest. An answer is compared with the part that lies
here. Where the archive has forgotten it, or its disk has changed it, the keeper brings that part, and the digest
decides. So a challenge costs the line at most PROOF_BYTES_MAX however large the model is, and neither another keeper's
word nor a bit that was lost here can harm anybody. A keeper that says that it lacks a blob has told no lie: it earns
nothing, and fails only when it has been a keeper of the range for LATE_LIVES and others have it. One that says nothing,
or does not bring the part in the time that a thin line takes, fails if another has answered at this look: else the
fault may be ours.

A light archive never had most of what it challenges about. Of a contribution it asks the keeper for the signed
document, and of a blob for a small part, which must be the same at another holder. If they differ, the keeper brings
the blob, and the digest decides: nobody is barred on another's word, and whose part nobody confirms earns nothing.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import random
from collections import defaultdict
from collections.abc import Mapping
from enum import Enum

from ..canonical import canonical_bytes, digest
from ..errors import BlobMissing, DipacoError, IntegrityError, Refused, SwarmError
from ..node.calls import Counted, GetContributions, GetKeepers, Prove
from ..node.items import read_items
from ..node.node import CONTROL_TIMEOUT_S, LEAST_BYTES_S, WAIT_S, Member, ask, fetch_in_time
from ..program.tasks import in_time
from ..protocol.documents import BlobRef, Contribution, Sealed, seal, unseal
from ..protocol.keeping import (
    BARRED_LIVES,
    LATE_LIVES,
    NONCE_CHARS,
    PROOF_BYTES_MAX,
    Conduct,
    KeepersCount,
    Range,
    counts_of,
    proof,
    range_of,
)
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId, short
from ..swarm.blobs.bandwidth import CUT_BYTES_MIN
from ..swarm.calls import ReadBlob
from ..topology import ModuleId
from .archive import SeedArchive
from .ranges import Offers, blobs_of_version, refs_of_version

log = logging.getLogger(__name__)

LOOK_LIVES = 4
"""Between two looks, in lifetimes of a heartbeat."""
TRIES = 64
"""Ranges that are drawn to find one of a keeper's."""
AT_ONCE = 8
"""Keepers that are asked at the same time."""
CONFIRMED_MAX = 8
"""Versions of one module that a look lets the archive forget."""
NAME = "keepers"
DIGEST_BYTES = 32
COMPARED_BYTES = 4096
"""Of a part that two holders show: those of a hundred keepers take 0.1 Mbit/s of the line."""


class Answer(Enum):
    """What a keeper's answer showed."""

    PROVED = "proved"
    LIED = "lied"
    LACKS = "lacks"
    SILENT = "silent"
    UNKNOWN = "unknown"
    """Nobody can tell: the parts were not taken down, and no other holder shows one."""


class Challenges:
    """Of one run's keepers, by the coordinator."""

    def __init__(self, node: Member, archive: SeedArchive, *, wanted: int) -> None:
        """Of every version `wanted` keepers must have proved all before the archive may forget it; 0: it waits for
        nobody."""
        self._node = node
        self._archive = archive
        self._wanted = wanted
        self._offers = Offers(node, lambda: archive.ledgers.values())
        self._since: dict[tuple[Range, PeerId], float] = {}
        """When a keeper was first asked for anything of a range."""
        self._proved: dict[tuple[ModuleId, int], set[PeerId]] = {}
        """Who has proved all of the versions that are to be forgotten next."""
        self._kept: dict[ModuleId, int] = {}
        """Up to which version as many as are wanted have proved all."""
        self._taken: dict[ModuleId, int] = {}
        """Up to which version the parts are taken down."""
        self._took_s: dict[PeerId, float] = defaultdict(float)
        """How long each keeper took at this look to prove versions."""
        self._new = asyncio.Event()
        self._asked = 0
        self._sealed: Sealed[KeepersCount] | None = self._read()
        count = None if self._sealed is None else self._sealed.document
        self.tested: dict[PeerId, Conduct] = {
            one.peer: Conduct(proofs=one.proofs, barred_until_s=one.barred_until_s)
            for one in (() if count is None else count.keepers)
        }
        """What the challenges of each keeper came to."""
        self._offers.count = count

    def serve(self) -> None:
        """Tell the count to whoever asks."""
        GetKeepers.serve(self._node.swarm, self._on_count)

    def kept(self, module: ModuleId) -> int:
        """Up to which version of a module the archive may forget: keepers can still be asked for it, and as many as are
        wanted have proved that they have all of it."""
        begin = self._archive.thinning.of(module).contributions
        taken = self._taken.get(module, begin)
        return min(taken, self._kept.get(module, begin)) if self._wanted else taken

    def on_version(self) -> None:
        """There is a new version."""
        self._new.set()

    async def run(self) -> None:
        """Challenge until cancelled."""
        while True:
            await self._node.clock.sleep(LOOK_LIVES * self._node.run.config.liveness.heartbeat_ttl_s)
            await self.look()

    async def take_down(self) -> None:
        """Take the parts of every new version down, until cancelled: the archive waits for it before it forgets."""
        while True:
            self._new.clear()
            await self._take_all_down()
            await self._new.wait()

    async def look(self) -> None:
        """Ask every keeper once at random, and for what the archive is to forget next."""
        await self._take_all_down()
        self._offers.look()
        before = dict(self.tested)
        drawn = [(peer, *what) for peer in self._alive() if (what := self._draw(peer)) is not None]
        gate = asyncio.Semaphore(AT_ONCE)

        async def asked(peer: PeerId, wanted: Range, blob: BlobRef | str) -> list[Answer]:
            async with gate:
                return [await self.challenge(peer, wanted, blob)]

        found = await asyncio.gather(*(asked(peer, wanted, blob) for peer, wanted, blob in drawn))
        answers = {peer: answer for (peer, _, _), answer in zip(drawn, found, strict=True)}

        async def confirmed(module: ModuleId) -> None:
            async with gate:
                await self._confirm(module, answers)

        self._took_s.clear()
        await asyncio.gather(*map(confirmed, self._archive.ledgers if self._wanted else ()))
        self._note(answers)
        if self.tested != before:
            self._sign()

    def _alive(self) -> list[PeerId]:
        return sorted(peer for peer in self._offers.peers if peer in self._node.watch.heartbeats)

    async def challenge(self, peer: PeerId, wanted: Range, blob: BlobRef | str) -> Answer:
        """Have `peer` show a part of a blob of a range that it should keep: that one, or the payload of a contribution
        with this id, which is not known here."""
        self._since.setdefault((wanted, peer), self._node.clock.now_s())
        try:
            ref = await self._payload(peer, blob) if isinstance(blob, str) else blob
            if ref is None:
                return await self._late(peer, wanted, blob)
            parts = await asyncio.to_thread(self._parts, ref)
            if not parts:
                return await self._compared(peer, wanted, ref)
            number = self._chance(peer).randrange(len(parts))
            request = self._request(peer, ref, offset=number * PROOF_BYTES_MAX, most=PROOF_BYTES_MAX)
            answer, limit_s = self._answer(peer, request, parts[number]), WAIT_S + request.length / LEAST_BYTES_S
            return await in_time(answer, self._node.clock, limit_s, what="an answer to a challenge")
        except Refused as error:
            return await self._late(peer, wanted, blob) if error.reason == Reason.MISSING else Answer.SILENT
        except DipacoError as error:
            log.info("...%s did not answer a challenge: %s", short(peer), error)
            return Answer.SILENT

    def _request(self, peer: PeerId, ref: BlobRef, *, offset: int, most: int) -> Prove:
        nonce = f"{self._chance(peer).getrandbits(128):0{NONCE_CHARS}x}"
        return Prove(digest=ref.digest, offset=offset, length=min(ref.size - offset, most), nonce=nonce)

    async def _payload(self, peer: PeerId, contribution: str) -> BlobRef | None:
        """That of a contribution, as `peer` shows its document: the id is a digest of that. None if it does not."""
        shown = await read_items(Contribution, await ask(self._node, peer, GetContributions(ids=(contribution,))))
        return next((sealed.document.payload for sealed in shown if sealed.id == contribution), None)

    async def _compared(self, peer: PeerId, wanted: Range, ref: BlobRef) -> Answer:
        """What `peer` answers about a small part of a blob whose parts nobody here knows."""
        chance = self._chance(peer)
        offset = chance.randrange(max(0, ref.size - COMPARED_BYTES) + 1)
        request = self._request(peer, ref, offset=offset, most=COMPARED_BYTES)
        said = await ask(self._node, peer, request, timeout_s=CONTROL_TIMEOUT_S)
        part, others = await self._brought(peer, request), self._others(peer, wanted)
        if said.proof != proof(request.nonce, peer, part):
            return Answer.LIED
        chance.shuffle(others)  # two friends that make up the same would else always confirm each other
        shown = b""
        for other in others:
            if len(shown := await self._brought(other, request)) == request.length:
                break
        else:
            return Answer.UNKNOWN
        if shown == part:
            return Answer.PROVED
        try:
            whole = await fetch_in_time(self._node, ref, holders=[peer])
        except (BlobMissing, IntegrityError):
            return Answer.LIED
        return Answer.PROVED if part == whole[offset : offset + request.length] else Answer.LIED

    async def _late(self, peer: PeerId, wanted: Range, blob: BlobRef | str) -> Answer:
        """What it means that `peer` lacks a blob. Who does so for long might as well have lied, unless nobody can give
        it: then it was lost before this keeper came."""
        late_s = LATE_LIVES * self._node.run.config.liveness.heartbeat_ttl_s
        if self._node.clock.now_s() - self._since[wanted, peer] <= late_s:
            return Answer.LACKS
        others, ref = self._others(peer, wanted), blob if isinstance(blob, BlobRef) else None
        for other in others if ref is None else ():
            with contextlib.suppress(DipacoError):
                ref = ref or await self._payload(other, str(blob))
        try:
            return Answer.LIED if ref and await fetch_in_time(self._node, ref, holders=others) else Answer.LACKS
        except (SwarmError, Refused, IntegrityError):
            return Answer.LACKS

    def _others(self, peer: PeerId, wanted: Range) -> list[PeerId]:
        return [one for one in self._offers.holders(wanted) if one != peer]

    async def _answer(self, peer: PeerId, request: Prove, expected: str) -> Answer:
        """What `peer` answers about the part with the digest `expected`; raises DipacoError if it does not."""
        said = await ask(self._node, peer, request, timeout_s=CONTROL_TIMEOUT_S)
        part = await asyncio.to_thread(self._node.store.read_range, request.digest, request.offset, request.length)
        if part is None or digest(part) != expected:
            part = await self._brought(peer, request)
        is_true = digest(part) == expected and said.proof == proof(request.nonce, peer, part)
        return Answer.PROVED if is_true else Answer.LIED

    async def _brought(self, peer: PeerId, wanted: Prove) -> bytes:
        """The part as `peer` has it, or as much as it gives; under a limit of its line it comes in pieces, none shorter
        than a fetch takes."""
        part = b""
        try:
            while (left := wanted.length - len(part)) > 0:
                request = ReadBlob(digest=wanted.digest, offset=wanted.offset + len(part), length=left)
                found = await ask(self._node, peer, request, timeout_s=CONTROL_TIMEOUT_S)
                if len(found.body) < min(left, CUT_BYTES_MIN):
                    break
                part += found.body
        except DipacoError as error:
            log.info("...%s said that it has blob %s, and did not bring it: %s", short(peer), wanted.digest[:8], error)
        return part

    # -- the parts of what is forgotten

    async def _take_all_down(self) -> None:
        for module, ledger in self._archive.ledgers.items():
            begin = self._taken.get(module, self._archive.thinning.of(module).contributions)
            for version in range(begin + 1, ledger.final + 1):
                for ref in refs_of_version(self._archive, module, version) or ():
                    await asyncio.to_thread(self._parts, ref)
                self._taken[module] = version

    def _parts(self, ref: BlobRef) -> list[str] | None:
        """The digest of each part of a blob; None if they were not taken down, and the blob is not here."""
        if ref.size <= PROOF_BYTES_MAX:
            return [ref.digest]
        store, name = self._node.store, f"parts-{ref.digest}"
        if (known := store.read_document(name)) is not None:
            raw = base64.b64decode(json.loads(known))
            return [raw[at : at + DIGEST_BYTES].hex() for at in range(0, len(raw), DIGEST_BYTES)]
        try:
            data = store.get(ref.digest)
        except IntegrityError as error:
            log.warning("%s", error)
            return None
        if data is None:
            return None
        found = [digest(data[at : at + PROOF_BYTES_MAX]) for at in range(0, len(data), PROOF_BYTES_MAX)]
        store.write_document(name, canonical_bytes(base64.b64encode(bytes.fromhex("".join(found))).decode()))
        return found

    # -- what is asked for

    def _draw(self, peer: PeerId) -> tuple[Range, BlobRef | str] | None:
        """A blob of a range that `peer` should keep, by chance, or a contribution that is not known here; None if it
        keeps nothing."""
        chance, ledgers = self._chance(peer), self._archive.ledgers
        modules = [module for module in ledgers if ledgers[module].final]
        for _ in range(TRIES if modules else 0):
            module = chance.choice(modules)
            version = chance.randint(1, ledgers[module].final)
            wanted = range_of(module, version)
            if peer in self._offers.keepers(wanted):
                blobs = blobs_of_version(self._archive, module, version)
                return (wanted, chance.choice(blobs)) if blobs else None
        return None

    async def _confirm(self, module: ModuleId, answers: dict[PeerId, list[Answer]]) -> None:
        """Let the archive forget the next versions of which the keepers prove all."""
        final = self._archive.ledgers[module].final
        begin, clock = self.kept(module), self._node.clock
        enough_s = LOOK_LIVES * self._node.run.config.liveness.heartbeat_ttl_s
        for version in range(begin + 1, min(begin + CONFIRMED_MAX, final) + 1):
            proved = self._proved.setdefault((module, version), set())
            for peer in self._offers.keepers(range_of(module, version)):
                is_silent = peer not in self._node.watch.heartbeats or Answer.SILENT in answers.get(peer, [])
                # A keeper that is always nearly late is no liar, but would hold up all others.
                is_passed_over = is_silent or self._took_s[peer] >= enough_s
                if len(proved) < self._wanted and peer not in proved and not is_passed_over:
                    began_s = clock.now_s()
                    if await self._proves_all(peer, module, version, answers):
                        proved.add(peer)
                    self._took_s[peer] += clock.now_s() - began_s
            if len(proved & set(self._offers.keepers(range_of(module, version)))) < self._wanted:
                return
            self._kept[module] = version
            by = sorted(self._proved.pop((module, version)))
            self._node.history.add("kept_elsewhere", module=str(module), version=version, by=by)

    async def _proves_all(
        self, peer: PeerId, module: ModuleId, version: int, answers: dict[PeerId, list[Answer]]
    ) -> bool:
        for ref in refs_of_version(self._archive, module, version) or ():
            answer = await self.challenge(peer, range_of(module, version), ref)
            if answer is not Answer.PROVED:
                answers.setdefault(peer, []).append(answer)
                return False
        answers.setdefault(peer, []).append(Answer.PROVED)
        return True

    # -- what came of it

    def _note(self, answers: Mapping[PeerId, list[Answer]]) -> None:
        """One look counts once for a peer: the worst of what it answered."""
        somebody_answered = any(Answer.PROVED in found or Answer.LACKS in found for found in answers.values())
        now_s = self._node.clock.now_s()
        barred_s = BARRED_LIVES * self._node.run.config.liveness.heartbeat_ttl_s
        for peer, found in answers.items():
            known = self.tested.get(peer, Conduct())
            if Answer.LIED in found or (Answer.SILENT in found and somebody_answered):
                self.tested[peer] = known = known.failed(now_s=now_s, barred_s=barred_s)
                if known.is_barred(now_s):
                    self._node.history.add("keeper_barred", peer=peer, until_s=known.barred_until_s)
            elif Answer.PROVED in found:
                self.tested[peer] = known.passed()
        keepers = self._offers.keepers  # who has given a range up has as long again when it takes it once more
        self._since = {(each, peer): s for (each, peer), s in self._since.items() if peer in keepers(each)}

    def _sign(self) -> None:
        number = 1 if self._sealed is None else self._sealed.document.number + 1
        author = self._node.swarm.signer
        count = KeepersCount(run=self._node.run.id, number=number, keepers=counts_of(self.tested), author=author.peer)
        self._sealed, self._offers.count = seal(author, count), count
        self._node.store.write_document(NAME, canonical_bytes(self._sealed.to_dict()))

    def _read(self) -> Sealed[KeepersCount] | None:
        data = self._node.store.read_document(NAME)
        try:
            return None if data is None else unseal(KeepersCount, json.loads(data))
        except (ValueError, IntegrityError) as error:
            log.warning("the count of keepers was damaged, and begins again: %s", error)
            return None

    def _chance(self, peer: PeerId) -> random.Random:
        """What nobody else can foresee, and a simulation plays alike each time: from a signature of ours."""
        self._asked += 1
        text = f"{self._node.run.id}|{peer}|{self._asked}|{self._node.clock.now_s()}"
        return random.Random(self._node.swarm.signer.sign("challenge", text.encode()))

    async def _on_count(self, sender: PeerId, request: GetKeepers) -> Counted:
        return Counted(count=self._sealed)
