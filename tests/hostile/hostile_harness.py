"""A real run, an attacker beside it, and what every attack must leave as it was.

Two programs run on for ever: a coordinator, and a volunteer that leads the modules and trains. The attacker is an
object of this test process: it has keys and a libp2p daemon of its own, speaks the protocol as a client would, and
where the client cannot say the bad thing it writes bytes on raw streams.

`Battlefield.attacked` is the frame of every attack: afterwards both programs must live and answer a stranger, their
memory, peak included, must have grown by less than a cap, and a receipt must come that is newer than the attack.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import struct
import threading
import time
from asyncio import IncompleteReadError, StreamReader
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from e2e_harness import Program, children_of, eventually

from dipaco_p2p import strict
from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.clock import SystemClock
from dipaco_p2p.errors import Refused
from dipaco_p2p.node.items import read_items
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.protocol.documents import BlobRef, Contribution, ModuleVersion, Part, Recipe, seal
from dipaco_p2p.protocol.liveness import Claim
from dipaco_p2p.protocol.records import claims_key
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.api import Reply, Swarm
from dipaco_p2p.swarm.blobs.blobs import send_blob
from dipaco_p2p.swarm.frames import read_frame
from dipaco_p2p.swarm.hivemind.libp2p import open_libp2p
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import ModuleId, PathId

MIB = 1024 * 1024
GROWTH_MAX_BYTES = 64 * MIB
"""Of a program's memory during one attack, peak included; the caps that are meant are smaller, but torch, Python and
Go take and give back some tens of MiB as they please."""
CALL_TIMEOUT_S = 15.0
CLAIM_TTL_S = 60.0
LATER = 2**20
HONEST = "taken"
"""What `Attacker.ask` says when there was no refusal."""
T = TypeVar("T")


class Background:
    """An event loop in a thread, so that attackers stay connected from test to test."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], *, within_s: float = 90.0) -> T:
        return self.start(work).result(within_s)

    def stop(self) -> None:
        self.run(self._close_streams())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close_streams(self) -> None:
        """hivemind 1.1.12 leaves streams open that others held when it ended, and whichever test runs when they are
        collected would fail of it."""
        for each in gc.get_objects():
            if type(each) is asyncio.StreamWriter and each._loop is self._loop:  # type: ignore[attr-defined]
                each.transport.abort()
        await asyncio.sleep(0.0)


@dataclass(frozen=True, slots=True)
class Target:
    """A program under attack, as the network sees it."""

    name: str
    program: Program
    peer: PeerId
    address: str

    @property
    def pids(self) -> tuple[int, int]:
        """The program and its libp2p daemon."""
        pid = self.program.process.pid
        [daemon] = [child for child in children_of(pid) if "p2pd" in Path(f"/proc/{child}/cmdline").read_text()]
        return pid, daemon

    def assert_lives(self) -> None:
        assert self.program.process.poll() is None, f"the {self.name} ended: {self.program.complaint[-2000:]}"


class Attacker:
    """One hostile identity, in the DHT of the run."""

    def __init__(self, swarm: Swarm, run: Run) -> None:
        self.swarm, self.run = swarm, run
        self.scoped = ScopedSwarm(swarm, run.id)

    @property
    def peer(self) -> PeerId:
        return self.swarm.peer

    async def call(self, target: Target, method: str, header: dict[str, Any], body: bytes = b"") -> Reply:
        """As an honest client calls."""
        return await self.scoped.call(
            target.peer, method, header, body, timeout_s=CALL_TIMEOUT_S, addresses=[target.address]
        )

    async def ask(self, target: Target, method: str, header: dict[str, Any], body: bytes = b"") -> str:
        """The reason of the refusal, or `HONEST`."""
        try:
            await self.call(target, method, header, body)
        except Refused as refused:
            return refused.reason
        return HONEST

    async def say(self, target: Target, data: bytes, *, half_close: bool = False) -> str:
        """Write `data` on a stream as it is; the reason that comes back, or "" if the stream is closed without one."""
        async with self.stream(target) as (reader, writer):
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                await writer.drain()
                if half_close:
                    writer.write_eof()
            return await reason_on(reader)

    @contextlib.asynccontextmanager
    async def stream(self, target: Target) -> Any:
        """A raw stream of the calls' protocol."""
        assert isinstance(self.swarm.peer, str)
        reader, writer = await self.swarm._daemon.open_stream(target.peer)  # type: ignore[attr-defined]
        try:
            yield reader, writer
        finally:
            writer.close()

    async def head(self, target: Target, module: ModuleId) -> ModuleVersion | None:
        """The newest version that `target` tells of; None before the first."""
        newest: ModuleVersion | None = None
        while True:
            after = newest.version if newest else 0
            page = await self.call(target, "module.next", {"module": str(module), "after": after, "wait_s": 0.0})
            found = await read_items(ModuleVersion, page)
            if not found:
                return newest
            newest = found[-1].document

    async def contribution(self, target: Target, path: PathId, module: ModuleId, payload: bytes) -> Contribution:
        """One that would be taken, if its payload were."""
        head = await self.head(target, module)
        genesis = {ref.module: ref.blob.digest for ref in self.run.manifest.genesis}
        return Contribution(
            run=self.run.id,
            module=module,
            path=path,
            base_version=head.version if head else 0,
            base_digest=head.snapshot.digest if head else genesis[module],
            payload=BlobRef.of(payload),
            steps=1,
            tokens=1,
            loss=1.0,
            others=tuple(
                Part(base_digest=genesis[other], payload=BlobRef.of(payload))
                for other in path.modules()
                if other != module and other in genesis
            ),
            state=BlobRef.of(b"a state that is given to nobody"),
            recipe=Recipe(round=head.version if head else 0, place=0, replicas=1),
            author=self.peer,
        )

    def sealed(self, kind: str, document: Any) -> dict[str, Any]:
        """Any JSON value, signed as a document of `kind`."""
        return {"document": document, "signature": self.swarm.signer.sign(kind, canonical_bytes(document))}

    async def claim(self, path: PathId) -> None:
        """As a volunteer that trains `path`, in a round that nobody comes to: none waits for it."""
        body = strict.plain(Claim(path=path, since_s=time.time(), round=LATER))
        assert await self.swarm.put(claims_key(self.run.id, path), body, ttl_s=CLAIM_TTL_S)

    async def upload(self, target: Target, data: bytes) -> str:
        return await send_blob(self.scoped, target.peer, data, timeout_s=CALL_TIMEOUT_S, addresses=[target.address])

    async def push(self, target: Target, contribution: Contribution, payload: bytes | None = None) -> str:
        """The reason why `target` does not want it, or `HONEST`."""
        try:
            if payload is not None:
                await self.upload(target, payload)
        except Refused as refused:
            return refused.reason
        return await self.ask(
            target, "module.contribute", {"contribution": seal(self.swarm.signer, contribution).to_dict()}
        )


async def reason_on(reader: StreamReader) -> str:
    """The reason of the refusal that comes on a raw stream, "" if it is closed without one."""
    try:
        async with asyncio.timeout(60):
            frame = await read_frame(reader.readexactly)
    except (ConnectionError, IncompleteReadError):
        return ""
    return str(frame.header.get("reason", HONEST))


def prefix(header_bytes: int, body_bytes: int, *, magic: bytes = b"DPP", version: int = 1, kind: int = 0) -> bytes:
    """The first bytes of a frame, whatever they claim."""
    return struct.pack(">3sBBII", magic, version, kind, header_bytes, body_bytes)


def frame_of(header: bytes, body: bytes = b"") -> bytes:
    """A request frame with this very header."""
    return prefix(len(header), len(body)) + header + body


class Battlefield:
    """The run under attack."""

    def __init__(
        self, coordinator: Program, volunteer: Program, background: Background, folder: Path, address: str
    ) -> None:
        self.background, self._folder, self._address = background, folder, address
        self._opened: list[Swarm] = []
        seed_peer = PeerId(address.rpartition("/")[2])
        self.seed = Target("coordinator", coordinator, seed_peer, address)
        self.bystander = background.run(self._open("bystander"))
        [self.run] = background.run(fetch_stages(self.bystander, seed_peer, expected=None))
        joined = volunteer.wait_event("joined")
        self.leader = Target("volunteer", volunteer, PeerId(joined["peer"]), self._address_of(joined["peer"]))
        self.drips = [background.start(self._drip(target)) for target in (self.seed, self.leader)]
        """A byte a second, from the beginning on: what becomes of it is known after half a minute."""
        self.attacker, self.second = self.new_attacker("attacker"), self.new_attacker("second")

    def join(self, name: str, **options: Any) -> Swarm:
        """Another peer of the DHT; raises as `open_libp2p`."""
        return self.background.run(self._open(name, **options))

    def new_attacker(self, name: str) -> Attacker:
        """Another hostile identity."""
        return Attacker(self.background.run(self._open(name)), self.run)

    async def _open(self, name: str, **options: Any) -> Swarm:
        options = {"initial_peers": [self._address], "clock": SystemClock()} | options
        swarm = await open_libp2p(self._folder / f"{name}.key", **options)
        self._opened.append(swarm)
        return swarm

    def _address_of(self, peer: str) -> str:
        return str(self.said_by(PeerId(peer), "peers")["addresses"][0])

    def said_by(self, peer: PeerId, rest: str) -> dict[str, Any]:
        """What `peer` says in the DHT under this key of the run, once it does."""
        key = f"dipaco/{self.run.id[:16]}/{rest}"

        def look() -> dict[str, Any] | None:
            record = self.background.run(self.bystander.get(key)).get(peer)
            return record.body if record else None

        body: dict[str, Any] = eventually(look, what=lambda: f"nothing from {peer} under {key}")
        return body

    @contextlib.contextmanager
    def attacked(self, *, growth_max_bytes: int = GROWTH_MAX_BYTES) -> Iterator[None]:
        """Whatever the block does, both programs go on as if nothing had been."""
        watched = [(target, pid) for target in (self.seed, self.leader) for pid in target.pids]
        before = [Memory.of(pid) for _, pid in watched]
        for _, pid in watched:
            forget_peak(pid)
        yield
        for (target, pid), start in zip(watched, before, strict=True):
            target.assert_lives()
            grown = Memory.of(pid).since(start)
            assert grown < growth_max_bytes, f"{target.name} {pid} grew by {grown / MIB:.0f} MiB"
        self.assert_serves()
        self.assert_goes_on()

    def assert_serves(self) -> None:
        """Both answer somebody who has done nothing wrong."""
        for target in (self.seed, self.leader):
            call = self.bystander.call(
                target.peer, "run.manifest", {}, timeout_s=CALL_TIMEOUT_S, addresses=[target.address]
            )
            assert len(json.loads(self.background.run(call).body)) == 1

    def assert_goes_on(self) -> None:
        """A contribution that is made from now on gets its receipt, and a version follows."""
        volunteer = self.leader.program
        receipts, versions = len(volunteer.events("receipt")), len(volunteer.events("version"))
        volunteer.wait_event("receipt", count=receipts + 2)  # the first may have been under way before
        volunteer.wait_event("version", count=versions + 1)

    async def _drip(self, target: Target) -> tuple[str, float]:
        """After how many seconds, and with which reason, a stream is closed on which a byte comes each second."""
        slow = Attacker(await self._open(f"slow-{target.name}"), self.run)
        start_s = time.monotonic()
        async with slow.stream(target) as (reader, writer):
            answer = asyncio.ensure_future(reason_on(reader))
            for byte in request("run.manifest", {}):
                with contextlib.suppress(ConnectionError):
                    writer.write(bytes([byte]))
                    await writer.drain()
                done, _ = await asyncio.wait({answer}, timeout=1)
                if done:
                    return answer.result(), time.monotonic() - start_s
        return "never closed", time.monotonic() - start_s

    def close(self) -> None:
        for drip in self.drips:
            drip.cancel()
        for swarm in self._opened:
            self.background.run(swarm.close())


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process has, in bytes: its own share of pages now, and the most that was resident at once."""

    own: int
    resident: int
    peak: int

    @classmethod
    def of(cls, pid: int) -> Memory:
        own = _kib(Path(f"/proc/{pid}/smaps_rollup").read_text(), "Pss")
        status = Path(f"/proc/{pid}/status").read_text()
        return cls(own, _kib(status, "VmRSS"), _kib(status, "VmHWM"))

    def since(self, before: Memory) -> int:
        """The greater of what it keeps and what it had in between, since `before` and `forget_peak`."""
        return max(self.own - before.own, self.peak - before.resident)


def forget_peak(pid: int) -> None:
    """From now on the kernel's peak of `pid` is a new one."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _kib(text: str, name: str) -> int:
    [line] = [line for line in text.splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def request(method: str, header: Any) -> bytes:
    """The bytes of a request frame for `method`, with this header."""
    return frame_of(canonical_bytes({"method": method, "header": header}))
