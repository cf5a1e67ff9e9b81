"""The promises of the design, checked offline on what a swarm left behind; each rule gives one line per breach.

    lost      a contribution with a receipt is counted, reported as expired, or kept for a round that is open
    twice     no contribution counts twice, and none of one author for one path from one version
    digest    who leads in a term makes one digest of a version, unless it gave the first one up for another branch;
              and the archive's history says what its chain says
    grow      versions follow each other without a gap, terms never fall, the archive takes each version once
    verify    every chain comes out again, to the bit, from its contributions
    retaken   the path of a dead or frozen volunteer has another claimant within `RETAKEN_EXPIRIES_MAX` expiries

A receipt names its holders. What only lay on disks that were deleted, or whose peers never came back, is excused:
no protocol could have it; so a receipt with two holders is safe from any single crash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .evidence import Evidence, Timeline
from .schedule import SEED_NODE

RETAKEN_EXPIRIES_MAX = 6.0
"""For the slowest; the median has a bound of its own (figures.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """One promise that was not kept."""

    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.detail}"


def check(evidence: Evidence) -> list[Breach]:
    """Every breach; empty when all promises were kept."""
    return [Breach(rule=rule.__name__.strip("_"), detail=detail) for rule in RULES for detail in rule(evidence)]


def lost_receipts(evidence: Evidence) -> list[str]:
    """Contributions with a receipt that are nowhere, though a holder's disk still exists."""
    safe = evidence.counted | evidence.expired
    receipts = {id_: event for id_, (_, event) in evidence.receipts.items() if id_ not in safe}
    return sorted(
        id_
        for id_, event in receipts.items()
        if not evidence.can_count(event) and not set(event["holders"]) <= evidence.lost_disks
    )


def counted_twice(evidence: Evidence) -> list[str]:
    """Contributions that a chain counts more than once, and works that it counts under two names."""
    found = []
    for module, links in evidence.chains.items():
        shares = [share for link in links for share in link.shares]
        ids = Counter(share.id for share in shares)
        works = Counter((share.peer, share.path, share.base) for share in shares)
        found += [f"{id_[:8]} of {module}" for id_, count in ids.items() if count > 1]
        found += [
            f"{path} of {module} from version {base} by ...{peer[-6:]}"
            for (peer, path, base), count in works.items()
            if count > 1 and not any(ids[s.id] > 1 for s in shares if (s.peer, s.path, s.base) == (peer, path, base))
        ]
    return found


def _lost(evidence: Evidence) -> Iterator[str]:
    for id_ in lost_receipts(evidence):
        name, event = evidence.receipts[id_]
        yield f"{id_[:8]} of {name} for {event['module']} from version {event['base']} has a receipt but no version"


def _twice(evidence: Evidence) -> Iterator[str]:
    for found in counted_twice(evidence):
        yield f"{found} is counted twice"


def _digest(evidence: Evidence) -> Iterator[str]:
    for name in evidence.histories:  # in two halves of a swarm two may lead in a term of one number
        yield from _made_twice(evidence, name)
    chains = {(module, link.version): link.digest for module, links in evidence.chains.items() for link in links}
    for _, event in evidence.events("archived"):
        key = (event["module"], event["version"])
        if chains.get(key) != event["digest"]:
            yield f"version {key[1]} of {key[0]} was archived as {event['digest'][:8]}, the chain has {chains.get(key)}"


def _made_twice(evidence: Evidence, name: str) -> Iterator[str]:
    made: dict[tuple[str, int, int], str] = {}
    for event in evidence.histories[name]:
        if event.ev == "gave_up":  # a better branch, or what it was made of is lost: its leader goes on from before it
            made = {key: v for key, v in made.items() if key[0] != event["module"] or key[1] <= event["after"]}
        elif event.ev == "version":
            key = module, version, term = event["module"], event["version"], event["term"]
            if made.setdefault(key, event["digest"]) != event["digest"]:
                yield f"{name} made version {version} of {module} with two digests in term {term}"


def _grow(evidence: Evidence) -> Iterator[str]:
    for module, links in evidence.chains.items():
        if [link.version for link in links] != list(range(1, len(links) + 1)):
            yield f"the chain of {module} has a gap: {[link.version for link in links]}"
        for before, after in zip(links, links[1:], strict=False):
            if after.term < before.term:
                yield f"version {after.version} of {module} is of term {after.term}, after one of term {before.term}"
    last: dict[str, int] = {}
    for event in evidence.histories.get(SEED_NODE, ()):
        if event.ev == "archived":
            module = event["module"]
            if event["version"] <= last.get(module, 0):
                yield f"version {event['version']} of {module} was archived after version {last[module]}"
            last[module] = event["version"]


def _verify(evidence: Evidence) -> Iterator[str]:
    yield from evidence.problems


def _retaken(evidence: Evidence) -> Iterator[str]:
    timeline, bound_s = Timeline(evidence), RETAKEN_EXPIRIES_MAX * evidence.ttl_s
    for death in evidence.deaths():
        path, back_s = timeline.path_of(death.name, death.t_s), evidence.back_s(death)
        until_s = death.t_s + bound_s
        if path is None or until_s > evidence.ended_s or (back_s is not None and back_s < until_s):
            continue  # it held nothing, or the run was over, or it came back in time to go on itself
        taken_s = timeline.retaken_s(death, path)
        if taken_s is None or taken_s > until_s:
            yield f"{path} of {death.name} had no other claimant within {bound_s:.0f} s"


RULES = (_lost, _twice, _digest, _grow, _verify, _retaken)
