"""The governor: beside a volunteer, it pauses and resumes it as its owner wishes, and ends it where no pause helps.

It looks every few seconds, at a GPU every second, and at the second when the schedule changes. What it decides is in
`holds`; what it sees comes from machine.py, from the card, from the swarm's counters and from the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import tzinfo
from pathlib import Path
from typing import Protocol

from dipaco_p2p.clock import Clock
from dipaco_p2p.core.model.microbatch import MicroBatch
from dipaco_p2p.errors import EnvironmentUnfit
from dipaco_p2p.node.node import Member
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.topology import PathId

from ..config import PeerConfig
from ..display import tell
from ..preferences.keys import GB, When
from ..preferences.schedule import next_month_s, opening
from ..status import Status
from . import machine
from .allowances import Allowance, InUse, MonthAccount, limited
from .machine import free_bytes
from .nvml import Card, choose_gpu, limit_memory, open_card
from .steps import BetweenSteps
from .yielding import Programs, Yielding

log = logging.getLogger(__name__)

MONTH_SHARE = 0.98
"""Of the monthly traffic: beyond it training pauses; the rest is for what goes on without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What is known of the machine at one moment."""

    now_s: float
    on_battery: bool = False
    idle_min: float | None = None
    """None: nobody knows, and then the owner is taken to be there."""
    month_share: float = 0.0
    """Of the monthly traffic, how much is used; 0 without a limit."""
    gpu: tuple[str, ...] = ()
    """Why the GPU is left alone, in words (yielding.py)."""


def holds(when: When, sight: Sight, zone: tzinfo | None = None) -> dict[str, float | None]:
    """Why training has to pause now, and until when each reason holds at least; None where nobody can say."""
    found: dict[str, float | None] = {}
    schedule = opening(when.schedule, sight.now_s, zone)
    if not schedule.is_open:
        found["schedule"] = schedule.until_s
    if sight.on_battery and not when.on_battery:
        found["battery"] = None
    if when.only_idle and (sight.idle_min is None or sight.idle_min < when.only_idle):
        found["idle"] = None
    if sight.month_share >= MONTH_SHARE:
        found["month"] = next_month_s(sight.now_s, zone)
    return found | dict.fromkeys(sight.gpu)


def look_s(when: When, sight: Sight, zone: tzinfo | None = None, *, at_most_s: float) -> float:
    """Seconds until the next look: at once when the schedule changes."""
    until_s = opening(when.schedule, sight.now_s, zone).until_s
    return at_most_s if until_s is None else max(0.01, min(at_most_s, until_s - sight.now_s))


LOOK_S = 5.0
GPU_LOOK_S = 1.0
"""Half of the time within which a GPU is yielded; the other half is for the step that is under way (steps.py)."""
IDLE_LOOK_S = 15.0
"""Between two questions whether anybody is there: each starts programs."""
MONTH_END_SHARE = 1.03
"""Of the monthly traffic: what goes on in a pause may take a little more; then the volunteer leaves."""
IDLE_HINT = "no `loginctl` answers here and no terminal is open; leave `only_idle` out, or set a schedule instead"


class Steered(Protocol):
    """Who is paused: `StageRunner` of peers/stages.py."""

    def pause(self, reason: str, *, until_s: float | None = None) -> None:
        """Take no steps, leave the path to others, stay; again with the same reason: a new time."""

    def resume(self, reason: str) -> None:
        """This reason holds no more; goes on when none does."""

    def stop(self) -> None:
        """Leave in good order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Senses:
    """What is asked of the machine; a test has its own."""

    on_battery: Callable[[], bool] = machine.on_battery
    idle_min: Callable[[], float | None] = machine.idle_min
    open_card: Callable[[str], Card] = open_card
    """The card that torch trains on; raises EnvironmentUnfit."""
    programs: Programs = machine


THIS_MACHINE = Senses()


class Governor:
    """Of one volunteer."""

    def __init__(
        self,
        steered: Steered,
        when: When,
        *,
        clock: Clock,
        senses: Senses = THIS_MACHINE,
        zone: tzinfo | None = None,
        month: MonthAccount | None = None,
        moved_bytes: Callable[[], int] = lambda: 0,
        each_look: Callable[[], None] = lambda: None,
        gpu: Callable[[], tuple[str, ...]] | None = None,
        give_way: Callable[[str], None] = lambda why: None,
    ) -> None:
        """`moved_bytes` is what the swarm has sent and received; `each_look` is what else has to be done often; `gpu`
        says why the GPU is to be left alone, and is asked in a thread; `give_way` is told when that begins, and with
        nothing when it ends."""
        self._steered = steered
        self._when = when
        self._clock = clock
        self._senses = senses
        self._zone = zone
        self._month = month
        self._moved_bytes = moved_bytes
        self._each_look = each_look
        self._gpu = gpu
        self._give_way = give_way
        self._gives_way = ""
        self._on_battery = False
        self._looked_s = -math.inf
        self._held: dict[str, float | None] = {}
        self._idle_min: float | None = None
        self._asked_s = -math.inf

    async def run(self) -> None:
        """Until cancelled. Raises EnvironmentUnfit when the month's traffic is used up."""
        while True:
            sight = await self._look()
            self._steer(holds(self._when, sight, self._zone))
            self._say_whether(", ".join(sight.gpu))
            if sight.month_share > MONTH_END_SHARE:
                assert self._month is not None
                raise self._month.used_up(sight.now_s)
            at_most_s = LOOK_S if self._gpu is None else GPU_LOOK_S
            await self._clock.sleep(look_s(self._when, sight, self._zone, at_most_s=at_most_s))

    async def _look(self) -> Sight:
        if self._gpu is None or abs(self._clock.now_s() - self._looked_s) >= LOOK_S:
            self._looked_s = self._clock.now_s()
            self._on_battery = not self._when.on_battery and self._senses.on_battery()
            self._each_look()
        gpu = () if self._gpu is None else await asyncio.to_thread(self._gpu)
        if self._when.only_idle and abs(self._clock.now_s() - self._asked_s) >= IDLE_LOOK_S:
            self._idle_min = await asyncio.to_thread(self._senses.idle_min)
            self._asked_s = self._clock.now_s()
        now_s = self._clock.now_s()
        return Sight(
            now_s=now_s,
            on_battery=self._on_battery,
            idle_min=self._idle_min,
            month_share=self._month_share(now_s),
            gpu=gpu,
        )

    def _steer(self, now: dict[str, float | None]) -> None:
        """Say what has changed."""
        for reason, until_s in now.items():
            if reason not in self._held or self._held[reason] != until_s:
                log.info("pause: %s", reason)
                self._steered.pause(reason, until_s=until_s)
        for reason in self._held.keys() - now.keys():
            log.info("no more: %s", reason)
            self._steered.resume(reason)
        self._held = now

    def _say_whether(self, gives_way: str) -> None:
        """After the pause has begun: steps that end now are to find that they are the last."""
        if gives_way != self._gives_way:
            self._gives_way = gives_way
            self._give_way(gives_way)

    def _month_share(self, now_s: float) -> float:
        if self._month is None:
            return 0.0
        self._month.count(self._moved_bytes(), now_s=now_s)
        return self._month.share


def moved_bytes(swarm: Swarm) -> int:
    """What a swarm has sent and received since it was opened."""
    statistics = swarm.statistics()
    return statistics.bytes_sent + statistics.bytes_received


@contextlib.asynccontextmanager
async def beside(governor: Governor, steered: Steered) -> AsyncIterator[None]:
    """The governor runs while the block does; when it cannot go on, the volunteer leaves, and the reason is raised."""
    task = asyncio.create_task(governor.run())

    def ended(done: asyncio.Task[None]) -> None:
        if not done.cancelled():
            steered.stop()

    task.add_done_callback(ended)
    try:
        yield
    finally:
        task.cancel()
        [outcome] = await asyncio.gather(task, return_exceptions=True)
    if isinstance(outcome, Exception):  # being cancelled is no failure
        raise outcome


FAILURES_MAX = 5
"""Looks in a row that NVML may fail in: a driver that wakes up says so too."""


class Governed(Steered, Protocol):
    """What the governor needs of a `StageRunner`."""

    node: Member | None
    """Of the stage that goes on."""
    status: Status | None
    steps: BetweenSteps


def between_steps(config: PeerConfig, micro: MicroBatch, *, device: str) -> BetweenSteps:
    """What goes on between the inner steps of this process."""
    is_shared = device != "cpu" and config.when.gpu_yield != "off"
    return BetweenSteps(
        config.limits,
        micro=micro if device == "cpu" else None,
        free_bytes=free_bytes,
        parts=micro if is_shared else None,
    )


def check_before(config: PeerConfig, clock: Clock, *, senses: Senses = THIS_MACHINE) -> None:
    """What can be known before anything is opened; raises EnvironmentUnfit."""
    choose_gpu(config.limits.gpu)
    if config.when.only_idle and senses.idle_min() is None:
        raise EnvironmentUnfit("nobody knows whether this machine is idle (`only_idle`)", hint=IDLE_HINT)
    now_s = clock.now_s()
    month = MonthAccount(config.home, now_s=now_s, limit_gb=config.limits.month_gb)
    if month.share >= 1.0:
        raise month.used_up(now_s)


@contextlib.asynccontextmanager
async def governed(
    runner: Governed,
    config: PeerConfig,
    swarm: Swarm,
    clock: Clock,
    *,
    device: str,
    senses: Senses = THIS_MACHINE,
    zone: tzinfo | None = None,
) -> AsyncIterator[None]:
    """While the block runs, `runner` keeps what its owner wishes. Raises EnvironmentUnfit when it cannot."""
    month = MonthAccount(config.home, now_s=clock.now_s(), zone=zone, limit_gb=config.limits.month_gb)
    limit_memory(device, config.limits.gpu_memory)
    card = watch(runner, config.when, clock, device, senses)
    with _space(runner, config) as allowance:
        governor = Governor(
            runner,
            config.when,
            clock=clock,
            senses=senses,
            zone=zone,
            month=month,
            moved_bytes=lambda: moved_bytes(swarm),
            each_look=lambda: None if allowance is None else allowance.measure(),
            gpu=None if card is None else card.look,
            give_way=runner.steps.give_way,
        )
        try:
            async with beside(governor, runner):
                yield
        finally:
            runner.steps.stop()
            month.count(moved_bytes(swarm), now_s=clock.now_s())
            month.save()


# -- the disk


@contextlib.contextmanager
def _space(runner: Governed, config: PeerConfig) -> Iterator[Allowance | None]:
    if config.limits.disk_gb is None:
        yield None
        return
    allowance = Allowance(
        config.home, int(config.limits.disk_gb * GB), in_use=lambda: in_use(runner.node, runner.status, config)
    )
    with limited(allowance):
        yield allowance


def in_use(node: Member | None, status: Status | None, config: PeerConfig) -> InUse:
    """What must stay: the stage that goes on. Its shards, but for that of the path that is trained, can be spared."""
    if node is None:
        return InUse()
    trained = None if status is None else status.path
    runs = frozenset({config.run_folder(node.run.id).name})
    return InUse(runs=runs, spare=_shards(node, but=trained), free=node.uploads.free)


def _shards(node: Member, *, but: PathId | None) -> Iterator[Path]:
    for path in node.run.topology.paths():
        if path != but:
            digest = node.run.shard(path).blob.digest
            yield node.store.folder / "blobs" / digest[:2] / digest


# -- the graphics card


class CardWatch:
    """Asks a card who uses it, until NVML fails for good: then the GPU is ours as if nobody asked."""

    def __init__(
        self,
        card: Card,
        when: When,
        *,
        clock: Clock,
        is_resting: Callable[[], bool],
        say: Callable[[str], None],
        who: Programs,
    ) -> None:
        """`is_resting` as in `Yielding`; `say` is told, from the thread of `look`, when the card is asked no more."""
        self._card = card
        self._yielding = Yielding(when, who=who)
        self._clock = clock
        self._is_resting = is_resting
        self._say = say
        self._failures = 0
        self._reasons: tuple[str, ...] = ()

    def look(self) -> tuple[str, ...]:
        """Why to leave the card alone now; takes some milliseconds."""
        if self._failures >= FAILURES_MAX:
            return ()
        try:
            reading = self._card.read()
        except EnvironmentUnfit as error:
            self._failures += 1
            if self._failures < FAILURES_MAX:
                return self._reasons
            said = f"the GPU is not yielded until the next start: {error}"
            log.warning(said)
            self._say(said)
            return ()
        self._failures = 0
        self._reasons = self._yielding.told(reading, now_s=self._clock.now_s(), is_resting=self._is_resting())
        return self._reasons


def watch(runner: Governed, when: When, clock: Clock, device: str, senses: Senses) -> CardWatch | None:
    """Of the card that is trained on; None without one, where its owner wants none, or where NVML is not there."""
    if not device.startswith("cuda") or (when.gpu_yield == "off" and when.gpu_temperature_c is None):
        return None
    try:
        card = senses.open_card(device)
    except EnvironmentUnfit as error:
        tell(f"the GPU is not yielded to other programs: {error}" + (f"; {error.hint}" if error.hint else ""))
        return None
    return CardWatch(
        card,
        when,
        clock=clock,
        is_resting=lambda: is_resting(runner.status),
        say=runner.steps.say,
        who=senses.programs,
    )


def is_resting(status: Status | None) -> bool:
    """Whether nothing is computed: in a pause, or before the first stage."""
    return status is None or status.doing == "paused"
