"""Which faults come when: a pure function of a seed, so that a run under faults can be asked for again.

A fault says what happens to whom and for how long; its actions are what is done to processes at which second. Time
counts from the moment when the swarm works. Nothing here looks at processes: what was really done, and when, notes
who plays the schedule (swarm.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

SEED_NODE = "seed"
"""The seed node's name among the members of a swarm; the others are `volunteer-1` and so on."""
SLOT_SHARE = (0.2, 0.6)
"""Each fault begins in this part of its slot, so that two never come together."""


class Kind(StrEnum):
    """What can happen to a process."""

    KILL = "SIGKILL"
    TERM = "SIGTERM"
    FREEZE = "SIGSTOP"
    JOIN = "late join"
    SEED = "seed killed"


class Verb(StrEnum):
    """What is done to a process."""

    START = "start"
    KILL = "kill"
    TERM = "term"
    FREEZE = "freeze"
    THAW = "thaw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of one member."""

    at_s: float
    kind: Kind
    victim: str
    away_s: float | None
    """How long it is away; None: it never comes back. Of a late join 0."""

    @property
    def back_s(self) -> float | None:
        """When it comes back."""
        return None if self.away_s is None else self.at_s + self.away_s


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Action:
    """Something that is done to one process."""

    at_s: float
    verb: Verb
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of what is to happen."""

    duration_s: float
    faults_per_minute: float = 1.0
    kinds: tuple[Kind, ...] = (Kind.KILL,)
    away_s: tuple[float, float] = (10.0, 20.0)
    """Bounds of the time that a victim is away."""
    never_back: float = 0.0
    """Share of the killed volunteers that stay away for good."""
    spared: int = 0
    """So many of the first volunteers, the last ones, never have a fault."""

    @property
    def slots(self) -> int:
        """How many faults there are: one in each of equally long slots."""
        return round(self.duration_s / 60 * self.faults_per_minute)


def volunteers(count: int) -> tuple[str, ...]:
    """The names of the first volunteers."""
    return tuple(f"volunteer-{number}" for number in range(1, count + 1))


def draw(seed: int, plan: Plan, *, peers: int) -> tuple[Fault, ...]:
    """The faults of a run that `peers` volunteers begin: the same for the same arguments.

    No member has a fault while it is away, and the last volunteer that is left stays.
    """
    chance, members, faults = random.Random(seed), list(volunteers(peers)), list[Fault]()
    spared = members[max(0, peers - plan.spared) :]
    for slot in range(plan.slots):
        at_s = (slot + chance.uniform(*SLOT_SHARE)) * plan.duration_s / plan.slots
        present = [name for name in members if not _is_away(name, faults, at_s)]
        victims = [name for name in present if name not in spared] if len(present) > 1 else []
        newcomer = f"volunteer-{len(members) + 1}"
        fault = _fault(chance, plan, at_s=at_s, victims=_victims(plan, victims, newcomer, faults, at_s))
        if fault is not None:
            faults.append(fault)
            members += [fault.victim] if fault.kind is Kind.JOIN else []
    return tuple(faults)


def actions(faults: Sequence[Fault]) -> tuple[Action, ...]:
    """What is to be done to which process, in order."""
    return tuple(sorted(action for fault in faults for action in _actions(fault)))


def _victims(
    plan: Plan, volunteers: list[str], newcomer: str, faults: Sequence[Fault], at_s: float
) -> dict[Kind, list[str]]:
    """Whom each kind of fault can befall now; kinds that can befall nobody are left out."""
    others = {Kind.JOIN: [newcomer], Kind.SEED: [] if _is_away(SEED_NODE, faults, at_s) else [SEED_NODE]}
    found = {kind: others.get(kind, volunteers) for kind in plan.kinds}
    return {kind: names for kind, names in found.items() if names}


def _fault(chance: random.Random, plan: Plan, *, at_s: float, victims: Mapping[Kind, Sequence[str]]) -> Fault | None:
    if not victims:
        return None
    kind = chance.choice(list(victims))
    away_s = None if kind is Kind.KILL and chance.random() < plan.never_back else chance.uniform(*plan.away_s)
    return Fault(at_s=at_s, kind=kind, victim=chance.choice(victims[kind]), away_s=0.0 if kind is Kind.JOIN else away_s)


def _is_away(name: str, faults: Sequence[Fault], at_s: float) -> bool:
    return any(fault.victim == name and (fault.back_s is None or at_s < fault.back_s) for fault in faults)


def _actions(fault: Fault) -> Iterator[Action]:
    begin, end = {
        Kind.KILL: (Verb.KILL, Verb.START),
        Kind.SEED: (Verb.KILL, Verb.START),
        Kind.TERM: (Verb.TERM, Verb.START),
        Kind.FREEZE: (Verb.FREEZE, Verb.THAW),
        Kind.JOIN: (None, Verb.START),
    }[fault.kind]
    if begin is not None:
        yield Action(at_s=fault.at_s, verb=begin, name=fault.victim)
    if fault.back_s is not None:
        yield Action(at_s=fault.back_s, verb=end, name=fault.victim)
