"""A path's modules from the first encoding until all have the next version, on lines of homes, beside hivemind.

Everybody has a public address, since hivemind's averager can be dialled at such ones alone, and a line of its own. The
volunteers train nothing: they push outer gradients that exist before the clock starts, and lead and mirror the modules
among themselves. The coordinator's line has no limit; its archive is light, so no payload comes to it.

The plan beside each figure is what no schedule undercuts, with lines that carry and nothing else that takes time: each
contribution goes to the leader and to the first mirror, as its receipt says; then the version's update goes to all but
these two, who have made it themselves, and everybody may pass it on as it comes.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.processes import Helper, Spent, spent, start_helper
from benchmarks.report import MB, show, table
from benchmarks.town.network import Machine, Rate, Town, town
from benchmarks.transfer.owner import config_of, model_of
from dipaco_p2p.config import RunConfig
from dipaco_p2p.core.outer.compress import bytes_max
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.sizes import module_size
from dipaco_p2p.protocol import owners
from dipaco_p2p.strict import plain
from dipaco_p2p.swarm.hivemind.daemon import sweep_stale_sockets
from dipaco_p2p.swarm.identity import KEY_NAME, load_or_create

RIVAL = "hivemind, 8 bits"
WARM = 2
"""Rounds with the leaders that stay: in the first one their mirrors still fetch parameters and outer states."""
OFF_MAX = 0.1
"""Of the average's length: 8 bits lose a few per cent."""
LISTEN = "/ip4/0.0.0.0/tcp/4001"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured."""

    peers: int
    modules: int
    """Of the path, each with another leader."""
    codec: str
    """Of the uplink; RIVAL: hivemind's averager, with all tensors at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One of a case."""

    seconds: float
    pushed_s: float
    """Until all have a receipt for all modules; 0 where nobody pushes."""
    payload_bytes: int
    """Of one volunteer, in all modules."""
    up_bytes: tuple[int, ...]
    """Of each volunteer's line."""
    down_bytes: tuple[int, ...]
    processor: Spent
    """Of all programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The rounds of a case."""

    case: Case
    plan_s: float
    rounds: Sequence[Round]

    @property
    def seconds(self) -> float:
        """Their median."""
        return statistics.median(one.seconds for one in self.rounds)


def planned(case: Case, rate: Rate, *, payload_bytes: float, update_bytes: float) -> float:
    """Seconds that no schedule undercuts; the bytes are of all modules together."""
    up_s, down_s, n = rate.up * MB / 8, rate.down * MB / 8, case.peers
    if case.codec == RIVAL:  # each sends every other one its part, and gets the average of it back
        return 2 * (n - 1) / n * payload_bytes / min(up_s, down_s)
    if case.modules == 1:
        pushing_s = max(2 * payload_bytes / up_s, (n - 1) * payload_bytes / down_s)
    else:  # owners, who are spread evenly, send themselves nothing
        pushing_s = 2 * payload_bytes * (n - 1) / n / min(up_s, down_s)
    lacking = update_bytes * (n - 2) / n
    first = update_bytes / min(n, 2 * case.modules)  # it has to leave those who made it once
    return pushing_s + max(lacking / up_s, first / up_s, (update_bytes if case.modules == 1 else lacking) / down_s)


def measure(cases: Sequence[Case], values: int, rate: Rate, *, runs: int) -> Iterator[Found]:
    """Each case in a fresh town, as far as it comes. Raises DipacoError."""
    for case in cases:
        folder = Path(tempfile.mkdtemp(prefix="town-update-"))
        try:
            with town() as place:
                yield asyncio.run(_measured(case, place, values, rate, runs=runs, folder=folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            sweep_stale_sockets()  # what was killed cannot remove its own


def tables(found: Sequence[Found], rate: Rate, *, values: int) -> list[Table]:
    """Times beside the plan and the rival; then what the lines carried."""
    rivals = {(one.case.peers, one.case.modules): one.seconds for one in found if one.case.codec == RIVAL}
    times, lines = [], []
    for one in found:
        case, rounds = one.case, one.rounds
        name = (str(case.peers), str(case.modules), case.codec)
        rival = rivals.get((case.peers, case.modules), math.nan)
        figures = (one.plan_s, one.seconds / one.plan_s, one.seconds / rival)
        pushed_s = statistics.median(each.pushed_s for each in rounds)
        times.append((*name, f"{pushed_s:.1f}", f"{one.seconds:.1f}", *(f"{each:.2f}" for each in figures)))
        up, down = [each.up_bytes for each in rounds], [each.down_bytes for each in rounds]
        carried = [
            statistics.median(how(each) for each in way) / MB for how in (statistics.fmean, max) for way in (up, down)
        ]
        used_s = statistics.median(each.processor.programs_s + each.processor.daemons_s for each in rounds)
        lines.append((*name, *(f"{each:.1f}" for each in (rounds[0].payload_bytes / MB, *carried, used_s))))
    first = ("peers", "modules", "codec")
    size = f"{4 * values / MB:.0f} MB of float32, {rate.up:g} Mbit/s up and {rate.down:g} down"
    heads = ("receipts, s", "all, s", "plan, s", "of the plan", "of hivemind's")
    bytes_ = ("payload, MB", "up, MB: mean", "down", "up, MB: most", "down", "processor, s")
    return [table(size, (*first, *heads), times), table("What lines carried in a round", (*first, *bytes_), lines)]


async def _measured(case: Case, place: Town, values: int, rate: Rate, *, runs: int, folder: Path) -> Found:
    machines = [place.public(rate) for _ in range(case.peers)]
    kind: type[_Rivals | _Swarm] = _Rivals if case.codec == RIVAL else _Swarm
    group = kind(case, place, machines, values, folder)
    rounds = []
    try:
        await group.open()
        while not group.is_ready:
            await group.round()
        for _ in range(WARM):
            await group.round()
        for _ in range(runs):
            rounds.append(await group.round())
            show(f"{case.peers} peers, {case.modules} modules, {case.codec}: {rounds[-1].seconds:.1f} s")
    finally:
        await group.close()
    payload_bytes = rounds[0].payload_bytes
    plan_s = planned(case, rate, payload_bytes=payload_bytes, update_bytes=group.update_bytes)
    return Found(case=case, plan_s=plan_s, rounds=rounds)


class _Group:
    """Helpers, one on each machine."""

    def __init__(self, case: Case, place: Town, machines: Sequence[Machine], values: int, folder: Path) -> None:
        self._case, self._place, self._machines = case, place, machines
        self._values, self._folder = values, folder
        self._peers: list[Helper] = []
        self._others: list[Helper] = []
        self._told: list[Any] = []
        """What peers answered to the last request to prepare a round."""

    async def _start(self, module: str, machine: Machine, *arguments: str) -> Helper:
        name = machine.namespace
        log = self._folder / f"{name}.log"
        inside = (*machine.inside, "env", "OMP_NUM_THREADS=1")  # they share this machine's cores
        return await start_helper(module, *arguments, name=name, log=log, inside=inside)

    async def _play(self) -> tuple[list[Any], dict[str, Any]]:
        """What all answer to a round, and its figures so far."""
        self._told = await asyncio.gather(*(one.ask("prepare") for one in self._peers))
        pids = [one.pid for one in (*self._peers, *self._others)]
        before, used = [machine.carried for machine in self._machines], spent(*pids)
        answers = await asyncio.gather(*(one.ask("round") for one in self._peers))
        after = [machine.carried for machine in self._machines]
        up, down = ([b[way] - a[way] for a, b in zip(before, after, strict=True)] for way in (0, 1))
        return answers, {"up_bytes": tuple(up), "down_bytes": tuple(down), "processor": spent(*pids).since(used)}

    async def close(self) -> None:
        await asyncio.gather(*(one.end() for one in self._peers))
        await asyncio.gather(*(one.end() for one in self._others))


class _Rivals(_Group):
    is_ready = True
    _rounds = 0

    async def open(self) -> None:
        address: tuple[str, ...] = ()
        for number, machine in enumerate(self._machines, 1):
            counts = map(str, (self._values, self._case.modules, self._case.peers, number))
            one = await self._start("benchmarks.town.rival", machine, *counts, *address)
            self._peers.append(one)
            if not address:
                places = (await one.ask("open"))["addresses"]
                address = (next(each for each in places if f"/{machine.address}/" in each),)

    async def round(self) -> Round:
        answers, figures = await self._play()
        off, self._rounds = max(each["off"] for each in answers), self._rounds + 1
        if off > OFF_MAX and self._rounds > 1:  # in the first one somebody may come too late
            raise DipacoError(f"hivemind's average is {off:.1%} off")
        began_s = min(each["began_s"] for each in answers)
        seconds = max(each["ended_s"] for each in answers) - began_s
        return Round(seconds=seconds, pushed_s=0.0, payload_bytes=self._values, **figures)

    @property
    def update_bytes(self) -> int:
        """Of all modules: here the means, which are as large as what they are of."""
        return self._values


class _Swarm(_Group):
    async def open(self) -> None:
        model = model_of(self._values, modules=self._case.modules)
        self._config = config_of(model, self._case.codec)
        seed = self._place.public()
        config = json.dumps(plain(self._config))
        owner = await self._start("benchmarks.transfer.owner", seed, str(self._folder / "seed"), config, LISTEN)
        self._others.append(owner)
        await owner.ask("open")
        address = f"/ip4/{seed.address}/tcp/4001/p2p/{load_or_create(self._folder / 'seed' / KEY_NAME).peer}"
        spread(self._folder, self._config, self._case.peers)
        for number, machine in enumerate(self._machines, 1):
            arguments = (str(self._folder), address, str(number), LISTEN)
            self._peers.append(await self._start("benchmarks.transfer.volunteer", machine, *arguments))

    @property
    def is_ready(self) -> bool:
        """Whether volunteers led all modules in the last round: they do once they have worked."""
        return sum(len(told["led"]) for told in self._told) == self._case.modules

    async def round(self) -> Round:
        answers, figures = await self._play()
        turns = [turn for answer in answers for turn in answer["turns"]]
        began_s = min(answer["began_s"] for answer in answers)
        return Round(
            seconds=max(max(turn["applied_s"].values()) for turn in turns) - began_s,
            pushed_s=max(turn["receipt_s"] for turn in turns) - began_s,
            payload_bytes=turns[0]["bytes"],
            **figures,
        )

    @property
    def update_bytes(self) -> int:
        config = self._config
        sizes = (module_size(config, module) for module in config.topology.modules())
        return sum(bytes_max(size, config.compression.downlink) for size in sizes)


def spread(folder: Path, config: RunConfig, peers: int) -> None:
    """Give each volunteer a key; of the modules no two come to the same one first, as far as they are enough."""
    modules = list(config.topology.modules())
    while True:
        names = [folder / f"volunteer-{number}" / KEY_NAME for number in range(1, peers + 1)]
        for name in names:
            name.parent.mkdir(parents=True, exist_ok=True)
            name.unlink(missing_ok=True)
        keys = [load_or_create(name).peer for name in names]
        if len({owners.rank(module, keys)[0] for module in modules}) == min(len(modules), peers):
            return
