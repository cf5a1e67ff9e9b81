"""`python -m benchmarks.overlap`: the share of time in inner steps, with `overlap` on and off, over slow lines.

The programs themselves, in virtual time; the swarm is the simulator's: `peers.stages.StageRunner` and
`bootstrap.coordinator.stage.SeedStage` with real outer gradients, codecs, blobs and owners. It is simplified in this.
An inner step takes time on the clock and nothing else. The path is a small one whose blobs take the time of a large
one's: every byte of them counts as often as the large path has more values. What peers send each other in calls goes
through the sender's uplink and the receiver's downlink, in pieces of 1 MiB one after the other, with LATENCY_S each
way; records of the DHT take the latency only. The coordinator's line has no limit. Encoding and decoding take no
time. A call's time limit does not count what it waits for the line.

What overlap costs in loss: `python -m benchmarks.methods --compare overlap`.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.report import JsonFile, run_benchmark, show, table, write_json
from dipaco_p2p.clock import Clock
from dipaco_p2p.config import (
    InnerConfig,
    LevelConfig,
    LivenessConfig,
    ModelConfig,
    RoundsConfig,
    RunConfig,
    WarmupConfig,
)
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.blobs.bandwidth import Line
from dipaco_p2p.swarm.memory import MemoryNetwork, MemorySwarm
from simulation.history import Event
from simulation.plan import Plan
from simulation.speed import remembered_signatures
from simulation.virtual_time import VirtualClock
from simulation.world import World, perform

VOLUNTEERS = 4
ROUNDS, QUICK_ROUNDS = 4, 3
ROUNDS_S = (60.0, 240.0, 600.0)
"""How long a round's inner steps take."""
STEPS = 10
WIDTH = 32
"""Of the small path."""
PIECE_BYTES = 1 << 20
LATENCY_S = 0.02
HEADER_BYTES = 512
"""Of a request or an answer, with its signature and what the transport adds; more or less."""
SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Of every volunteer, in millions of bits a second."""

    up_mbit: float
    down_mbit: float
    values: int
    """Of the path whose blobs they carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Medians over the volunteers of one run."""

    round_s: float
    """How long a round's inner steps take."""
    overlap: bool
    share: float
    """Of the time from the first inner step to the end of the last push, what inner steps took."""
    seconds: float
    """That time, by round."""


def main(
    up_mbit: Annotated[float, typer.Option(min=0.01, help="Every volunteer's uplink.")] = 20.0,
    down_mbit: Annotated[float, typer.Option(min=0.01, help="Every volunteer's downlink.")] = 100.0,
    values: Annotated[int, typer.Option(min=1, help="Parameters of the path.")] = 150_000_000,
    quick: Annotated[bool, typer.Option("--quick", help="Rounds of one length, three of them: for trying.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Play four volunteers over slow lines in virtual time, with and without overlap."""
    lines, shares = Lines(up_mbit=up_mbit, down_mbit=down_mbit, values=values), list[Share]()
    for round_s in ROUNDS_S[:1] if quick else ROUNDS_S:
        for overlap in (False, True):
            shares.append(share_of(lines, round_s=round_s, overlap=overlap, rounds=QUICK_ROUNDS if quick else ROUNDS))
            show(f"{round_s:g} s of inner steps, {'on' if overlap else 'off'}: {shares[-1].share:.1%}")
    show(share_table(shares, lines))
    write_json(json_file, asdict(lines) | {"shares": [asdict(share) for share in shares]})


def share_table(shares: Sequence[Share], lines: Lines) -> Table:
    """Off and on, by the time that a round's inner steps take."""
    rows = []
    for off, on in zip(shares[::2], shares[1::2], strict=True):
        assert (off.round_s, off.overlap, on.overlap) == (on.round_s, False, True)
        figures = (f"{off.share:.1%}", f"{on.share:.1%}", f"{off.seconds:.1f}", f"{on.seconds:.1f}")
        rows.append((f"{off.round_s:g}", *figures, f"{off.seconds / on.seconds:.2f}x"))
    title = f"{lines.values:,} values a path, {lines.up_mbit:g} Mbit/s up and {lines.down_mbit:g} down"
    return table(title, ("inner steps, s", "share off", "share on", "round off, s", "round on, s", "faster"), rows)


def model_of(width: int) -> ModelConfig:
    """A 2x2 grid of two levels; a path has eight blocks."""
    return ModelConfig(
        vocab_size=1024,
        width=width,
        heads=2,
        ffn_width=3 * width,
        context=65,
        levels=(LevelConfig(modules=2, blocks=4, embedding=True, head=True), LevelConfig(modules=2, blocks=4)),
    )


def path_values(model: ModelConfig) -> int:
    """Parameters of a path."""
    return sum(module_layout(model, level).size for level in range(len(model.levels)))


def share_of(lines: Lines, *, round_s: float, overlap: bool, rounds: int = ROUNDS) -> Share:
    """Play one run without faults in which every path has a volunteer."""
    with tempfile.TemporaryDirectory(prefix="dipaco-overlap-") as name, remembered_signatures():
        world = LineWorld(_plan(round_s=round_s, overlap=overlap, rounds=rounds), Path(name), lines)
        perform(world)
    spans = [_span([event for event in world.events if event.who == each.name]) for each in world.volunteers]
    trained_s, whole_s = (sorted(values)[len(values) // 2] for values in zip(*spans, strict=True))
    return Share(round_s=round_s, overlap=overlap, share=trained_s / whole_s, seconds=whole_s / rounds)


def _span(events: Sequence[Event]) -> tuple[float, float]:
    """Seconds in inner steps, and from the first of these to the end of the last push."""
    rounds = [event for event in events if event.ev == "round"]
    trained_s = sum(float(event.facts["training_s"]) for event in rounds)
    return trained_s, rounds[-1].t_s - (rounds[0].t_s - float(rounds[0].facts["seconds"]))


def _plan(*, round_s: float, overlap: bool, rounds: int) -> Plan:
    config = RunConfig(
        name="overlap",
        model=model_of(WIDTH),
        warmup=WarmupConfig(rounds=0),
        inner=InnerConfig(steps=STEPS, batch=2, warmup_steps=1),
        rounds=RoundsConfig(rounds=rounds, min_paths=VOLUNTEERS, deadline_s=3600.0, overlap=overlap),
        liveness=LivenessConfig(),
    )
    return Plan(
        seed=SEED,
        config=config,
        volunteers=VOLUNTEERS,
        step_s=(round_s / STEPS,) * VOLUNTEERS,
        join_s=(0.0,) * VOLUNTEERS,
        delay_s=(LATENCY_S, LATENCY_S),
        loss=0.0,
        faulty_s=0.0,
        faults=(),
    )


class LineWorld(World):
    """A simulated run whose volunteers sit behind lines."""

    def __init__(self, plan: Plan, folder: Path, lines: Lines) -> None:
        super().__init__(plan, folder)
        self.network = LineNetwork(plan, lines, unlimited=self.seed.peer)

    @property
    def bound_s(self) -> float:
        return 24 * 3600.0

    async def _watch(self) -> None:
        """What promises rest on is nobody's question here, and looking for it takes most of the time."""


class LineNetwork(MemoryNetwork):
    """The wires, and what is on its way in each."""

    def __init__(self, plan: Plan, lines: Lines, *, unlimited: PeerId) -> None:
        super().__init__(plan.seed, VirtualClock(), delay_s=plan.delay_s)
        self._lines = lines
        self.weight = max(1.0, lines.values / path_values(plan.config.model))
        """How often a byte of a blob counts."""
        self._unlimited = unlimited
        self._free_s: defaultdict[tuple[str, PeerId], float] = defaultdict(float)
        """When a line has sent all that it was given."""

    def join(self, signer: Signer, *, clock: Clock | None = None, line: Line | None = None) -> MemorySwarm:
        node = self._nodes[signer.peer] = LineSwarm(self, signer, clock or self.clock, line or Line())
        return node

    async def carry(self, sender: PeerId, receiver: PeerId, size_bytes: int) -> None:
        """Take so many bytes from one peer to the other."""
        for start in range(0, size_bytes, PIECE_BYTES):
            await self._carry(sender, receiver, min(PIECE_BYTES, size_bytes - start))

    async def _carry(self, sender: PeerId, receiver: PeerId, size_bytes: int) -> None:
        mbit, now_s = size_bytes * 8 / 1e6, self.clock.now_s()
        times_s = {("up", sender): mbit / self._lines.up_mbit, ("down", receiver): mbit / self._lines.down_mbit}
        end_s = now_s
        for line, time_s in times_s.items():
            if line[1] != self._unlimited:
                self._free_s[line] = max(self._free_s[line], now_s) + time_s
                end_s = max(end_s, self._free_s[line])
        await self.clock.sleep(end_s - now_s)


class LineSwarm(MemorySwarm):
    """A node whose calls take the time of their bytes."""

    async def call(
        self,
        peer: PeerId,
        method: str,
        header: dict[str, Any],
        body: bytes = b"",
        *,
        timeout_s: float,
        addresses: Sequence[str] = (),
    ) -> Reply:
        network = self._network
        assert isinstance(network, LineNetwork)
        weight = network.weight if method.endswith(("blob.read", "blob.write")) else 1.0
        await network.carry(self.peer, peer, HEADER_BYTES + round(weight * len(body)))
        reply = await super().call(peer, method, header, body, timeout_s=timeout_s, addresses=addresses)
        await network.carry(peer, self.peer, HEADER_BYTES + round(weight * len(reply.body)))
        return reply


if __name__ == "__main__":
    run_benchmark(main)
