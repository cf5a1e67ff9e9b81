"""What a volunteer gives, said before it is given: device, memory, disk, line, and the path that it would train.

`dipaco-peer join` prints these lines and starts; with `--dry-run` it names the path as well, claims nothing, and ends.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dipaco_p2p.clock import SystemClock
from dipaco_p2p.node.node import open_observer
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.sizes import Needs, needs_of
from dipaco_p2p.program.files import free_disk
from dipaco_p2p.program.text import in_bytes
from dipaco_p2p.protocol.claims import choose_path
from dipaco_p2p.protocol.decrees import Decreed
from dipaco_p2p.protocol.names import name_words
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.summaries import draw_path, path_needs
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.dialback import Reach
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import PathId

from ..config import PeerConfig
from ..decrees import decrees_at
from ..governor.machine import free_bytes, training_threads
from ..invitations import WORDS
from .arrival import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is there."""

    device: str
    """For people."""
    is_cpu: bool
    memory_bytes: int | None
    """Free, of the device that trains; None where nobody says."""
    disk_bytes: int
    """Free, where the home is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """Everything that is said before the start."""

    run: Run
    peer: str
    home: Path
    reach: str
    machine: Machine
    needs: Needs
    up_mbit: float | None
    down_mbit: float | None
    path: PathId | None
    """None: not asked for, or there is nothing left to train."""
    is_asked: bool
    """Whether the path was asked for."""
    decreed: Decreed = Decreed()
    """By the coordinator: its reasons are told before the start."""
    name: str = ""
    team: str = ""

    @property
    def fits(self) -> bool:
        """Whether one sequence at a time fits into the memory that is free."""
        free = self.machine.memory_bytes
        return free is None or self.needs.least_memory(is_cpu=self.machine.is_cpu) <= free

    def lines(self) -> list[str]:
        """For people: a heading, and one line for each thing."""
        config, grid = self.run.manifest.config, self.run.topology
        stage = (
            f"grid {grid}, {grid.path_count} paths"
            if self.run.manifest.router is not None
            else "in its warm-up, one path"
        )
        heading = f"{self.run.name} `{config.name}`: {stage}, {self.run.rounds} rounds"
        return [heading, *(f"  {name:<11}{value}" for name, value in self._rows())]

    def _rows(self) -> Iterator[tuple[str, str]]:
        needs, machine = self.needs, self.machine
        yield "volunteer", f"...{self.peer[-6:]} in {self.home}; {self.reach}"
        if words := name_words(self.name, self.team):
            hidden = self.decreed.nameless.get(PeerId(self.peer))
            told = "shown to everybody beside your id" if hidden is None else f"the coordinator hides it: {hidden}"
            yield "name", f"{words}: {told}"
        yield "device", machine.device
        yield "memory", self._memory()
        fits = "" if needs.disk <= machine.disk_bytes else ": DOES NOT FIT"
        yield "disk", f"up to {in_bytes(needs.disk)} of {in_bytes(machine.disk_bytes)} free{fits}"
        yield "at first", f"{in_bytes(needs.first_down)} down"
        yield "each round", f"{in_bytes(needs.round_up)} up, {in_bytes(needs.round_down)} down; {self._limits()}"
        yield "admission", WORDS[self.run.config.admission.policy]
        if self.peer in self.decreed.banned:
            yield "banned", f"by the coordinator: {self.decreed.banned[PeerId(self.peer)]}"
        if self.decreed.frozen is not None:
            yield "frozen", f"by the coordinator: {self.decreed.frozen}"
        if self.is_asked:
            yield "path", f"{self.path} would be claimed" if self.path else "all paths are finished"

    def _memory(self) -> str:
        least = self.needs.least_memory(is_cpu=self.machine.is_cpu)
        free = "an unknown amount" if self.machine.memory_bytes is None else in_bytes(self.machine.memory_bytes)
        verdict = "" if self.fits else ": DOES NOT FIT"
        return f"at least {in_bytes(least)} for {self.needs.parameters:,} parameters, of {free} free{verdict}"

    def _limits(self) -> str:
        ways = (("up", self.up_mbit), ("down", self.down_mbit))
        return ", ".join(f"{way} {'no limit' if mbit is None else f'{mbit:g} Mbit/s at most'}" for way, mbit in ways)


async def take_preview(arrival: Arrival, config: PeerConfig, *, device: str, with_path: bool) -> Preview:
    """The preview of who has just arrived; nothing is claimed or said."""
    run = arrival.opened.stages[-1]
    path = await likely_path(run, arrival.swarm) if with_path else None
    return Preview(
        run=run,
        peer=arrival.swarm.peer,
        home=config.home,
        reach=reach_words(arrival.reach, is_listening=config.is_listening),
        machine=this_machine(device, config),
        needs=needs_of(run, path or run.topology.path(0)),
        up_mbit=config.up_mbit,
        down_mbit=config.down_mbit,
        path=path,
        is_asked=with_path,
        decreed=(await decrees_at(run, arrival.swarm, arrival.opened.host)).state,
        name=config.name,
        team=config.team,
    )


async def likely_path(run: Run, swarm: Swarm) -> PathId | None:
    """The path that `Claiming` would try first now; None when all are finished."""
    watch = open_observer(run, ScopedSwarm(swarm, run.id), SystemClock()).watch
    await watch.refresh()
    seed, last = zlib.crc32(f"{swarm.peer}|0|0".encode()), run.rounds
    if watch.is_whole:
        await watch.read_rounds()
    found = {path: watch.how_far(path) for path in watch.claims}
    standings = {path: standing for path, standing in found.items() if standing is not None}
    counts = {path: count for path, count in watch.paths.counts().items() if watch.round(path) < last}
    if not counts:
        return None
    if watch.is_whole:
        return choose_path({path: watch.claims[path] for path in counts}, standings, seed=seed)
    return draw_path(path_needs(counts, standings), seed=seed)


def this_machine(device: str, config: PeerConfig) -> Machine:
    """What is free here now; `device` is torch's word."""
    disk_bytes = free_disk(config.home)
    if device.startswith("cuda"):
        import torch

        free, total = torch.cuda.mem_get_info(torch.device(device))
        words = f"{device}: {torch.cuda.get_device_name(torch.device(device))}, {in_bytes(total)}"
        return Machine(device=words, is_cpu=False, memory_bytes=free, disk_bytes=disk_bytes)
    cores = len(os.sched_getaffinity(0))
    threads = training_threads(config.threads, offered=cores, cores=cores)
    words = f"{device} with {threads} of {cores} threads"
    return Machine(device=words, is_cpu=True, memory_bytes=free_bytes(), disk_bytes=disk_bytes)


def reach_words(reach: Reach, *, is_listening: bool) -> str:
    """Whether others can dial this machine, for people."""
    if not is_listening or reach is Reach.NO:
        return "nobody can dial it: it trains, but leads no module"
    if reach is Reach.RELAYED:
        return "dialled through a relay"
    return "can be reached from outside" if reach is Reach.YES else "whether it can be reached is not known"
