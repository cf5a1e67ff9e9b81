"""The benchmarks of codecs and of the inner loop measure what they say, on sizes that take no time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.compression import speeds
from benchmarks.gpu import utilisation
from benchmarks.gpu.utilisation import PATH, Way, attention_flops, flops_per_token, nominal_flops, product_weights
from benchmarks.overlap import WIDTH, Lines, model_of, path_values, share_of, share_table
from benchmarks.trainer import __main__ as report
from benchmarks.trainer.__main__ import measure, ratios
from benchmarks.trainer.loops import EXACT, PLAIN, loops
from benchmarks.trainer.rounds import Volunteer, shares
from dipaco_p2p.config import InnerConfig, LevelConfig, ModelConfig, RunConfig
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.core.model.shards import batch
from dipaco_p2p.core.model.transformer import PathModel
from dipaco_p2p.core.outer.compress import CODECS

MODEL = ModelConfig(
    vocab_size=258,
    width=16,
    heads=2,
    ffn_width=24,
    context=64,
    levels=(LevelConfig(embedding=True, head=True), LevelConfig(blocks=1)),
)


def test_every_codec_is_measured_and_the_smaller_ones_are_smaller() -> None:
    found = speeds(50_000)
    assert [speed.codec for speed in found] == list(CODECS)
    assert found[0].bytes > found[1].bytes > found[2].bytes
    assert all(speed.ratio * speed.bytes == pytest.approx(200_000) and speed.encode_mb_s > 0 for speed in found)


VALUES = 20 * path_values(model_of(WIDTH))
LINES, SLOW = (Lines(up_mbit=up_mbit, down_mbit=100.0, values=VALUES) for up_mbit in (20.0, 4.0))


def test_a_slow_line_is_hidden_by_inner_steps() -> None:
    off, on = (share_of(LINES, round_s=4.0, overlap=overlap, rounds=3) for overlap in (False, True))
    assert 0 < off.share < on.share <= 1
    assert on.seconds < off.seconds
    assert list(share_table([off, on], LINES).columns[1].cells) == [f"{off.share:.1%}"]


def test_a_slower_line_leaves_less_time_for_steps() -> None:
    fast, slow = (share_of(lines, round_s=2.0, overlap=False, rounds=2).share for lines in (LINES, SLOW))
    assert fast > slow


def test_both_loops_learn_the_same_from_the_same_batches() -> None:
    found = loops(MODEL, InnerConfig(batch=4, weight_decay=0.0), is_quick=True)
    assert list(found) == [PLAIN, EXACT]
    assert found[PLAIN](0, 3) == pytest.approx(found[EXACT](0, 3), rel=1e-4)


def test_ratios_are_taken_within_each_turn() -> None:
    assert ratios({PLAIN: [1.0, 2.0, 9.0], "twice": [0.5, 1.0, 4.5]}) == {PLAIN: 1.0, "twice": 2.0}
    calls: list[str] = []
    found = {name: lambda first, count, name=name: calls.append(name) or 0.0 for name in ("a", "b")}
    measure(found, steps=1, runs=2)
    assert calls == ["a", "b", "a", "b"]


# -- whole rounds


def test_whole_rounds_go_on_from_each_other_beside_the_bare_steps() -> None:
    config = RunConfig(model=replace(MODEL, context=72), inner=InnerConfig(steps=1, batch=2))
    volunteer = Volunteer(config, device="cpu", fast=False)
    start = volunteer.flats
    assert volunteer.bare_s(2) > 0 and volunteer.flats is start and volunteer.rounds_done == 0
    assert volunteer.whole_s(2) > 0 and volunteer.rounds_done == 2
    assert all((old != new).any() for old, new in zip(start, volunteer.flats, strict=True))
    assert len(shares(config, rounds=1, runs=3, device="cpu", fast=False)) == 3


def test_the_figures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "ModelConfig", lambda: MODEL)
    monkeypatch.setattr(report, "whole_rounds", lambda **wish: {"median": 0.5, **wish, "steps_a_round": 1})
    file = tmp_path / "trainer.json"
    report.main(threads=1, rounds=3, device="cpu", quick=True, json_file=file)
    figures = json.loads(file.read_text())
    assert figures["tokens_a_step"] == InnerConfig().batch * MODEL.context and figures["device"] == "cpu"
    assert list(map(len, figures["seconds_a_step"].values())) == [2, 2]
    assert figures["whole_rounds"]["exact"].items() >= {"rounds": 3, "runs": 2, "steps": 3, "fast": False}.items()


# -- utilisation


def test_the_products_are_those_that_torch_counts() -> None:
    model, tokens = PathModel(MODEL), batch(utilisation.noise(MODEL), seed=0, step=0, size=2)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    masked = attention_flops(MODEL)  # this computes the masked half too
    assert counter.get_total_flops() == tokens.numel() * (flops_per_token(MODEL) + masked)


def test_the_path_is_as_large_as_it_says() -> None:
    parameters = sum(module_layout(PATH, level).size for level in range(len(PATH.levels)))
    assert 149e6 < product_weights(PATH) < parameters < 150.5e6
    assert sum(level.blocks for level in PATH.levels) == 12 and (PATH.width, PATH.context) == (896, 1024)


def test_a_share_of_the_peak_is_measured_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilisation, "hindrance", lambda device: "not worth compiling here")
    own = utilisation.utilisation("cpu", model=MODEL, way=Way(batch=2), steps=2, peak_size=64)
    assert own.of_peak == pytest.approx(own.flops_per_token * 2 * MODEL.context / own.step_s / own.peak)
    assert own.nominal is None and own.of_nominal is None and "micro-batch 2" in own.setup


def test_a_nominal_rate_is_found_by_the_name_of_the_chip() -> None:
    assert nominal_flops("NVIDIA H100 PCIe") < nominal_flops("NVIDIA H100 80GB HBM3")
    assert nominal_flops("Some Other Chip") is None
