"""One simulated run from its plan to its outcome."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from dipaco_p2p.canonical import digest
from dipaco_p2p.node import neighbourhood
from dipaco_p2p.node.calls import GetChain, Prove, Proven
from dipaco_p2p.node.items import Page, items_reply, read_items
from dipaco_p2p.node.path_counts import PathCounts
from dipaco_p2p.owner import challenges, follower, keeper, sources
from dipaco_p2p.owner.keeper import Keeper
from dipaco_p2p.owner.leader import Leader
from dipaco_p2p.owner.mirror_calls import MirrorCalls
from dipaco_p2p.owner.version import Made
from dipaco_p2p.program.files import listening
from dipaco_p2p.protocol import neighbours
from dipaco_p2p.protocol.documents import BlobRef, ModuleVersion, Sealed, seal
from dipaco_p2p.protocol.keeping import Range
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm import record_cache

from .actors import Environment, VolunteerMachine
from .disk import installed
from .faults import FAULTS, OWNERS_IN_A_NARROW_KEY, pardon
from .history import Look
from .observe import DiskView, Movement, logged, longest_rest_s, look, observed, told_waits
from .plan import CHECKPOINT, Plan
from .virtual_time import WHO, VirtualLoop
from .witness import Witness

LOOK_EVERY_S = 1.0
BOUND_ROUNDS_S = 40.0
"""For each round that may still be before everybody, once the faults are over; and for the restarts before."""

NARROW = (
    (neighbours, "WHOLE_MAX", 0),
    (neighbours, "BUCKET_MAX", 3),
    (neighbours, "BUCKET_MIN", 1),
    (neighbourhood, "BUCKET_MIN", 1),
    (neighbourhood, "SETTLED_MIN", 1),
    (record_cache, "OWNERS_PER_KEY_MAX", OWNERS_IN_A_NARROW_KEY),
    (sources, "SMALL_BYTES", 0),
)
"""What makes a swarm of a dozen, and its modules, look large to its peers."""

SOONER = ((keeper, "LOOK_LIVES", 0.15), (challenges, "LOOK_LIVES", 0.3), (keeper, "FREE_BYTES_MIN", 0))
"""A run here is over before keepers would have looked often."""

LONG = ((follower, "FAR_BEHIND", CHECKPOINT), (follower, "READ_BEFORE", 1))
"""What makes a chain of a few versions so long that whoever comes late begins at a checkpoint."""

LIE = 0.01
"""What a liar adds to each value of the residual; each parameter then moves by about as much."""

_home: str | None = None
"""The folder of this process's disks, if somebody chose one."""


class World(Environment):
    """A run that is played: its faults, what comes after, and what could be seen meanwhile."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan, folder)
        self.looks: list[Look] = []
        self.where: dict[str, str] = {}
        """What the programs waited in at the end that had not come to theirs."""
        self.waits: tuple[str, ...] = ()
        """Who waited for whom, if the swarm stood still for longer than any rule lets it."""
        self.calm_s = self.end_s = 0.0
        self.witness = Witness(self.seed.folder)
        """Of a run with a light archive."""
        self._disks = DiskView(self)

    async def play(self) -> None:
        """The whole run, faults and what comes after."""
        self.seed.start()
        tasks = [asyncio.create_task(self._watch())]
        for volunteer, join_s in zip(self.volunteers, self.plan.join_s, strict=True):
            asyncio.get_running_loop().call_later(join_s, volunteer.start)
        for fault in self.plan.faults:
            tasks.append(asyncio.create_task(self._strike(fault.at_s, fault.name, fault.seed)))
        while self.now_s < self.plan.faulty_s and not self.is_complete:
            await asyncio.sleep(LOOK_EVERY_S)
        for task in tasks[1:]:
            task.cancel()
        self.calm_down()
        await self._finish()
        self.where = {each.name: each.where() for each in self.volunteers if each.is_up}
        if tasks[0].done() and (error := tasks[0].exception()) is not None:
            self.bug(f"nobody watched the run any more: {error!r}", error)
        tasks[0].cancel()

    def calm_down(self) -> None:
        """From now on nothing goes wrong any more, and everybody comes back."""
        self.is_calm, self.calm_s = True, self.now_s
        self.traps = {}
        self.network.heal()
        self.network.loss = self.network.duplication = self.network.reordering = 0.0
        for machine in self.machines:
            self.network.slow(machine.peer, 0.0)
            self.network.overload(machine.peer, is_over=True)
            machine.clock.skew_s = 0.0
            machine.thaw()
            machine.start()
        self.stayers.append(asyncio.create_task(pardon(self)))
        self.note("", "faults over")

    async def _strike(self, at_s: float, name: str, seed: int) -> None:
        await asyncio.sleep(at_s)
        self.note("", "fault", fault=name)
        try:
            await FAULTS[name](self, random.Random(seed))
        except Exception as error:
            self.bug(f"the fault {name} failed: {error!r}", error)

    async def _watch(self) -> None:
        while True:
            self.looks.append(look(self, self._disks))
            await asyncio.sleep(LOOK_EVERY_S)

    async def _finish(self) -> None:
        """Until the run is complete, the time for it is over, or it stands still: that ends by nothing."""
        until_s, movement, longest_s = self.now_s + self.bound_s, Movement(self.now_s), longest_rest_s(self.plan.config)
        while self.now_s < until_s and not self.is_complete:
            await asyncio.sleep(LOOK_EVERY_S)
            done = frozenset(each.name for each in self.volunteers if each.is_done)
            if self.looks and movement.rested_s(self.looks[-1], done) > longest_s:
                self.waits = (f"nothing moved for {longest_s:.0f} s", *told_waits(self))
                return

    @property
    def is_complete(self) -> bool:
        return all(volunteer.is_done or volunteer.is_gone for volunteer in self.volunteers)

    @property
    def bound_s(self) -> float:
        return BOUND_ROUNDS_S * (2 + self.plan.config.rounds.rounds)


def _running(world: World) -> VolunteerMachine | None:
    """The volunteer whose program runs now."""
    process = WHO.get()
    return next((each for each in world.volunteers if process is not None and each.name == process.name), None)


def _lying(world: World) -> Callable[..., str]:
    """What leaders tell of their paths: those that lie, a lie."""
    honest = PathCounts.tell

    def tell(counts: PathCounts, *arguments: Any, **named: Any) -> str:
        volunteer, text = _running(world), honest(counts, *arguments, **named)
        lie = "" if volunteer is None else volunteer.lie
        claimants = {"crowded": "99", "empty": "0"}.get(lie)
        if claimants is not None:
            return " ".join(".".join((claimants, *part.split(".")[1:2], "0")) for part in text.split(" "))
        return "7.7 x" if lie else text

    return tell


def _empty_handed(world: World) -> Iterator[tuple[Any, str, Any]]:
    """What keepers do: one that lies brings nothing, and makes its answers up."""
    keep, prove = Keeper._keep, Keeper._on_prove

    def lies() -> bool:
        volunteer = _running(world)
        return volunteer is not None and volunteer.is_empty_handed

    async def brings(self: Keeper, wanted: Range) -> bool:
        return lies() or await keep(self, wanted)

    async def proves(self: Keeper, sender: PeerId, request: Prove) -> Proven:
        return Proven(proof=digest(b"made up")) if lies() else await prove(self, sender, request)

    yield Keeper, "_keep", brings
    yield Keeper, "_on_prove", proves


def _false_versions(world: World) -> tuple[Any, str, Any]:
    """What leaders make: one that lies makes something else, with an update and an outer state to match."""
    make = Leader._make

    def makes(self: Leader) -> Made:
        volunteer = _running(world)
        is_liar = volunteer is not None and volunteer.lie_as_leader == "versions"
        if is_liar and not world.is_calm and self._state is not None:
            self._state = replace(self._state, residual=self._state.residual + LIE)
        return make(self)

    return Leader, "_make", makes


def _false_branch(world: World) -> tuple[Any, str, Any]:
    """What leaders show of their chains: one that lies shows versions of its own, each the successor of the last."""
    show = MirrorCalls._on_chain

    async def shows(self: MirrorCalls, sender: PeerId, request: GetChain) -> Page[ModuleVersion]:
        volunteer, shown = _running(world), await show(self, sender, request)
        if volunteer is None or volunteer.lie_as_leader != "branch" or world.is_calm:
            return shown
        forged: list[Sealed[ModuleVersion]] = []
        for document in (sealed.document for sealed in await read_items(ModuleVersion, shown)):
            parent = forged[-1].document.digest if forged else document.parent
            made_up = BlobRef.of(f"version {document.version} of another branch".encode())
            author = volunteer.peer
            forged.append(seal(volunteer.signer, replace(document, parent=parent, snapshot=made_up, author=author)))
        return items_reply(forged)

    return MirrorCalls, "_on_chain", shows


def _changed(world: World) -> Iterator[tuple[Any, str, Any]]:
    """What the programs do otherwise in this run: what liars say, and the limits that the plan makes small."""
    yield PathCounts, "tell", _lying(world)
    yield _false_versions(world)
    yield _false_branch(world)
    if world.plan.is_long:
        yield from LONG
    if world.plan.has_keepers:
        yield from (*SOONER, *_empty_handed(world))
    if world.plan.is_narrow:
        yield from NARROW


def keep_disks_in(home: str) -> None:
    """Have the disks of this process's runs in a folder that whoever made it removes."""
    global _home
    _home = home


def perform(world: World, *, with_log: bool = False) -> None:
    """Play the run of a world that is ready."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(installed(world.disk))
        stack.enter_context(listening(world.reached))
        stack.enter_context(observed(world))
        stack.enter_context(logged(world, logging.INFO if with_log else logging.ERROR))
        stack.enter_context(_without_collector())
        if world.plan.remade < 1:
            world.witness.watch(stack)
        for home, name, value in _changed(world):
            stack.enter_context(mock.patch.object(home, name, value))
        _perform(world)


def _perform(world: World) -> None:
    loop = VirtualLoop()
    loop.set_exception_handler(lambda loop, context: None)  # what dead processes left behind
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(world.play())
        world.end_s = loop.time()
    finally:
        for machine in world.machines:
            if machine.process is not None:
                machine.process.kill()
            machine.release()
        for node in world.network.nodes:
            world.network.kill(node.peer)
        world.stayers.clear()  # a call on its way would keep what it waits for until the world itself is forgotten
        asyncio.set_event_loop(None)
        loop.close()


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Dead processes' coroutines are closed only at the end, all at once, and what they say then interests nobody."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # the last collection of a run need not look at all that was imported
    try:
        yield
    finally:
        hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
        with warnings.catch_warnings(action="ignore"):  # tasks that were killed before their first step
            gc.collect()
        gc.unfreeze()
        sys.unraisablehook = hook
        if was_enabled:
            gc.enable()


def disks_folder() -> str | None:
    """Where the disks of runs lie: a file system in memory, if the machine has one, since none needs a real disk."""
    if _home is not None:
        return _home
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
