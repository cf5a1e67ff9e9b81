"""A stranger: a peer of a run with a client of its own, without a GPU, and with as many keys as it likes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dipaco_p2p import strict
from dipaco_p2p.core.model.layout import decode_module
from dipaco_p2p.core.outer.compress import compress, encode_compressed
from dipaco_p2p.errors import DipacoError, Refused
from dipaco_p2p.node.calls import Contribute, Forward
from dipaco_p2p.node.node import Member, fetch, send
from dipaco_p2p.node.reading import fetch_chain
from dipaco_p2p.protocol.documents import BlobRef, Contribution, ModuleVersion, Part, Recipe, Sealed, seal
from dipaco_p2p.protocol.liveness import Claim
from dipaco_p2p.protocol.records import claims_key, sign_record
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.swarm.hivemind.libp2p import Libp2pSwarm
from dipaco_p2p.topology import ModuleId, PathId

HEARD, KEYS = "heard.json", "keys.json"
TIMEOUT_S = 10.0
AGAIN_S = 0.1
"""Between two looks at the swarm, or two questions."""

Floats = np.ndarray[Any, np.dtype[np.float32]]
Make = Callable[[ModuleVersion, ModuleVersion | None], Awaitable[Floats | None]]
"""An outer gradient that begins with the first of the two, whose parent is the second; None: not from this one."""


class Stranger:
    """One process without a GPU: a node of the DHT, and as many keys as it likes."""

    def __init__(self, swarm: Libp2pSwarm, node: Member, folder: Path, *, before: Stranger | None = None) -> None:
        """`before` is the same stranger in the stage before this one."""
        self.swarm, self.node, self.run, self.folder = swarm, node, node.run, folder
        self.heard: Counter[str] = before.heard if before else Counter()
        self.signers: list[Signer] = before.signers if before else [swarm.signer]
        self.modules = list(node.run.topology.modules())
        self.ttl_s = node.run.config.liveness.heartbeat_ttl_s
        self._claimed: PathId | None = None
        self._claimed_s = 0.0

    def new_keys(self, count: int) -> list[Signer]:
        """Identities cost nothing, and need no node of their own to be heard."""
        made = [Signer(secrets.token_bytes(32)) for _ in range(count)]
        self.signers += made
        return made

    def write(self) -> None:
        """What was heard so far, and by whom."""
        (self.folder / HEARD).write_text(json.dumps(self.heard))
        (self.folder / KEYS).write_text(json.dumps([signer.peer for signer in self.signers]))

    async def look(self) -> None:
        """Keep up with the swarm, and tell of ourselves; without an end."""
        await asyncio.gather(self._see(), self.node.presence.run())

    async def _see(self) -> None:
        while True:
            with contextlib.suppress(DipacoError):
                await self.node.watch.refresh()
            self.write()
            await asyncio.sleep(self.ttl_s / 6)

    async def put_as(self, signer: Signer, key: str, body: Any) -> None:
        """A record of any of our keys."""
        now_s = time.time()
        plain = strict.plain(body)
        record = sign_record(signer, key=key, counter=int(1000 * now_s), expires_s=now_s + self.ttl_s, body=plain)
        assert self.swarm._node is not None
        await self.swarm._node.store(key, record.to_bytes(), record.expires_s, subkey=signer.peer)

    def document(
        self,
        module: ModuleId,
        path: PathId,
        head: ModuleVersion,
        payload: bytes,
        *,
        author: Signer,
        tokens: int = 0,
        parts: Mapping[ModuleId, Part] | None = None,
        like: Contribution | None = None,
    ) -> Sealed[Contribution]:
        """A contribution that is well formed, and weighs as much as it may. `parts` are those of all modules; without,
        the others are said to be like this one. Auditors are told what the author of `like` tells them, if given."""
        ours = Part(base_digest=head.digest, payload=BlobRef.of(payload))
        contribution = Contribution(
            run=self.run.id,
            module=module,
            path=path,
            base_version=head.version,
            base_digest=head.digest,
            payload=BlobRef.of(payload),
            steps=like.steps if like else 1,
            tokens=like.tokens if like else tokens or self.run.tokens_full,
            loss=1.0,
            others=tuple((parts or {}).get(other, ours) for other in path.modules() if other != module),
            state=like.state if like else BlobRef.of(b"a state that is given to nobody"),
            recipe=like.recipe if like else Recipe(round=head.version, place=0, replicas=1),
            author=author.peer,
        )
        return seal(author, contribution)

    def payload(self, module: ModuleId, values: Floats) -> bytes:
        """An outer gradient as the run encodes it."""
        return encode_compressed(compress(values, codec=self.run.config.compression.uplink)[0])

    async def params(self, version: ModuleVersion) -> Floats:
        """The parameters of a version, from whoever gives them."""
        holders = sorted(self.node.watch.heartbeats)
        data = await fetch(self.node, version.snapshot, holders=holders, keep=True)
        return decode_module(data, self.run.layout(version.module))

    async def push(self, sealed: Sealed[Contribution], payload: bytes, *, is_own: bool = True) -> str:
        """What the leader says of it: a reason, or `taken`."""
        module = sealed.document.module
        leader = self.node.watch.leader(module)
        if leader is None or leader == self.node.peer:
            return "no leader"
        request = (Contribute if is_own else partial(Forward, module=module))(contribution=sealed)
        addresses = self.node.watch.addresses(leader)
        try:
            await send(self.node, leader, payload)
            await request.call(self.node.swarm, leader, timeout_s=TIMEOUT_S, addresses=addresses)
        except Refused as refused:
            return refused.reason
        except DipacoError as error:
            return type(error).__name__
        return "taken"

    async def head_and_parent(self, module: ModuleId) -> tuple[ModuleVersion, ModuleVersion | None]:
        """The newest version that anybody shows, and the one before it."""
        chain = [genesis_version(self.run.manifest, module), *await fetch_chain(self.node, module)]
        return chain[-1], chain[-2] if len(chain) > 1 else None

    async def contribute(
        self, make: Make, *, paths: Collection[PathId] | None = None, is_claiming: bool = False
    ) -> None:
        """On these paths, or all, of every module, from every version on, with one identity and no training; a path is
        claimed just before, or none ever is."""
        wanted = set(self.run.topology.paths() if paths is None else paths)
        told: set[tuple[ModuleId, PathId, int]] = set()
        while True:
            made: dict[ModuleId, tuple[ModuleVersion, bytes]] = {}
            for module in self.modules:
                with contextlib.suppress(DipacoError):
                    head, parent = await self.head_and_parent(module)
                    if (
                        head.version < self.run.config.rounds.rounds
                        and (values := await make(head, parent)) is not None
                    ):
                        made[module] = head, self.payload(module, values)
                        self.node.store.put(made[module][1])  # judges read it here
            parts = {
                module: Part(base_digest=head.digest, payload=BlobRef.of(payload))
                for module, (head, payload) in made.items()
            }
            for module, (head, payload) in made.items():
                for path in sorted(wanted.intersection(self.run.topology.paths_through(module))):
                    if (module, path, head.version) not in told:
                        if is_claiming:
                            await self.say_claim(path)
                        said = await self.contribute_to(head, path, payload, parts)
                        if said in ("taken", "norm"):
                            told.add((module, path, head.version))
            await asyncio.sleep(AGAIN_S)

    async def contribute_to(
        self,
        head: ModuleVersion,
        path: PathId,
        payload: bytes,
        parts: Mapping[ModuleId, Part],
        *,
        like: Contribution | None = None,
    ) -> str:
        """Push it as work on `path` from `head`, with the path's other parts; what the leader says, which is noted."""
        sealed = self.document(head.module, path, head, payload, author=self.swarm.signer, parts=parts, like=like)
        said = await self.push(sealed, payload)
        self.heard[said] += 1
        return said

    async def say_claim(self, path: PathId) -> None:
        """That we train `path` from now on, and no other."""
        if self._claimed != path:
            self._claimed, self._claimed_s = path, time.time()
        await self.put_as(self.swarm.signer, claims_key(self.run.id, path), Claim(path=path, since_s=self._claimed_s))
