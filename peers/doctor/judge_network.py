"""Judgements on the clock, the seeds, the way to this machine and the line: from facts to findings."""

from __future__ import annotations

from collections.abc import Sequence

from dipaco_p2p.errors import EnvironmentUnfit, IntegrityError, WrongRun
from dipaco_p2p.node.sizes import Needs
from dipaco_p2p.program.examination import (
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
from dipaco_p2p.protocol.records import CLOCK_SKEW_MAX_S
from dipaco_p2p.swarm.blobs.bandwidth import MBIT_BYTES
from dipaco_p2p.swarm.dialback import Reach

from .facts import SeedFacts, SpeedFacts

SLOW_LATENCY_S = 1.0
CLOCK_REMEDY = "set the clock: timedatectl set-ntp true, or an NTP service of your system"


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
            return failure("clock", f"{words}, though NTP is in step here", "tell the coordinator: its clock is wrong")
        return failure("clock", words, CLOCK_REMEDY)
    if is_synchronised is False:
        return warning("clock", "NTP is not in step, and no seed to compare with", CLOCK_REMEDY)
    return fine("clock", "NTP is in step" if is_synchronised else "no seed to compare with, and nobody says of NTP")


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
        return failure(check, words, "see `clock` for whose is wrong; nobody joins through it")
    parts = [seed.run.name] if seed.run is not None else []
    parts += [f"{seed.latency_s * 1000:,.0f} ms"] if seed.latency_s is not None else []
    parts += [f"clock {seed.ahead_s:+.1f} s"] if seed.ahead_s is not None else []
    words = ", ".join(parts) or "answers"
    if seed.latency_s is not None and seed.latency_s > SLOW_LATENCY_S:
        return warning(check, words, "its answers are slow: see whether the line is busy with something else")
    return fine(check, words)


def judge_reach(reach: Reach, *, port: int | None) -> Finding:
    """Whether peers can dial this machine; `port` is None for one that does not listen."""
    if port is None:
        return fine("reach", "does not listen: trains, leads no module")
    if reach is Reach.YES:
        return fine("reach", "can be reached from outside, and may lead modules")
    if reach is Reach.NO:
        remedy = "to lead modules, open a TCP port and name it with --listen; training works without"
        return warning("reach", f"nobody reaches port {port} from outside: goes on as a client", remedy)
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
