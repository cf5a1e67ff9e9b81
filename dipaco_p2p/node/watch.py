"""The swarm as this peer sees it: who lives, who trains which path, who leads which module.

`Watch` is refreshed on a timer from the DHT; what we say ourselves is seen at once. It asks the leaders for their open
rounds when these are needed. Everything here is a hint; what is signed, and believed, is with `Mandates` and `Decrees`.

A small swarm is read whole, of a larger one what concerns us (`Concerns`). How many train the other paths we know as
their leaders tell (`PathCounts`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ..clock import Clock
from ..errors import ConfigError, IntegrityError, Refused, SwarmError
from ..program.tasks import SingleFlight
from ..protocol import owners
from ..protocol.documents import Grant, Sealed
from ..protocol.invitations import is_listed
from ..protocol.liveness import Claim, Head, Heartbeat, read_all
from ..protocol.neighbours import place
from ..protocol.records import Record, claims_key, heads_key
from ..protocol.rounds import OpenRound, Standing, read_open_round, standing, within_bounds
from ..protocol.sightings import Sightings
from ..protocol.signing import PeerId
from ..swarm.addresses import worth_trying
from ..swarm.api import Swarm
from ..topology import ModuleId, PathId
from .authority import Decrees, Mandates, grant_of
from .calls import GetOpenRound
from .concerns import Concerns
from .decree_news import DecreeNews
from .mandate_news import ANSWER_TIMEOUT_S, MandateNews
from .neighbourhood import Neighbourhood
from .path_counts import PathCounts
from .run import Run

log = logging.getLogger(__name__)

ASKED_AT_ONCE = 32  # keys or leaders; keys that are read at one moment share requests
WORKER_TTLS = 3
"""Lives of a heartbeat in which only those who have worked may lead: to gather a chain from slow peers takes a while,
and they may wait for a version that is lost."""
CLAIM_LOOK_S = 0.5
"""Between two looks for claims that a contribution needs: a volunteer asks again as often."""
ROUND_TIMEOUT_S = 5.0
"""For the answer to `module.round`: a peer that looks for work must not wait long for a frozen leader."""
STRANGERS_ADDRESSES = 2
"""That are dialled at once."""
SAMPLES = 2
"""Buckets that whoever takes no part looks into at each look, beside its own: it reckons how many there are."""
SOUGHT_TRAINERS, SOUGHT_MAX = 4, 24
"""Peers that a look seeks because they train the paths that we read: holders of versions; and for a leader judges."""


class Watch:
    """Reads the records of a run. `refresh` reads what concerns us; the single reads are for who needs to know now."""

    def __init__(
        self,
        run: Run,
        swarm: Swarm,
        clock: Clock,
        mandates: Mandates,
        decrees: Decrees,
        neighbourhood: Neighbourhood,
    ) -> None:
        self._run = run
        self._swarm = swarm
        self._clock = clock
        self._gate = asyncio.Semaphore(ASKED_AT_ONCE)
        self._begun: dict[asyncio.Task[None], None] = {}
        self.neighbourhood = neighbourhood
        self.concerns = Concerns(run, clock, neighbourhood)
        self.heartbeats: dict[PeerId, Heartbeat] = {}
        self._beaten: dict[PeerId, tuple[float, float]] = {}
        """Of each live peer: until when its heartbeat holds, and when that one was first seen here."""
        self._dialled_here: Collection[PeerId] = ()
        """Whom our relay serves: a guest may be a member whose bucket is not ours."""
        self.claims: dict[PathId, dict[PeerId, Claim]] = {path: {} for path in run.topology.paths()}
        """Those that weigh (protocol/sightings.py), of the paths whose claims we read."""
        self.paths = PathCounts(run, clock, self.claims, is_whole=lambda: self.is_whole)
        ttl_s, places = run.config.liveness.heartbeat_ttl_s, run.config.places_min
        deadline_s, earlier = run.config.rounds.deadline_s, run.manifest.workers
        self.sightings = Sightings(swarm.peer, ttl_s=ttl_s, deadline_max_s=deadline_s, places=places, earlier=earlier)
        self._looked_s: dict[PathId, float] = {}
        """When the claims of a path were last looked for between two looks at the swarm."""
        self._looking: SingleFlight[None] = SingleFlight()
        self.heads: dict[ModuleId, dict[PeerId, Head]] = {module: {} for module in run.topology.modules()}
        self._mandates = mandates
        self._decrees = decrees
        decrees.listen(self._obey)
        self.seen: dict[ModuleId, int] = dict.fromkeys(self.heads, 0)
        """The newest version of each module that any leader ever announced."""
        self.typed: dict[PeerId, tuple[str, ...]] = {}
        """Addresses that the user typed: behind a forwarded port a peer does not know its own."""
        self.resigned: dict[ModuleId, dict[PeerId, int]] = {module: {} for module in self.heads}
        """Of leaders that said that they lead no more, in which term."""
        self._moved: dict[ModuleId, tuple[int, float]] = {module: (0, clock.now_s()) for module in self.heads}
        """The version that each module has reached, and since when it is known here."""
        self._announced = dict.fromkeys(self.heads, "")
        """By module, the signature of the newest grant that its leader has announced; empty before any."""
        self._terms_s: dict[ModuleId, tuple[int, float]] = {module: (0, clock.now_s()) for module in self.heads}
        """The newest term of each module, and since when it is known here."""
        self.led_s: dict[ModuleId, float] = dict.fromkeys(self.heads, clock.now_s())
        """When each module was last seen to be led, in its newest term: one that was deposed may not notice, or lie."""
        self._chance = random.Random(swarm.signer.sign("watch", b""))
        self.workers: Callable[[], Collection[PeerId]] = tuple
        """Whose work versions count, as far as somebody here reads chains."""
        self._known: set[PeerId] = set()
        """As `known` was at the last look: there may be thousands."""
        self.mandate_news = MandateNews(
            swarm, clock, mandates, ttl_s=ttl_s, addresses=self.addresses, known=self.known, begin=self._begin
        )
        self.decree_news = DecreeNews(swarm, clock, decrees, ttl_s=ttl_s, addresses=self.addresses)
        self.rounds: dict[ModuleId, OpenRound] = {}
        """The open rounds of the modules whose leaders answered last time."""

    async def refresh(self) -> None:
        """Read heartbeats, claims and heads; and ask now and then whether those who claim a path work on it."""
        heads, new = self.concerns.look()
        for module in new:  # who has not watched it does not know for how long nobody has led it
            self.led_s[module] = self._clock.now_s()
        for module in self.concerns.outdated(self.heads):
            self.heads[module] = {}
        for path, claims in self.claims.items():
            if claims and not self.paths.is_read(path):
                self.claims[path] = {}
        await asyncio.gather(self.read_peers(), self.read_claims(self.concerns.paths()), *map(self.read_heads, heads))
        if paths := self.sightings.to_ask(now_s=self._clock.now_s()):
            self._begin(self.read_rounds({module for path in paths for module in path.modules()}))

    @property
    def is_whole(self) -> bool:
        """Whether the swarm is so small that we read every key."""
        return self.concerns.is_whole

    def _sought(self) -> list[PeerId]:
        """Those who are sought though they are no neighbours: seeds, owners of our modules, and some who train paths
        that we read. A coordinator in the bucket of all may have lost sight of those who wait for it: some workers."""
        modules = sorted(self.concerns.mine)
        owners = [peer for module in modules if (grant := self._mandates.grant(module)) for peer in grant.group]
        leaders = [leader for module in sorted(self.concerns.sought) if (leader := self.leader(module)) is not None]
        training = [peer for claims in self.claims.values() for peer in claims]
        training = training[: SOUGHT_MAX if self.concerns.led() else SOUGHT_TRAINERS]
        author, seeds = self._run.manifest.author, self._decrees.state.seeds
        known = [] if self.neighbourhood.depth or self._swarm.peer != author else sorted(self._known)
        lost = self._chance.sample(known, min(len(known), SOUGHT_TRAINERS))
        return list(dict.fromkeys([author, *seeds, *leaders, *owners, *training, *lost, *self._dialled_here]))

    async def find(self, *peers: PeerId) -> None:
        """Look for these peers now, if they are not seen to live."""
        await self.neighbourhood.find(self._get, [peer for peer in peers if peer not in self.heartbeats])
        self._take_heartbeats(self.neighbourhood.heard())

    async def find_electorate(self, module: ModuleId, peer: PeerId) -> None:
        """Learn of those who may look after `module`, and of `peer`, which says that it is its turn."""
        await asyncio.gather(self.neighbourhood.look_around(self._get, str(module)), self.find(peer))
        self._take_heartbeats(self.neighbourhood.heard())
        beat = self.heartbeats.get(peer)
        if beat is not None and beat.path in self.claims and module in beat.path.modules() and not self.is_whole:
            await self._read_claims_of(beat.path)

    async def read_level(self, level: int) -> None:
        """Read the heads of all modules of a level: together they tell of all paths."""
        await asyncio.gather(*(self.read_heads(module) for module in self.heads if module.level == level))

    async def survey(self) -> None:
        """Read all heads: whether the run is over."""
        await asyncio.gather(*map(self.read_heads, self.heads))

    def hurry(self, module: ModuleId) -> None:
        """Ask at the next refresh who works on the paths through `module`: its round may want one of them again."""
        self.sightings.hurry(self._run.topology.paths_through(module))

    def close(self) -> None:
        """Ask nobody for anything any more."""
        for task in self._begun:
            task.cancel()

    async def find_leader(self, module: ModuleId) -> None:
        """Read the heads, and as long as nobody is believed to lead, once more after each answer: who has just come
        knows no mandates, asks for them beside the look, and would believe them at the next one."""
        await self.read_heads(module)
        until_s = self._clock.now_s() + 2 * ANSWER_TIMEOUT_S
        while self.leader(module) is None and self._begun and self._clock.now_s() < until_s:
            await asyncio.wait(list(self._begun), return_when=asyncio.FIRST_COMPLETED)
            await self.read_heads(module)

    async def read_peers(self) -> None:
        samples = SAMPLES if self.concerns.held is None else 0
        self._take_heartbeats(await self.neighbourhood.look(self._get, sought=self._sought(), samples=samples))
        self._known = self.known()
        self.decree_news.heard(self.heartbeats, self._known, begin=self._begin)

    def _take_heartbeats(self, records: Mapping[PeerId, Record]) -> None:
        beats = read_all(Heartbeat, {peer: record.body for peer, record in records.items()})
        self.heartbeats = {peer: beat for peer, beat in beats.items() if not beat.left and not self._is_out(peer)}
        self.concerns.peers = len(self.heartbeats)
        known, now_s = self._beaten, self._clock.now_s()
        self._beaten = {}
        for peer in self.heartbeats:
            until_s, before = records[peer].expires_s, known.get(peer)
            self._beaten[peer] = before if before is not None and before[0] == until_s else (until_s, now_s)
        relays = {peer: self.addresses(peer) for peer in self.relays()}
        self._dialled_here = self._swarm.note_peers(
            members=self.heartbeats, known=self._known, banned=self._decrees.state.banned, relays=relays
        )

    async def read_claims(self, paths: Iterable[PathId] | None = None) -> None:
        await asyncio.gather(*map(self._read_claims_of, self.claims if paths is None else list(paths)))

    async def claimed_s(self, peer: PeerId, path: PathId) -> float | None:
        """Since when the newest claim of `peer` is one of `path`; None if it is not. A claim that we have not seen yet
        is looked for, at most once in CLAIM_LOOK_S for each path, whoever asks."""
        found, now_s = self.sightings.claimed_s(peer, path), self._clock.now_s()
        if found is None and now_s - self._looked_s.get(path, -math.inf) >= CLAIM_LOOK_S:
            await self._looking.do(str(path), partial(self._look_for_claims, path))
            found = self.sightings.claimed_s(peer, path)
        return found

    async def _look_for_claims(self, path: PathId) -> None:
        await self._read_claims_of(path)
        self._looked_s[path] = self._clock.now_s()

    async def read_heads(self, module: ModuleId) -> None:
        records = await self._get(heads_key(self._run.id, module))
        found = read_all(Head, {peer: record.body for peer, record in records.items()})
        self.concerns.read_head(module)
        heads = dict(sorted(found.items(), key=lambda item: item[1].term))  # one may follow from the one before
        shown = {peer: grant for peer, head in heads.items() if (grant := self._grant_shown(module, peer, head))}
        believed = [peer for peer, grant in shown.items() if self._mandates.believes(module, grant)]
        self.heads[module] = {peer: heads[peer] for peer in believed}
        # Also of an earlier term than the newest: its branch may be the better one.
        doubted = [peer for peer in shown if peer not in self.heads[module] and peer != self._swarm.peer]
        self.mandate_news.heard(module, doubted)
        self.resigned[module] = {peer: head.term for peer, head in heads.items() if head.resigned}
        self.seen[module] = max([self.seen[module], *(head.version for head in self.heads[module].values())])
        best, newest = self._best(module), self._mandates.newest(module)
        if best is not None and best[1].grant == newest[-1].signature:
            self._announced[module], self.led_s[module] = best[1].grant, self._clock.now_s()
        if self._moved[module][0] != self.reached(module):
            self._moved[module] = self.reached(module), self._clock.now_s()
            self.sightings.moved(self._run.topology.paths_through(module))
        if best is None:
            self.paths.note_head(module, None, until_s=0.0)
        elif best[0] in records:
            self.paths.note_head(module, best[1], until_s=records[best[0]].expires_s)

    async def read_rounds(self, modules: Iterable[ModuleId] | None = None) -> None:
        """Ask the leaders of `modules`, or of all, what is in their open rounds."""
        asked = set(self.heads if modules is None else modules)
        await asyncio.gather(*map(self._read_round, asked))
        self._note_work(asked)

    def leader(self, module: ModuleId) -> PeerId | None:
        """The peer that leads `module`, as far as its live head says; None while nobody does."""
        best = self._best(module)
        return best[0] if best else None

    def reached(self, module: ModuleId) -> int:
        """The version that `module` has, as its leader says; while nobody leads it, the newest that anybody told."""
        best = self._best(module)
        return best[1].version if best else self.seen[module]

    def successors(self, module: ModuleId, *, workers: Collection[PeerId] = ()) -> Sequence[PeerId]:
        """The live peers that should lead `module`, the first choice first; `workers` have worked for the run. A leader
        that has resigned wants it no more."""
        grant, author = self._mandates.grant(module), self._run.manifest.author
        group = grant.group if grant else ()
        alive = {
            peer: beat
            for peer, beat in self.heartbeats.items()
            if peer == author or (beat.role == "volunteer" and (peer in group or self._may_look_after(module, peer)))
        }
        if grant is not None and grant.leader != author and self._has_resigned(grant):
            alive.pop(grant.leader, None)
        incumbent = self.leader(module)
        if incumbent in self.heartbeats:
            alive[incumbent] = self.heartbeats[incumbent]
        return owners.successors(module, alive, incumbent=incumbent, group=group, workers=workers)

    def _may_look_after(self, module: ModuleId, peer: PeerId) -> bool:
        """Whether `peer` sees that nobody leads `module`: it is a neighbour of the module, or trains it."""
        if self.neighbourhood.is_all or self.neighbourhood.is_same_bucket(place(str(module)), place(peer)):
            return True
        return any(peer in self.claims[path] for path in self._run.topology.paths_through(module))

    def falls_to(
        self,
        module: ModuleId,
        peer: PeerId,
        *,
        workers: Collection[PeerId] = (),
        since_s: float = -math.inf,
        slack_s: float = 0.0,
    ) -> bool:
        """Whether `peer` should lead `module` now: a peer waits a heartbeat's life for each one before it in the order,
        which may be alive and yet unable to lead, from `since_s` on at the earliest; the seed node and strangers wait
        WORKER_TTLS more for those who have worked. `slack_s` is how much later than `peer` we may have seen that nobody
        leads."""
        order = self.successors(module, workers=workers)
        if peer not in order or (
            self.is_taking_over(module, workers=workers) and self._mandates.newest(module)[-1].document.leader != peer
        ):
            return False
        waited_s = self._clock.now_s() - max(self.led_s[module], since_s) + slack_s
        lives = order.index(peer) + WORKER_TTLS * (peer not in workers and order[0] in workers)
        return waited_s >= lives * self._run.config.liveness.heartbeat_ttl_s

    def is_taking_over(self, module: ModuleId, *, workers: Collection[PeerId] = ()) -> bool:
        """Whether the leader of the newest term may still be about to announce itself: within a heartbeat's life, or
        WORKER_TTLS more if it has worked."""
        grant, now_s = self._mandates.grant(module), self._clock.now_s()
        if grant is None:
            return False
        if self._terms_s[module][0] != grant.term:
            self._terms_s[module] = (grant.term, now_s)
        lives = 1 + WORKER_TTLS * (grant.leader in workers)
        is_new = now_s - self._terms_s[module][1] < lives * self._run.config.liveness.heartbeat_ttl_s
        return is_new and self.is_silent(module) and grant.leader in self.heartbeats

    def is_silent(self, module: ModuleId) -> bool:
        """Whether the leader of the newest term has not announced itself, nor resigned."""
        newest = self._mandates.newest(module)
        is_said = not newest or self._announced[module] == newest[-1].signature
        return not (is_said or self._has_resigned(newest[-1].document))

    def _has_resigned(self, grant: Grant) -> bool:
        return self.resigned[grant.module].get(grant.leader, 0) >= grant.term

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Where `peer` answers, by its last heartbeat; of a stranger some places, drawn each time, since it may name
        anybody's."""
        beat, typed = self.heartbeats.get(peer), self.typed.get(peer, ())
        told = beat.addresses if beat else ()
        if len(told) > STRANGERS_ADDRESSES and peer not in self._known:
            told = worth_trying(told, self._chance, most=STRANGERS_ADDRESSES)
        return (*typed, *told)

    def beaten_s(self, peer: PeerId) -> float | None:
        """When the newest heartbeat of a live peer was first seen here; None for a peer that is gone."""
        return self._beaten[peer][1] if peer in self._beaten else None

    def volunteers(self) -> set[PeerId]:
        """Those that live."""
        return {peer for peer, beat in self.heartbeats.items() if beat.role == "volunteer"}

    @property
    def volunteers_alive(self) -> int:
        """How many live; in a large swarm about as many as all peers."""
        return len(self.volunteers()) if self.neighbourhood.is_all else self.peers_alive

    @property
    def peers_alive(self) -> int:
        """How many live, seed nodes among them; in a large swarm about so many."""
        return len(self.heartbeats) if self.neighbourhood.is_all else self.neighbourhood.estimate().peers

    def seeds(self) -> list[PeerId]:
        """Those who keep everything: the coordinator's seed node first, then others that it has appointed. Whoever only
        says that it is a seed may keep nothing."""
        author, appointed = self._run.manifest.author, self._decrees.state.seeds
        found = sorted(peer for peer, beat in self.heartbeats.items() if beat.role == "seed")
        return sorted((peer for peer in found if peer == author or peer in appointed), key=lambda peer: peer != author)

    def known(self) -> set[PeerId]:
        """For whom more speaks than their own word: the coordinator, appointed seeds, owners, and whose work counts."""
        return self._mandates.all_peers().union(self._decrees.state.seeds, self.workers())

    def relays(self) -> list[PeerId]:
        """Whom peers behind a NAT are dialled through: seed nodes first, then others, for each of us in another order,
        so that no relay has them all."""
        seeds = [peer for peer in self.seeds() if self.heartbeats[peer].relays]
        offered = {peer for peer, beat in self.heartbeats.items() if beat.relays and not beat.is_relayed}
        me = self._swarm.peer
        others = sorted(offered.difference(seeds), key=lambda peer: hashlib.sha256(f"{me}|{peer}".encode()).digest())
        return [*seeds, *others]

    def coordinators(self) -> list[PeerId]:
        """The one seed node that signs for the run, while it lives: the others grant nothing, and must not keep anybody
        from going on."""
        return [peer for peer in self.seeds() if peer == self._run.manifest.author]

    def round(self, path: PathId) -> int:
        """How far `path` is: the oldest head among its modules."""
        newest = [self._best(module) for module in path.modules()]
        return min(found[1].version if found else 0 for found in newest)

    def still_s(self, path: PathId) -> float:
        """For how many seconds no module that holds `path` back has had a new version, as seen from here."""
        least = min(map(self.reached, path.modules()))
        behind = [module for module in path.modules() if self.reached(module) == least]
        return self._clock.now_s() - max(self._moved[module][1] for module in behind)

    def standing(self, path: PathId) -> Standing | None:
        """How far `path` is, whoever trained it; None unless the leaders of all its modules have answered."""
        rounds = [self.rounds.get(module) for module in path.modules()]
        known = [found for found in rounds if found is not None]
        if len(known) < len(rounds):
            return None
        versions, done = [found.version for found in known], [found.has(path) for found in known]
        return standing(versions, done, rounds=self._run.rounds)

    def how_far(self, path: PathId) -> Standing | None:
        """As `standing`; in a large swarm as the leaders' heads tell, of paths whose leaders nobody has asked."""
        return self.standing(path) if self.is_whole else self.paths.standing(path)

    def _best(self, module: ModuleId) -> tuple[PeerId, Head] | None:
        return self._mandates.best_head(module, self.heads[module])

    def _grant_shown(self, module: ModuleId, peer: PeerId, head: Head) -> Sealed[Grant] | None:
        """By which grant `peer` says that it leads `module`; None if it does not, or shows what nobody could sign."""
        if head.resigned or self._is_out(peer):
            return None
        try:
            return grant_of(head, run=self._run.id, module=module, leader=peer)
        except ConfigError:
            return None

    def _is_out(self, peer: PeerId) -> bool:
        """Whether nobody listens to `peer`: it is banned, or the run has a list and `peer` is not on it."""
        admission, author = self._run.config.admission, self._run.manifest.author
        is_in = is_listed(peer, admission=admission, coordinator=author, seeds=self._decrees.state.seeds)
        return not is_in or self._decrees.is_banned(peer)

    # -- the coordinator's decrees

    def _obey(self) -> None:
        """Forget what banned peers said; a peer that is admitted again is seen with the next look."""
        said: list[dict[PeerId, Any]] = [self.heartbeats, *self.claims.values(), *self.heads.values()]
        for peer in self._decrees.state.banned:
            for each in said:
                each.pop(peer, None)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._begun[task] = None
        task.add_done_callback(self._begun.pop)

    async def _read_claims_of(self, path: PathId) -> None:
        records = await self._get(claims_key(self._run.id, path))
        claims = read_all(Claim, {peer: record.body for peer, record in records.items()})
        live = {
            peer: claim
            for peer, claim in claims.items()
            if claim.path == path and not claim.released and not self._is_out(peer)
        }
        self.claims[path] = self.sightings.weighing(path, live, now_s=self._clock.now_s())
        self.paths.note_claims(path)
        self.concerns.read_claims(path, len(claims))

    async def _read_round(self, module: ModuleId) -> None:
        peer, found = self.leader(module), None
        if peer is not None:
            request, addresses = GetOpenRound(module=module), self.addresses(peer)
            try:
                async with self._gate:
                    reply = await request.call(self._swarm, peer, timeout_s=ROUND_TIMEOUT_S, addresses=addresses)
                found = read_open_round(reply.body)
            except (SwarmError, Refused, IntegrityError) as error:
                log.info("the leader of %s did not tell its open round: %s", module, error)
        if found is None:
            self.rounds.pop(module, None)
        else:
            self.rounds[module] = found

    def _note_work(self, asked: set[ModuleId]) -> None:
        """Judge the claims of the paths whose leaders were all asked, by what they told; a path is free at once."""
        paths, now_s = [path for path in self.claims if asked.issuperset(path.modules())], self._clock.now_s()
        has_begun, ttl_s = self.may_have_begun, self._run.config.liveness.heartbeat_ttl_s
        found = {path: self.standing(path) if has_begun and not self._decrees.is_frozen else None for path in paths}
        standings = {path: how_far for path, how_far in found.items() if how_far is not None}
        for path in found.keys() - standings.keys():
            self.sightings.excuse(path, now_s=now_s, ask_s=now_s + ttl_s / 3 if has_begun else now_s)
        deadlines_s = {path: self._deadline_s(path) for path in standings}
        self.sightings.told(self.rounds, standings, deadlines_s=deadlines_s, now_s=now_s)
        self.claims |= {path: self.sightings.still_weighing(path, self.claims[path]) for path in standings}

    @property
    def may_have_begun(self) -> bool:
        """Whether anybody may have worked: before `min_paths` are claimed nobody does."""
        is_open = any(self.seen.values()) or any(open_.version or open_.entries for open_ in self.rounds.values())
        return is_open or self.paths.covered() >= self._run.config.rounds.min_paths

    def _deadline_s(self, path: PathId) -> float:
        """How long the rounds of `path` wait, by the most patient of its leaders."""
        rounds, liveness = self._run.config.rounds, self._run.config.liveness
        told_s = [self.rounds[module].deadline_s or rounds.deadline_s for module in path.modules()]
        return within_bounds(max(told_s), rounds, liveness)

    async def _get(self, key: str) -> Mapping[PeerId, Record]:
        async with self._gate:
            return await self._swarm.get(key)
