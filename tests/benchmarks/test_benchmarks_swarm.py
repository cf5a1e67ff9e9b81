"""The benchmarks of transfers play real rounds, on sizes that take no time, and cut and compare what they timed."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from netns import NEEDS_ROOT

from benchmarks.line.__main__ import line_table, verdict
from benchmarks.line.experiment import PATH_150M, QUICK_PATH, LineRound, covered_s, play
from benchmarks.line.experiment import Wish as LineWish
from benchmarks.line.network import DEVICE, home_line, require_root
from benchmarks.line.observer import Gaps
from benchmarks.processes import DAEMON, Spent, spent, start_helper
from benchmarks.transfer.__main__ import compared, linearity, processor_table, ratio_table
from benchmarks.transfer.measure import (
    ANNOUNCED,
    AVERAGED,
    CLOSED,
    PHASES,
    Case,
    OurRound,
    OurSwarm,
    Wish,
    ends_of,
    fan_ins,
    phases_of,
    slope_ratio,
)
from benchmarks.transfer.runs import config_of, model_of
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.core.outer.compress import CODECS, bytes_max
from dipaco_p2p.errors import DipacoError, EnvironmentUnfit

VALUES = 80_000


def size(values: int) -> int:
    return module_layout(model_of(values), 0).size


def our_round(seconds: float, **changes: Any) -> OurRound:
    given = {"seconds": seconds, "phases": dict.fromkeys(PHASES, 0.0), "kept_s": 0.0, "payload_bytes": 1}
    given |= {"owner": Spent(1.0, 0.25), "contributors": Spent(2.0, 0.5)}
    return OurRound(**(given | {"before_bytes": 1, "peak_bytes": 3} | changes))


def line_round(push_s: float, **changes: Any) -> LineRound:
    given = {"push_s": push_s, "pull_s": 2.0, "wait_s": 3.0, "payload_bytes": 1, "up_bytes": 2, "down_bytes": 3}
    return LineRound(**(given | {"gap_s": 5.0, "missed": 0} | changes))


@pytest.mark.parametrize("values", [VALUES, 1_000_000, 25_000_000])
def test_a_module_has_the_size_that_is_asked_for_but_for_a_row(values: int) -> None:
    assert values - model_of(values).width < size(values) <= values


def test_the_path_of_the_line_has_150_million_parameters_in_two_modules_of_equal_depth() -> None:
    assert [level.blocks for level in PATH_150M.levels] == [6, 6]
    sizes = [module_layout(PATH_150M, level).size for level in range(len(PATH_150M.levels))]
    assert sum(sizes) == pytest.approx(150e6, rel=0.01)


def test_a_run_without_text_says_what_the_run_file_would() -> None:
    assert config_of(model_of(VALUES)).compression == config_of(model_of(VALUES), "int4").compression
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


@pytest.mark.parametrize(("seconds", "ratio"), [([3, 5, 9, 17], 1.0), ([4, 16, 64, 256], 2.4), ([4, 4, 4, 4], None)])
def test_the_slopes_of_the_halves_say_whether_a_time_is_linear(seconds: list[float], ratio: float | None) -> None:
    found = slope_ratio([2, 4, 8, 16], seconds)
    assert found == (None if ratio is None else pytest.approx(ratio))


def test_two_fan_ins_say_nothing_of_linearity() -> None:
    cases = [Case(codec="int8", fan_in=fan_in, rounds=[our_round(fan_in)]) for fan_in in (2, 4)]
    assert "too few" in linearity(cases)[0]
    cases.append(Case(codec="int8", fan_in=8, rounds=[our_round(20.0)]))
    assert "worse than linear" in linearity(cases)[0]


def test_ratios_are_taken_within_each_turn() -> None:
    case = Case(codec="int8", fan_in=2, rounds=[our_round(1.0), our_round(2.0), our_round(9.0, peak_bytes=8)])
    case.rival_s = [2.0, 4.0, 3.0]
    assert case.ratio == 0.5 and case.seconds == 2.0
    assert (case.peak_bytes, case.grown_bytes) == (8, 7)
    assert list(ratio_table([case], title="").columns[4].cells) == ["0.50"]
    wish = Wish(values=VALUES, fan_ins=(2,), codecs=("int8",), rival="float16", runs=3, processes=1)
    assert "float16" in compared(wish)
    assert Case(codec="int8", fan_in=2, rounds=[our_round(1.0)]).ratio is None


def test_what_the_processor_did_is_told_of_programs_and_daemons() -> None:
    case = Case(codec="int8", fan_in=2, rounds=[our_round(1.0)])

    def cells() -> list[str]:
        return [str(next(iter(column.cells))) for column in processor_table([case]).columns[2:]]

    assert cells()[:4] == ["1.00", "2.00", "0.75", "3.75"]
    told = case.take(our_round(1.0), {"seconds": 2.0, "programs_s": 5.0, "daemons_s": 1.5})
    assert told == ", hivemind 2.00 s" and case.rival_s == [2.0]
    assert cells()[4:] == ["5.00", "1.50", "6.50"]


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


def test_gaps_between_heartbeats_are_measured_from_one_sight_to_the_next() -> None:
    gaps = Gaps(100.0)
    for counter, now_s in ((1, 101.0), (1, 104.0), (2, 105.5), (None, 106.0), (3, 107.0)):
        gaps.look(counter, now_s)
    assert (gaps.greatest_s, gaps.missed) == (4.5, 1)


def test_time_that_two_pulls_share_counts_once() -> None:
    assert covered_s([(1.0, 3.0), (2.0, 4.0), (6.0, 7.0), (6.5, 6.6)]) == 4.0


def test_the_line_is_judged_by_the_median_round_and_the_worst_gap() -> None:
    rounds = [line_round(10.0), line_round(13.0), line_round(90.0, gap_s=14.0)]
    assert "within the goal" in verdict(rounds, ttl_s=15.0) and "on time" in verdict(rounds, ttl_s=15.0)
    late = [line_round(14.0, gap_s=16.0, missed=2)]
    assert "beyond the goal" in verdict(late, ttl_s=15.0) and "late" in verdict(late, ttl_s=15.0)
    assert rounds[0].total_s == 15.0
    assert list(line_table({"int4": rounds}, title="").columns[1].cells)[-1] == "14.0"


def test_without_root_there_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EnvironmentUnfit, match="need root"):
        require_root()


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
    async def scenario() -> list[OurRound]:
        config = config_of(model_of(VALUES), "int8")
        swarm = OurSwarm(tmp_path, config, contributors=2, processes=1)
        try:
            await swarm.open()
            return [await swarm.round() for _ in range(2)]
        finally:
            await swarm.close()

    for played in asyncio.run(scenario()):
        assert size(VALUES) < played.payload_bytes <= bytes_max(size(VALUES), "int8")
        assert played.peak_bytes >= played.before_bytes > 0
        assert played.seconds == pytest.approx(sum(played.phases.values())) and played.phases["pull"] > 0


@NEEDS_ROOT
def test_the_line_is_limited_both_ways_each_at_its_own_end() -> None:
    with home_line() as line:
        line.limit(up_mbit=20.0, down_mbit=100.0)
        rates = [shown("tc", "-n", host.namespace, "qdisc", "show", "dev", DEVICE) for host in (line.home, line.far)]
    assert "rate 20Mbit" in rates[0] and "rate 100Mbit" in rates[1]


def shown(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.libp2p
@pytest.mark.slow
@NEEDS_ROOT
def test_a_round_goes_over_the_line_and_leaves_no_namespace(tmp_path: Path) -> None:
    wish = LineWish(model=QUICK_PATH, codec=next(iter(CODECS)), rounds=1, up_mbit=8.0, down_mbit=8.0)
    [played] = asyncio.run(play(wish, tmp_path, lambda text: None))
    assert played.up_bytes > played.payload_bytes and played.down_bytes > 0
    assert f"dipaco-line-{os.getpid()}" not in shown("ip", "netns", "list")
