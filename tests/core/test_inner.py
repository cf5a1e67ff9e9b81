"""The inner loop: schedule, learning, early stop, and a restart that nobody can tell from going on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from models_harness import plain_loss, small

from dipaco_p2p.config import InnerConfig
from dipaco_p2p.core.model import inner
from dipaco_p2p.core.model.inner import InnerLoop, StepReport, learning_rate
from dipaco_p2p.core.model.microbatch import MicroBatch, OutOfMemory
from dipaco_p2p.core.model.shards import Shard, batch
from dipaco_p2p.core.model.transformer import PathModel, initial_modules, load_modules, read_module
from dipaco_p2p.core.tensor_file import decode, encode
from dipaco_p2p.errors import DipacoError, IntegrityError

MODEL = small()
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
        plain_loss(model, tokens).backward()
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


@pytest.mark.parametrize("reads_late", [False, True])
def test_a_step_that_is_not_wanted_any_more_leaves_no_trace(reads_late: bool):
    def parts() -> InnerLoop:
        return InnerLoop(CONFIG, 30, MODEL, device="cpu", seed=5, micro=MicroBatch(size=1), reads_late=reads_late)

    asked: list[int] = []

    def goes_on() -> bool:
        asked.append(len(asked))
        return len(asked) <= 2 * CONFIG.batch + 1

    stopped, whole = parts(), parts()
    result = stopped.run(FLATS, SHARD, first_step=0, steps=9, goes_on=goes_on)
    expected = whole.run(FLATS, SHARD, first_step=0, steps=2)
    assert len(asked) == 2 * CONFIG.batch + 2, "the third step ended before its second part"
    assert (result.steps_done, result.tokens, result.loss) == (2, expected.tokens, expected.loss)
    assert all(np.array_equal(one, other) for one, other in zip(result.flats, expected.flats, strict=True))
    assert stopped.state_bytes() == whole.state_bytes()


def test_a_round_whose_first_step_is_not_wanted_has_none():
    fresh, stopped = loop(), loop()
    result = stopped.run(FLATS, SHARD, first_step=0, steps=3, goes_on=lambda: False)
    assert (result.steps_done, result.tokens) == (0, 0) and np.isnan(result.loss)
    assert all(np.array_equal(one, other) for one, other in zip(result.flats, FLATS, strict=True))
    assert stopped.state_bytes() == fresh.state_bytes()


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
        "another model": {"model.layers.9.mlp.up_proj.weight/exp_avg": np.zeros((24, 16), np.uint8)},
        "has the shape": {"model.norm.weight/exp_avg": np.zeros(3, np.uint8)},
        "not finite": {"model.norm.weight/exp_avg_scales": np.full(1, np.nan, np.float32)},
        "without": {"model.norm.weight/exp_avg": np.zeros(16, np.uint8)},
    }
    for message, values in wrong.items():
        with pytest.raises(IntegrityError, match=message):
            one.load_state(encode(values))
    assert one.state_bytes() == before


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("step", np.array(-1, np.int64), "not a count of"),
        ("step", np.array(2**24 + 1, np.int64), "not a count of"),
        ("step", np.array(2**63 - 1, np.int64), "not a count of"),
        ("step", np.zeros(3, np.int64), "not a count of"),
        ("step", np.array(2.0, np.float32), "not a count of"),
        ("exp_avg", np.zeros(16, np.float32), "float32"),
        ("exp_avg_scales", np.zeros(2, np.float32), "shape"),
        ("exp_avg_sq_scales", np.full(1, -1e-9, np.float32), "negative"),
        ("exp_avg_sq_scales", np.full(1, np.inf, np.float32), "not finite"),
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


def test_a_loss_that_is_not_finite_does_not_reach_the_optimizer():
    one = loop()
    one.run(FLATS, SHARD, first_step=0, steps=2)
    before, broken = one.state_bytes(), [flat * np.float32(1e30) for flat in FLATS]
    with pytest.raises(DipacoError, match="inner step 2"):
        one.run(broken, SHARD, first_step=2, steps=1)
    assert one.state_bytes() == before


# -- in parts, and read late


def trained(**settings: object) -> tuple[list[bytes], bytes, float]:
    one = InnerLoop(CONFIG, 30, MODEL, device="cpu", seed=5, **settings)
    result = one.run(FLATS, SHARD, first_step=0, steps=6)
    return [flat.tobytes() for flat in result.flats], one.state_bytes(), result.loss


@pytest.mark.parametrize(
    "settings",
    [
        {"micro": MicroBatch(size=CONFIG.batch)},
        {"micro": MicroBatch(memory_bytes=2**40)},
        {"micro": MicroBatch(checkpoint=True)},
        {"reads_late": True},
    ],
    ids=["whole batch", "memory enough", "checkpointed", "read late"],
)
def test_these_change_no_bit(settings: dict[str, object]):
    assert trained(**settings) == trained()


@pytest.mark.parametrize(("checkpoint", "times"), [(None, 1), (True, 2)])
def test_a_checkpointed_block_is_computed_twice_a_step(checkpoint: bool | None, times: int):
    one, calls = InnerLoop(CONFIG, 30, MODEL, device="cpu", seed=5, micro=MicroBatch(checkpoint=checkpoint)), []
    one._model.model.layers[0].input_layernorm.register_forward_hook(lambda *passed: calls.append(passed[0]))
    one.run(FLATS, SHARD, first_step=0, steps=3)
    assert len(calls) == 3 * times


def test_parts_of_a_batch_train_like_the_whole():
    (_, _, whole), (_, _, parts) = trained(), trained(micro=MicroBatch(size=1))
    assert parts == pytest.approx(whole, abs=1e-4)


def test_a_step_that_runs_out_of_memory_is_taken_again_in_parts(monkeypatch: pytest.MonkeyPatch):
    one, sizes = loop(), []
    exact = one._loss

    def short_of_memory(model: PathModel, tokens: torch.Tensor) -> torch.Tensor:
        sizes.append(len(tokens))
        if len(tokens) > 2:
            raise OutOfMemory("CUDA out of memory.")
        return exact(model, tokens)

    monkeypatch.setattr(one, "_loss", short_of_memory)
    result = one.run(FLATS, SHARD, first_step=0, steps=2)
    assert sizes == [4, 2, 2, 2, 2] and result.tokens == 2 * 4 * 64
    assert result.loss == pytest.approx(loop().run(FLATS, SHARD, first_step=0, steps=2).loss, abs=1e-4)
    assert "micro-batch 2" in one.described() and "4 did not fit" in one.described()


def test_the_moments_to_come_are_held_free_while_the_first_gradient_finds_its_fit(monkeypatch: pytest.MonkeyPatch):
    one, held, asked = loop(), [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: held.append(size) or asked(*size, **kind))
    one.run(FLATS, SHARD, first_step=0, steps=3)
    moments = 8 * sum(flat.size for flat in FLATS)
    assert held.count((moments,)) == 1, "once, since then they are there"
    restarted = loop()
    restarted.load_state(one.state_bytes())
    held.clear()
    restarted.run(FLATS, SHARD, first_step=3, steps=1)
    assert (moments,) not in held, "those of a state are there before the first step"


def test_nothing_is_compiled_while_the_fit_is_being_found(monkeypatch: pytest.MonkeyPatch):
    calls, micro = [], MicroBatch()

    def named(name: str, limit: int) -> Callable[[PathModel, torch.Tensor], torch.Tensor]:
        def loss_of(model: PathModel, tokens: torch.Tensor) -> torch.Tensor:
            calls.append((name, len(tokens)))
            if len(tokens) > limit:
                raise OutOfMemory("CUDA out of memory.")
            return model.loss(tokens)

        return loss_of

    compiled = named("compiled", 4)
    monkeypatch.setattr(inner, "fast_loss", compiled)
    monkeypatch.setattr(inner, "eager_loss", named("eager", 2))
    monkeypatch.setattr(inner, "training_loss", lambda **settings: compiled)
    one = InnerLoop(CONFIG, 30, MODEL, device="cpu", seed=5, fast=True, micro=micro)
    one.run(FLATS, SHARD, first_step=0, steps=2)
    assert calls == [("eager", 4), *[("eager", 2)] * 2, *[("compiled", 2)] * 2]
    calls.clear()
    InnerLoop(CONFIG, 30, MODEL, device="cpu", seed=5, fast=True, micro=micro).run(FLATS, SHARD, first_step=0, steps=1)
    assert calls == [("compiled", 2)] * 2, "what one loop has found is there for the next"


def test_a_small_budget_takes_a_batch_in_parts():
    one = InnerLoop(CONFIG, 30, MODEL, device="cpu", seed=5, micro=MicroBatch(memory_bytes=1))
    assert one.run(FLATS, SHARD, first_step=0, steps=1).steps_done == 1
    assert "micro-batch 1, checkpointing" in one.described()


def late_loop() -> InnerLoop:
    """As on a GPU, where nobody waits for a step before the next one is under way."""
    return InnerLoop(CONFIG, 30, MODEL, device="cpu", seed=5, reads_late=True)


def test_a_loop_that_is_read_late_reports_every_step_and_stops_one_later():
    reports: list[StepReport] = []
    result = late_loop().run(FLATS, SHARD, first_step=10, steps=20, on_step=lambda r: reports.append(r) or r.step < 12)
    assert [report.step for report in reports] == [10, 11, 12, 13]
    assert (result.steps_done, result.tokens) == (4, 4 * 4 * 64)
    exact = loop().run(FLATS, SHARD, first_step=10, steps=4)
    assert [flat.tobytes() for flat in result.flats] == [flat.tobytes() for flat in exact.flats]


@pytest.mark.parametrize("steps", [1, 5])
def test_what_is_read_late_raises_before_anything_is_given_back(steps: int):
    broken = [flat.copy() for flat in FLATS]
    broken[0][0:] = 3e38
    with pytest.raises(DipacoError, match="inner step 7"):
        late_loop().run(broken, SHARD, first_step=7, steps=steps)


def wide_loop(*, eight_bit: bool) -> InnerLoop:
    """Matrices of 4,096 values and more: smaller ones bitsandbytes keeps in float32."""
    return InnerLoop(CONFIG, 40, WIDE, device="cpu", seed=3, eight_bit=eight_bit)


def test_the_8bit_optimizer_trains_like_the_float32_one():
    flats = list(initial_modules(WIDE, seed=5).values())
    ours, theirs = (wide_loop(eight_bit=bits).run(flats, SHARD, first_step=0, steps=12) for bits in (True, False))
    started = wide_loop(eight_bit=False).run(flats, SHARD, first_step=0, steps=1)
    assert ours.loss < started.loss
    assert abs(ours.loss - theirs.loss) < 0.05 * (started.loss - theirs.loss)


def moments_of(one: InnerLoop) -> dict[str, torch.Tensor]:
    state = one.state()
    return {key: state.moment(key) for key in state.values if key.endswith(("/exp_avg", "/exp_avg_sq"))}


def test_an_8bit_state_survives_a_restart_and_a_change_of_optimizer():
    flats = list(initial_modules(WIDE, seed=5).values())
    going_on = wide_loop(eight_bit=True)
    going_on.run(flats, SHARD, first_step=0, steps=6)
    restarted = wide_loop(eight_bit=True)
    restarted.load_state(going_on.state_bytes())
    before, after = (moments_of(part) for part in (going_on, restarted))
    for name, values in before.items():  # expanded and quantised again: within a step of the 8-bit codes
        assert (after[name] - values).abs().max() <= 0.08 * values.abs().max()
    # From a CPU's float32 state, as every volunteer with a GPU starts from the warm-up's.
    warmed = wide_loop(eight_bit=False)
    after = warmed.run(flats, SHARD, first_step=0, steps=6).flats
    moved = wide_loop(eight_bit=True)
    moved.load_state(warmed.state_bytes())
    there, here = (loop.run(after, SHARD, first_step=6, steps=4).loss for loop in (moved, warmed))
    fresh = wide_loop(eight_bit=True).run(after, SHARD, first_step=6, steps=4).loss
    assert abs(there - here) < 0.2 * abs(fresh - here)
