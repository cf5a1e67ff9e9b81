"""Whole runs beside a game, in one process and in virtual time, driven by a made-up card: steps stop within 2 s, the
run goes on without this volunteer, and it comes back when the card is free.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import GIB, LOST, OURS, FakeNvml, FakePrograms
from stages_harness import Home, run_file
from test_governed_runs import events
from tiny_run import signer
from virtual_time import eventually

from dipaco_p2p.clock import Clock
from dipaco_p2p.config import InnerConfig, RoundsConfig
from dipaco_p2p.core.model.inner import InnerResult, StepReport
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.use.folder import GRID
from peers.config import PeerConfig
from peers.control.control import state
from peers.governor.governor import Senses, governed
from peers.governor.nvml import Card
from peers.governor.yielding import QUIET_S
from peers.path.trainer import PathTrainer
from peers.preferences.keys import When
from peers.stages import Entrance, Parts, StageRunner
from peers.status import in_words

YIELD_S = 2.0
PART_S = 0.3
PARTS = 8
"""Of a step: it takes longer than a GPU may be kept."""
STEPS = 4
GAME, VOLUNTEER = 201, 208
PLAYING = "yielding the GPU to eldenring.exe"


class SlowTrainer(PathTrainer):
    """Its steps take time on the clock, part by part, before they are computed."""

    def __init__(self, *parts: Any, clock: Clock, busy_s: list[float], **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self._clock = clock
        self._busy_s = busy_s

    async def train(
        self,
        flats: Sequence[Any],
        *,
        round_number: int,
        replica: tuple[int, int],
        on_step: Callable[[StepReport], bool],
    ) -> InnerResult:
        first_step = self._run.first_step(round_number)
        done = await self._steps_done(on_step)
        if not done:
            return InnerResult(flats=list(flats), steps_done=0, tokens=0, loss=math.nan)
        return self._loop.run(flats, self._shard.part(*replica), first_step=first_step, steps=done)

    async def _steps_done(self, on_step: Callable[[StepReport], bool]) -> int:
        assert self._steps is not None
        for done in range(STEPS):
            for _ in range(PARTS):
                if not self._steps.goes_on():
                    return done
                await self._clock.sleep(PART_S)
                self._busy_s.append(self._clock.now_s())
            if not on_step(StepReport(step=done, loss=1.0, grad_norm=1.0, lr=0.0, tokens=1)):
                return done + 1
        return STEPS


@dataclass
class Gamer:
    """A volunteer whose card plays games."""

    home: Home
    when: When = field(default_factory=When)
    nvml: FakeNvml = field(default_factory=FakeNvml)
    who: FakePrograms = field(default_factory=lambda: FakePrograms(names={GAME: "eldenring.exe", VOLUNTEER: "python3"}))
    busy_s: list[float] = field(default_factory=list)
    """When parts of steps ended."""
    runner: StageRunner | None = None

    def open_card(self, device: str) -> Card:
        assert device == "cuda"
        return self.nvml.card()

    async def join(self, number: int, *, device: str = "cuda") -> None:
        home = self.home
        swarm = home.network.join(signer(number))
        stages = await fetch_stages(swarm, home.coordinator, expected=None)
        config = PeerConfig(home=home.homes / f"volunteer-{number}", when=self.when)
        config.home.mkdir(parents=True)

        parts = Parts(make_trainer=partial(SlowTrainer, clock=home.clock, busy_s=self.busy_s))
        runner = self.runner = StageRunner(
            swarm, config, home.clock, entrance=Entrance(host=home.coordinator), device="cpu", parts=parts
        )
        senses = Senses(on_battery=lambda: False, idle_min=lambda: None, open_card=self.open_card, programs=self.who)
        async with governed(runner, config, swarm, home.clock, device=device, senses=senses):
            await runner.take_part(stages)

    async def show(self) -> None:
        """The card says what time it is, and that we use it while we do."""
        while True:
            self.nvml.now_s = now_s = self.home.clock.now_s()
            self.nvml.put(OURS, memory=4 * GIB, use=90 if now_s - max(self.busy_s, default=0.0) < 1.0 else 0)
            await self.home.clock.sleep(0.1)

    def is_in_first_step(self) -> bool:
        """Of a round, and hardly begun."""
        status = None if self.runner is None else self.runner.status
        is_new = status is not None and (status.doing, status.step) == ("training", 0)
        return is_new and self.home.clock.now_s() - max(self.busy_s) < PART_S

    def stands(self) -> str:
        """As `dipaco-peer status` says it."""
        assert self.runner is not None
        return f"{state(self.runner, self.runner.pauses)}: {in_words(self.runner.pauses)}"


@asynccontextmanager
async def a_gamer(folder: Path, corpus: Path, **settings: Any) -> AsyncIterator[Gamer]:
    """One of two volunteers of a long run, which has the card; afterwards they take the run to its end."""
    file = run_file(
        corpus,
        inner=InnerConfig(steps=STEPS, batch=2, warmup_steps=1),
        rounds=RoundsConfig(rounds=6, min_paths=2, deadline_s=60.0, grace_s=1.0),
    )
    home = Home(folder, file)
    gamer, other = Gamer(home, **settings), Gamer(home)
    gamer.nvml.own_bytes = 3 * GIB
    showing = asyncio.create_task(gamer.show())
    try:
        home.start()
        both = [asyncio.create_task(gamer.join(1)), asyncio.create_task(other.join(2, device="cpu"))]
        await eventually(lambda: len(gamer.busy_s) > PARTS)
        yield gamer
        await asyncio.gather(*both)
        assert set(home.heads(GRID).values()) == {6}
        assert events(home, 1, "left")[-1]["complete"]
    finally:
        showing.cancel()
        await home.close()


async def test_a_game_has_the_card_within_two_seconds_and_training_has_it_back_after_half_a_minute(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with a_gamer(tmp_path, corpus) as gamer:
        clock, busy_s = gamer.home.clock, gamer.busy_s
        await eventually(gamer.is_in_first_step)
        began_s = clock.now_s()
        gamer.nvml.put(GAME, memory=GIB // 8, use=40)
        await clock.sleep(45.0)
        assert began_s < max(busy_s) <= began_s + YIELD_S
        assert gamer.stands() == f"paused: {PLAYING}"
        ended_s = clock.now_s()
        gamer.nvml.take(GAME)
        await clock.sleep(QUIET_S - 1)
        assert max(busy_s) <= began_s + YIELD_S, "it may only be loading"
        await eventually(lambda: max(busy_s) > ended_s)
        assert max(busy_s) < ended_s + QUIET_S + 10.0
        assert gamer.stands() == "running: "
    said = capsys.readouterr().err
    for line in (f"limits: {PLAYING}", f"paused for {PLAYING}", "limits: the GPU is free again", "goes on"):
        assert line in said
    logged = "".join(path.read_text() for path in (tmp_path / "volunteer-1").rglob("peer.log"))
    assert f"pause: {PLAYING}" in logged and f"no more: {PLAYING}" in logged
    history = [path.read_text() for path in (tmp_path / "volunteer-1").rglob("history.jsonl")]
    assert any(f'"detail": "{PLAYING}"' in text or f'"detail":"{PLAYING}"' in text for text in history)
    assert not any("NaN" in text for text in history), "a round without a step is none"


async def test_beside_another_volunteer_on_the_same_card_both_go_on(tmp_path: Path, corpus: Path) -> None:
    async with a_gamer(tmp_path, corpus) as gamer:
        gamer.who.volunteers.add(VOLUNTEER)
        gamer.nvml.put(VOLUNTEER, memory=8 * GIB, use=70)
        await gamer.home.clock.sleep(20.0)
        assert not gamer.runner or not gamer.runner.pauses
    text = "".join(path.read_text() for path in (tmp_path / "volunteer-1").rglob("history.jsonl"))
    assert "yielding" not in text and "paused" not in text


async def test_without_nvml_one_line_says_so_and_the_volunteer_trains(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with a_gamer(tmp_path, corpus, nvml=FakeNvml(failure=LOST)) as gamer:
        gamer.nvml.put(GAME, memory=GIB, use=90)
    line = "the GPU is not yielded to other programs: NVML fails: NVML error 15"
    assert capsys.readouterr().err.splitlines().count(line) == 1


async def test_a_hot_card_is_left_to_cool_down(tmp_path: Path, corpus: Path) -> None:
    async with a_gamer(tmp_path, corpus, when=When(gpu_yield="off", gpu_temperature_c=80.0)) as gamer:
        clock, busy_s = gamer.home.clock, gamer.busy_s
        began_s = clock.now_s()
        gamer.nvml.celsius = 85
        await clock.sleep(20.0)
        assert began_s < max(busy_s) <= began_s + YIELD_S
        assert gamer.stands() == "paused: cooling the GPU, above 80 °C"
        gamer.nvml.celsius = 50
        await eventually(lambda: max(busy_s) > began_s + QUIET_S)


async def test_when_nvml_fails_beside_a_game_the_volunteer_says_so_and_goes_on(tmp_path: Path, corpus: Path) -> None:
    async with a_gamer(tmp_path, corpus) as gamer:
        clock, busy_s = gamer.home.clock, gamer.busy_s
        gamer.nvml.put(GAME, memory=GIB // 8, use=40)
        await eventually(lambda: gamer.stands().startswith("paused"))
        gamer.nvml.failure = LOST
        failed_s = clock.now_s()
        await eventually(lambda: max(busy_s) > failed_s)
    text = "".join(path.read_text() for path in (tmp_path / "volunteer-1").rglob("history.jsonl"))
    assert "the GPU is not yielded until the next start: NVML fails: NVML error 15" in text
