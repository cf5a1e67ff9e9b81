"""The benchmark of text that comes later: what it trains, and on what."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import late_text
from benchmarks.late_text import WIDE, Grid, Texts, compare
from bootstrap.text.sequences import PARTS, Sequences
from dipaco_p2p.config import InnerConfig, RoundsConfig, RunConfig, WarmupConfig
from dipaco_p2p.core.model.shards import HeldOut


@pytest.fixture(autouse=True)
def few_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootstrap.genesis.prepare.MOMENT_STEPS", 2)


def text(low: int, *, seed: int) -> Sequences:
    """Sequences of 200 tokens from `low` on."""
    chance = np.random.default_rng(seed)
    parts = {
        name: HeldOut(
            tokens=chance.integers(low, low + 200, (40 if name == "train" else 6, 128)).astype(np.int32),
            documents=np.arange(40 if name == "train" else 6, dtype=np.int32),
        )
        for name in PARTS
    }
    return Sequences(**parts)


def config() -> RunConfig:
    return RunConfig(
        model=late_text._model(WIDE),
        warmup=WarmupConfig(rounds=1),
        inner=InnerConfig(steps=1, batch=2, warmup_steps=1),
        rounds=RoundsConfig(rounds=2),
    )


def test_all_runs_are_measured_on_both_texts_and_the_same_tokens() -> None:
    losses = compare(Texts(first=text(1, seed=1), second=text(500, seed=2)), config())
    assert set(losses) == {"from the start", "later", "never"}
    assert all(set(parts) == {"first text", "second text"} for parts in losses.values())
    assert all(0 < loss < 10 for parts in losses.values() for loss in parts.values())
    row = late_text._row(losses)
    above = np.exp(losses["later"]["second text"] - losses["from the start"]["second text"]) - 1
    assert row["second text, later over from the start, %"] == pytest.approx(100 * above)


def test_a_grid_that_grows_begins_as_it_was_and_gives_the_new_text_to_the_new_paths() -> None:
    first, second = text(1, seed=1).train.tokens, text(500, seed=2).train.tokens
    grid = Grid(late_text.replace(config(), model=late_text._model(WIDE // 2)), first)
    grid.round()
    before = [grid.states[module].params for module in grid.config.topology.path(1).modules()]
    grid.grow(WIDE, first, second)
    for flat, module in zip(before, grid.config.topology.path(2).modules(), strict=True):
        np.testing.assert_array_equal(flat, grid.states[module].params)
    shards = [set(map(bytes, shard.tokens)) for shard in grid._shards]
    assert shards[0] | shards[2] == set(map(bytes, first)) and shards[1] | shards[3] == set(map(bytes, second))
    grid.round()
