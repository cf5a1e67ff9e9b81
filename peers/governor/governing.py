"""Joins the governor to a volunteer: built once in `join`, from the owner's wishes; nothing of it knows the others."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
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
from ..status import Status
from .allowances import Allowance, InUse, MonthAccount, limited
from .governor import IDLE_HINT, Governor, Senses, Steered, beside, month_share, moved_by, used_up
from .machine import free_bytes
from .nvml import Card, choose_gpu, limit_memory
from .steps import BetweenSteps
from .yielding import Programs, Yielding

log = logging.getLogger(__name__)

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


def check_before(config: PeerConfig, clock: Clock, *, senses: Senses | None = None) -> None:
    """What can be known before anything is opened; raises EnvironmentUnfit."""
    choose_gpu(config.limits.gpu)
    if config.when.only_idle and (senses or Senses()).idle_min() is None:
        raise EnvironmentUnfit("nobody knows whether this machine is idle (`only_idle`)", hint=IDLE_HINT)
    month, now_s = MonthAccount(config.home, now_s=clock.now_s()), clock.now_s()
    if month_share(month, config.limits.month_gb) >= 1.0:
        raise used_up(month, config.limits.month_gb, now_s, None)


@contextlib.asynccontextmanager
async def governed(
    runner: Governed,
    config: PeerConfig,
    swarm: Swarm,
    clock: Clock,
    *,
    device: str,
    senses: Senses | None = None,
    zone: tzinfo | None = None,
) -> AsyncIterator[None]:
    """While the block runs, `runner` keeps what its owner wishes. Raises EnvironmentUnfit when it cannot."""
    month = MonthAccount(config.home, now_s=clock.now_s(), zone=zone)
    limit_memory(device, config.limits.gpu_memory)
    card = watch(runner, config.when, clock, device, senses or Senses())
    with _space(runner, config) as allowance:
        governor = Governor(
            runner,
            config.when,
            clock=clock,
            senses=senses,
            zone=zone,
            month=month,
            month_gb=config.limits.month_gb,
            moved_bytes=moved_by(swarm),
            each_look=lambda: None if allowance is None else allowance.measure(),
            gpu=None if card is None else card.look,
            give_way=runner.steps.give_way,
        )
        try:
            async with beside(governor, runner):
                yield
        finally:
            runner.steps.stop()
            month.count(moved_by(swarm)(), now_s=clock.now_s())
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
    return InUse(runs=frozenset({config.run_folder(node.run.id).name}), spare=_shards(node, but=trained))


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
