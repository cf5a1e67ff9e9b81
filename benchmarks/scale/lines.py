"""What a round costs the lines of a busy leader, keeper and coordinator: worked out from the rules, not played.

A module is counted through which most paths go, when everybody trains. Its leader, its mirrors and the archive take in
each contribution that a version counts, and each of them from its author; before, the leader sent it on to the others.
A light archive takes the updates of all modules instead; what it makes again itself (`remade`) is not counted here
(owner/archive.py). Where volunteers measure for it, it takes the signed documents, and the parameters of every
`SNAPSHOTS`-th version. Versions went to every trainer from the leader, the mirrors and the coordinator, which shared
that evenly, before trainers had turns; now an owner sends at most two copies, and the coordinator none.

Keepers bring what makes the versions of their ranges again (protocol/keeping.py). Which peer has how many of the ranges
that grow at the same time is a matter of lots: these are drawn for peers with made-up ids.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dipaco_p2p.config import SHARES_MAX
from dipaco_p2p.core.outer.compress import CODECS
from dipaco_p2p.protocol.claims import places_drawn
from dipaco_p2p.protocol.fan_out import COPIES
from dipaco_p2p.protocol.keeping import KEEPERS, RANGE_VERSIONS, SHARES, Range, keepers
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId

SHARE_BYTES, SIGNED_BYTES = 430, 1000
"""Of a share in a version's document; of an appraisal or a check (node/calls.py)."""
JUDGES = MEASURERS = 2
FLOAT_BYTES = 4
STATE_FLOATS = 3
"""Of a parameter: itself, momentum and residual, which a range begins with."""
RANGES_DRAWN = 9
"""Of so many ranges that follow each other the busiest keeper is looked for: the median counts."""
SNAPSHOTS = 50
"""Every so many versions the default run file has a light archive keep the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One case; Mbit/s are means over a round."""

    volunteers: int
    values: int
    """Of a module."""
    uplink: str
    downlink: str
    round_s: float
    contributions: int
    """That a version counts."""
    trainers: int
    """Of the module."""
    leader_in: float
    author_out: float
    """What a volunteer sends of its own work in the modules of its path."""
    work_before: float
    """Contributions that the leader sent on before mirrors fetched them from their authors."""
    leader_before: float
    """Versions that it sent before trainers had turns."""
    leader_out: float
    """Versions that it sends now."""
    keepers: int
    keeper_in: float
    """What a keeper brings for others, on average,"""
    busiest_keeper_in: float
    """and the one with the most ranges."""
    coordinator_before: float
    """Versions of all modules that the coordinator sent."""
    coordinator_in: float
    """Contributions to all modules that its archive takes."""
    light_in: float
    """Updates of all modules that a light one takes instead."""
    bare_in: float
    """What one takes that has parameters where it needs them alone."""
    measuring: float
    """Parameters that a volunteer fetches, and another sends, to measure for it: the mean of all."""

    def contributions_of(self, down_mbit: float) -> int:
        """So many a version could count before an owner's downlink is full."""
        return int(self.contributions * down_mbit / self.leader_in)


def load(
    volunteers: int,
    *,
    widths: Sequence[int],
    values: int,
    uplink: str,
    downlink: str,
    round_s: float,
    owners: int = 3,
    contributions_max: int = SHARES_MAX,
    keepers: int = 100,
) -> Load:
    """Of a grid of modules of `values` parameters each, where so many volunteers are `keepers` of all that they can."""
    paths, width = math.prod(widths), min(widths)
    through = paths // width
    places = places_drawn(contributions_max // through)
    contributions = through * max(1, min(volunteers // paths, places))
    trainers = max(1, volunteers // width)
    payload, update = CODECS[uplink].tensor_bytes(values), CODECS[downlink].tensor_bytes(values)

    def mbit(bytes_: float) -> float:
        return bytes_ * 8 / 1e6 / round_s

    shared, modules = trainers / (owners + 1), sum(widths)
    kept = contributions * payload + STATE_FLOATS * FLOAT_BYTES * values / RANGE_VERSIONS
    signed = modules * contributions * (SHARE_BYTES + JUDGES * SIGNED_BYTES) + paths * MEASURERS * SIGNED_BYTES
    return Load(
        volunteers=volunteers,
        values=values,
        uplink=uplink,
        downlink=downlink,
        round_s=round_s,
        contributions=contributions,
        trainers=trainers,
        leader_in=mbit(contributions * payload),
        author_out=mbit(payload * (owners + 1) * len(widths)),
        work_before=mbit(contributions * payload * owners),
        leader_before=mbit(shared * update),
        leader_out=mbit(min(COPIES, trainers / owners) * update),
        keepers=keepers,
        keeper_in=mbit(kept * modules * min(KEEPERS, keepers) / keepers),
        busiest_keeper_in=mbit(kept * most_ranges(widths, count=keepers)),
        coordinator_before=mbit(shared * update * modules),
        coordinator_in=mbit(contributions * payload * modules),
        light_in=mbit(update * modules),
        bare_in=mbit(signed + FLOAT_BYTES * values * modules / SNAPSHOTS),
        measuring=mbit(MEASURERS * paths * len(widths) * FLOAT_BYTES * values / volunteers),
    )


def most_ranges(widths: Sequence[int], *, count: int) -> float:
    """Of how many modules one of so many keepers keeps the newest range, where it is the one with most."""
    modules = [ModuleId(level, index) for level, width in enumerate(widths) for index in range(width)]
    offers = {PeerId(f"keeper {number}"): SHARES for number in range(count)}
    found = []
    for number in range(RANGES_DRAWN):
        chosen = (peer for module in modules for peer in keepers("lines", Range(module, number), offers))
        found.append(max(Counter(chosen).values()))
    return statistics.median(found)


def rows(loads: Sequence[Load], *, up_mbit: float, down_mbit: float) -> Iterator[str]:
    """For people; the first line says what the columns are."""
    yield "volunteers  values of a module  up      down    s a round  counted  trainers  |  author out  leader in"
    yield "           leader out: work before  now  versions before   now  |  coordinator: versions before  now  |  cut"
    for one in loads:
        is_full = one.leader_in > down_mbit or one.leader_out > up_mbit
        verdict = f"needed above {one.contributions_of(down_mbit)} contributions" if is_full else "not needed"
        yield (
            f"{one.volunteers:10d}  {one.values:18,d}  {one.uplink:6s}  {one.downlink:6s}  {one.round_s:9.0f}"
            f"  {one.contributions:7d}  {one.trainers:8d}  |  {one.author_out:10.2f}  {one.leader_in:9.1f}"
        )
        yield (
            f"            {one.work_before:23.1f}  {0:3d}  {one.leader_before:15.1f}  {one.leader_out:4.2f}  |"
            f"  {one.coordinator_before:29.1f}  {0:3d}  |  {verdict}"
        )
        yield (
            f"            coordinator: in {one.coordinator_in:.1f}; with a light archive {one.light_in:.2f}, where"
            f" volunteers measure {one.bare_in:.2f} (each {one.measuring:.2f})"
        )
        yield f"            {one.keepers} keepers: in {one.keeper_in:.1f}; the busiest {one.busiest_keeper_in:.1f}"
