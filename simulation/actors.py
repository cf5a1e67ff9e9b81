"""A simulated run's machines, and what they find around them.

Each machine has a disk, a clock and a key, and runs a production program again and again. The volunteers' is
`peers.stages.StageRunner`, the coordinator's is `bootstrap.coordinator.stage.SeedStage`: what is here only starts and
ends them, as a user, a service manager or the power company would.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from bootstrap.control.decrees import Decreeing
from bootstrap.control.requests import Request
from bootstrap.coordinator.stage import SeedStage
from bootstrap.folder import write_stage
from dipaco_p2p.errors import DipacoError, SwarmError
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.stages import Stages, fetch_stages
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.judge import Gains
from dipaco_p2p.owner.retention import Retention
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.memory import MemoryNetwork, MemorySwarm
from dipaco_p2p.topology import ModuleId
from dipaco_p2p.use.folder import open_stage
from peers.config import PeerConfig
from peers.preferences.keys import Limits
from peers.stages import Entrance, Parts, StageRunner

from .disk import Crashed, SimulatedDisk
from .history import Event
from .plan import Plan
from .training import BribedRepeater, FakeTrainer, NoEvaluator, bribed_gains, make_run, no_text, toy_gains
from .virtual_time import WHO, Process, VirtualClock, waits_in

GRACE_S = 5.0
RETRY_S = 1.0
RESTART_S = 4.0
"""After a program ended with an error; then its user starts it again."""
RESTARTS_MAX = 8
KEEPERS_WANTED = 2
"""Before a version may be forgotten. None is: the checkers read all of them."""
SEED_KEY = b"coordinator of a simulated run.."


class Environment:
    """All machines of one run, the network between them, and what was observed."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        """Below `folder` lies the disk of each machine."""
        self.plan = plan
        self.folder = folder
        self.chance = random.Random(plan.seed)
        self.network = MemoryNetwork(plan.seed, VirtualClock(), delay_s=plan.delay_s, loss=plan.loss)
        self.disk = SimulatedDisk()
        self.events: list[Event] = []
        self.points: Counter[str] = Counter()
        """How often each fault point was passed."""
        self.bugs: list[str] = []
        self.tracebacks: list[str] = []
        self.traps: dict[str, tuple[str, bool]] = {}
        """Machines that are to crash at the fault point, and whether their power fails."""
        self.stayers: list[asyncio.Task[None]] = []
        """Hostile work that goes on when the faults are over."""
        self.is_calm = False
        self.seed = SeedMachine(self, Signer(SEED_KEY))
        self.volunteers = [
            VolunteerMachine(self, number, step_s=step_s) for number, step_s in enumerate(plan.step_s, start=1)
        ]
        store = Store(self.seed.folder)
        earlier = [volunteer.peer for volunteer in self.volunteers[: plan.earlier]]
        self.run: Run = write_stage(store, make_run(store, plan.config, self.seed.signer, workers=earlier).sealed)

    @property
    def machines(self) -> list[Machine]:
        """The seed node's first, then the volunteers'."""
        return [self.seed, *self.volunteers]

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return asyncio.get_running_loop().time()

    def note(self, who: str, ev: str, **facts: Any) -> None:
        """Record an event of the run."""
        self.events.append(Event(self.now_s, who, ev, facts))

    def bug(self, what: str, error: BaseException | None = None) -> None:
        """Record an error that no program may make."""
        self.bugs.append(what)
        logging.getLogger("simulation").error("%s", what, exc_info=error)

    def observe(self, ev: str, facts: dict[str, Any]) -> None:
        """Record an event of the program that is running."""
        process = WHO.get()
        if process is not None and not process.is_dead:
            self.note(process.name, ev, **facts)

    def reached(self, point: str) -> None:
        """A program passes a fault point: here it may be struck dead."""
        process = WHO.get()
        if process is None or process.is_dead:
            return
        self.points[point] += 1
        trap = self.traps.get(process.name)
        if trap is not None and trap[0] == point:
            del self.traps[process.name]
            self.note(process.name, "struck", point=point)
            self.machine(process.name).crash(power=trap[1])
            raise Crashed(process.name)

    def add_volunteer(self, *, step_s: float) -> VolunteerMachine:
        """One more machine, not started yet."""
        self.volunteers.append(VolunteerMachine(self, len(self.volunteers) + 1, step_s=step_s))
        return self.volunteers[-1]

    def machine(self, name: str) -> Machine:
        return next(machine for machine in self.machines if machine.name == name)

    def has_left_complete(self, machine: Machine) -> bool:
        """Whether the program's last word was that the run is complete."""
        left = [event for event in self.events if event.who == machine.name and event.ev == "left"]
        return bool(left) and bool(left[-1].facts["complete"])

    def ended(self, machine: Machine) -> None:
        """A program came to its own end; who wanted to stay starts it again."""
        if not machine.is_done and self.is_calm and len(machine.errors) <= RESTARTS_MAX:
            outside = contextvars.Context()  # else the timer would die with the process that it is set in
            asyncio.get_running_loop().call_later(RESTART_S, machine.start, context=outside)


def away_s(world: Environment, chance: random.Random) -> float:
    """How long somebody is away: shorter or longer than a heartbeat lives."""
    return chance.uniform(0.3, 3.0) * world.plan.ttl_s


def some(world: Environment, chance: random.Random) -> VolunteerMachine:
    """A volunteer that runs, if one does."""
    up = [volunteer for volunteer in world.volunteers if volunteer.is_running]
    return chance.choice(up or world.volunteers)


class Machine:
    """One machine, whatever runs on it."""

    def __init__(self, world: Environment, name: str, signer: Signer) -> None:
        self.world = world
        self.name = name
        self.signer = signer
        self.clock = VirtualClock()
        self.folder = world.folder / name
        self.process: Process | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_gone = False
        """Whether it will never come back."""
        self.is_done = False
        """Whether its program came to the end of the run."""
        self.errors: list[str] = []

    @property
    def peer(self) -> PeerId:
        return self.signer.peer

    @property
    def is_up(self) -> bool:
        """Whether its program runs, frozen or not."""
        return self.process is not None and not self.process.is_dead

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.is_running

    def start(self) -> None:
        """Start the program; nothing to do while it runs."""
        if not self.is_up and not self.is_done and not self.is_gone:
            self.process = Process(self.name)
            self.task = self.process.start(self._run(self.process))

    def crash(self, *, power: bool = False) -> None:
        """SIGKILL, or a power cut: then the disk loses what was not synced."""
        if self.process is not None and not self.process.is_dead:
            self.process.kill()
            self.world.network.kill(self.peer)
            self.world.note(self.name, "crashed", power=power)
            if power:
                self.world.disk.of(self.name).cut_power(self.world.chance)

    def freeze(self) -> None:
        if self.is_running and self.world.network.lives(self.peer):
            assert self.process is not None
            self.world.network.freeze(self.peer)
            self.process.freeze()
            self.world.note(self.name, "frozen")

    def thaw(self) -> None:
        if self.process is not None and self.process.is_frozen and not self.process.is_dead:
            self.process.thaw()
            self.world.network.thaw(self.peer)
            self.world.note(self.name, "thawed")

    def lose_disk(self) -> None:
        """The program is dead, and all its files are gone."""
        self.crash()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.world.note(self.name, "disk lost", peer=self.peer)

    def where(self) -> str:
        """What its program waits in."""
        return waits_in(self.task)

    def release(self) -> None:
        """All is over: let go of what its programs were."""
        self.process = self.task = None

    async def _run(self, process: Process) -> None:
        """The program's whole life, with what an unexpected end means."""
        try:
            swarm = self.world.network.join(self.signer, clock=self.clock)
            await self._program(swarm)
        except DipacoError as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            self.world.note(self.name, "ended", error=self.errors[-1])
        except Exception as error:
            if process.is_dead:  # closed by the collector
                raise
            self.world.bug(f"{self.name} ended with {error!r}", error)
        await swarm.close()
        process.end()
        self.world.ended(self)

    async def _program(self, swarm: MemorySwarm) -> None:
        raise NotImplementedError


class _Runner(StageRunner):
    """As ever, up to a growth: here no larger grid is opened, and the stage's end is what is looked at."""

    async def _next(self, run: Run) -> Run | None:
        return None if run.growth is not None else await super()._next(run)


class VolunteerMachine(Machine):
    """A volunteer's."""

    def __init__(self, world: Environment, number: int, *, step_s: float) -> None:
        super().__init__(world, f"volunteer-{number}", Signer(number.to_bytes(2, "big") * 16))
        self.step_s = step_s
        self.is_bribed = False
        """Whether it lies as a judge."""
        self.is_forging = False
        """Whether its own steps are others than those of its path."""
        self.is_spoiling = False
        """Whether its own steps make its path worse."""
        self.is_empty_handed = False
        """Whether it says that it keeps old versions, and keeps none."""
        self.lie_as_leader = ""
        """`versions` if these do not follow from the contributions that they count, `branch` if it shows another."""
        self.lie = ""
        """What it says of the paths through its modules: `crowded`, `empty`, `junk`, or the truth."""
        self._tour: StageRunner | None = None

    def where(self) -> str:
        volunteer = getattr(self._tour, "_volunteer", None)  # for whoever looks for a cause, not for the simulation
        return waits_in(getattr(volunteer, "_work", None) or self.task)

    def release(self) -> None:
        super().release()
        self._tour = None

    def stop(self) -> None:
        """Ctrl-C."""
        if self.is_running and self._tour is not None:
            self.world.note(self.name, "stopped")
        self.tell(StageRunner.stop)

    def tell(self, word: Callable[[StageRunner], None]) -> None:
        """What a command on its machine would: pause, resume, finish."""
        if self.is_running and self._tour is not None:
            assert self.process is not None
            self.process.context.copy().run(word, self._tour)

    async def _program(self, swarm: MemorySwarm) -> None:
        stages = await self._stages(swarm)
        make_trainer = partial(FakeTrainer, clock=self.clock, step_s=self.step_s)
        own_trainer = partial(make_trainer, device="cpu")  # a forger judges others like anybody else
        repeater = partial(BribedRepeater, bribed=lambda: self.is_bribed, make_trainer=own_trainer)
        self._tour = _Runner(
            swarm,
            PeerConfig(home=self.folder, grace_s=GRACE_S, limits=Limits(keep_gb=float(self.world.plan.has_keepers))),
            self.clock,
            entrance=Entrance(host=self.world.seed.peer),
            device="cpu",
            parts=Parts(
                make_trainer=partial(make_trainer, forges=lambda: self.is_forging, spoils=lambda: self.is_spoiling),
                show=_show_nothing,
                log_to=_log_nowhere,
                measure=self._measure,
                make_repeater=lambda node, make_trainer: repeater(node),
                keeps_on=False,
            ),
        )
        await self._tour.take_part(stages)
        self.is_done = self.world.has_left_complete(self)

    def _measure(self, *work: Any) -> Gains:
        return bribed_gains(*work) if self.is_bribed else toy_gains(*work)

    async def _stages(self, swarm: MemorySwarm) -> list[Run]:
        """From the seed node, or from whoever else is there: a volunteer that took part knows others."""
        while True:
            for machine in self.world.machines:
                if machine is not self and machine.is_up:
                    with contextlib.suppress(SwarmError, DipacoError):
                        return await fetch_stages(swarm, machine.peer, expected=self.world.run.id)
            await self.clock.sleep(RETRY_S)


class SeedMachine(Machine):
    """The coordinator's."""

    def __init__(self, world: Environment, signer: Signer) -> None:
        super().__init__(world, "seed", signer)
        self._open: tuple[Process | None, SeedStage] | None = None
        self._undoing: asyncio.Task[None] | None = None

    @property
    def stage(self) -> SeedStage | None:
        """Of the program that runs now."""
        is_now = self._open is not None and self._open[0] is self.process and self.is_running
        return self._open[1] if self._open is not None and is_now else None

    def release(self) -> None:
        super().release()
        self._open = None

    def decree(self, act: str, **values: Any) -> bool:
        """What a command in its folder would; whether there was somebody to ask."""
        if self.stage is None:
            return False
        assert self.process is not None
        decrees, reason = self.stage.seen().decrees, "" if act in ("admit", "unfreeze") else "a simulation"
        with contextlib.suppress(Crashed):
            self.process.context.copy().run(
                lambda: decrees.issue(self.signer, act, at_s=self.clock.now_s(), reason=reason, **values)
            )
            self.world.note(self.name, "decreed", act=act)
        return True

    def undo(self, peer: PeerId) -> None:
        """What `ban --undo` does after the ban, as far as this process gets."""
        if self.stage is None or self.process is None:
            return
        stage, seen, order = self.stage, self.stage.seen(), Request(ask="ban", reason="a simulation", undo=True)
        ledgers, rebuild = seen.ledgers, stage.rebuild
        decreeing = Decreeing(seen.decrees, self.signer, seen.run, ledgers, thinned=seen.thinned, rebuild=rebuild)

        async def go() -> None:
            with contextlib.suppress(Crashed):
                await decreeing.undo(order, peer, now_s=self.clock.now_s)

        self._undoing = self.process.context.copy().run(lambda: asyncio.create_task(go()))

    def archived(self) -> dict[ModuleId, int]:
        """The newest version of each module in its archive."""
        ledgers = {} if self.stage is None else self.stage.seen().ledgers
        return {module: ledger.head.version for module, ledger in ledgers.items()}

    async def _program(self, swarm: MemorySwarm) -> None:
        store = Store(self.folder)
        run = open_stage(store)
        assert run is not None, "the run was made before its seed node starts"
        Stages(swarm).add(run)
        stage = SeedStage(
            run,
            swarm,
            store,
            sequences=no_text,
            clock=self.clock,
            make_evaluator=cast(Any, NoEvaluator),
            measure=toy_gains,
            retention=Retention(
                keepers=KEEPERS_WANTED if self.world.plan.has_keepers and self.world.plan.remade == 1 else 0,
                rounds=0 if self.world.plan.measured == 1 else 1,
                remade=self.world.plan.remade,
                measured=self.world.plan.measured,
            ),
        )
        stage.begin()
        self._open = self.process, stage
        await asyncio.Event().wait()


def _log_nowhere(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("dipaco_p2p")


@contextlib.asynccontextmanager
async def _show_nothing(status: object, history: object) -> AsyncIterator[None]:
    yield
