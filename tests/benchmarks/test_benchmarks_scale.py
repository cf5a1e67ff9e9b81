"""The model of large swarms: it repeats itself, its parts do what they say, and its command tells of bad input."""

from __future__ import annotations

import random
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.scale.__main__ import exponent, main
from benchmarks.scale.churned import DAY_S, FLASH_S, Churn
from benchmarks.scale.costs import TTL_S, Costs, Peer, depth_of, nearest, record_bytes
from benchmarks.scale.lines import load
from benchmarks.scale.model import Swarm
from benchmarks.scale.real import HOURS, Real, model_of, write_run
from bootstrap.runfile import load_run_file
from dipaco_p2p.config import SHARES_MAX
from dipaco_p2p.protocol.neighbours import place
from dipaco_p2p.protocol.records import KEY_BYTES_MAX, KEY_RECORDS_MAX
from dipaco_p2p.topology import Topology


def test_a_swarm_repeats_itself_and_covers_its_paths() -> None:
    played = [Swarm(30, hours=1.0, churn=Churn(), widths=(3, 3)).play() for _ in range(2)]
    assert asdict(played[0]) == asdict(played[1])
    one = played[0]
    assert one.covered > 0.95 and one.goodput > 0.2 and one.rounds >= 3
    assert one.fullest_records <= KEY_RECORDS_MAX and one.fullest_bytes <= KEY_BYTES_MAX


def test_fewer_volunteers_than_paths_train_all_of_them_in_turn() -> None:
    few = Swarm(4, hours=3.0, churn=Churn(is_quiet=True), widths=(3, 3)).play()
    assert few.covered > 0.95 and few.rounds >= 2


def test_a_small_swarm_reads_every_key_at_each_look_unless_it_trains_and_a_larger_one_its_own() -> None:
    """4x4 paths are 16 keys of claims and 8 of heads, and there are 12 looks a minute. Who trains reads the keys of
    others at every third."""

    def played(peers: int) -> float:
        return Swarm(peers, hours=1.0, churn=Churn(is_quiet=True), widths=(4, 4)).play().reads

    every = 12 * (16 + 8)
    small, large = played(30), played(60)
    with mock.patch("benchmarks.scale.costs.LOOKS_MAX", 1):
        idle = played(30)
    assert every < idle < 1.3 * every and large < idle / 2
    assert every / 3 < small < 0.8 * every and large < 0.8 * small


def test_what_was_released_stays_in_the_dht_as_long_as_it_lives() -> None:
    topology = Topology((2, 2))
    path, *_ = topology.paths()
    costs = Costs(topology, {each: {} for each in topology.paths()}, {})
    costs.released.append((100.0, path))
    peer = Peer("peer", place("peer"), 1.0, 1e9, 0.0)
    found = []
    for now_s in (60.0, 120.0):
        costs.account([peer], 60.0, now_s=now_s)
        found.append(costs.spent["records"])
    assert found[0] - (found[1] - found[0]) == 12  # at each of the looks of a minute


def test_the_run_of_the_real_processes_is_one_and_its_model_has_as_many_paths(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    write_run(path, 12, (4, 4))
    config = load_run_file(path).run
    assert config.model.path_count == 16 and config.liveness.heartbeat_ttl_s == TTL_S


@pytest.mark.parametrize("cadence_s", [40.0, 90.0])
def test_the_model_beside_processes_has_versions_as_often(cadence_s: float) -> None:
    real = Real(volunteers=12, median={}, busiest={}, cadence_s=cadence_s, memory_bytes=0.0, idle={}, ordinary=12)
    assert model_of(real, (4, 4)).rounds == pytest.approx(HOURS * 3600 / cadence_s, rel=0.1)


def test_a_leader_that_leaves_is_followed_within_three_expiries() -> None:
    swarm = Swarm(60, hours=1.0, churn=Churn(region_at_s=1800.0), widths=(3, 3))
    assert 0 < swarm.play().leaderless_max_s <= 90


def test_sessions_are_as_they_were_measured() -> None:
    chance = random.Random(1)
    found = [Churn().session_s(chance) for _ in range(4000)]
    assert 0.08 < sum(each == float("inf") for each in found) / len(found) < 0.12
    assert 3600 < statistics.median(found) < 3 * 3600
    assert Churn(is_quiet=True).session_s(chance) == float("inf")
    flash = Churn(flash_at_s=DAY_S / 2)
    assert flash.wanted(100, DAY_S / 2) == pytest.approx(50, rel=0.01)
    assert flash.wanted(100, DAY_S / 2 + FLASH_S) == pytest.approx(100, rel=0.05)


def test_the_nearest_nodes_are_those_that_differ_least() -> None:
    places = sorted(random.Random(2).getrandbits(64) for _ in range(200))
    for at in (0, 2**63 + 12345, 2**64 - 1, places[7]):
        assert nearest(places, at) == sorted(places, key=lambda one: one ^ at)[:5]
    assert nearest([], 3) == []


def test_sizes_and_depths() -> None:
    sizes = record_bytes()
    assert sizes["claim"] < sizes["heartbeat"] < sizes["head"] < 2048
    assert [depth_of(count) for count in (0, 64, 65, 10_000)] == [0, 0, 1, 8]


def test_an_exponent_is_a_slope() -> None:
    assert exponent([10, 100, 1000], [5, 50, 500]) == pytest.approx(1.0)
    assert exponent([10, 100], [7, 7]) == 0.0 and exponent([10, 100], [0, 7]) == 0.0


def test_a_leader_sends_two_copies_of_a_version_and_no_work_however_many_train_the_module() -> None:
    kinds: dict[str, Any] = {"widths": (16, 16), "values": 12_500_000, "uplink": "top128", "downlink": "int4"}
    few, many = (load(volunteers, round_s=600.0, **kinds) for volunteers in (256, 10_000))
    assert few.leader_out == many.leader_out < 0.2 < few.leader_before < many.leader_before
    assert few.author_out == many.author_out < few.work_before < many.work_before
    assert (few.contributions, few.trainers, many.trainers) == (16, 16, 625)
    assert many.contributions <= SHARES_MAX and many.leader_in < 10
    assert many.keeper_in < many.busiest_keeper_in < 10
    bounded = load(10_000, round_s=600.0, **kinds | {"uplink": "int4", "contributions_max": 64})
    assert bounded.contributions == 48 and bounded.leader_in < 10
    half = load(10_000, round_s=300.0, **kinds)
    assert half.leader_out == pytest.approx(2 * many.leader_out)
    assert half.contributions_of(half.leader_in) in (half.contributions, half.contributions - 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--modelled", "many"],
        ["--counted", "1"],
        ["--grid", "0x4"],
        ["--round-s", "0"],
        ["--path-values", "a few"],
        ["--keepers", "0"],
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_the_command_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--modelled", "20,40", "--hours", "0.5", "--modelled-grid", "2x2"]) == 0
    shown = capsys.readouterr().out
    assert "exponents: reads" in shown and len(shown.splitlines()) == 5
