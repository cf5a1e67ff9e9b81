"""What a run will take, worked out from its run file alone: parameters, bytes on the line, memory, disk.

Sizes of modules, payloads, updates and states come from the functions that the programs use themselves, so they hold;
the amount of text is an estimate. Training time is known where it is said how fast volunteers train.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dipaco_p2p.config import DOWNLINKS, MUON, RunConfig
from dipaco_p2p.core.model.layout import hidden_values
from dipaco_p2p.core.outer.compress import CODECS, bytes_max
from dipaco_p2p.node.sizes import (
    FLOAT_BYTES,
    MOMENTS_BYTES_A_VALUE,
    PROGRAM_BYTES,
    led_bytes,
    memory_of,
    module_size,
    outer_state_bytes,
    path_needs,
    snapshot_bytes,
)
from dipaco_p2p.owner.retention import Retention
from dipaco_p2p.program.text import in_bytes
from dipaco_p2p.protocol.claims import places_drawn
from dipaco_p2p.protocol.fan_out import COPIES
from dipaco_p2p.swarm.blobs.bandwidth import MBIT_BYTES
from dipaco_p2p.topology import ModuleId

from ..genesis.prepare import WARMUP_REPLICAS
from .advice import Advice, advise

if TYPE_CHECKING:
    from .probe import Probe

SCHEMA = "dipaco.plan/1"
TEXT_BYTES_A_TOKEN = (2048, 2.6)
"""Of the demo, with its vocabulary: 94.97 of perplexity are 2.472 bits a byte. With one of bytes alone it is 1."""
TOKEN_BYTES = 4
MOMENT_BYTES = 2 * FLOAT_BYTES
EIGHT_BIT_MOMENT_BYTES = 2
MOMENTUM_BYTES = FLOAT_BYTES
"""Of Muon, which has nothing smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What a volunteer's line is taken to be."""

    up_mbit: float
    down_mbit: float

    def seconds(self, up: int, down: int) -> float:
        """For so many bytes, one way after the other."""
        return up / (self.up_mbit * MBIT_BYTES) + down / (self.down_mbit * MBIT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The modules of one level."""

    level: int
    modules: int
    parameters: int
    """Of each, as all that follows."""
    up_bytes: int
    """A contribution, at most."""
    down_bytes: int
    """An update, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of one volunteer."""

    steps: int
    tokens: int
    up_bytes: int
    down_bytes: int
    up_bytes_by_codec: dict[str, int]
    down_bytes_by_codec: dict[str, int]
    line_s: float
    """On a line of the stated speed, both ways one after the other."""
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Of one volunteer, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    optimizer_8bit: int
    copies: int
    """The modules before, after and on their way."""
    sequence_float32: int
    """What one sequence keeps on its way forward."""
    sequence_bfloat16: int
    least: int
    """One sequence at a time with checkpointing."""
    program: int
    """Python, torch and the network, before any model; on a CPU beside all of this."""
    batch_float32: int
    batch_bfloat16: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """One round of the busiest leader; a mirror takes in as much."""

    module: str
    contributions: int
    """That its version counts."""
    down_bytes: int
    up_bytes: int
    """The version, to the first that hand it on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """In bytes; the seed's at the end of the run, with what its archive keeps by then."""

    volunteer: int
    owner: int
    """What leading a module takes, at most; a mirror of it as much. One module is in a volunteer's."""
    seed_text: int
    seed_versions: int
    seed_contributions: int
    seed: int
    seed_round: int
    """By which one more round makes the seed's grow; what goes in its place is taken off."""
    seed_whole: int
    """The seed's if its archive dropped nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How long it takes, if all volunteers are as fast; in seconds."""

    tokens_per_s: float
    round_s: float
    """A round of the grid: inner steps, then the exchange, unless these overlap."""
    run_s: float
    """Warm-up and grid, without a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All figures of a run."""

    name: str
    grid: str
    paths: int
    modules: int
    volunteers: int
    rounds: int
    warmup_rounds: int
    levels: tuple[Level, ...]
    path_parameters: int
    all_parameters: int
    text_tokens: int
    """About."""
    passes: float
    """How often a path reads its shard in the grid's rounds."""
    first_down_bytes: int
    round: Round
    memory: Memory
    disk: Disk
    line: Line
    training: Training | None = None
    """None where it is not known how fast volunteers are."""
    coordinator_down_bytes: int = 0
    """What comes to the coordinator's archive for each round of the grid, besides signed documents."""
    advice: Advice | None = None
    """Which codecs suit that pace; None where it is not known."""
    leader: Leader

    @property
    def line_s(self) -> float:
        """What one volunteer's line is busy over the whole run."""
        first_s = self.line.seconds(0, self.first_down_bytes)
        return first_s + (self.rounds + self.warmup_rounds) * self.round.line_s

    def document(self) -> dict[str, Any]:
        """For programs."""
        return {"schema": SCHEMA, **asdict(self), "line_s": self.line_s}


def plan(
    config: RunConfig,
    *,
    text_bytes: int,
    line: Line,
    volunteers: int = 0,
    retention: Retention | None = None,
    tokens_per_s: float = 0.0,
) -> Plan:
    """`text_bytes` is what the corpus has, at most; `volunteers` 0: as many as there are paths; without `retention` the
    archive drops nothing. A volunteer trains `tokens_per_s`; 0: that is not known."""
    grid, tokens = config.topology, tokens_of(text_bytes, config.model.vocab_size)
    volunteers = volunteers or grid.path_count
    levels = _levels(config)
    path = sum(level.parameters for level in levels)
    shard = min(tokens, math.ceil(tokens * config.routing.overlap / grid.path_count))
    needs = path_needs(config, grid.path(0), shard_bytes=TOKEN_BYTES * shard, start_bytes=MOMENTS_BYTES_A_VALUE * path)
    each = _round(config, levels, up=needs.round_up, down=needs.round_down, line=line)
    disk = Disk(
        volunteer=needs.disk,
        owner=max(led_bytes(config, ModuleId(level.level, 0)) for level in levels),
        **_seed_disk(config, tokens=tokens, volunteers=volunteers, retention=retention or Retention()),
    )
    return Plan(
        name=config.name,
        grid=str(grid),
        paths=grid.path_count,
        modules=sum(grid.widths),
        volunteers=volunteers,
        rounds=config.rounds.rounds,
        warmup_rounds=config.warmup.rounds,
        levels=levels,
        path_parameters=path,
        all_parameters=sum(level.modules * level.parameters for level in levels),
        text_tokens=tokens,
        passes=config.rounds.rounds * _tokens_a_round(config) / shard,
        first_down_bytes=needs.first_down,
        round=each,
        memory=_memory(config, path, least=needs.least_memory(is_cpu=False)),
        disk=disk,
        line=line,
        training=_training(config, line_s=each.line_s, volunteers=volunteers, tokens_per_s=tokens_per_s),
        coordinator_down_bytes=_coordinator_down(config, volunteers, retention or Retention()),
        leader=_leader(config, levels, volunteers),
        advice=_advice(config, each, line, steps_s=_tokens_a_round(config) / tokens_per_s) if tokens_per_s else None,
    )


def _advice(config: RunConfig, each: Round, line: Line, *, steps_s: float) -> Advice:
    def line_s(uplink: str, downlink: str) -> float:
        return line.seconds(each.up_bytes_by_codec[uplink], each.down_bytes_by_codec[downlink])

    return advise(config, line_s, steps_s=steps_s)


def _training(config: RunConfig, *, line_s: float, volunteers: int, tokens_per_s: float) -> Training | None:
    """As slow as the volunteers with most paths: paths without a volunteer of their own take turns."""
    if not tokens_per_s:
        return None
    turns = math.ceil(config.topology.path_count / volunteers)
    steps_s = _tokens_a_round(config) / tokens_per_s
    round_s = turns * (steps_s if config.rounds.overlap and steps_s >= line_s else steps_s + line_s)
    run_s = config.warmup.rounds * (steps_s + line_s) + config.rounds.rounds * round_s
    return Training(tokens_per_s=tokens_per_s, round_s=round_s, run_s=run_s)


def tokens_of(text_bytes: int, vocab_size: int) -> int:
    """About; the text of a token grows with the logarithm of the vocabulary."""
    known_size, known = TEXT_BYTES_A_TOKEN
    bytes_a_token = 1 + (known - 1) * math.log(vocab_size / 256) / math.log(known_size / 256)
    return max(1, int(text_bytes / bytes_a_token))


def _levels(config: RunConfig) -> tuple[Level, ...]:
    sizes = [module_size(config, ModuleId(level, 0)) for level in range(len(config.topology.widths))]
    return tuple(
        Level(
            level=level,
            modules=width,
            parameters=size,
            up_bytes=bytes_max(size, config.compression.uplink),
            down_bytes=bytes_max(size, config.compression.downlink),
        )
        for level, (width, size) in enumerate(zip(config.topology.widths, sizes, strict=True))
    )


def _tokens_a_round(config: RunConfig) -> int:
    return config.inner.steps * config.inner.batch * config.model.context


def _round(config: RunConfig, levels: tuple[Level, ...], *, up: int, down: int, line: Line) -> Round:
    def sent(codec: str) -> int:
        return sum(bytes_max(level.parameters, codec) for level in levels)

    return Round(
        steps=config.inner.steps,
        tokens=_tokens_a_round(config),
        up_bytes=up,
        down_bytes=down,
        up_bytes_by_codec={codec: sent(codec) for codec in CODECS},
        down_bytes_by_codec={codec: sent(codec) for codec in DOWNLINKS},
        line_s=line.seconds(up, down),
        deadline_s=config.rounds.deadline_s,
    )


def _memory(config: RunConfig, parameters: int, *, least: int) -> Memory:
    need, batch = memory_of(config.model, parameters), config.inner.batch
    weights, moments = FLOAT_BYTES * parameters, MOMENT_BYTES * parameters
    hidden = hidden_values(config.model) if config.inner.optimizer == MUON else 0
    # AdamW's two, but one for what Muon steps.
    optimizer = moments - (MOMENT_BYTES - MOMENTUM_BYTES) * hidden
    eight_bit = optimizer if hidden else EIGHT_BIT_MOMENT_BYTES * parameters
    half = need.sequence // 2
    return Memory(
        weights=weights,
        gradients=weights,
        optimizer=optimizer,
        optimizer_8bit=eight_bit,
        copies=need.fixed - 2 * weights - moments,
        sequence_float32=need.sequence,
        sequence_bfloat16=half,
        least=least,
        program=PROGRAM_BYTES,
        batch_float32=need.fixed + batch * need.sequence,
        batch_bfloat16=need.fixed + batch * half,
    )


def _seed_disk(config: RunConfig, *, tokens: int, volunteers: int, retention: Retention) -> dict[str, int]:
    """What the coordinator's folder is at the end: text, and what it keeps of the versions and contributions of both
    stages."""
    text = TOKEN_BYTES * tokens
    shards = text * min(config.routing.overlap, config.topology.path_count)
    cuts = 1 + sum(number < config.rounds.rounds for number in config.routing.reshard_rounds)
    warmed = min(text, WARMUP_REPLICAS * config.warmup.rounds * _tokens_a_round(config) * TOKEN_BYTES)
    stages = [config, *([config.for_warmup()] if config.warmup.rounds else [])]
    versions = sum(_versions(stage, retention) for stage in stages)
    contributions = sum(_kept_rounds(stage, retention) * _contributions(stage, volunteers) for stage in stages)
    found = {"seed_text": text + shards * cuts + warmed, "seed_versions": versions, "seed_contributions": contributions}
    seed = sum(found.values())
    if not retention.rounds:
        grid = sum(map(sum, _version_bytes(config))) + _contributions(config, volunteers)
        return {**found, "seed": seed, "seed_round": grid, "seed_whole": seed}
    whole = _seed_disk(config, tokens=tokens, volunteers=volunteers, retention=Retention())
    every = retention.snapshots
    grown = sum(snapshot for snapshot, _ in _version_bytes(config)) // every if every else 0
    return {**found, "seed": seed, "seed_round": grown, "seed_whole": whole["seed_whole"]}


def _leader(config: RunConfig, levels: tuple[Level, ...], volunteers: int) -> Leader:
    """Of the module whose leader takes in the most bytes."""
    trained = _trained(config, volunteers)
    busiest = max(levels, key=lambda level: level.up_bytes / level.modules)
    contributions = trained // busiest.modules
    return Leader(
        module=str(ModuleId(busiest.level, 0)),
        contributions=contributions,
        down_bytes=contributions * busiest.up_bytes,
        up_bytes=min(COPIES, contributions) * busiest.down_bytes,
    )


def _coordinator_down(config: RunConfig, volunteers: int, retention: Retention) -> int:
    """A full archive takes all contributions; a light one a share of them, and updates, or where volunteers measure for
    it the parameters that it needs."""
    contributions = _contributions(config, volunteers)
    if not retention.is_light:
        return contributions
    modules = [module_size(config, each) for each in config.topology.modules()]
    updates = sum(bytes_max(size, config.compression.downlink) for size in modules)
    if not retention.has_all_params:
        path = sum(module_size(config, module) for module in config.topology.path(0).modules())
        measured = retention.measured * config.topology.path_count * snapshot_bytes(path)
        kept = sum(map(snapshot_bytes, modules)) / retention.snapshots if retention.snapshots else 0.0
        updates = math.ceil(measured + kept)
    return math.ceil(retention.remade * contributions) + updates


def _kept_rounds(config: RunConfig, retention: Retention) -> int:
    rounds = config.rounds.rounds
    if retention.is_light:
        return 0
    return min(rounds, retention.rounds) if retention.rounds else rounds


def _version_bytes(config: RunConfig) -> list[tuple[int, int]]:
    """Of a version of each module: its parameters, and its update and outer state."""
    sizes = [module_size(config, module) for module in config.topology.modules()]
    codec = config.compression.downlink
    return [(snapshot_bytes(size), bytes_max(size, codec) + outer_state_bytes(size)) for size in sizes]


def _versions(config: RunConfig, retention: Retention) -> int:
    """Of one stage: of each module the versions that are kept whole, the parameters of others, and what the stage began
    with. Each path may be served with a round of its own."""
    rounds, found = config.rounds.rounds, 0
    whole = min(rounds, retention.versions(config)) if retention.rounds else rounds
    if not retention.has_all_params:
        whole = 1
    rest, marked = range(1, rounds - whole + 1), set(config.routing.reshard_rounds)
    if retention.snapshots:
        marked.update(range(retention.snapshots, rounds, retention.snapshots))
    marked.intersection_update(rest)
    for module, (snapshot, others) in zip(config.topology.modules(), _version_bytes(config), strict=True):
        served = min(len(rest) - len(marked), len(config.topology.paths_through(module)))
        served *= retention.has_all_params
        found += whole * (snapshot + others) + (len(marked) + served) * snapshot
    path = sum(module_size(config, module) for module in config.topology.path(0).modules())
    return found + snapshot_bytes(path) + MOMENTS_BYTES_A_VALUE * path


def _contributions(config: RunConfig, volunteers: int) -> int:
    """Of a round of one stage."""
    sizes = [module_size(config, module) for module in config.topology.path(0).modules()]
    return _trained(config, volunteers) * sum(bytes_max(size, config.compression.uplink) for size in sizes)


def _trained(config: RunConfig, volunteers: int) -> int:
    """How often paths are trained in a round: each once at least, and by replicas as far as a version counts them."""
    paths = config.topology.path_count
    return min(max(paths, volunteers), paths * places_drawn(config.places_min))


def show_plan(planned: Plan, *, is_json: bool, probe: Probe | None = None) -> None:
    """Print it on the standard output, and what a probe found."""
    if is_json:
        print(json.dumps(planned.document() | ({} if probe is None else {"probe": probe.document()}), indent=2))
        return
    print("\n".join([*lines(planned), *([] if probe is None else probe.lines())]))


def lines(planned: Plan) -> Iterator[str]:
    """For people: a heading, and one line for each thing."""
    rounds = f"{planned.warmup_rounds} rounds of warm-up, {planned.rounds} of the grid"
    yield f"{planned.name}: grid {planned.grid}, {planned.paths} paths, {planned.modules} modules, {rounds}"
    for name, value in _rows(planned):
        yield f"  {name:<17}{value}"


def _rows(planned: Plan) -> Iterator[tuple[str, str]]:
    for level in planned.levels:
        yield f"level {level.level}", f"{level.modules} modules of {level.parameters:,} parameters"
    yield "a path", f"{planned.path_parameters:,} parameters; all modules {planned.all_parameters:,}"
    yield "text", f"about {planned.text_tokens:,} tokens; each path reads its part {planned.passes:.1f} times"
    yield from _line_rows(planned)
    yield from _memory_rows(planned.memory)
    yield from _disk_rows(planned)


def _line_rows(planned: Plan) -> Iterator[tuple[str, str]]:
    each, line = planned.round, planned.line
    both = f"{in_bytes(each.up_bytes)} up, {in_bytes(each.down_bytes)} down"
    yield "at first", f"{in_bytes(planned.first_down_bytes)} down for each volunteer"
    yield "each round", f"{each.steps} steps, {each.tokens:,} tokens; {both}"
    both_ways = each.down_bytes_by_codec
    yield "  by codec", _by(both_ways)
    yield "  up alone", _by({codec: size for codec, size in each.up_bytes_by_codec.items() if codec not in both_ways})
    speed = f"{line.up_mbit:g} Mbit/s up and {line.down_mbit:g} down"
    yield "  line", f"{_time(each.line_s)} at {speed}; a round waits {each.deadline_s:g} s at most for who is missing"
    one = planned.leader
    work = f"{in_bytes(one.down_bytes)} down for {one.contributions} contributions to {one.module}"
    yield "  busiest leader", f"{work}, {in_bytes(one.up_bytes)} up for its version"
    yield "  coordinator", f"{in_bytes(planned.coordinator_down_bytes)} down for its archive, and signed documents"
    yield "whole run", f"{_time(planned.line_s)} of each volunteer's line, besides training"
    if (training := planned.training) is not None:
        pace = f"at {training.tokens_per_s:,.0f} tokens/s of each volunteer"
        yield "  time", f"{_time(training.round_s)} a round, {_time(training.run_s)} in all, {pace}"
    if (advice := planned.advice) is not None:
        yield "  advice", advice.words
        yield from (("", reason) for reason in advice.why)


def _memory_rows(memory: Memory) -> Iterator[tuple[str, str]]:
    fixed = memory.weights + memory.gradients + memory.optimizer + memory.copies
    has_8bit = memory.optimizer_8bit < memory.optimizer
    name, in_8bit = "AdamW" if has_8bit else "Muon and AdamW", f" ({in_bytes(memory.optimizer_8bit)} in 8 bits)"
    adamw = f"{name} {in_bytes(memory.optimizer)}{in_8bit if has_8bit else ''}"
    yield "memory", f"at least {in_bytes(memory.least)}, besides {in_bytes(memory.program)} of the program itself"
    yield "  parameters", f"{in_bytes(fixed)}, of which {adamw}"
    yield "  whole batches", f"{in_bytes(memory.batch_float32)}; in bfloat16 {in_bytes(memory.batch_bfloat16)}"


def _disk_rows(planned: Plan) -> Iterator[tuple[str, str]]:
    disk = planned.disk
    parts = {"text": disk.seed_text, "versions": disk.seed_versions, "contributions": disk.seed_contributions}
    yield "disk", f"{in_bytes(disk.volunteer)} of a volunteer; {in_bytes(disk.owner)} for each module that it owns"
    yield "  coordinator", f"{in_bytes(disk.seed)} at the end, with {planned.volunteers} volunteers: {_by(parts)}"
    is_less, more = disk.seed < disk.seed_whole, f"{in_bytes(disk.seed_whole)} if [archive] kept all rounds"
    whole = more if is_less else "all is kept"
    yield "  each round", f"{in_bytes(disk.seed_round)} more; {whole}"


def _by(found: dict[str, int]) -> str:
    return ", ".join(f"{codec} {in_bytes(count)}" for codec, count in found.items())


def _time(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s"
