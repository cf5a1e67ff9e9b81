"""Thousands of volunteers in virtual time: the rules of the protocol as they are, and a cost in place of the rest.

Real, the code of `dipaco_p2p.protocol`: who draws which path and who moves (summaries), how often a key is read
(neighbours), when a round closes (rounds), who should lead (owners), and the sizes of signed records.

In its place: inner steps are seconds, an upload is bytes on a line, and signatures and disks are left out. The DHT is a
model of Kademlia: a key lies with the 5 nodes nearest to it, each of which answers each read (an upper bound), and a
look-up takes log2(N) / 3 hops besides, told apart. All buckets are as deep as most should be. What heads tell is
`TOLD_S` old. The reads and renewals of a minute are counted as a product. Judging, decrees and the archive are not
played: the seed node leads what nobody does, grants what the order of owners says, and never fails. Nobody lies.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Callable
from functools import partial

from dipaco_p2p.config import RoundsConfig
from dipaco_p2p.node.neighbourhood import PROBED_MAX
from dipaco_p2p.protocol import owners
from dipaco_p2p.protocol.claims import drawn, places_drawn
from dipaco_p2p.protocol.documents import MIRRORS_MAX
from dipaco_p2p.protocol.liveness import Claim, Heartbeat
from dipaco_p2p.protocol.neighbours import PLACE_BITS, place
from dipaco_p2p.protocol.rounds import Awaited, Round, RoundState, everybody, waits_for_newcomers
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.summaries import Need, draw_path, share_moving
from dipaco_p2p.topology import PathId, Topology

from .churned import CRASHES, REGION, REGION_S, RETURN_S, Churn
from .costs import (
    ACCOUNT_S,
    BEAT_S,
    DOWN_BIT_S,
    DRAWS_MAX,
    LOOK_S,
    OWNERS,
    TAKEOVER_S,
    TOLD_S,
    TTL_S,
    UP_BIT_S,
    WORKED,
    Costs,
    Figures,
    Led,
    Pace,
    Peer,
    depth_of,
)


class Path(PathId):
    """A path that knows its hash: it is a key of everything here."""

    __slots__ = ("hash",)
    hash: int

    def __hash__(self) -> int:
        return self.hash


def known_path(path: PathId) -> Path:
    found = Path(path.indices)
    object.__setattr__(found, "hash", hash(path))
    return found


class Swarm:
    """One run of the model; `play` plays it."""

    def __init__(
        self,
        volunteers: int,
        *,
        hours: float,
        churn: Churn,
        widths: tuple[int, ...] = (16, 16),
        pace: Pace | None = None,
        seed: int = 1,
    ):
        self.volunteers, self.hours, self.churn, self.pace = volunteers, hours, churn, pace or Pace()
        self.chance = random.Random(seed)
        self.topology = Topology(widths)
        self.rounds = RoundsConfig(rounds=10_000, deadline_s=self.pace.deadline_s, grace_s=10.0, owners=OWNERS)
        self.now_s, self.end_s = 0.0, hours * 3600
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.counter = 0
        self.peers: dict[PeerId, Peer] = {}
        known = {path: known_path(path) for path in self.topology.paths()}
        self.claims: dict[PathId, dict[PeerId, Claim]] = {path: {} for path in known.values()}
        """As the DHT has them: those of the dead until they expire. In the order in which they came."""
        self.told: deque[tuple[float, dict[PathId, int]]] = deque()
        self.modules = {}
        for module in self.topology.modules():
            paths = tuple(known[path] for path in self.topology.paths_through(module))
            self.modules[module] = Led(module, paths, Round(number=0, expected=frozenset(paths)))
        self.of = {path: [self.modules[module] for module in path.modules()] for path in self.claims}
        self.nobody: dict[PathId, dict[PeerId, Claim]] = {path: {} for path in self.claims}
        self.places = places_drawn(self.rounds.contributions_max // (self.topology.path_count // min(widths)))
        """Of each path in a round."""
        self.shares: dict[int, float] = {}
        self.progress: dict[PathId, int] = {}
        self.accounted_s = 0.0
        self.costs = Costs(self.topology, self.claims, self.modules)
        self.path_rounds, self.missed, self.closed, self.shares_max = 0, 0, 0, 0
        self.counted_s = 0.0
        self.joins = 0
        self.all_covered_s: float | None = None
        self.watched_from_s: float | None = None
        self.leaderless_max_s = 0.0

    # -- time

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        self.counter += 1
        heapq.heappush(self.heap, (time_s, self.counter, act))

    def later(self, peer: Peer, delay_s: float, act: Callable[[Peer], None]) -> None:
        """Do what is next for a peer, unless it does something else by then."""
        peer.serial += 1
        serial = peer.serial

        def go() -> None:
            if peer.alive and peer.serial == serial:
                act(peer)

        self.at(self.now_s + delay_s, go)

    def play(self) -> Figures:
        self.at(0.0, self.beat)
        if self.churn.region_at_s < self.end_s:
            self.at(self.churn.region_at_s, self.lose_region)
        while self.heap and self.heap[0][0] <= self.end_s:
            self.now_s, _, act = heapq.heappop(self.heap)
            act()
        return self.figures()

    def beat(self) -> None:
        """Every BEAT_S: who comes, what leaders tell, which rounds close, who moves; and what all that costs."""
        alive = [peer for peer in self.peers.values() if peer.alive]
        gap = self.churn.wanted(self.volunteers, self.now_s) - len(alive)
        rate = gap if self.now_s == 0 and self.churn.is_quiet else gap * min(1.0, BEAT_S / RETURN_S)
        for _ in range(self.poisson(max(0.0, rate))):
            self.at(self.now_s + self.chance.uniform(0, BEAT_S), self.join)
        self.told.append((self.now_s, {path: len(claims) for path, claims in self.claims.items()}))
        while len(self.told) > 1 and self.told[1][0] <= self.now_s - TOLD_S:
            self.told.popleft()
        self.shares = {}
        self.progress = {path: min(led.round.number for led in of) for path, of in self.of.items()}
        for led in self.modules.values():
            self.tend(led)
            self.tick(led)
        told = self.told[0][1]
        fewest = min(told.values())
        for peer in alive if max(map(len, self.claims.values())) > fewest else ():
            if peer.alive and peer.doing == "waiting" and peer.path is not None:
                self.maybe_move(peer, told, fewest)
        if self.now_s - self.accounted_s >= ACCOUNT_S:
            self.costs.account(alive, self.now_s - self.accounted_s, now_s=self.now_s)
            self.accounted_s = self.now_s
        self.at(self.now_s + BEAT_S, self.beat)

    def poisson(self, mean: float) -> int:
        if mean > 50:
            return max(0, round(self.chance.gauss(mean, math.sqrt(mean))))
        level, count, product = math.exp(-mean), 0, self.chance.random()
        while product > level:
            count, product = count + 1, product * self.chance.random()
        return count

    # -- a volunteer

    def join(self) -> None:
        self.joins += 1
        name = PeerId(f"peer-{self.joins}")
        session_s = self.churn.session_s(self.chance)
        pace = math.exp(self.pace.train_sigma * self.chance.gauss(0.0, 1.0))
        peer = Peer(name, place(name), pace, self.now_s + session_s, self.now_s)
        self.peers[name] = peer
        if session_s < math.inf:
            self.at(peer.until_s, lambda: self.leave(peer, crashes=self.chance.random() < CRASHES))
        if self.joins == min(2000, max(1, int(0.9 * self.volunteers))):
            self.watched_from_s = self.now_s
        self.costs.spend("reads", PROBED_MAX + 1)
        self.choose(peer)

    def choose(self, peer: Peer, target: PathId | None = None) -> None:
        """Draw a path by what one level's leaders tell, look at its claims, claim it, and settle."""
        told, path = self.told[0][1], target
        self.costs.spend("reads", 16)
        self.costs.spend("records", 16)
        self.costs.spend("bytes", 16 * self.costs.sizes["head"])
        known: dict[PathId, int] = {}
        for _ in range(DRAWS_MAX if path is None else 0):
            needs = {drawn: Need(count, True, self.progress[drawn]) for drawn, count in (told | known).items()}
            path = draw_path(needs, seed=self.chance.getrandbits(32))
            known[path] = len(self.claims[path])
            self.costs.spend("reads", 1)
            self.costs.spend("records", known[path])
            if known[path] <= needs[path].claimants:
                break
        assert path is not None
        peer.path, peer.since_s, peer.doing = path, self.now_s, "settling"
        version = min(led.round.number for led in self.of[path])
        is_new = not self.claims[path] and not any((path, WORKED) in led.work for led in self.of[path])
        peer.round = version if is_new or not version else version + 1
        self.claims[path][peer.name] = Claim(path=path, since_s=self.now_s, round=peer.round)
        self.later(peer, self.pace.settle_s, self.settled)

    def settled(self, peer: Peer) -> None:
        assert peer.path is not None
        rank = list(self.claims[peer.path]).index(peer.name)
        told = self.told[0][1]
        if rank and min(count for path, count in told.items() if path != peer.path) < rank:
            if self.chance.random() < self.share(rank):
                self.release(peer)
                return self.choose(peer)
        if self.all_covered_s is None and self.watched_from_s is not None and all(self.claims.values()):
            self.all_covered_s = self.now_s - self.watched_from_s
        peer.doing = "fetching"
        self.costs.spend("calls", 4)
        self.later(peer, 2 * self.pace.module_bytes * 8 / DOWN_BIT_S, self.wait)

    def wait(self, peer: Peer) -> None:
        """Begin to train if the path is due."""
        assert peer.path is not None
        peer.doing = "waiting"
        version = min(led.round.number for led in self.of[peer.path])
        if version >= peer.round:
            self.train(peer, version)

    def train(self, peer: Peer, version: int) -> None:
        assert peer.path is not None
        if len(claimants := self.claims[peer.path]) > self.places:
            if peer.name not in drawn(peer.path, claimants, round_number=version, places=self.places):
                peer.round = version + 1
                self.claims[peer.path][peer.name] = Claim(path=peer.path, since_s=peer.since_s, round=peer.round)
                return
        peer.doing, peer.round = "training", version
        self.claims[peer.path][peer.name] = Claim(path=peer.path, since_s=peer.since_s, round=version)
        upload_s = 2 * self.pace.module_bytes * 8 / UP_BIT_S
        self.costs.spend("calls", 2)
        self.later(peer, self.pace.train_s * peer.pace + upload_s, self.contribute)

    def contribute(self, peer: Peer) -> None:
        assert peer.path is not None
        for module in peer.path.modules():
            led = self.modules[module]
            key = peer.path, peer.name
            is_late = led.round.number > peer.round
            if is_late and led.round.number > peer.round + 1:
                continue
            led.round = led.round.contributed(peer.path, peer.name, now_s=self.now_s, is_late=is_late)
            led.work[key] = self.pace.train_s * peer.pace
            led.work[peer.path, WORKED] = 0.0
            peer.has_worked = True
            if led.leader is not None:
                self.costs.leader_calls[led.leader] += 8
        self.costs.spend("calls", 2 * (4 + self.pace.module_bytes / 2**20 / 4) + 2 * 4)
        peer.round += 1
        self.wait(peer)

    def leave(self, peer: Peer, *, crashes: bool) -> None:
        if not peer.alive:
            return
        peer.alive = False
        del self.peers[peer.name]
        if crashes:
            self.at(self.now_s + self.chance.uniform(2 / 3, 1.0) * TTL_S, lambda: self.release(peer))
        else:
            self.release(peer)
        for led in self.modules.values():
            if led.leader == peer.name:
                led.leader = None
                led.leaderless_s = self.now_s
                seen_s = self.chance.uniform(2 / 3, 1.0) * TTL_S if crashes else 0.0
                self.at(self.now_s + seen_s + self.chance.uniform(0, LOOK_S), partial(self.succeed, led))

    def release(self, peer: Peer) -> None:
        if peer.path is not None:
            if self.claims[peer.path].pop(peer.name, None) is not None:
                self.costs.released.append((self.now_s + TTL_S, peer.path))
            peer.path = None

    def lose_region(self) -> None:
        for peer in list(self.peers.values()):
            if self.chance.random() < REGION:
                self.at(self.now_s + self.chance.uniform(0, REGION_S), partial(self.leave, peer, crashes=True))

    # -- moving where it is needed more

    def share(self, rank: int) -> float:
        if rank not in self.shares:
            self.shares[rank] = share_moving(rank, self.told[0][1])
        return self.shares[rank]

    def rotate(self, peer: Peer, told: dict[PathId, int]) -> None:
        """To a path that nobody trains and that is no further, if its claims and its leaders say the same."""
        behind = [path for path, count in told.items() if not count and self.progress[path] < peer.round]
        for path in sorted(self.chance.sample(behind, min(DRAWS_MAX, len(behind))), key=lambda one: self.progress[one]):
            self.costs.spend("reads", 1 + len(self.of[path]))
            self.costs.spend("calls", len(self.of[path]))
            if not self.claims[path] and not any((path, WORKED) in led.work for led in self.of[path]):
                self.release(peer)
                return self.choose(peer, path)

    def maybe_move(self, peer: Peer, told: dict[PathId, int], fewest: int) -> None:
        assert peer.path is not None
        order = self.claims[peer.path]
        rank = list(order).index(peer.name)
        if not fewest and rank == 0:
            return self.rotate(peer, told)
        if fewest >= rank or self.chance.random() >= self.share(rank):
            return
        needs = {path: Need(count, True, 0) for path, count in told.items() if count < rank and path != peer.path}
        if needs:
            target = draw_path(needs, seed=self.chance.getrandbits(32))
            self.costs.spend("reads", 1)
            self.costs.spend("records", len(self.claims[target]))
            if len(self.claims[target]) < rank:
                self.release(peer)
                self.choose(peer, target)

    # -- a module

    def tick(self, led: Led) -> None:
        """Let the round close by its own rules, with the claims of the module's paths and the count of all others."""
        if led.round.state is RoundState.OPEN or (
            led.round.state is RoundState.COLLECTING
            and self.now_s < led.round.last_s + self.pace.deadline_s
            and self.is_missing(led)
        ):
            return
        claims = self.nobody | {path: self.claims[path] for path in led.paths}
        elsewhere = {led.round.number: max(0, len(self.peers) - sum(map(len, claims.values())))}
        ticked = led.round.tick(
            claims, self.rounds, now_s=self.now_s, elsewhere=elsewhere, is_awaited=self.awaits(led.round.number)
        )
        if not ticked.is_closed:
            led.round = ticked
            return
        self.closed += 1
        self.path_rounds += len(led.paths)
        self.missed += len(set(led.paths) - ticked.paths)
        self.shares_max = max(self.shares_max, len(led.work) - len(ticked.paths))
        self.counted_s += sum(led.work.values()) / len(self.topology.widths)
        led.work = {}
        led.round = Round(number=led.round.number + 1, expected=frozenset(led.paths))
        for path in led.paths:
            for name in list(self.claims[path]):
                peer = self.peers.get(name)
                if peer is not None and peer.doing == "waiting":
                    self.costs.spend("calls", 2)
                    self.later(peer, self.pace.module_bytes * 8 / DOWN_BIT_S, self.wait)

    def awaits(self, number: int) -> Awaited:
        if waits_for_newcomers(number):
            return everybody
        return lambda name, path: name in self.peers and self.peers[name].has_worked

    def is_missing(self, led: Led) -> bool:
        """Whether anybody is that the round waits for: then it cannot be complete."""
        number, work = led.round.number, led.work
        is_awaited = self.awaits(number)
        return any((path, WORKED) not in work for path in led.paths) or any(
            claim.round <= number and (path, name) not in work and is_awaited(name, path)
            for path in led.paths
            for name, claim in self.claims[path].items()
        )

    def tend(self, led: Led) -> None:
        """Fill the group, as its leader does; a module that nobody leads at the beginning is the seed's until there is
        a worker."""
        if led.leader is None:
            if led.leaderless_s is None and led.round.number:
                self.succeed(led)
            return
        alive = [mirror for mirror in led.mirrors if mirror in self.peers]
        if len(alive) < OWNERS - 1:
            around = self.around(led)
            led.mirrors = owners.mirrors(led.id, around, leader=led.leader, present=alive, owners=OWNERS)[:MIRRORS_MAX]

    def around(self, led: Led) -> dict[PeerId, Heartbeat]:
        """Who may look after the module: the neighbours of its place, its mirrors, and those who train it."""
        depth = depth_of(len(self.peers))
        at = place(str(led.id)) >> (PLACE_BITS - depth) if depth else 0
        near = [peer.name for peer in self.peers.values() if not depth or peer.at >> (PLACE_BITS - depth) == at]
        training = [name for path in led.paths for name in list(self.claims[path])[:1] if name in self.peers]
        return {name: Heartbeat(owns=True) for name in (*near, *led.mirrors, *training) if name in self.peers}

    def succeed(self, led: Led) -> None:
        """The order of owners says who; each waits a life of a heartbeat for those before it, who are seen to live."""
        if led.leader is not None:
            return
        around = self.around(led)
        workers = {name for path in led.paths for name in self.claims[path] if name in around} or set(around)
        order = owners.successors(led.id, around, incumbent=None, group=led.mirrors, workers=workers)
        if not order:
            self.at(self.now_s + LOOK_S, lambda: self.succeed(led))
            return

        def take() -> None:
            if order[0] not in self.peers:
                return self.succeed(led)
            led.leader = order[0]
            if led.leaderless_s is not None:
                self.leaderless_max_s = max(self.leaderless_max_s, self.now_s - led.leaderless_s)
                led.leaderless_s = None

        self.at(self.now_s + TAKEOVER_S, take)

    def figures(self) -> Figures:
        minutes = max(self.costs.ordinary_s / 60, 1e-9)
        spent = {name: self.costs.spent[name] / minutes for name in ("reads", "records", "bytes", "puts", "calls")}
        run_minutes, alive = self.end_s / 60, self.costs.alive_s / self.end_s
        return Figures(
            volunteers=self.volunteers,
            hours=self.hours,
            alive_mean=alive,
            **spent,
            hops=spent["reads"] * math.log2(max(alive, 2)) / 3,
            leader_records=max(self.costs.leader_records.values(), default=0.0) / run_minutes,
            leader_calls=max(self.costs.leader_calls.values(), default=0) / run_minutes,
            node_reads=statistics.fmean(reads for reads, _ in self.costs.node_minutes or [(0.0, 0.0)]),
            node_bytes=statistics.fmean(sent for _, sent in self.costs.node_minutes or [(0.0, 0.0)]),
            fullest_records=self.costs.fullest_records,
            fullest_bytes=self.costs.fullest_bytes,
            covered=1 - self.missed / max(self.path_rounds, 1),
            all_covered_s=self.all_covered_s,
            goodput=self.counted_s / max(self.costs.alive_s, 1e-9),
            leaderless_max_s=self.leaderless_max_s,
            rounds=self.closed // len(self.modules),
            shares_max=self.shares_max,
        )
