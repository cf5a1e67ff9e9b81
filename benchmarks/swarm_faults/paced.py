"""What judging, audits and kills cost where steps take time and nothing else: the real programs in virtual time.

On one machine the dead lend their cores to the living, and auditors take them from trainers. Here every step takes as
long as it is told to, whatever else goes on, so what is lost was waited for. A network with 10 to 50 ms of delay and no
loss; measuring a loss takes no time, repeating a work as long as its steps did.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from benchmarks.report import show, table, write_json
from benchmarks.scale.counted import Unfinished, counted_plan
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from simulation.plan import Plan as Scene
from simulation.speed import remembered_signatures
from simulation.world import World, disks_folder, perform

from .schedule import Action, Plan, Verb, actions, draw

WIDTHS = (1, 2, 2)
STEPS = 20
WARM_UP_S = 30.0
"""Before the first kill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paced:
    """One run in numbers; times are virtual."""

    tokens: int
    """That the chains count, of all modules together."""
    versions: int
    trained: float
    """Share of the time that volunteers lived in which they took steps of their own."""
    living: float
    """Share of the time that they lived."""
    works: int
    audits: int
    on_probation_s: float | None
    """Median time between two versions of the trunk while any author is on probation; None without such a time."""
    round_s: float | None
    """After that."""


class _Struck(Unfinished):
    """A world whose volunteers are killed as a schedule says."""

    schedule: Sequence[Action] = ()
    away_s = 0.0

    async def play(self) -> None:
        striking = asyncio.create_task(self._follow())
        await super().play()
        striking.cancel()
        await asyncio.gather(striking, return_exceptions=True)  # it counts who is still away

    async def _follow(self) -> None:
        killed_s: dict[str, float] = {}
        try:
            for action in self.schedule:
                await asyncio.sleep(max(0.0, WARM_UP_S + action.at_s - self.now_s))
                victim = self.volunteers[int(action.name.rsplit("-", 1)[1]) - 1]
                if action.verb is Verb.KILL:
                    victim.crash()
                    killed_s[action.name] = self.now_s
                else:
                    victim.start()
                    self.away_s += self.now_s - killed_s.pop(action.name)
        finally:
            self.away_s += sum(self.plan.faulty_s - each_s for each_s in killed_s.values())


def play_paced(
    *, peers: int, minutes: float, round_s: float, ttl_s: float, judges: int, kills_per_minute: float, seed: int
) -> Paced:
    """Play a swarm over 2x2 paths whose volunteers need `round_s` for the steps of a round."""
    duration_s = 60 * minutes
    scene = _scene(peers, seed=seed, until_s=WARM_UP_S + duration_s, round_s=round_s, ttl_s=ttl_s, judges=judges)
    kills = Plan(duration_s=duration_s, faults_per_minute=kills_per_minute, away_s=(1.5 * ttl_s, 2.5 * ttl_s))
    with tempfile.TemporaryDirectory(prefix="dipaco-scale-", dir=disks_folder()) as name, remembered_signatures():
        world = _Struck(scene, Path(name))
        world.schedule = actions(draw(seed, kills, peers=peers))
        perform(world)
        assert not world.bugs, world.bugs
        return _figures(world)


def _scene(peers: int, *, seed: int, until_s: float, round_s: float, ttl_s: float, judges: int) -> Scene:
    plan = counted_plan(peers, grid=WIDTHS, until_s=until_s, seed=seed)
    rounds = replace(
        plan.config.rounds, min_paths=min(peers, 4), quorum=0.75, deadline_s=2.5 * round_s, grace_s=1.0, owners=3
    )
    config = replace(
        plan.config,
        inner=replace(plan.config.inner, steps=STEPS),
        rounds=rounds,
        liveness=replace(plan.config.liveness, heartbeat_ttl_s=ttl_s, settle_s=0.5),
        judging=replace(plan.config.judging, judges=judges, audited=10 if judges else 0),
    )
    return replace(plan, config=config, step_s=(round_s / STEPS,) * peers)


def _figures(world: _Struck) -> Paced:
    archive, audited = SeedArchive(world.run, Store(world.seed.folder)), world.plan.config.judging.audited
    trunk, *_ = world.run.topology.modules()
    repeated, known = Counter[str](), {peer.peer for peer in world.volunteers}
    on_probation = 0
    for sealed in archive.ledgers[trunk].versions:
        on_probation += any(repeated[peer] < audited for peer in known)
        repeated.update(sealed.document.findings.repeated if sealed.document.findings is not None else ())
    times_s = sorted(_made_s(world, str(trunk)).values())
    lengths_s = [after - before for before, after in pairwise([0.0, *times_s])]
    shares = [s for ledger in archive.ledgers.values() for v in ledger.versions for s in v.document.shares]
    in_all_s, rounds = len(known) * world.plan.faulty_s, [event for event in world.events if event.ev == "round"]
    living_s = in_all_s - world.away_s
    return Paced(
        tokens=sum(share.tokens for share in shares),
        versions=len(times_s),
        trained=sum(event.facts["training_s"] for event in rounds) / living_s,
        living=living_s / in_all_s,
        works=len(rounds),
        audits=sum(event.ev == "audited" for event in world.events),
        on_probation_s=statistics.median(lengths_s[:on_probation]) if lengths_s[1:on_probation] else None,
        round_s=statistics.median(lengths_s[on_probation:]) if lengths_s[on_probation:] else None,
    )


def _made_s(world: World, module: str) -> dict[int, float]:
    """When each version of a module was first made."""
    found: dict[int, float] = {}
    for event in world.events:
        if event.ev == "version" and event.facts["module"] == module:
            found.setdefault(event.facts["version"], event.t_s)
    return found


def run_paced(
    *,
    peers: int,
    minutes: float,
    round_s: float,
    ttl_s: float,
    kills_per_minute: float,
    seed: int,
    json_file: Path | None,
) -> None:
    """Play the swarm without judges, with them, and with them under kills, and print what each came to."""
    kinds = {"nobody judges": (0, 0.0), "judged": (2, 0.0), "judged, under kills": (2, kills_per_minute)}
    runs = {
        name: play_paced(
            peers=peers,
            minutes=minutes,
            round_s=round_s,
            ttl_s=ttl_s,
            judges=judges,
            kills_per_minute=kills,
            seed=seed,
        )
        for name, (judges, kills) in kinds.items()
        if kills or "kills" not in name
    }
    first = next(iter(runs.values()))
    rows = [
        (
            name,
            str(one.versions),
            _seconds(one.on_probation_s),
            _seconds(one.round_s),
            f"{one.trained:.1%}",
            f"{one.audits} of {one.works}",
            f"{one.tokens / first.tokens:.1%}",
            f"{one.tokens / first.tokens / one.living:.1%}",
        )
        for name, one in runs.items()
    ]
    columns = ("", "versions", "round on probation, s", "after, s", "time in own steps", "audits, works")
    title = f"{peers} volunteers, 2x2 paths, {round_s:g} s of steps a round, {minutes:g} virtual minutes"
    show(table(title, (*columns, "goodput", "of what the living could"), rows))
    write_json(json_file, {name: asdict(one) for name, one in runs.items()})


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
