"""The whole examination, in its order: the machine, then the network, then whether this run fits this machine."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from dipaco_p2p.errors import EnvironmentUnfit, WrongRun
from dipaco_p2p.node.entry import Entry, read_entry
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.sizes import needs_of
from dipaco_p2p.program.examination import Finding, Level, document, exit_code, failure, told, worst
from dipaco_p2p.swarm.addresses import read_address, read_place
from dipaco_p2p.swarm.hivemind.libp2p import Libp2pSwarm

from ..config import PeerConfig
from ..joining.arrival import open_swarm
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
    probe_ntp,
    remove,
)
from .network import judge_clock, judge_reach, judge_seeds, judge_speed, probe_reach, probe_seeds, probe_speed

STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
SCHEMA = "dipaco.doctor/1"


async def examine(text: str | None, config: PeerConfig, *, run: str | None, is_fixing: bool) -> list[Finding]:
    """All findings on this machine, and on the run that `text` leads to. Raises ConfigError for a bad ticket."""
    home, gpu = probe_home(config.home), await probe_gpu()
    findings = [*machine_findings(home, gpu, config), _leftovers(is_fixing=is_fixing)]
    device, problem = chosen_device(config)
    findings += [problem] if problem else []
    if config.is_listening:
        findings.append(await port_finding(config.listen))
    stage, network = await _network(text, config, run=run)
    needs = needs_of(stage, stage.topology.path(0)) if stage else None
    findings += [judge_memory(this_machine(device, config), needs), judge_disk(home, needs)]
    return [*findings, *network]


async def _network(text: str | None, config: PeerConfig, *, run: str | None) -> tuple[Run | None, list[Finding]]:
    """The run, if a seed shows it, and what is to be said of clock, seeds, reach and line."""
    is_synchronised = await probe_ntp()
    if text is None:
        return None, [judge_clock([], is_synchronised=is_synchronised)]
    try:
        entry = read_entry(text, run=run)
    except WrongRun as error:
        clock = judge_clock([], is_synchronised=is_synchronised)
        return None, [clock, failure("ticket", str(error), error.hint, code=error.exit_code)]
    try:
        async with _visitor(config) as swarm:
            return await _visit(swarm, entry, config, is_synchronised=is_synchronised)
    except EnvironmentUnfit as error:  # the port is told of already, but for one that was taken just now
        return None, [failure("network", str(error), error.hint)]


async def _visit(
    swarm: Libp2pSwarm, entry: Entry, config: PeerConfig, *, is_synchronised: bool | None
) -> tuple[Run | None, list[Finding]]:
    seeds = await probe_seeds(swarm, entry)
    findings = [judge_clock(seeds, is_synchronised=is_synchronised), *judge_seeds(seeds)]
    open_seed = next((seed for seed in seeds if seed.run is not None), None)
    if open_seed is None or open_seed.run is None:
        return None, findings
    stage = open_seed.run
    port = read_place(read_address(swarm.addresses[0]).place)[1] if swarm.addresses else None
    findings.append(judge_reach(await probe_reach(swarm, seeds), port=port))
    speed = await probe_speed(swarm, open_seed, stage)
    needs, deadline_s = needs_of(stage, stage.topology.path(0)), stage.config.rounds.deadline_s
    findings.append(judge_speed(speed, needs, deadline_s=deadline_s))
    return stage, findings


def _leftovers(*, is_fixing: bool) -> Finding:
    found = find_leftovers()
    return judge_leftovers(remove(found), is_fixed=True) if is_fixing and found.count else judge_leftovers(found)


@asynccontextmanager
async def _visitor(config: PeerConfig) -> AsyncIterator[Libp2pSwarm]:
    """A place in the network under a name that is forgotten afterwards: a volunteer of this home may be at work."""
    with tempfile.TemporaryDirectory(prefix="dipaco-") as folder:
        swarm = await open_swarm(replace(config, home=Path(folder)), is_listening=config.is_listening)
        try:
            yield swarm
        finally:
            await swarm.close()


def show(findings: Sequence[Finding], *, is_json: bool) -> int:
    """Print them on the standard output; the exit code."""
    if is_json:
        print(json.dumps(document(findings, schema=SCHEMA), indent=2))
        return exit_code(findings)
    console = Console(highlight=False, soft_wrap=True)
    for level, line in told(findings):
        console.print(Text.assemble((f"{level or '':<5}", STYLES[level] if level else ""), line))
    console.print(_verdict(worst(findings)))
    return exit_code(findings)


def _verdict(level: Level) -> str:
    return {
        Level.OK: "This machine is fit.",
        Level.WARN: "This machine can take part; the warnings say what it costs.",
        Level.FAIL: "This machine cannot take part until the failures above are fixed.",
    }[level]
