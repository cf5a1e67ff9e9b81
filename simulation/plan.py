"""What one integer makes of a run: its grid, its volunteers, its network, and when which fault strikes.

Everything that happens is a function of the plan, so a seed repeats its run.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dipaco_p2p.config import (
    InnerConfig,
    JudgingConfig,
    LevelConfig,
    LivenessConfig,
    ModelConfig,
    OuterConfig,
    RoundsConfig,
    RunConfig,
    WarmupConfig,
)

GRIDS = ((1, 2, 2), (1, 2), (2, 2), (1, 3), (2, 1), (1, 4), (2, 3))
STEPS = 2
FAULTY_S = (20.0, 60.0)
LOSSES = (0.0, 0.0, 0.02, 0.05)
OVERLAPS = (False, False, False, True)
JUDGES = (0, 2, 2, 2, 3)
"""How many judge each work, as often as the numbers stand here."""
AUDITED = (0, 1, 3, 100)
"""How many first works of each volunteer are audited."""
DECREES = ("ban", "halt", "rollback")
"""What the coordinator may decree, by its names among the faults (faults.py)."""
GROWTH = "growth"
GROWN_UNTIL_S = 15.0
GROWN_SHARE = 0.1
"""Of the seeds that may, if they may have other faults as well."""
NARROW_SHARE = 0.25
LONG_SHARE = 0.5
CHECKPOINT = 1
"""Whoever comes to a longer chain, in a run where it looks long, begins at one of the newest versions."""
EARLIER_SHARE = 0.3
OF_LARGE_SWARMS = ("lying summary", "flooded bucket")
KEEPING = "lying keeper"
"""Where it strikes, volunteers keep old versions for others."""
LIGHT_SHARE = 0.2
"""Of the seeds without a lying keeper, which needs a full archive; where a leader lies, all of these."""
BARE_SHARE = 0.5
"""Of the light archives: they have parameters only where they need them."""
LYING = "lying leader"
SPOILING = "spoiling volunteer"
"""Where it strikes, one volunteer alone worked in a stage before."""
EARLY = {
    KEEPING: ("keepers", 0.15, 10.0),
    LYING: ("lying", 0.1, 10.0),
    "usurper": ("usurper", 0.1, 2.0),
    SPOILING: ("spoiling", 0.05, 1.5),
    "leaving forger": ("leaving", 0.05, 1.5),
    "idle worker": ("idle worker", 0.05, 12.0),
}
"""Faults that begin early: the name of the lot of each, its share of the seeds, and until when it begins. By lots of
their own, as decrees, so that other seeds are what they were before there was such a fault."""
REMADE = (0.0, 0.0, 0.3)
"""The share of versions that a light archive makes again."""
DECREED_SHARE = 0.3
"""Of the seeds that may, if they may have other faults as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One fault: when, which, and the seed of what it draws itself."""

    at_s: float
    name: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run."""

    seed: int
    config: RunConfig
    volunteers: int
    step_s: tuple[float, ...]
    """Seconds of an inner step of each volunteer."""
    join_s: tuple[float, ...]
    """When each comes for the first time."""
    delay_s: tuple[float, float]
    loss: float
    faulty_s: float
    """From here on there are no faults any more."""
    faults: tuple[PlannedFault, ...]
    remade: float = 1.0
    """The share of versions that the coordinator makes again; below 1 its archive is light."""
    measured: float = 1.0
    """Likewise of the losses that it measures; below 1 its archive has parameters only where it needs them."""
    is_narrow: bool = False
    """Whether peers know as little of each other as in a swarm of thousands: buckets split when they have a few
    members, and nobody reads the swarm whole."""
    is_long: bool = False
    """Whether chains look so long to whoever comes late that it begins at a checkpoint."""
    earlier: int = 0
    """So many of the first volunteers worked in a stage before."""

    @property
    def has_keepers(self) -> bool:
        """Whether volunteers keep old versions: where one lies, and where the archive is light."""
        return self.remade < 1 or any(fault.name == KEEPING for fault in self.faults)

    @property
    def ttl_s(self) -> float:
        return self.config.liveness.heartbeat_ttl_s


def make_plan(seed: int, faults: Sequence[str], *, volunteers: int | None = None) -> Plan:
    """The run of this seed, with faults of these names."""
    chance = random.Random(seed)
    count = volunteers or chance.choice((4, 4, 4, 5, 5, 5, 6, 6, 8, 12))
    is_large = count > 20
    faulty_s = chance.uniform(*FAULTY_S)
    decrees = [name for name in faults if name in DECREES]
    others = [name for name in faults if name not in (*DECREES, *EARLY, GROWTH)]
    count_of_others = chance.randint(3, 10) if others else 0
    found = _drawn(chance, others, count_of_others, until_s=faulty_s)
    found += _decrees(seed, decrees, is_all=not others, until_s=faulty_s)
    is_all = not (others or decrees)
    for name in EARLY:
        found += _early(seed, faults, name, is_all=is_all)
    found += _growth(seed, is_all=not others) if GROWTH in faults else []
    return Plan(
        seed=seed,
        config=_config(chance, is_large=is_large, overlap=_has_overlap(seed), judging=_judging(seed)),
        volunteers=count,
        step_s=tuple(chance.uniform(0.2, 1.0) for _ in range(count)),
        join_s=tuple(chance.uniform(0.0, 5.0) for _ in range(count)),
        delay_s=(0.001, chance.choice((0.01, 0.05, 0.2))),
        loss=chance.choice(LOSSES),
        faulty_s=faulty_s,
        faults=tuple(sorted(found, key=lambda fault: fault.at_s)),
        remade=(remade := _remade(seed, {fault.name for fault in found})),
        measured=0.0 if remade < 1 and random.Random(f"measured {seed}").random() < BARE_SHARE else 1.0,
        earlier=1 if any(fault.name == SPOILING for fault in found) else _earlier(seed, count),
        is_long=random.Random(f"long {seed}").random() < LONG_SHARE,
        is_narrow=is_narrow(seed) or any(fault.name in OF_LARGE_SWARMS for fault in found),
    )


def _drawn(chance: random.Random, faults: Sequence[str], count: int, *, until_s: float) -> list[PlannedFault]:
    return [
        PlannedFault(at_s=chance.uniform(3.0, until_s), name=chance.choice(faults), seed=chance.randrange(2**31))
        for _ in range(count)
    ]


def _decrees(seed: int, names: Sequence[str], *, is_all: bool, until_s: float) -> list[PlannedFault]:
    """By a lot of their own, as the overlap, so that other seeds are what they were."""
    chance = random.Random(f"decrees {seed}")
    if not names or (chance.random() >= DECREED_SHARE and not is_all):
        return []
    return _drawn(chance, names, chance.randint(1, 3), until_s=until_s)


def _early(seed: int, faults: Sequence[str], name: str, *, is_all: bool) -> list[PlannedFault]:
    """As decrees, and early: who lies late has little left to lie about."""
    lot, share, until_s = EARLY[name]
    chance = random.Random(f"{lot} {seed}")
    if name not in faults or (chance.random() >= share and not is_all):
        return []
    return [PlannedFault(at_s=chance.uniform(1.0, until_s), name=name, seed=chance.randrange(2**31))]


def _growth(seed: int, *, is_all: bool) -> list[PlannedFault]:
    """By a lot of its own as well; soon, or no round is left in which it could end a stage."""
    chance = random.Random(f"growth {seed}")
    if chance.random() >= GROWN_SHARE and not is_all:
        return []
    return _drawn(chance, [GROWTH], 1, until_s=GROWN_UNTIL_S)


def _remade(seed: int, faults: Collection[str]) -> float:
    """By a lot of its own as well."""
    chance = random.Random(f"light {seed}")
    remade, is_light = chance.choice(REMADE), chance.random() < LIGHT_SHARE
    return remade if KEEPING not in faults and (is_light or LYING in faults) else 1.0


def is_narrow(seed: int) -> bool:
    """By a lot of its own as well."""
    return random.Random(f"narrow {seed}").random() < NARROW_SHARE


def _earlier(seed: int, volunteers: int) -> int:
    """By a lot of its own as well."""
    chance = random.Random(f"earlier {seed}")
    return chance.randint(1, volunteers) if chance.random() < EARLIER_SHARE else 0


def _has_overlap(seed: int) -> bool:
    """By a lot of its own, so that runs without are what they were before there was a choice."""
    return random.Random(f"overlap {seed}").choice(OVERLAPS)


def _judging(seed: int) -> JudgingConfig:
    """By lots of their own, too."""
    judges, audited = random.Random(f"judges {seed}").choice(JUDGES), random.Random(f"audited {seed}").choice(AUDITED)
    return JudgingConfig(judges=judges, sequences=8, audited=audited)


def _config(chance: random.Random, *, is_large: bool, overlap: bool, judging: JudgingConfig) -> RunConfig:
    widths = chance.choice(GRIDS)
    levels = tuple(
        LevelConfig(modules=width, blocks=0 if number == 0 else 1, embedding=number == 0, head=number == 0)
        for number, width in enumerate(widths)
    )
    model = ModelConfig(vocab_size=258, width=8, heads=1, ffn_width=8, context=65, levels=levels)
    rounds = RoundsConfig(
        rounds=2 if is_large else chance.randint(3, 6),
        min_paths=chance.choice((1, 1, 2)),  # more, and a run may wait, rightly, for volunteers that never come
        quorum=chance.choice((0.5, 0.75, 1.0)),
        deadline_s=chance.uniform(5.0, 12.0),
        grace_s=1.0,
        staleness=chance.choice((0, 1, 1, 2)),
        owners=chance.choice((1, 2, 3, 3, 3)),
        overlap=overlap,
    )
    return RunConfig(
        name="simulated",
        model=model,
        warmup=WarmupConfig(rounds=0),
        inner=InnerConfig(steps=STEPS, batch=2, warmup_steps=1),
        outer=OuterConfig(norm_rule=chance.choice(("sqrt", "rda"))),
        rounds=rounds,
        liveness=LivenessConfig(heartbeat_ttl_s=30.0 if is_large else chance.uniform(4.0, 8.0), settle_s=0.5),
        judging=judging,
    )
