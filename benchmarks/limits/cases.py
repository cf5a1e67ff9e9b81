"""One case for each limit: what was wished, what was measured, and the ratio of the two."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from .processes import Scene, Volunteer

MB, GB, MBIT = 10**6, 10**9, 10**6
HELD_MAX = 1.1
"""A limit holds when no more than a tenth above it was measured."""
CORE_SHARE = 0.1
RAM_SHARE = 0.7
DISK_SHARE = 0.6
RATE_MBIT = 0.25
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    limit: str
    wished: float
    measured: float
    unit: str
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.measured / self.wished

    @property
    def is_held(self) -> bool:
        return self.ratio <= HELD_MAX


Case = Callable[[Scene, float], Awaitable[list[Row]]]


async def cpu(scene: Scene, seconds: float) -> list[Row]:
    """A tenth of a core, so that a busy machine has it to give, over so many seconds of training."""
    cores = len(os.sched_getaffinity(0))
    share = CORE_SHARE / cores
    async with scene.volunteer("cpu", "--cpu", f"{share:g}") as volunteer:
        await volunteer.event("doing", doing="training")
        await volunteer.event("round")
        mean = await _cpu_share(volunteer, seconds) / cores
    return [Row(limit="cpu", wished=share, measured=mean, unit="of all cores", note=f"over {seconds:g} s")]


async def ram(scene: Scene, seconds: float) -> list[Row]:
    """Less than a volunteer without a limit takes."""
    async with scene.volunteer("ram-free") as volunteer:
        free = await _memory_peak(volunteer, seconds)
    limit = RAM_SHARE * free
    async with scene.volunteer("ram", "--ram-gb", f"{limit / GB:.3f}") as volunteer:
        used = await _memory_peak(volunteer, seconds)
        said = [event["detail"] for event in volunteer.events("limited", "engine")]
    note = f"{free / MB:.0f} MB without; {said[-1] if said else 'nothing said'}"
    return [Row(limit="ram_gb", wished=limit / MB, measured=used / MB, unit="MB at its peak", note=note)]


async def rates(scene: Scene, seconds: float) -> list[Row]:
    """The shard and the optimizer's start down, and the pushes of a round up: blobs, which are what is limited."""
    limits = ("--up-mbit", f"{RATE_MBIT}", "--down-mbit", f"{RATE_MBIT}")
    async with scene.volunteer("rates", *limits) as volunteer:
        await volunteer.event("doing", doing="fetching modules")
        down = _blob_bytes(volunteer, "blobs")
        up = 0
        while not volunteer.events("round"):
            up = max(up, _blob_bytes(volunteer, "outbox/blobs"))
            await asyncio.sleep(POLL_S)
        doings = volunteer.events("doing", "round")
    down_s, up_s = _lasted(doings, "fetching its shard"), _lasted(doings, "pushing")
    return [
        Row(
            limit="down_mbit",
            wished=RATE_MBIT,
            measured=down * 8 / MBIT / down_s,
            unit="Mbit/s",
            note=f"{down / MB:.2f} MB in {down_s:.1f} s",
        ),
        Row(
            limit="up_mbit",
            wished=RATE_MBIT,
            measured=up * 8 / MBIT / up_s,
            unit="Mbit/s",
            note=f"{up / MB:.2f} MB in {up_s:.1f} s",
        ),
    ]


async def disk(scene: Scene, seconds: float) -> list[Row]:
    """Less than a volunteer without a limit takes: what can go goes, and then it leaves with exit code 5."""
    async with scene.volunteer("disk-free") as volunteer:
        await volunteer.event("round")
        free = volunteer.home_bytes()
    limit = DISK_SHARE * free
    async with scene.volunteer("disk", "--disk-gb", f"{limit / GB:.6f}") as volunteer:
        most, until_s = 0, time.monotonic() + seconds * 4
        while volunteer.child.is_alive and time.monotonic() < until_s:
            most = max(most, volunteer.home_bytes())
            await asyncio.sleep(POLL_S)
    note = f"{free / MB:.2f} MB without; exit code {volunteer.child.process.returncode}"
    return [Row(limit="disk_gb", wished=limit / MB, measured=most / MB, unit="MB at its most", note=note)]


async def schedule(scene: Scene, seconds: float) -> list[Row]:
    """It trains, pauses when the schedule closes, takes no step in the pause, and goes on when it opens."""
    closes = (datetime.now() + timedelta(seconds=max(90.0, seconds))).replace(second=0, microsecond=0)
    closes += timedelta(minutes=1)
    opens, ends = closes + timedelta(minutes=1), closes + timedelta(minutes=30)
    before = closes - timedelta(minutes=10)
    spans = f"{before:%H:%M}-{closes:%H:%M}, {opens:%H:%M}-{ends:%H:%M}"
    async with scene.volunteer("schedule", "--schedule", spans) as volunteer:
        await volunteer.event("round")
        paused = await volunteer.event("doing", doing="paused")
        share = await _cpu_share(volunteer, min(seconds, 30.0))

        def goes_on() -> float | None:
            later = [e["t"] for e in volunteer.events("doing") if e["doing"] == "training" and e["t"] > paused["t"]]
            return later[0] if later else None

        resumed_s = await volunteer.until(goes_on, "training after the pause")
    delay_s = paused["t"] - closes.timestamp()
    again_s = resumed_s - opens.timestamp()
    return [
        Row(limit="schedule", wished=0.1, measured=share, unit="of a core in the pause", note=_said(delay_s, again_s)),
    ]


def _said(delay_s: float, again_s: float) -> str:
    return f"paused {delay_s:.1f} s after it closed, its push included; trained {again_s:.1f} s after it opened"


CASES: dict[str, Case] = {"cpu": cpu, "ram": ram, "rates": rates, "disk": disk, "schedule": schedule}


async def _cpu_share(volunteer: Volunteer, seconds: float) -> float:
    """Cores that it takes in the mean."""
    used_s, began_s = volunteer.cpu_s(), time.monotonic()
    await asyncio.sleep(seconds)
    return (volunteer.cpu_s() - used_s) / (time.monotonic() - began_s)


async def _memory_peak(volunteer: Volunteer, seconds: float) -> int:
    """Until its first round is done, and so many seconds more."""
    most, done_s = 0, float("inf")
    while time.monotonic() < done_s + seconds and volunteer.child.is_alive:
        most = max(most, volunteer.memory_bytes())
        if done_s == float("inf") and volunteer.events("round"):
            done_s = time.monotonic()
        await asyncio.sleep(POLL_S)
    return most


def _blob_bytes(volunteer: Volunteer, folder: str) -> int:
    return sum(path.stat().st_size for path in volunteer.home.glob(f"runs/*/{folder}/*/*") if path.suffix != ".tmp")


def _lasted(events: list[dict[str, object]], doing: str) -> float:
    """How long it did this for the first time."""
    at = next(number for number, event in enumerate(events) if event.get("doing") == doing)
    return float(str(events[at + 1]["t"])) - float(str(events[at]["t"]))
