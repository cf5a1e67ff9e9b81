"""The whole examination, in its order: the machine, then the network, then whether this run fits this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dipaco_p2p.config import OPEN
from dipaco_p2p.errors import ConfigError, DipacoError, EnvironmentUnfit, IntegrityError, Unreachable, WrongRun
from dipaco_p2p.node.entry import Entry
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.sizes import Needs, needs_of
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.program.control.show import show_findings
from dipaco_p2p.program.examination import (
    CLOCK_REMEDY,
    DAMAGED,
    MISMATCH,
    SILENT,
    UNFIT,
    Finding,
    Level,
    failure,
    fine,
    milder,
    warning,
)
from dipaco_p2p.program.files import is_clock_synchronised
from dipaco_p2p.protocol.decrees import Decreed
from dipaco_p2p.protocol.records import CLOCK_SKEW_MAX_S
from dipaco_p2p.swarm.addresses import read_address, read_place
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.blobs.bandwidth import MBIT_BYTES
from dipaco_p2p.swarm.calls import ReadBlob
from dipaco_p2p.swarm.dialback import Reach, ask_reach, greets
from dipaco_p2p.swarm.hivemind.libp2p import Libp2pSwarm
from dipaco_p2p.swarm.stage_scope import ScopedSwarm

from ..config import PeerConfig
from ..control.home import peer_of
from ..invitations import WORDS, check_admitted, kept
from ..joining.arrival import find_relay, open_swarm, port_of
from ..joining.choice import ANOTHER, Choice
from ..joining.preview import this_machine
from .machine import (
    chosen_device,
    find_leftovers,
    judge_disk,
    judge_leftovers,
    judge_memory,
    machine_findings,
    port_finding,
    probe_gpu,
    probe_home,
    remove,
)

SCHEMA = "dipaco.doctor/1"


async def examine(choice: Choice | None, config: PeerConfig, *, is_fixing: bool) -> list[Finding]:
    """All findings on this machine, and on the run of `choice`. Raises ConfigError for a bad ticket."""
    home, gpu = probe_home(config.home), await probe_gpu()
    findings = [*machine_findings(home, gpu, config), _leftovers(is_fixing=is_fixing)]
    device, problem = chosen_device(config)
    findings += [problem] if problem else []
    if config.is_listening:
        findings.append(await port_finding(config.listen))
    stage, network = await _network(choice, config)
    needs = needs_of(stage, stage.topology.path(0)) if stage else None
    findings += [judge_memory(this_machine(device, config), needs), judge_disk(home, needs)]
    return [*findings, *network]


async def _network(choice: Choice | None, config: PeerConfig) -> tuple[Run | None, list[Finding]]:
    """The run, if a seed shows it, and what is to be said of clock, seeds, reach and line."""
    is_synchronised = await asyncio.to_thread(is_clock_synchronised)
    if choice is None:
        return None, [judge_clock([], is_synchronised=is_synchronised)]
    try:
        with choice.explained(ConfigError, WrongRun):
            entry = choice.entry()
    except WrongRun as error:
        clock = judge_clock([], is_synchronised=is_synchronised)
        return None, [clock, failure("ticket", str(error), error.hint, code=error.exit_code)]
    try:
        async with _visitor(config) as swarm:
            stage, findings, reach = await _visit(swarm, entry, config, is_synchronised=is_synchronised)
            port = port_of(swarm) if config.is_listening else None
        if reach is Reach.NO and config.is_listening:
            reach = await probe_relay(entry, config)
        if stage is not None:
            findings.insert(-1, judge_reach(reach, port=port))  # before the line, which it may be the reason for
    except EnvironmentUnfit as error:  # the port is told of already, but for one that was taken just now
        return None, [failure("network", str(error), error.hint)]
    if stage is None and choice.source:
        findings.append(failure("run", f"{choice.name}, {choice.source}, cannot be reached", ANOTHER, code=SILENT))
    return stage, findings


async def _visit(
    swarm: Libp2pSwarm, entry: Entry, config: PeerConfig, *, is_synchronised: bool | None
) -> tuple[Run | None, list[Finding], Reach]:
    seeds = await probe_seeds(swarm, entry)
    findings = [judge_clock(seeds, is_synchronised=is_synchronised), *judge_seeds(seeds)]
    open_seed = next((seed for seed in seeds if seed.run is not None), None)
    if open_seed is None or open_seed.run is None:
        return None, findings, Reach.UNKNOWN
    stage = open_seed.run
    findings.append(judge_admission(stage, config.home))
    reach = await probe_reach(swarm, seeds)
    speed = await probe_speed(swarm, open_seed, stage)
    needs, deadline_s = needs_of(stage, stage.topology.path(0)), stage.config.rounds.deadline_s
    findings.append(judge_speed(speed, needs, deadline_s=deadline_s))
    return stage, findings, reach


def _leftovers(*, is_fixing: bool) -> Finding:
    found = find_leftovers()
    return judge_leftovers(remove(found), is_fixed=True) if is_fixing and found.count else judge_leftovers(found)


@asynccontextmanager
async def _visitor(config: PeerConfig, *, behind_nat: bool = False) -> AsyncIterator[Libp2pSwarm]:
    """A place in the network under a name that is forgotten afterwards: a volunteer of this home may be at work."""
    with tempfile.TemporaryDirectory(prefix="dipaco-") as folder:
        swarm = await open_swarm(replace(config, home=Path(folder)), behind_nat=behind_nat)
        try:
            yield swarm
        finally:
            await swarm.close()


VERDICTS = {
    Level.OK: "This machine is fit.",
    Level.WARN: "This machine can take part; the warnings say what it costs.",
    Level.FAIL: "This machine cannot take part until the failures above are fixed.",
}


def show(findings: Sequence[Finding], *, is_json: bool) -> int:
    """Print them on the standard output; the exit code."""
    return show_findings(findings, schema=SCHEMA, verdicts=VERDICTS, is_json=is_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedFacts:
    """What one seed said when it was asked alone."""

    address: str
    problem: DipacoError | None = None
    """Why it does not open the run."""
    latency_s: float | None = None
    """Of one small question."""
    ahead_s: float | None = None
    """How far its clock is ahead of ours."""
    run: Run | None = None
    """The newest stage that it shows, and that passed all checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFacts:
    """What the line to one seed carried for a moment, in bytes per second; None: nothing could be moved."""

    up: float | None
    down: float | None


SLOW_LATENCY_S = 1.0


def judge_clock(seeds: Sequence[SeedFacts], *, is_synchronised: bool | None) -> Finding:
    """Our clock against those of the seeds that told theirs, and by the word of the system's NTP."""
    ahead = [-seed.ahead_s for seed in seeds if seed.ahead_s is not None]
    near = [value for value in ahead if abs(value) <= CLOCK_SKEW_MAX_S]
    if near:
        best = min(near, key=abs)
        return fine("clock", f"within {abs(best):.1f} s of {len(near)} of {len(ahead)} seeds")
    if ahead:
        off = min(ahead, key=abs)
        words = (
            f"{abs(off):,.0f} s {'ahead of' if off > 0 else 'behind'} every seed ({CLOCK_SKEW_MAX_S:g} s are allowed)"
        )
        if is_synchronised:
            return failure(
                "clock", f"{words}, though NTP synchronises this one", "tell the coordinator: its clock is wrong"
            )
        return failure("clock", words, CLOCK_REMEDY)
    if is_synchronised is False:
        return warning("clock", "not synchronised by NTP, and no seed to compare with", CLOCK_REMEDY)
    return fine(
        "clock", "synchronised by NTP" if is_synchronised else "no seed to compare with; NTP's state is unknown"
    )


def judge_seeds(seeds: Sequence[SeedFacts]) -> list[Finding]:
    """One finding for each; as long as one of them opens the run, the others are warnings."""
    findings = [_judge_seed(seed) for seed in seeds]
    is_open = any(finding.level is not Level.FAIL for finding in findings)
    return list(map(milder, findings)) if is_open else findings


def _judge_seed(seed: SeedFacts) -> Finding:
    check = f"seed {seed.address}"
    if seed.problem is not None:
        kinds = ((WrongRun, MISMATCH), (IntegrityError, DAMAGED), (EnvironmentUnfit, UNFIT))
        code = next((code for kind, code in kinds if isinstance(seed.problem, kind)), SILENT)
        remedy = seed.problem.hint or "try another seed, or ask the coordinator for a newer ticket"
        return failure(check, " ".join(str(seed.problem).split()), remedy, code=code)
    if seed.ahead_s is not None and abs(seed.ahead_s) > CLOCK_SKEW_MAX_S:
        words = f"its clock is {abs(seed.ahead_s):,.0f} s {'ahead of' if seed.ahead_s > 0 else 'behind'} this one"
        return failure(
            check, words, "`clock` says whose is wrong; until it is right, nobody can join through this seed"
        )
    parts = [seed.run.name] if seed.run is not None else []
    parts += [f"{seed.latency_s * 1000:,.0f} ms"] if seed.latency_s is not None else []
    parts += [f"clock {seed.ahead_s:+.1f} s"] if seed.ahead_s is not None else []
    words = ", ".join(parts) or "answers"
    if seed.latency_s is not None and seed.latency_s > SLOW_LATENCY_S:
        return warning(check, words, "it answers slowly: is the line busy with something else?")
    return fine(check, words)


def judge_admission(run: Run, home: Path) -> Finding:
    """Whether the run takes work of the volunteer in `home`; bans are not looked for."""
    words, policy = WORDS[run.config.admission.policy], run.config.admission.policy
    try:
        peer = peer_of(home)
    except DipacoError:  # none yet: it is made at the first join; or a bad one, which `identity` tells of
        remedy = "`dipaco-peer join` makes an identity and prints its id: send that to the coordinator"
        return fine("admission", words) if policy == OPEN else warning("admission", words, remedy)
    try:
        check_admitted(run, peer, kept(home, run.origin), Decreed())
    except DipacoError as error:
        return warning("admission", f"{words}; {error}", error.hint)
    return fine("admission", words)


def judge_reach(reach: Reach, *, port: int | None) -> Finding:
    """Whether peers can dial this machine; `port` is None for one that does not listen."""
    if port is None:
        return fine("reach", "does not listen: it trains, but leads no module")
    if reach is Reach.YES:
        return fine("reach", "can be reached from outside, and may lead modules")
    remedy = "open a TCP port of your router and name it with --listen; docs/routers.md says how"
    if reach is Reach.RELAYED:
        words = f"nobody reaches port {port} from outside, but a relay has a slot: may lead modules through it"
        return fine("reach", f"{words}; others first try a hole in both routers. To spare the relay, {remedy}")
    if reach is Reach.NO:
        words = f"nobody reaches port {port} from outside, and no relay has a slot: goes on as a client"
        return warning("reach", words, f"to lead modules, {remedy}; training works without")
    return fine("reach", "no seed could say; join asks again")


def judge_speed(speed: SpeedFacts, needs: Needs, *, deadline_s: float) -> Finding:
    """Whether the line to a seed carries a round's bytes within the longest time that a round waits."""
    if not speed.up or not speed.down:
        return warning("line", "nothing could be moved to measure it", "try again when the seed is less busy")
    words = f"{speed.up / MBIT_BYTES:,.1f} Mbit/s up, {speed.down / MBIT_BYTES:,.1f} Mbit/s down to the seed"
    takes_s = needs.round_up / speed.up + needs.round_down / speed.down
    if takes_s > deadline_s:
        found = f"{words}: a round's bytes take {takes_s:,.0f} s, and rounds wait {deadline_s:g} s"
        return warning("line", found, "free the line, or rounds may close without this volunteer's work")
    return fine("line", f"{words}; a round's bytes take {takes_s:,.1f} s")


CONNECT_TIMEOUT_S = 10.0
RANGE_BYTES = 256 * 1024
RANGES_MAX = 16
SPEED_S = 4.0
"""Per direction; and no more than `RANGES_MAX` ranges."""
CALL_S = 10.0


async def probe_seeds(swarm: Libp2pSwarm, entry: Entry) -> list[SeedFacts]:
    """All seeds of the entry, at the same time."""
    return list(await asyncio.gather(*(_probe_seed(swarm, entry, address) for address in entry.addresses)))


async def _probe_seed(swarm: Libp2pSwarm, entry: Entry, address: str) -> SeedFacts:
    run, latency_s, ahead_s, peer = None, None, None, read_address(address).peer
    try:
        # Apart from the swarm, which would not dial a second address of a peer that it knows.
        if not await greets(*read_place(read_address(address).place)):
            raise Unreachable("no libp2p answers there", hint="check that it is running, and that its port is open")
        await swarm.connect(address, timeout_s=CONNECT_TIMEOUT_S)
        with contextlib.suppress(Unreachable):
            ahead_s, latency_s = await swarm.clock_ahead_s(peer)
        stages = await fetch_stages(swarm, peer, expected=entry.run, author=entry.coordinator, addresses=[address])
        run = stages[-1]
    except DipacoError as error:
        return SeedFacts(address=address, problem=error, latency_s=latency_s, ahead_s=ahead_s)
    return SeedFacts(address=address, latency_s=latency_s, ahead_s=ahead_s, run=run)


async def probe_reach(swarm: Swarm, seeds: list[SeedFacts]) -> Reach:
    """What the seeds that answer say when they dial us back."""
    answering = {read_address(seed.address).peer: [seed.address] for seed in seeds if seed.problem is None}
    reach, _ = await ask_reach(swarm, list(answering.items())[:3])
    return reach


async def probe_relay(entry: Entry, config: PeerConfig) -> Reach:
    """Whether a seed has a slot for us, as for somebody who comes for the first time."""
    async with _visitor(config, behind_nat=True) as swarm:
        found = [read_address(address) for address in entry.addresses]
        return await find_relay(swarm, [(one.peer, [f"{one.place}/p2p/{one.peer}"]) for one in found])


async def probe_speed(swarm: Swarm, seed: SeedFacts, run: Run) -> SpeedFacts:
    """What one seed sends and takes within some seconds: a blob of the run down, zeros that it forgets up."""
    peer, scoped = read_address(seed.address).peer, ScopedSwarm(swarm, run.id)
    blobs = [*(ref.blob for ref in run.manifest.genesis), *(ref.blob for ref in run.manifest.shards)]
    blob = max(blobs, key=lambda ref: ref.size)

    async def down(number: int) -> int:
        offset = number * RANGE_BYTES % max(blob.size - RANGE_BYTES, 1)
        header = {"digest": blob.digest, "offset": offset, "length": RANGE_BYTES}
        return len((await scoped.call(peer, ReadBlob.METHOD, header, timeout_s=CALL_S, addresses=[seed.address])).body)

    async def up(number: int) -> int:
        # Asking for the size of a blob needs no body, and one that is there is read and forgotten.
        header = {"digest": blob.digest, "offset": 0, "length": 0}
        await scoped.call(
            peer, ReadBlob.METHOD, header, os.urandom(RANGE_BYTES), timeout_s=CALL_S, addresses=[seed.address]
        )
        return RANGE_BYTES

    return SpeedFacts(down=await _rate(down), up=await _rate(up))


async def _rate(move: Callable[[int], Awaitable[int]]) -> float | None:
    """Bytes per second of one move after the other, until the time or the ranges are over; None if none succeeds."""
    start_s, moved = time.monotonic(), 0
    with contextlib.suppress(DipacoError):
        for number in range(RANGES_MAX):
            moved += await move(number)
            if time.monotonic() - start_s > SPEED_S:
                break
    return moved / max(time.monotonic() - start_s, 1e-6) if moved else None
