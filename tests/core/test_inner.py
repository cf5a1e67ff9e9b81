"""The inner loop: schedule, learning, early stop, and a restart that nobody can tell from going on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from dipaco_p2p.config import InnerConfig, LevelConfig, ModelConfig
from dipaco_p2p.core.codec import decode, encode
from dipaco_p2p.core.inner import InnerLoop, StepReport, learning_rate, make_optimizer
from dipaco_p2p.core.model import PathModel, initial_modules, load_modules, next_token_loss, read_module
from dipaco_p2p.core.shards import Shard, batch
from dipaco_p2p.errors import DipacoError, IntegrityError

MODEL = ModelConfig(
    vocab_size=258,
    width=16,
    heads=2,
    ffn_width=24,
    context=64,
    levels=(LevelConfig(embedding=True, head=True), LevelConfig(modules=2, blocks=1)),
)
WIDE = dataclasses.replace(MODEL, width=64, ffn_width=96)
CONFIG = InnerConfig(batch=4, warmup_steps=3, lr=5e-3)
FLATS = list(initial_modules(MODEL, seed=0).values())
SHARD = Shard(tokens=(np.arange(40)[:, None] * 3 + np.arange(64)).astype(np.int32) % 7)


def loop() -> InnerLoop:
    return InnerLoop(CONFIG, 30, MODEL, device="cpu", seed=5)


def test_learning_rate_rises_then_falls_along_a_cosine():
    config = InnerConfig(lr=1.0, lr_min_ratio=0.1, warmup_steps=10)
    assert [learning_rate(config, step, 110) for step in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert learning_rate(config, 60, 110) == pytest.approx(0.55)
    assert learning_rate(config, 110, 110) == learning_rate(config, 10_000, 110) == pytest.approx(0.1)
    assert learning_rate(InnerConfig(lr=1.0, warmup_steps=0), 0, 10) == 1.0
    assert 0 < learning_rate(InnerConfig(warmup_steps=20), 3, 5) < 3e-3


def test_steps_match_a_loop_written_with_torch_alone():
    result = loop().run(FLATS, SHARD, first_step=0, steps=6)
    model = PathModel(MODEL)
    load_modules(model, FLATS)
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    matrices = [p for n, p in model.named_parameters() if "norm" not in n]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    for step in range(6):
        for group in adam.param_groups:
            group["lr"] = learning_rate(CONFIG, step, 30)
        tokens = batch(SHARD, seed=5, step=step, size=4)
        adam.zero_grad()
        next_token_loss(model(tokens), tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
    for level, flat in enumerate(result.flats):
        np.testing.assert_allclose(flat, read_module(model, level), atol=1e-4)


def test_training_lowers_the_loss_and_reports_each_step():
    reports: list[StepReport] = []
    result = loop().run(FLATS, SHARD, first_step=0, steps=30, on_step=lambda r: reports.append(r) is None)
    assert reports[-1].loss < 0.6 * reports[0].loss
    assert [report.step for report in reports] == list(range(30))
    assert (result.steps_done, result.tokens) == (30, 30 * 4 * 64)
    assert result.loss == pytest.approx(np.mean([report.loss for report in reports]))


def test_on_step_can_stop_the_loop():
    result = loop().run(FLATS, SHARD, first_step=10, steps=20, on_step=lambda report: report.step < 12)
    assert (result.steps_done, result.tokens) == (3, 3 * 4 * 64)


def test_the_given_modules_are_not_changed():
    before = [flat.copy() for flat in FLATS]
    loop().run(FLATS, SHARD, first_step=0, steps=1)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(before, FLATS, strict=True))


def test_a_restart_from_bytes_goes_on_with_the_same_bits():
    going_on = loop()
    middle = going_on.run(FLATS, SHARD, first_step=0, steps=5)
    state = going_on.state_bytes()
    expected = going_on.run(middle.flats, SHARD, first_step=5, steps=5)

    restarted = loop()
    restarted.load_state(state)
    assert restarted.state_bytes() == state
    result = restarted.run(middle.flats, SHARD, first_step=5, steps=5)
    assert [flat.tobytes() for flat in result.flats] == [flat.tobytes() for flat in expected.flats]
    assert restarted.state_bytes() == going_on.state_bytes()


def test_the_optimizer_state_is_kept_between_rounds():
    one = loop()
    middle = one.run(FLATS, SHARD, first_step=0, steps=5)
    kept = one.run(middle.flats, SHARD, first_step=5, steps=1)
    fresh = loop().run(middle.flats, SHARD, first_step=5, steps=1)
    assert kept.flats[1].tobytes() != fresh.flats[1].tobytes()


def test_a_state_before_the_first_step_can_be_loaded():
    one = loop()
    one.load_state(loop().state_bytes())
    assert one.state_bytes() == loop().state_bytes()


def test_a_state_of_another_model_is_refused():
    one = loop()
    one.run(FLATS, SHARD, first_step=0, steps=1)
    before = one.state_bytes()
    wrong = {
        "another model": {"model.layers.9.mlp.up_proj.weight/exp_avg": np.zeros((24, 16), np.float32)},
        "has the shape": {"model.norm.weight/exp_avg": np.zeros(3, np.float32)},
        "not finite": {"model.norm.weight/exp_avg": np.full(16, np.nan, np.float32)},
        "without": {"model.norm.weight/exp_avg": np.zeros(16, np.float32)},
    }
    for message, values in wrong.items():
        with pytest.raises(IntegrityError, match=message):
            one.load_state(encode(values))
    assert one.state_bytes() == before


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("step", np.array(-1, np.int64), "count of steps"),
        ("step", np.zeros(3, np.int64), "count of steps"),
        ("step", np.array(2.0, np.float32), "count of steps"),
        ("exp_avg", np.zeros(16, np.float16), "float16"),
        ("exp_avg_sq", np.full(16, -1e-9, np.float32), "negative"),
        ("exp_avg_sq", np.full(16, np.inf, np.float32), "not finite"),
        ("more", np.zeros(16, np.float32), "another model"),
        ("exp_avg/more", np.zeros(16, np.float32), "another model"),
    ],
)
def test_a_state_that_no_adamw_leaves_behind_is_refused(kind, value, message):
    """It may come from another volunteer."""
    one = loop()
    one.run(FLATS, SHARD, first_step=0, steps=1)
    before = one.state_bytes()
    values, _ = decode(before)
    with pytest.raises(IntegrityError, match=message):
        one.load_state(encode(values | {f"model.norm.weight/{kind}": value}))
    del values["model.norm.weight/step"]
    with pytest.raises(IntegrityError, match="without `model.norm.weight/step`"):
        one.load_state(encode(values))
    assert one.state_bytes() == before


def test_a_loss_that_is_not_finite_says_what_to_do():
    broken = [flat.copy() for flat in FLATS]
    broken[0][0:] = 3e38
    with pytest.raises(DipacoError, match="inner step 7") as caught:
        loop().run(broken, SHARD, first_step=7, steps=1)
    assert "lr" in caught.value.hint


def test_only_matrices_decay():
    groups = make_optimizer(PathModel(MODEL), CONFIG).param_groups
    assert {p.ndim for p in groups[0]["params"]} == {2} and groups[0]["weight_decay"] == CONFIG.weight_decay
    assert {p.ndim for p in groups[1]["params"]} == {1} and groups[1]["weight_decay"] == 0


def wide_loop(*, eight_bit: bool) -> InnerLoop:
    """Matrices of 4,096 values and more: smaller ones bitsandbytes keeps in float32."""
    return InnerLoop(CONFIG, 40, WIDE, device="cpu", seed=3, eight_bit=eight_bit)


def test_the_8bit_optimizer_trains_like_the_float32_one():
    flats = list(initial_modules(WIDE, seed=5).values())
    ours, theirs = (wide_loop(eight_bit=bits).run(flats, SHARD, first_step=0, steps=12) for bits in (True, False))
    started = wide_loop(eight_bit=False).run(flats, SHARD, first_step=0, steps=1)
    assert ours.loss < started.loss
    assert abs(ours.loss - theirs.loss) < 0.05 * (started.loss - theirs.loss)


def test_an_8bit_state_survives_a_restart_and_a_change_of_optimizer():
    flats = list(initial_modules(WIDE, seed=5).values())
    going_on = wide_loop(eight_bit=True)
    going_on.run(flats, SHARD, first_step=0, steps=6)
    restarted = wide_loop(eight_bit=True)
    restarted.load_state(going_on.state_bytes())
    before, after = (decode(part.state_bytes())[0] for part in (going_on, restarted))
    for name, values in before.items():  # expanded and quantised again: within a step of the 8-bit code
        assert np.abs(after[name] - values).max() <= 0.02 * np.abs(values).max()
    # From a CPU's float32 state, as every volunteer with a GPU starts from the warm-up's.
    warmed = wide_loop(eight_bit=False)
    after = warmed.run(flats, SHARD, first_step=0, steps=6).flats
    moved = wide_loop(eight_bit=True)
    moved.load_state(warmed.state_bytes())
    there, here = (loop.run(after, SHARD, first_step=6, steps=4).loss for loop in (moved, warmed))
    fresh = wide_loop(eight_bit=True).run(after, SHARD, first_step=6, steps=4).loss
    assert abs(there - here) < 0.2 * abs(fresh - here)
