"""Whole swarms of the real programs in which a test says what happens, and when."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from virtual_time import eventually

from simulation.actors import Machine, VolunteerMachine
from simulation.checks import broken
from simulation.history import Event
from simulation.outcome import outcome_of
from simulation.plan import Plan, make_plan
from simulation.speed import remembered_signatures
from simulation.world import World, perform

ROUNDS = 14


class Scene(World):
    """A world in which a test says what happens."""

    def __init__(self, plan: Plan, folder: Path, script: Callable[[Scene], Awaitable[None]]) -> None:
        super().__init__(plan, folder)
        self._script = script

    async def play(self) -> None:
        self.is_calm = True
        self.seed.start()
        for volunteer in self.volunteers:
            volunteer.start()
        await self._script(self)

    def said(self, who: Machine, ev: str, *, since_s: float = 0.0) -> list[Event]:
        return [each for each in self.events if each.who == who.name and each.ev == ev and each.t_s >= since_s]

    async def rest(self, who: VolunteerMachine, *, until_s: float | None = None) -> float:
        """Pause it, and wait until it rests; when that was."""
        who.tell(lambda tour: tour.pause("user", until_s=until_s))
        count = len(self.said(who, "paused"))
        await eventually(lambda: len(self.said(who, "paused")) > count)
        return self.now_s

    async def is_over(self) -> None:
        await eventually(lambda: self.is_complete, limit_s=1000)


def scene(folder: Path, script: Callable[[Scene], Awaitable[None]], *, volunteers: int = 3, **rounds: Any) -> Scene:
    """Three volunteers on two paths, for long enough; every promise must hold at the end."""
    plan = make_plan(2, (), volunteers=volunteers)
    config = plan.config
    levels = (config.model.levels[0], replace(config.model.levels[0], modules=2, blocks=1, embedding=False, head=False))
    settings = {"rounds": ROUNDS, "min_paths": 1, "owners": 3, "staleness": 1, "deadline_s": 8.0, "overlap": False}
    config = replace(
        config,
        model=replace(config.model, levels=(replace(levels[0], modules=1), levels[1])),
        inner=replace(config.inner, steps=6),
        rounds=replace(config.rounds, **(settings | rounds)),
    )
    plan = replace(plan, config=config, step_s=(0.5,) * volunteers, join_s=(0.0,) * volunteers, loss=0.0)
    world = Scene(plan, folder, script)
    with remembered_signatures():
        perform(world)
        assert world.bugs == [] and world.tracebacks == []
        if world.is_complete:
            found = list(map(str, broken(outcome_of(world))))
            assert found == [], found
    return world
