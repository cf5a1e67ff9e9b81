"""What a minute of the model costs: reads, records and bytes of ordinary volunteers, of leaders, and of DHT nodes."""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dipaco_p2p import strict
from dipaco_p2p.protocol.liveness import Claim, Head, Heartbeat
from dipaco_p2p.protocol.neighbours import (
    BUCKET_MAX,
    DEPTH_MAX,
    LOOKS_MAX,
    PLACE_BITS,
    bits,
    is_whole,
    looks_between,
    place,
)
from dipaco_p2p.protocol.records import claims_key, heads_key, peers_key, sign_record
from dipaco_p2p.protocol.rounds import PathClaims, Round
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.protocol.summaries import PathSummary, write_summaries
from dipaco_p2p.topology import ModuleId, PathId, Topology

TTL_S = 30.0
LOOK_S, BEAT_S = TTL_S / 6, TTL_S / 3
TOLD_S = 15.0
UP_BIT_S, DOWN_BIT_S = 20e6, 100e6
TAKEOVER_S = 5.0
"""To gather a chain and announce it."""
OWNERS = 2
REPLICAS = 5
SOUGHT = 4
DRAWS_MAX = 4
ACCOUNT_S = 60.0
WORKED = PeerId("")
"""Stands for anybody: that a path is in."""
RUN = "0" * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long a round takes, and what it sends."""

    train_s: float = 300.0
    train_sigma: float = 0.25
    """Of the logarithm of how much longer one volunteer takes than another."""
    module_bytes: float = 20e6
    deadline_s: float = 600.0
    settle_s: float = 5.0


@dataclass(slots=True)
class Peer:
    """One volunteer."""

    name: PeerId
    at: int
    """Its place among the buckets."""
    pace: float
    """How long its steps take, of the usual time."""
    until_s: float
    joined_s: float
    alive: bool = True
    path: PathId | None = None
    since_s: float = 0.0
    round: int = 0
    doing: str = "choosing"
    counted_s: float = 0.0
    has_worked: bool = False
    serial: int = 0
    """Of what it does: an event about an earlier one is void."""


@dataclass(slots=True)
class Led:
    """One module."""

    id: ModuleId
    paths: tuple[PathId, ...]
    round: Round
    leader: PeerId | None = None
    mirrors: tuple[PeerId, ...] = ()
    leaderless_s: float | None = None
    work: dict[tuple[PathId, PeerId], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a minute costs whom, and how well the swarm works."""

    volunteers: int
    hours: float
    alive_mean: float
    reads: float
    records: float
    bytes: float
    puts: float
    calls: float
    hops: float
    leader_records: float
    """That the busiest leader reads a minute."""
    leader_calls: float
    """That the busiest leader answers a minute."""
    node_reads: float
    """That the busiest DHT node answers a minute."""
    node_bytes: float
    fullest_records: int
    fullest_bytes: int
    covered: float
    """Of the path-rounds that closed."""
    all_covered_s: float | None
    """From the 2,000th join (the last one of a smaller swarm's first ten minutes) until every path had somebody."""
    goodput: float
    """Seconds of training that counted, of those that volunteers were there."""
    leaderless_max_s: float
    rounds: int
    shares_max: int
    """Contributions that one version counted."""


def record_bytes() -> dict[str, int]:
    """The sizes of signed records as they travel."""
    signer, path, module = Signer(bytes(32)), PathId((15, 15)), ModuleId(1, 15)
    address = f"/ip4/203.0.113.250/tcp/31337/p2p/{signer.peer}"
    told = write_summaries([PathSummary(claimants=39, round=140, age_s=12.0)] * 16)
    head = Head(version=140, digest="a" * 64, term=9, weight=10**9, final=139, grant="b" * 128, paths=told)
    head = strict.load(Head, strict.plain(head) | {"mirrors": [signer.peer], "granted_by": signer.peer}, where="a head")
    bodies = {
        "heartbeat": (
            peers_key(RUN, "0" * 8),
            Heartbeat(addresses=(address, address), owns=True, doing="training", path=path),
        ),
        "claim": (claims_key(RUN, path), Claim(path=path, since_s=1.7e9, round=140)),
        "head": (heads_key(RUN, module), head),
    }
    return {
        name: len(sign_record(signer, key=key, counter=1, expires_s=1.7e9, body=strict.plain(body)).to_bytes())
        for name, (key, body) in bodies.items()
    }


def depth_of(peers: int) -> int:
    """Of most buckets: they split when they are full."""
    return min(DEPTH_MAX, max(0, math.ceil(math.log2(max(1, peers) / BUCKET_MAX))))


class Costs:
    """Kept while a swarm plays, whose claims and modules these are."""

    def __init__(self, topology: Topology, claims: PathClaims, modules: Mapping[ModuleId, Led]) -> None:
        self.topology, self.claims, self.modules = topology, claims, modules
        self.sizes = record_bytes()
        self.spent: dict[str, float] = defaultdict(float)
        """Of ordinary volunteers, all together."""
        self.ordinary_s = self.alive_s = 0.0
        self.leader_records: dict[ModuleId, float] = defaultdict(float)
        self.leader_calls: Counter[PeerId] = Counter()
        self.node_minutes: list[tuple[float, float]] = []
        self.fullest_records = self.fullest_bytes = 0
        self.released: deque[tuple[float, PathId]] = deque()
        """Claims that were given up, and until when the DHT has them."""

    def spend(self, what: str, amount: float) -> None:
        self.spent[what] += amount

    def account(self, alive: list[Peer], span_s: float, *, now_s: float) -> None:
        """The looks of everybody in this time."""
        looks, depth = span_s / LOOK_S, depth_of(len(alive))
        members = Counter(peer.at >> (PLACE_BITS - depth) if depth else 0 for peer in alive)
        near = Counter(place(str(module)) >> (PLACE_BITS - depth) if depth else 0 for module in self.modules)
        leaders: dict[PeerId, list[Led]] = {}
        for led in self.modules.values():
            if led.leader is not None:
                leaders.setdefault(led.leader, []).append(led)
        self.fullest_records = max(self.fullest_records, *members.values(), *map(len, self.claims.values()), 0)
        self.fullest_bytes = max(
            self.fullest_bytes,
            max(members.values(), default=0) * self.sizes["heartbeat"],
            max(map(len, self.claims.values())) * self.sizes["claim"],
        )
        everything = is_whole(depth=depth, modules=len(self.modules), paths=len(self.claims), peers=len(alive))
        while self.released and self.released[0][0] <= now_s:
            self.released.popleft()
        given_up = Counter(path for _, path in self.released)
        everywhere = sum(map(len, self.claims.values())) + len(self.released)
        for peer in alive:
            bucket = peer.at >> (PLACE_BITS - depth) if depth else 0
            count = members[bucket]
            rate = looks / looks_between(count)
            reads, beats = rate + looks * (2 if depth else 1) / LOOKS_MAX, rate * count
            replicas = len(self.claims[peer.path]) + given_up[peer.path] if peer.path is not None else 0
            far = looks / (LOOKS_MAX if peer.doing == "training" else 1)  # looks also at what others train
            ours = len(self.topology.widths)
            heads = ours * looks + min(len(self.modules) - ours, near[bucket]) * far
            sought = 1 + len(self.topology.widths) * OWNERS + min(SOUGHT, replicas) if depth else 0
            seeking = looks / LOOKS_MAX * sought
            claims = looks / looks_between(replicas)
            waiting = looks * (peer.doing == "waiting")
            one_more = waiting / looks_between(replicas)
            if peer.name in leaders:
                through = {path for led in leaders[peer.name] for path in led.paths}
                read = sum(looks / looks_between(len(self.claims[path])) * len(self.claims[path]) for path in through)
                level = looks / LOOKS_MAX * 16 * len(leaders[peer.name])
                for led in leaders[peer.name]:
                    self.leader_records[led.id] += beats + read + heads + level
                continue
            keys, read = claims + one_more, (claims + one_more) * replicas
            if everything:
                keys, read = looks + far * (len(self.claims) - 1), looks * replicas + far * (everywhere - replicas)
                waiting = 0.0
            self.ordinary_s += span_s
            self.spent["reads"] += reads + heads + seeking + waiting + keys
            self.spent["records"] += beats + heads + seeking + waiting + read
            self.spent["bytes"] += (beats + seeking) * self.sizes["heartbeat"] + read * self.sizes["claim"]
            self.spent["bytes"] += (heads + waiting) * self.sizes["head"]
            self.spent["puts"] += ((2 if depth else 1) + 1) * span_s / BEAT_S
        self.alive_s += span_s * len(alive)
        if alive and int(now_s) % 600 < span_s:
            self.node_minutes.append(self.busiest_node(alive, depth, members, 60 / LOOK_S))

    def busiest_node(self, alive: list[Peer], depth: int, members: Counter[int], looks: float) -> tuple[float, float]:
        """Reads and bytes a minute of the node that answers most: each read is answered by all that keep the key."""
        load: dict[int, float] = defaultdict(float)
        sent: dict[int, float] = defaultdict(float)
        places = sorted(peer.at for peer in alive)
        for key, reads, size in self.loads(depth, members, looks, len(alive)):
            for at in nearest(places, place(key)):
                load[at] += reads
                sent[at] += reads * size
        return max(load.values(), default=0.0), max(sent.values(), default=0.0)

    def loads(self, depth: int, members: Counter[int], looks: float, count: int) -> Iterator[tuple[str, float, float]]:
        """Each key with its reads in so many looks, and the bytes of an answer."""
        for led in self.modules.values():
            following = sum(len(self.claims[path]) for path in led.paths)
            near = members.get(place(str(led.id)) >> (PLACE_BITS - depth), 0) if depth else count
            yield f"heads {led.id}", looks * (following + near), float(self.sizes["head"])
        for path, claims in self.claims.items():
            rate = looks / looks_between(len(claims))
            yield f"claims {path}", rate * (len(claims) + len(self.topology.widths)), len(claims) * self.sizes["claim"]
        for bucket, many in members.items():
            rate = looks / looks_between(many) + looks / LOOKS_MAX
            yield f"peers {bits(bucket << (PLACE_BITS - depth), depth)}", rate * many, many * self.sizes["heartbeat"]
        if depth:
            yield "peer seed", looks / LOOKS_MAX * count, float(self.sizes["heartbeat"])


def nearest(places: list[int], at: int) -> list[int]:
    """The nodes nearest to a place by the bits that differ: those that share its longest beginnings."""
    low, high, found = 0, len(places), len(places)
    for depth in range(PLACE_BITS + 1):
        first = (at >> (PLACE_BITS - depth)) << (PLACE_BITS - depth) if depth else 0
        begin, end = bisect.bisect_left(places, first), bisect.bisect_left(places, first + (1 << (PLACE_BITS - depth)))
        if end - begin < REPLICAS:
            break
        low, high, found = begin, end, end - begin
    return sorted(places[low:high], key=lambda one: one ^ at)[:REPLICAS] if found else []
