"""Joins the governor to a volunteer: built once in `join`, from the owner's wishes; nothing of it knows the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import tzinfo
from pathlib import Path
from typing import Protocol

from dipaco_p2p.clock import Clock
from dipaco_p2p.core.microbatch import MicroBatch
from dipaco_p2p.errors import EnvironmentUnfit
from dipaco_p2p.runtime.node import Node
from dipaco_p2p.runtime.tasks import keep_going
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.topology import PathId

from ..config import PeerConfig
from ..display import tell
from ..machine import free_bytes
from ..preferences.keys import GB
from ..status import Status
from . import gpu
from .brake import PowerShare
from .governor import IDLE_HINT, Governor, Senses, Steered, beside, month_share, moved_by, used_up
from .month import MonthAccount
from .space import Allowance, InUse, limited
from .steps import BetweenSteps

POWER_LOOK_S = 1.0


class Toured(Steered, Protocol):
    """What the governor needs of a `Tour`."""

    node: Node | None
    """Of the stage that goes on."""
    status: Status | None
    steps: BetweenSteps


def between_steps(config: PeerConfig, micro: MicroBatch, *, device: str) -> BetweenSteps:
    """What goes on between the inner steps of this process."""
    return BetweenSteps(config.limits, micro=micro if device == "cpu" else None, free_bytes=free_bytes)


def check_before(config: PeerConfig, clock: Clock, *, senses: Senses | None = None) -> None:
    """What can be known before anything is opened; raises EnvironmentUnfit."""
    gpu.choose(config.limits.gpu)
    if config.when.only_idle and (senses or Senses()).idle_min() is None:
        raise EnvironmentUnfit("nobody knows whether this machine is idle (`only_idle`)", hint=IDLE_HINT)
    month, now_s = MonthAccount(config.home, now_s=clock.now_s()), clock.now_s()
    if month_share(month, config.limits.month_gb) >= 1.0:
        raise used_up(month, config.limits.month_gb, now_s, None)


@contextlib.asynccontextmanager
async def governed(
    tour: Toured,
    config: PeerConfig,
    swarm: Swarm,
    clock: Clock,
    *,
    device: str,
    senses: Senses | None = None,
    zone: tzinfo | None = None,
) -> AsyncIterator[None]:
    """While the block runs, `tour` keeps what its owner wishes. Raises EnvironmentUnfit when it cannot."""
    month = MonthAccount(config.home, now_s=clock.now_s(), zone=zone)
    with _space(tour, config) as allowance, _power(tour, config, device) as power:
        governor = Governor(
            tour,
            config.when,
            clock=clock,
            senses=senses,
            zone=zone,
            month=month,
            month_gb=config.limits.month_gb,
            moved_bytes=moved_by(swarm),
            each_look=lambda: None if allowance is None else allowance.measure(),
        )
        try:
            async with beside(governor, tour), contextlib.AsyncExitStack() as stack:
                if power is not None:
                    await stack.enter_async_context(_sampling(power, clock))
                yield
        finally:
            tour.steps.stop()
            month.count(moved_by(swarm)(), now_s=clock.now_s())
            month.save()


# -- the disk


@contextlib.contextmanager
def _space(tour: Toured, config: PeerConfig) -> Iterator[Allowance | None]:
    if config.limits.disk_gb is None:
        yield None
        return
    allowance = Allowance(
        config.home, int(config.limits.disk_gb * GB), in_use=lambda: in_use(tour.node, tour.status, config)
    )
    with limited(allowance):
        yield allowance


def in_use(node: Node | None, status: Status | None, config: PeerConfig) -> InUse:
    """What must stay: the stage that goes on. Its shards, but for that of the path that is trained, can be spared."""
    if node is None:
        return InUse()
    trained = None if status is None else status.path
    return InUse(runs=frozenset({config.run_folder(node.run.id).name}), spare=_shards(node, but=trained))


def _shards(node: Node, *, but: PathId | None) -> Iterator[Path]:
    for path in node.run.topology.paths():
        if path != but:
            digest = node.run.shard(path).blob.digest
            yield node.store.folder / "blobs" / digest[:2] / digest


# -- the graphics card


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """A card whose mean power is kept by waiting."""

    card: gpu.Card
    share: PowerShare


@contextlib.contextmanager
def _power(tour: Toured, config: PeerConfig, device: str) -> Iterator[Power | None]:
    """Raises EnvironmentUnfit when a card does not say what it draws."""
    gpu.limit_memory(device, config.limits.gpu_memory)
    watts = config.limits.gpu_power_w
    if watts is None or not device.startswith("cuda"):
        yield None
        return
    card = gpu.Card(gpu.uuid_of(device))
    card.check()
    try:
        if card.limit(watts):
            tell(f"the GPU's own power limit is {watts:g} W now, and is put back at the end")
            yield None
        else:
            tell(
                f"the GPU's power is kept at {watts:g} W in the mean by waiting between steps: its own limit needs root"
            )
            power = Power(card=card, share=PowerShare(watts))
            tour.steps.brake(power.share)
            yield power
    finally:
        card.give_back()


@contextlib.asynccontextmanager
async def _sampling(power: Power, clock: Clock) -> AsyncIterator[None]:
    task = asyncio.create_task(keep_going(lambda: _sample(power, clock), clock))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _sample(power: Power, clock: Clock) -> None:
    is_told = False
    while True:
        watts = await asyncio.to_thread(power.card.power_w)
        if watts is not None:
            power.share.told(watts)
        if power.share.is_too_low and not is_told:
            is_told = True
            tell(f"the GPU draws {watts:g} W though hardly anything is computed: `gpu_power_w` cannot be kept")
        await clock.sleep(POWER_LOOK_S)
