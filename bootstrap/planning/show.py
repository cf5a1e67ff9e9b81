"""What `check` and `plan` print."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from dipaco_p2p.program.examination import Finding, Level, document, exit_code, told, worst
from dipaco_p2p.program.text import in_bytes

from .plan import Memory, Plan

SCHEMA = "dipaco.check/1"
STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
VERDICTS = {
    Level.OK: "The run can start.",
    Level.WARN: "The run can start; the warnings say what it costs.",
    Level.FAIL: "The run cannot start before the failures are mended.",
}


def show_findings(findings: Sequence[Finding], *, is_json: bool) -> int:
    """Print them on the standard output; the exit code."""
    if is_json:
        print(json.dumps(document(findings, schema=SCHEMA), indent=2))
        return exit_code(findings)
    console = Console(highlight=False, soft_wrap=True)
    for level, line in told(findings):
        console.print(Text.assemble((f"{level or '':<5}", STYLES[level] if level else ""), line))
    console.print(VERDICTS[worst(findings)])
    return exit_code(findings)


def show_plan(planned: Plan, *, is_json: bool) -> None:
    """Print it on the standard output."""
    print(json.dumps(planned.document(), indent=2) if is_json else "\n".join(lines(planned)))


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
    yield "  up by codec", _by(each.up_bytes_by_codec)
    yield "  down by codec", _by(each.down_bytes_by_codec)
    speed = f"{line.up_mbit:g} Mbit/s up and {line.down_mbit:g} down"
    yield "  line", f"{_time(each.line_s)} at {speed}; a round waits {each.deadline_s:g} s at most for who is missing"
    yield "whole run", f"{_time(planned.line_s)} of each volunteer's line, besides training"


def _memory_rows(memory: Memory) -> Iterator[tuple[str, str]]:
    fixed = memory.weights + memory.gradients + memory.optimizer + memory.copies
    adamw = f"{in_bytes(memory.optimizer)} ({in_bytes(memory.optimizer_8bit)} in 8 bits)"
    yield "memory", f"at least {in_bytes(memory.least)}, besides {in_bytes(memory.program)} of the program itself"
    yield "  parameters", f"{in_bytes(fixed)}, of which AdamW {adamw}"
    yield "  whole batches", f"{in_bytes(memory.batch_float32)}; in bfloat16 {in_bytes(memory.batch_bfloat16)}"


def _disk_rows(planned: Plan) -> Iterator[tuple[str, str]]:
    disk = planned.disk
    parts = {"text": disk.seed_text, "versions": disk.seed_versions, "contributions": disk.seed_contributions}
    yield "disk", f"{in_bytes(disk.volunteer)} of a volunteer; {in_bytes(disk.owner)} for each module that it owns"
    yield "  coordinator", f"{in_bytes(disk.seed)} at the end, with {planned.volunteers} volunteers: {_by(parts)}"


def _by(found: dict[str, int]) -> str:
    return ", ".join(f"{codec} {in_bytes(count)}" for codec, count in found.items())


def _time(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s"
