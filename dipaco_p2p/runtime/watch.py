"""The swarm as this peer sees it: who lives, who trains which path, who leads which module.

Refreshed on a timer from the DHT; what we say ourselves is seen at once. What is in the open rounds is asked of the
leaders when it is needed. Everything here is a hint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from ..clock import Clock
from ..errors import IntegrityError, Refused, SwarmError
from ..protocol.grants import is_head_granted
from ..protocol.keys import claims_key, heads_key, peers_key
from ..protocol.liveness import Claim, Head, Heartbeat, best_head, read_all
from ..protocol.owners import leader
from ..protocol.rounds import OpenRound, Standing, read_open_round, standing
from ..protocol.signing import PeerId
from ..swarm.api import Swarm
from ..topology import ModuleId, PathId
from .run import Run

log = logging.getLogger(__name__)

GETS_AT_ONCE = 8
ROUND_TIMEOUT_S = 5.0
"""For the answer to `module.round`: who looks around for work must not wait long for a frozen leader."""


class Watch:
    """Reads the records of a run. `refresh` reads all; the single reads are for who needs to know now."""

    def __init__(self, run: Run, swarm: Swarm, clock: Clock) -> None:
        self._run = run
        self._swarm = swarm
        self._clock = clock
        self._gate = asyncio.Semaphore(GETS_AT_ONCE)
        self.heartbeats: dict[PeerId, Heartbeat] = {}
        self.claims: dict[PathId, dict[PeerId, Claim]] = {path: {} for path in run.topology.paths()}
        self.heads: dict[ModuleId, dict[PeerId, Head]] = {module: {} for module in run.topology.modules()}
        self.rounds: dict[ModuleId, OpenRound] = {}
        """The open rounds of the modules whose leaders answered last time."""

    async def refresh(self) -> None:
        """Read heartbeats, claims and heads."""
        await asyncio.gather(self.read_peers(), self.read_claims(), *map(self.read_heads, self.heads))

    async def read_peers(self) -> None:
        beats = read_all(Heartbeat, await self._bodies(peers_key(self._run.id)))
        self.heartbeats = {peer: beat for peer, beat in beats.items() if not beat.left}

    async def read_claims(self, paths: Iterable[PathId] | None = None) -> None:
        await asyncio.gather(*map(self._read_claims_of, self.claims if paths is None else list(paths)))

    async def read_heads(self, module: ModuleId) -> None:
        heads = read_all(Head, await self._bodies(heads_key(self._run.id, module)))
        self.heads[module] = {peer: head for peer, head in heads.items() if self._is_leading(module, peer, head)}

    async def read_rounds(self, modules: Iterable[ModuleId] | None = None) -> None:
        """Ask the leaders of `modules`, or of all, what is in their open rounds."""
        await asyncio.gather(*map(self._read_round, self.heads if modules is None else set(modules)))

    def leader(self, module: ModuleId) -> PeerId | None:
        """The peer that leads `module`, as far as its live head says; None while nobody does."""
        best = best_head(self.heads[module])
        return best[0] if best else None

    def successor(self, module: ModuleId, *, incumbent: PeerId | None) -> PeerId | None:
        """The peer that should lead `module`."""
        return leader(module, self.heartbeats, incumbent=incumbent)

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Where `peer` answers, by its last heartbeat."""
        beat = self.heartbeats.get(peer)
        return beat.addresses if beat else ()

    def seeds(self) -> list[PeerId]:
        return sorted(peer for peer, beat in self.heartbeats.items() if beat.role == "seed")

    def round(self, path: PathId) -> int:
        """How far `path` is: the oldest head among its modules."""
        newest = [best_head(self.heads[module]) for module in path.modules()]
        return min(found[1].version if found else 0 for found in newest)

    def standing(self, path: PathId) -> Standing | None:
        """How far `path` is, whoever trained it; None unless the leaders of all its modules have answered."""
        rounds = [self.rounds.get(module) for module in path.modules()]
        known = [found for found in rounds if found is not None]
        if len(known) < len(rounds):
            return None
        versions, done = [found.version for found in known], [found.has(path) for found in known]
        return standing(versions, done, rounds=self._run.config.rounds.rounds)

    def _is_leading(self, module: ModuleId, peer: PeerId, head: Head) -> bool:
        """Whether `peer` leads, by its own word and the coordinator's."""
        run, coordinator = self._run.id, self._run.manifest.author
        return not head.resigned and is_head_granted(head, run=run, module=module, leader=peer, coordinator=coordinator)

    async def _read_claims_of(self, path: PathId) -> None:
        claims = read_all(Claim, await self._bodies(claims_key(self._run.id, path)))
        self.claims[path] = {peer: claim for peer, claim in claims.items() if claim.path == path and not claim.released}

    async def _read_round(self, module: ModuleId) -> None:
        self.rounds.pop(module, None)
        peer = self.leader(module)
        if peer is not None:
            header, addresses = {"module": str(module)}, self.addresses(peer)
            try:
                async with self._gate:
                    reply = await self._swarm.call(
                        peer, "module.round", header, timeout_s=ROUND_TIMEOUT_S, addresses=addresses
                    )
                self.rounds[module] = read_open_round(reply.body)
            except (SwarmError, Refused, IntegrityError) as error:
                log.info("the leader of %s did not tell its open round: %s", module, error)

    async def _bodies(self, key: str) -> dict[PeerId, dict[str, object]]:
        async with self._gate:
            return {peer: record.body for peer, record in (await self._swarm.get(key)).items()}
