"""What the benchmark of a module's update says of its figures; the town itself needs root and minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.processes import Spent
from benchmarks.town.network import Rate
from benchmarks.town.update import RIVAL, Case, Found, Round, planned, spread, tables
from benchmarks.transfer.owner import config_of, model_of
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.protocol import owners
from dipaco_p2p.swarm.identity import KEY_NAME, load_or_create

LINE = Rate(up=20.0, down=100.0)  # 2.5 and 12.5 MB/s
MB = 1e6


@pytest.mark.parametrize(
    ("peers", "modules", "seconds"),
    [
        (4, 1, 20 / 2.5 + 10 / 2 / 2.5),  # two copies of each payload; both owners send half of the update
        (8, 1, 20 / 2.5 + 10 * 6 / 8 / 2.5),  # six lack it, and all eight send
        (24, 1, 23 * 10 / 12.5 + 10 * 22 / 24 / 2.5),  # the owners' downlinks are full
        (4, 4, 20 * 3 / 4 / 2.5 + 10 * 2 / 4 / 2.5),  # nobody sends itself anything
    ],
)
def test_a_plan_counts_what_has_to_cross_the_fullest_line(peers: int, modules: int, seconds: float) -> None:
    case = Case(peers=peers, modules=modules, codec="int4")
    assert planned(case, LINE, payload_bytes=10 * MB, update_bytes=10 * MB) == pytest.approx(seconds)


def test_an_all_reduce_sends_everybody_its_part_and_gets_the_means_back() -> None:
    case = Case(peers=4, modules=1, codec=RIVAL)
    assert planned(case, LINE, payload_bytes=25 * MB, update_bytes=25 * MB) == pytest.approx(15.0)


def test_tables_hold_times_against_the_plan_and_the_rival() -> None:
    def found(codec: str, *seconds: float) -> Found:
        case = Case(peers=4, modules=1, codec=codec)
        facts = {"pushed_s": 2.0, "payload_bytes": 3_000_000, "processor": Spent(1.0, 0.5)}
        lines = {"up_bytes": (1_000_000, 3_000_000), "down_bytes": (2_000_000, 6_000_000)}
        return Found(case=case, plan_s=4.0, rounds=[Round(seconds=each, **facts, **lines) for each in seconds])

    times, lines = tables([found(RIVAL, 9.0, 10.0, 11.0), found("int4", 5.0)], LINE, values=25_000_000)
    assert [list(column.cells)[1] for column in times.columns][2:] == ["int4", "2.0", "5.0", "4.00", "1.25", "0.50"]
    assert [list(column.cells)[1] for column in lines.columns][3:] == ["3.0", "2.0", "4.0", "3.0", "6.0", "1.5"]


def test_modules_of_a_path_are_about_as_large_and_come_to_different_leaders(tmp_path: Path) -> None:
    config = config_of(model_of(25_000_000, modules=4), "ternary640")
    assert config.compression.downlink == "int4"
    sizes = [module_layout(config.model, level).size for level in range(4)]
    assert max(sizes) < 1.1 * min(sizes) and sum(sizes) == pytest.approx(25_000_000, rel=0.05)
    spread(tmp_path, config, 4)
    keys = [load_or_create(tmp_path / f"volunteer-{number}" / KEY_NAME).peer for number in range(1, 5)]
    assert sorted(owners.rank(module, keys)[0] for module in config.topology.modules()) == sorted(keys)
