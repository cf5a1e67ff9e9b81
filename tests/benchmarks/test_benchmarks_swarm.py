"""The benchmarks of transfers play real rounds, on sizes that take no time, and cut and compare what they timed."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes import DAEMON, Spent, spent, start_helper
from benchmarks.transfer.__main__ import (
    ANNOUNCED,
    AVERAGED,
    CLOSED,
    PHASES,
    Case,
    Round,
    Swarm,
    ends_of,
    fan_ins,
    phases_of,
    tables,
)
from benchmarks.transfer.owner import config_of, model_of
from dipaco_p2p.config import CompressionConfig
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.core.outer.compress import bytes_max
from dipaco_p2p.errors import DipacoError

VALUES = 80_000


def size(values: int) -> int:
    return module_layout(model_of(values), 0).size


def our_round(seconds: float, **changes: Any) -> Round:
    given = {"seconds": seconds, "phases": dict.fromkeys(PHASES, 0.0), "kept_s": 0.0, "payload_bytes": 1}
    given |= {"owner": Spent(1.0, 0.25), "contributors": Spent(2.0, 0.5)}
    return Round(**(given | {"before_bytes": 1, "peak_bytes": 3} | changes))


@pytest.mark.parametrize("values", [VALUES, 1_000_000, 25_000_000])
def test_a_module_has_the_size_that_is_asked_for_but_for_a_row(values: int) -> None:
    assert values - model_of(values).width < size(values) <= values


def test_a_run_without_text_says_what_the_run_file_would() -> None:
    assert config_of(model_of(VALUES), "int4").compression == CompressionConfig()
    assert config_of(model_of(VALUES), "int8").compression.downlink == "int8"


def turn(*ends_s: float) -> dict[str, Any]:
    encoded_s, uploaded_s, receipt_s, *applied_s = ends_s
    times = {"encoded_s": encoded_s, "uploaded_s": uploaded_s, "receipt_s": receipt_s}
    return times | {"applied_s": {f"L{level}.M0": at_s for level, at_s in enumerate(applied_s)}}


@pytest.mark.parametrize(
    ("began_s", "turns", "passed", "phases"),
    [
        (0.5, [turn(1, 2, 3, 9), turn(2.5, 4, 4.5, 8, 11)], (4.75, 6, 6.5), [2, 1.5, 0.5, 0.25, 1.25, 0.5, 4.5]),
        (0, [turn(3, 2, 4, 6)], (4.5, 5, 5), [3, 0, 1, 0.5, 0.5, 0, 1]),  # pushed before all had encoded: no time
    ],
)
def test_phases_are_cut_at_the_last_contributor_and_add_up(
    began_s: float, turns: list[dict[str, Any]], passed: tuple[float, ...], phases: list[float]
) -> None:
    ends_s = ends_of(turns, dict(zip((CLOSED, AVERAGED, ANNOUNCED), passed, strict=True)))
    found = phases_of(began_s, ends_s)
    assert list(found) == list(PHASES) and list(found.values()) == phases
    assert sum(found.values()) == ends_s[-1] - began_s


def test_fan_ins_double() -> None:
    assert fan_ins(8) == fan_ins(15) == [2, 4, 8]


def test_tables_tell_medians_and_the_most_memory() -> None:
    case = Case(codec="int8", fan_in=2, rounds=[our_round(1.0), our_round(2.0), our_round(9.0, peak_bytes=8)])
    assert (case.seconds, case.peak_bytes, case.grown_bytes) == (2.0, 8, 7)
    rounds, _, processor = ([str(next(iter(c.cells))) for c in each.columns[2:]] for each in tables([case], title=""))
    assert rounds[0] == "2.00" and processor == ["1.00", "2.00", "0.75", "3.75"]


def test_the_processor_time_of_a_program_has_that_of_what_it_started(tmp_path: Path) -> None:
    daemon = tmp_path / DAEMON  # the system names a process by its file
    daemon.symlink_to("/bin/sh")
    work = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo done; read end"
    script = f"{daemon} -c '{work}'; true"
    before = spent(os.getpid())
    with subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stdout.readline() == b"done\n"
        found, ours = spent(program.pid), spent(os.getpid()).since(before)
        program.communicate(b"end\n")
    assert 0 < found.daemons_s <= ours.daemons_s and found.programs_s < found.daemons_s
    assert spent(program.pid) == Spent(0, 0)


def test_a_helper_that_ends_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        helper = await start_helper("benchmarks.nothing", name="nothing", log=tmp_path / "log")
        try:
            with pytest.raises(DipacoError, match="ended before it could open") as caught:
                await helper.ask("open")
            assert "No module named" in caught.value.hint
        finally:
            await helper.end()

    asyncio.run(scenario())


@pytest.mark.libp2p
@pytest.mark.slow
def test_a_round_counts_every_contributor_and_is_followed_by_all(tmp_path: Path) -> None:
    async def scenario() -> list[Round]:
        config = config_of(model_of(VALUES), "int8")
        swarm = Swarm(tmp_path, config, contributors=2)
        try:
            await swarm.open()
            return [await swarm.round() for _ in range(2)]
        finally:
            await swarm.close()

    for played in asyncio.run(scenario()):
        assert size(VALUES) < played.payload_bytes <= bytes_max(size(VALUES), "int8")
        assert played.peak_bytes >= played.before_bytes > 0
        assert played.seconds == pytest.approx(sum(played.phases.values())) and played.phases["pull"] > 0
