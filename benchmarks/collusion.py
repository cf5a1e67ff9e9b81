"""`python -m benchmarks.collusion`: how long friends among the auditors pass forged work, and have others' refused.

One module, with the rules of the programs (gate.py, standing.py) and nothing else: no loss gate, no coordinator that
bans anybody, no leader that lies. In each round everybody hands in one work; friends forge all of theirs, call each
other's the same, and others' forged. Printed are medians over seeds, and in brackets what one in twenty exceeds.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from benchmarks.report import JsonFile, run_benchmark, show, table, write_json
from dipaco_p2p.canonical import digest
from dipaco_p2p.owner.auditing import AGAIN
from dipaco_p2p.protocol import gate
from dipaco_p2p.protocol.gate import Appraisal, Judged, Repetition
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.standing import Findings, Standings

SAME, OFF = Repetition(cosine=1.0, ratio=1.0, moments=1.0), Repetition(cosine=0.5, ratio=1.0, moments=1.0)
COORDINATOR = PeerId("coordinator")
RUN = digest(b"a run")
ROUNDS_MAX = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Swarm:
    """Volunteers of one module; the first `friends` of them collude, after `honest` rounds in which they did not."""

    peers: int
    friends: int
    audited: int
    honest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What became of one swarm, counted from the round in which friends begin."""

    first: int
    """Rounds until one of them was found."""
    all: int
    """Until all were."""
    forged: int
    """Forged works that counted by then."""
    refused: float
    """Share of honest works that were refused as forged by then."""
    heard: int
    """Friends whose word still counts then."""


def play(swarm: Swarm, seed: int) -> Course:
    """One course of events. Friends that were found forge no more, and go on lying about others."""
    chance, standings = random.Random(seed), Standings()
    peers = [PeerId(f"peer-{number:04}") for number in range(swarm.peers)]
    friends, caught = set(peers[: swarm.friends]), dict[PeerId, int]()
    forged = honest = refused = 0
    for version in range(1, swarm.honest + ROUNDS_MAX):
        liars = friends if version > swarm.honest else set[PeerId]()
        forgers = liars - caught.keys()
        works = _works(peers, standings, liars, forgers, swarm.audited, chance)
        reasons = gate.refused(works, coordinator=COORDINATOR)
        found = {work.author for id_, work in works.items() if reasons.get(id_) == Reason.NOT_REPEATED}
        caught |= {peer: version - swarm.honest for peer in found & forgers}
        forged += len(forgers & works.keys() - found)
        honest += len(works.keys() - friends) if liars else 0
        refused += len(found - friends)
        authors = [PeerId(author) for author in works.keys() - found]
        standings.add(version, authors=authors, findings=_findings(works, reasons, version))
        if len(caught) == len(friends):
            break
    rounds = [*sorted(caught.values()), *[ROUNDS_MAX] * (len(friends) - len(caught))]
    heard = sum(standings.of(peer).is_heard for peer in friends)
    return Course(first=rounds[0], all=rounds[-1], forged=forged, refused=refused / max(honest, 1), heard=heard)


def _works(
    peers: Sequence[PeerId],
    standings: Standings,
    liars: set[PeerId],
    forgers: set[PeerId],
    audited: int,
    chance: random.Random,
) -> dict[str, Judged]:
    """What everybody that may hands in, by author, and what auditors say of it."""
    works: dict[str, Judged] = {}
    heard = [peer for peer in peers if standings.of(peer).is_heard]
    for author in peers:
        standing, said = standings.of(author), list[Appraisal]()
        if standing.waits:
            continue
        if chance.random() < standing.audit_chance(audited):
            is_forged, least = author in forgers, 2 if chance.random() < AGAIN else 1
            for auditor in chance.sample(heard, len(heard)):
                if len(said) >= least and not gate.is_undecided(said):
                    break
                if auditor != author:
                    is_off = is_forged if auditor not in liars else author not in liars
                    said.append(_appraisal(author, auditor, OFF if is_off else SAME))
        works[author] = Judged(is_known=standing.is_known, appraisals=said)
    return works


def _findings(works: Mapping[str, Judged], reasons: Mapping[str, Reason], version: int) -> Findings | None:
    """What this version notes; each version's works are others."""
    names = {author: digest(f"{version} {author}".encode()) for author in works}
    named = {names[author]: work for author, work in works.items()}
    why = {names[author]: reason for author, reason in reasons.items()}
    return gate.findings(named, why, repeatable=named, is_noted=lambda finding: False)


def _appraisal(author: PeerId, auditor: PeerId, repeated: Repetition) -> Appraisal:
    return Appraisal(
        run=RUN, work=RUN, of=author, tokens=1, gain=1.0, error=0.0, draw="", repeated=repeated, author=auditor
    )


def main(
    peers: Annotated[
        list[int] | None, typer.Option(min=3, help="Volunteers; more than once. Default: 12 and 48.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Courses of each.")] = 200,
    audited: Annotated[int, typer.Option(min=1, help="As `judging.audited` of a run file.")] = 10,
    json: JsonFile = None,
) -> None:
    """Play friends among the auditors: from the first round on, and after 60 honest rounds."""
    swarms = [
        Swarm(peers=count, friends=round(count * share), audited=audited, honest=honest)
        for count in peers or (12, 48)
        for share in (1 / 12, 1 / 4, 1 / 3)
        for honest in (0, 60)
    ]
    rows, figures = [], []
    for swarm in swarms:
        courses = [play(swarm, seed) for seed in range(seeds)]
        figures.append({"swarm": asdict(swarm), "courses": [asdict(one) for one in courses]})
        spread = (_spread([getattr(one, name) for one in courses]) for name in ("first", "all", "forged", "refused"))
        heard = statistics.mean(one.heard for one in courses)
        rows.append([str(swarm.peers), str(swarm.friends), str(swarm.honest), *spread, f"{heard:.1f}"])
    names = ("peers", "friends", "honest before", "first found", "all found", "forged, counted", "honest refused, %")
    show(table("rounds and works until all friends are found", [*names, "still heard"], rows))
    write_json(json, figures)


def _spread(values: Sequence[float]) -> str:
    """The median, and what one in twenty exceeds; shares in percent."""
    scale = 100 if isinstance(values[0], float) else 1
    low, high = statistics.median(values) * scale, sorted(values)[int(0.95 * len(values))] * scale
    return f"{low:.3g} ({high:.3g})"


if __name__ == "__main__":
    run_benchmark(main)
