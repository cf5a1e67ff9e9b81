"""The faults, by name. Each strikes a world at the moment when it is called, and undoes itself after a while.

What a fault draws comes from its own generator, so that adding one draw to a fault changes no other. When the faulty
time of a run is over, whatever is still under way is cancelled, and `World.calm_down` undoes the rest.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from dipaco_p2p.protocol.decrees import GROW_AHEAD
from dipaco_p2p.protocol.neighbours import bits, place
from dipaco_p2p.protocol.records import CLOCK_SKEW_MAX_S
from dipaco_p2p.protocol.signing import PeerId

from .actors import Environment, Machine, away_s, some
from .hostile import HOSTILE_ACTS, Stranger
from .liars import claim_for_ever, idle_worker, leaving_forger, never_comes_back, spoiling_volunteer, usurper
from .observe import heads
from .plan import CHECKPOINT, SPOILING

Fault = Callable[[Environment, random.Random], Awaitable[None]]

FAULTS: dict[str, Fault] = {}
ROOT = Path(__file__).parents[1]
PACKAGES = ("dipaco_p2p", "peers", "bootstrap", "simulation")
RETRY_S = 0.5
OWNERS_IN_A_NARROW_KEY = 12
"""Records that a key holds where buckets are small."""
HEARERS_DIE = 0.7
"""The share of forgeries whose first hearer dies."""
SLOWEST_S = 10.0
"""Of an inner step, even where two make a machine slow: it is over before a run counts as standing still."""


def fault(name: str) -> Callable[[Fault], Fault]:
    """Register a fault under its name."""

    def register(strike: Fault) -> Fault:
        FAULTS[name] = strike
        return strike

    return register


@functools.cache
def fault_points() -> tuple[str, ...]:
    """All names that `reach` is called with, sorted. Raises ValueError for one that is no literal."""
    found = {name for package in PACKAGES for path in (ROOT / package).rglob("*.py") for name in _points_of(path)}
    return tuple(sorted(found))


def _points_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "reach":
            continue
        [name] = node.args
        if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
            raise ValueError(f"{path}:{node.lineno}: a fault point must be a literal text")
        yield name.value


def _any(world: Environment, chance: random.Random) -> Machine:
    return chance.choice([world.seed, *world.volunteers])


async def _lay_trap(
    world: Environment, chance: random.Random, victims: Sequence[Machine], *, point: str, power: bool
) -> None:
    """Whoever of `victims` passes the point first dies there, if one does within a while; all are back later."""
    for victim in victims:
        world.traps[victim.name] = (point, power)
    until_s = world.now_s + 3 * world.plan.ttl_s
    while world.now_s < until_s and all(victim.is_up for victim in victims):
        await asyncio.sleep(0.2)
    for victim in victims:
        world.traps.pop(victim.name, None)
    await asyncio.sleep(away_s(world, chance))
    for victim in victims:
        victim.start()


async def _strike_dead(world: Environment, chance: random.Random, *, power: bool) -> None:
    victim = some(world, chance)
    victim.crash(power=power)
    await _return(world, chance, victim)


async def _return(world: Environment, chance: random.Random, victim: Machine, times: float = 1.0) -> None:
    """Start the machine again after a while."""
    await asyncio.sleep(times * away_s(world, chance))
    victim.start()


fault("crash")(functools.partial(_strike_dead, power=False))  # SIGKILL, and a restart from the disk
fault("power cut")(functools.partial(_strike_dead, power=True))  # as a crash, but what was not synced may be lost


@fault("crash at a point")
async def crash_at_a_point(world: Environment, chance: random.Random) -> None:
    """A crash at the next fault point of one name that anybody of some passes; torn writes are among them."""
    point, is_power_cut = chance.choice(fault_points()), chance.random() < 0.5
    victims = [_any(world, chance) for _ in range(3)]
    await _lay_trap(world, chance, victims, point=point, power=is_power_cut)


@fault("torn write")
async def torn_write(world: Environment, chance: random.Random) -> None:
    """The power fails in the middle of a write."""
    await _lay_trap(world, chance, [_any(world, chance)], point="write: in the middle", power=True)


@fault("freeze")
async def freeze(world: Environment, chance: random.Random) -> None:
    """SIGSTOP, and SIGCONT later."""
    victim = _any(world, chance)
    victim.freeze()
    await asyncio.sleep(away_s(world, chance))
    victim.thaw()


@fault("slow")
async def slow(world: Environment, chance: random.Random) -> None:
    """A machine far away, or with a poor line, that also trains slowly."""
    victim = some(world, chance)
    world.network.slow(victim.peer, chance.uniform(0.2, 2.0))
    before, victim.step_s = victim.step_s, min(victim.step_s * chance.uniform(2.0, 10.0), SLOWEST_S)
    await asyncio.sleep(2 * away_s(world, chance))
    world.network.slow(victim.peer, 0.0)
    victim.step_s = before


@fault("overload")
async def overload(world: Environment, chance: random.Random) -> None:
    """A machine answers `busy` to everything, for longer than a round takes, and goes on leading what it leads."""
    victim = some(world, chance)
    world.network.overload(victim.peer)
    await asyncio.sleep(chance.uniform(1.0, 4.0) * world.plan.config.rounds.deadline_s)
    world.network.overload(victim.peer, is_over=True)


@fault("join")
async def join(world: Environment, chance: random.Random) -> None:
    """Somebody comes who was never there."""
    world.add_volunteer(step_s=chance.uniform(0.2, 1.0)).start()


@fault("leave")
async def leave(world: Environment, chance: random.Random) -> None:
    """Ctrl-C: in good order; and back again later."""
    victim = some(world, chance)
    victim.stop()
    await _return(world, chance, victim, 2)


@fault("partition")
async def partition(world: Environment, chance: random.Random) -> None:
    """Two halves that do not see each other."""
    machines = list(world.machines)
    chance.shuffle(machines)
    cut = chance.randint(1, len(machines) - 1)
    world.network.partition([{machine.peer for machine in machines[:cut]}])
    await asyncio.sleep(chance.uniform(0.5, 6.0) * world.plan.ttl_s)  # long enough that both sides make versions
    world.network.heal()


@fault("parted owners")
async def parted_owners(world: Environment, chance: random.Random) -> None:
    """As soon as a volunteer leads with a mirror that is one too, these two are with some on one side, the seed and all
    others on the other: both sides make versions, and one counts what the other has never seen. Once in a run."""
    if any(event.ev == "parted" for event in world.events):
        return
    world.note("", "parted")
    while not (pairs := list(_led_by_two(world))):
        await asyncio.sleep(RETRY_S)
    side = {*chance.choice(pairs), *(each.peer for each in world.volunteers if chance.random() < 0.4)}
    world.network.partition([side])
    await asyncio.sleep(chance.uniform(2.0, 5.0) * world.plan.config.rounds.deadline_s)
    world.network.heal()


def _led_by_two(world: Environment) -> Iterator[tuple[PeerId, PeerId]]:
    """Each volunteer that leads a module, with each mirror that is a volunteer."""
    up = {volunteer.peer for volunteer in world.volunteers if volunteer.is_running}
    for module in world.run.topology.modules():
        for peer, head in heads(world, module).items():
            if peer in up and not head.resigned:
                yield from ((peer, mirror) for mirror in head.mirrors if mirror in up)


@fault("one-way cut")
async def one_way_cut(world: Environment, chance: random.Random) -> None:
    """What one machine says reaches nobody, or some not; it hears all."""
    victim = _any(world, chance)
    for other in world.machines:
        if other is not victim and chance.random() < 0.7:
            world.network.cut(victim.peer, other.peer)
    await asyncio.sleep(away_s(world, chance))
    world.network.heal()


def _network_fault(name: str, least: float, most: float) -> None:
    """Register a fault of the whole network: its chance of `name` (swarm/memory.py) is in this range for a while."""

    @fault(name)
    async def strike(world: Environment, chance: random.Random) -> None:
        before, probability = getattr(world.network, name), chance.uniform(least, most)
        setattr(world.network, name, probability)
        await asyncio.sleep(2 * away_s(world, chance))
        setattr(world.network, name, before)


_network_fault("loss", 0.05, 0.4)
_network_fault("duplication", 0.2, 1.0)
_network_fault("reordering", 0.2, 0.8)


@fault("bit rot")
async def bit_rot(world: Environment, chance: random.Random) -> None:
    """The disk of a volunteer changes a byte of a blob, or of a document, while its program is down."""
    victim = some(world, chance)
    victim.crash()
    files = sorted(path for path in victim.folder.rglob("*") if path.is_file() and _may_rot(path))
    for path in chance.sample(files, min(len(files), chance.randint(1, 3))):
        flip(path, chance)
        world.note(victim.name, "bit rot", file=path.name)
    await _return(world, chance, victim)


def _may_rot(path: Path) -> bool:
    return path.parent.name == "documents" or "blobs" in path.parts


def flip(path: Path, chance: random.Random) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)


@fault("clock skew")
async def clock_skew(world: Environment, chance: random.Random) -> None:
    """A machine's clock is wrong by a little, or by more than records allow."""
    victim = _any(world, chance)
    most_s = chance.choice((CLOCK_SKEW_MAX_S, 20.0))
    victim.clock.skew_s = chance.uniform(-most_s, most_s)
    await asyncio.sleep(3 * away_s(world, chance))
    victim.clock.skew_s = 0.0


@fault("hostile peer")
async def hostile_peer(world: Environment, chance: random.Random) -> None:
    """A stranger who does, one after the other, what an honest program never would."""
    stranger = Stranger(world, chance)
    try:
        for _ in range(chance.randint(3, 10)):
            await chance.choice(HOSTILE_ACTS)(stranger)
            await asyncio.sleep(chance.uniform(0.1, 1.5))
    finally:
        stranger.leave()


@fault("bribed volunteer")
async def bribed_volunteer(world: Environment, chance: random.Random) -> None:
    """A volunteer works well, and as a judge it lies, also when the other faults are over. At most one in a run."""
    if not any(volunteer.is_bribed for volunteer in world.volunteers):
        victim = some(world, chance)
        victim.is_bribed = True
        world.note(victim.name, "bribed")


@fault("lying keeper")
async def lying_keeper(world: Environment, chance: random.Random) -> None:
    """A volunteer offers to keep old versions, answers every challenge, and keeps nothing, also when the other faults
    are over. At most one in a run."""
    if not any(volunteer.is_empty_handed for volunteer in world.volunteers):
        liar = some(world, chance)
        liar.is_empty_handed = True
        world.note(liar.name, "keeps nothing")


@fault("lying leader")
async def lying_leader(world: Environment, chance: random.Random) -> None:
    """Until the other faults are over the first volunteer that leads makes versions that do not follow from what they
    count, or, where whoever comes late begins at a checkpoint, shows another branch."""
    while not (leads := [event.who for event in world.events if event.ev == "leads" and event.who != world.seed.name]):
        await asyncio.sleep(RETRY_S)
    liar = next(volunteer for volunteer in world.volunteers if volunteer.name == leads[0])
    liar.lie_as_leader = "branch" if world.plan.is_long else "versions"
    world.note(liar.name, "lies as a leader")
    while max(world.seed.archived().values(), default=0) <= CHECKPOINT:
        await asyncio.sleep(RETRY_S)
    await disk_loss(world, chance)


@fault("forging volunteer")
async def forging_volunteer(world: Environment, chance: random.Random) -> None:
    """A volunteer works well, and from now on its outer gradients are not what its steps come to, but longer, and good
    for its path. At most one at a time. Now and then whoever hears of it from auditors dies soon after, perhaps before
    a version says so. Half of the forgers train honestly again when they may have been found out, and have to wait all
    the same."""
    if any(volunteer.is_forging for volunteer in world.volunteers):
        return
    forger, repents = some(world, chance), chance.random() < 0.5
    forger.is_forging = True
    world.note(forger.name, "forges")
    try:
        while chance.random() < HEARERS_DIE:
            known = len(world.events)
            while not (heard := [event for event in world.events[known:] if event.facts.get("is_forged")]):
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(chance.uniform(0.5, 3.0))
            victim = world.machine(heard[0].who)
            victim.crash()
            await _return(world, chance, victim, 2)
        if repents:
            await asyncio.sleep(away_s(world, chance))
    finally:
        forger.is_forging = not repents


@fault("gone for good")
async def gone_for_good(world: Environment, chance: random.Random) -> None:
    """A volunteer dies and is never seen again; two at least stay that have not come to the end."""
    if sum(not (volunteer.is_gone or volunteer.is_done) for volunteer in world.volunteers) > 2:
        never_comes_back(world, some(world, chance))


@fault("idle claimant")
async def idle_claimant(world: Environment, chance: random.Random) -> None:
    """Somebody claims a path and never trains it, also when the other faults are over: slower, but no stop. In half of
    the runs it has a new key for each claim that it says."""
    stranger, paths = Stranger(world, chance), list(world.run.topology.paths())
    path, has_many = chance.choice(paths), chance.random() < 0.5
    claiming = claim_for_ever(world, stranger, path, renewed=chance if has_many else None)
    world.stayers.append(asyncio.create_task(claiming))


@fault("idle leader")
async def idle_leader(world: Environment, chance: random.Random) -> None:
    """Somebody leads or mirrors whatever it can get, and does nothing, also when the other faults are over."""
    if not any(event.ev == "stranger stays" for event in world.events):
        world.note("stranger", "stranger stays")
        world.stayers.append(asyncio.create_task(Stranger(world, chance).lead_idly()))


fault("usurper")(usurper)
fault("leaving forger")(leaving_forger)
fault("idle worker")(idle_worker)
fault(SPOILING)(spoiling_volunteer)


@fault("false seed")
async def false_seed(world: Environment, chance: random.Random) -> None:
    """Somebody says that it is an archive, and keeps nothing, also when the other faults are over."""
    world.note("stranger", "false seed stays")
    world.stayers.append(asyncio.create_task(Stranger(world, chance).be_a_seed()))


@fault("lying summary")
async def lying_summary(world: Environment, chance: random.Random) -> None:
    """A volunteer works well, and what it tells of the paths through the modules that it leads is a lie, also when the
    other faults are over. At most one in a run."""
    if not any(volunteer.lie for volunteer in world.volunteers):
        led = {event.who for event in world.events if event.ev == "leads"}
        leading = [volunteer for volunteer in world.volunteers if volunteer.is_running and volunteer.name in led]
        victim = chance.choice(leading) if leading else some(world, chance)
        victim.lie = chance.choice(("crowded", "empty", "junk"))
        world.note(victim.name, "lies", lie=victim.lie)


@fault("flooded bucket")
async def flooded_bucket(world: Environment, chance: random.Random) -> None:
    """Somebody fills a volunteer's bucket with keys, also when the other faults are over. At most one in a run."""
    if not any(event.ev == "bucket flooded" for event in world.events):
        victim = some(world, chance)
        bucket = bits(place(victim.peer), chance.randint(0, 1))
        world.note("stranger", "bucket flooded", bucket=bucket)
        work = Stranger(world, chance).flood(bucket, count=OWNERS_IN_A_NARROW_KEY)
        world.stayers.append(asyncio.create_task(work))


@fault("seed death")
async def seed_death(world: Environment, chance: random.Random) -> None:
    """The coordinator dies, and comes back."""
    world.seed.crash(power=chance.random() < 0.5)
    await _return(world, chance, world.seed, 3)


@fault("disk loss")
async def disk_loss(world: Environment, chance: random.Random) -> None:
    """A volunteer's disk is gone, and it begins anew, as the peer that it was. At most one in a run."""
    if any(event.ev == "disk lost" for event in world.events):
        return  # who is gone for good takes its disk along
    victim = some(world, chance)
    victim.lose_disk()
    await _return(world, chance, victim)


@fault("total outage")
async def total_outage(world: Environment, chance: random.Random) -> None:
    """The power fails everywhere, and everybody comes back, in any order."""
    world.note("", "total outage")
    is_power_cut = chance.random() < 0.5
    machines = list(world.machines)
    for machine in machines:
        machine.crash(power=is_power_cut)
    await asyncio.sleep(away_s(world, chance))
    chance.shuffle(machines)
    for machine in machines:
        machine.start()
        await asyncio.sleep(chance.uniform(0.0, 1.0))


# -- decrees of the coordinator. Each is undone after a while, a rollback never.


@fault("ban")
async def ban(world: Environment, chance: random.Random) -> None:
    """A volunteer is banned, perhaps its work undone, and it is admitted again later; two at least stay that have not
    come to the end."""
    if sum(not (volunteer.is_gone or volunteer.is_done) for volunteer in world.volunteers) > 2:
        victim = some(world, chance)
        if world.seed.decree("ban", peer=victim.peer):
            if chance.random() < 0.5:
                world.seed.undo(victim.peer)
            await asyncio.sleep(3 * away_s(world, chance))
            await _insist(world, "admit", peer=victim.peer)
            victim.start()


@fault("halt")
async def halt(world: Environment, chance: random.Random) -> None:
    """The run is frozen for a while."""
    if world.seed.decree("freeze"):
        await asyncio.sleep(2 * away_s(world, chance))
        await _insist(world, "unfreeze")


@fault("rollback")
async def rollback(world: Environment, chance: random.Random) -> None:
    """A module goes back to any version before its newest."""
    heads = {
        module: head for module, head in world.seed.archived().items() if 0 < head < world.run.config.rounds.rounds
    }
    if heads:
        module = chance.choice(sorted(heads))
        to, after = chance.randrange(heads[module]), heads[module]
        world.seed.decree("rollback", stage=world.run.id, module=module, to=to, after=after)


@fault("growth")
async def growth(world: Environment, chance: random.Random) -> None:
    """The stage ends early, for its grid to grow, if there is a round left for it; this never ends."""
    if (stage := world.seed.stage) is None:
        return
    seen = stage.seen()
    head = max(max(ledger.head.version, seen.watch.reached(module)) for module, ledger in seen.ledgers.items())
    last, levels = head + GROW_AHEAD, tuple(2 * width for width in world.run.topology.widths)
    if last < world.run.config.rounds.rounds:
        world.seed.decree("grow", stage=world.run.id, to=last, after=head, levels=levels)


async def pardon(world: Environment) -> None:
    """When the faults are over nobody is banned any more, and nothing is frozen."""
    while (stage := world.seed.stage) is None:
        await asyncio.sleep(RETRY_S)
    state = stage.seen().decrees.state
    for peer in sorted(state.banned):
        await _insist(world, "admit", peer=peer)
    if state.frozen is not None:
        await _insist(world, "unfreeze")


async def _insist(world: Environment, act: str, **values: str) -> None:
    """As soon as there is a coordinator to ask."""
    while not world.seed.decree(act, **values):
        await asyncio.sleep(RETRY_S)
