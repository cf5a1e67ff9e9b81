"""Muon for the matrices inside the blocks, AdamW for the rest: their steps, their state, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from models_harness import path_model, plain_loss, small

from dipaco_p2p.config import MUON, InnerConfig, LevelConfig
from dipaco_p2p.core.model.inner import InnerLoop, StepReport, learning_rate
from dipaco_p2p.core.model.layout import hidden_values
from dipaco_p2p.core.model.optimizer import (
    BUFFER,
    MEAN,
    MOMENTUM,
    SEPARATOR,
    SQUARED,
    MuonAndAdamW,
    make_optimizer,
    moments_bytes_to_come,
    optimizer_name,
)
from dipaco_p2p.core.model.shards import Shard, batch
from dipaco_p2p.core.model.transformer import PathModel, initial_modules, load_modules, read_module
from dipaco_p2p.core.tensor_file import decode, encode
from dipaco_p2p.errors import ConfigError, EnvironmentUnfit, IntegrityError
from dipaco_p2p.strict import load, plain

MODEL = small(LevelConfig(modules=2, blocks=1), tied=False)
ADAMW_CONFIG = InnerConfig(batch=4, warmup_steps=3, lr=5e-3)
CONFIG = replace(ADAMW_CONFIG, optimizer=MUON)
FLATS = list(initial_modules(MODEL, seed=0).values())
SHARD = Shard(tokens=(np.arange(40)[:, None] * 3 + np.arange(64)).astype(np.int32) % 7)


def loop(config: InnerConfig = CONFIG, *, fast: bool = False) -> InnerLoop:
    return InnerLoop(config, 30, MODEL, device="cpu", seed=5, fast=fast)


def hidden(name: str) -> bool:
    return "_proj." in name


def test_steps_match_a_loop_written_with_torch_alone():
    result = loop().run(FLATS, SHARD, first_step=0, steps=6)
    model = PathModel(MODEL)
    load_modules(model, FLATS)
    named = list(model.named_parameters())
    matrices = [p for name, p in named if "embed" in name or "lm_head" in name]
    norms = [p for name, p in named if "norm" in name]
    inside = [p for name, p in named if hidden(name)]
    assert len(inside) == 7 and len(matrices) == 2 and len(inside) + len(matrices) + len(norms) == len(named)
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    muon = torch.optim.Muon(inside, weight_decay=0.1, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    for step in range(6):
        for group in [*adamw.param_groups, *muon.param_groups]:
            group["lr"] = learning_rate(CONFIG, step, 30)
        model.zero_grad()
        plain_loss(model, batch(SHARD, seed=5, step=step, size=4)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        muon.step()
    for level, flat in enumerate(result.flats):
        np.testing.assert_allclose(flat, read_module(model, level), atol=1e-3)


@pytest.mark.parametrize("fast", [False, True])
def test_training_lowers_the_loss(fast: bool):
    reports: list[StepReport] = []
    trained = loop(fast=fast)
    trained.use(fast=fast, compiled=False)
    trained.run(FLATS, SHARD, first_step=0, steps=30, on_step=lambda r: reports.append(r) is None)
    assert reports[-1].loss < 0.6 * reports[0].loss
    assert "Muon" in trained.described()


def test_a_restart_from_bytes_goes_on_with_the_same_bits():
    going_on, restarted = loop(), loop()
    middle = going_on.run(FLATS, SHARD, first_step=0, steps=5)
    state = going_on.state_bytes()
    expected = going_on.run(middle.flats, SHARD, first_step=5, steps=5)
    restarted.load_state(state)
    assert restarted.state_bytes() == state
    result = restarted.run(middle.flats, SHARD, first_step=5, steps=5)
    assert [flat.tobytes() for flat in result.flats] == [flat.tobytes() for flat in expected.flats]
    assert restarted.state_bytes() == going_on.state_bytes()


def test_its_momentum_takes_what_two_moments_take_and_is_what_the_next_step_begins_with():
    one, other = loop(), loop(ADAMW_CONFIG)
    middle = one.run(FLATS, SHARD, first_step=0, steps=5)
    other.run(FLATS, SHARD, first_step=0, steps=5)
    values, _ = decode(one.state_bytes())
    kinds = {key.rpartition(SEPARATOR)[2] for key in values if hidden(key)}
    assert kinds == {BUFFER} and BUFFER not in {key.rpartition(SEPARATOR)[2] for key in values if not hidden(key)}
    assert len(one.state_bytes()) < 1.05 * len(other.state_bytes())
    kept = one.run(middle.flats, SHARD, first_step=5, steps=1)
    fresh = loop().run(middle.flats, SHARD, first_step=5, steps=1)
    assert kept.flats[1].tobytes() != fresh.flats[1].tobytes()


def test_a_longer_momentum_shows_in_the_norms_that_auditors_compare():
    one = loop()
    one.run(FLATS, SHARD, first_step=0, steps=5)
    values, _ = decode(one.state_bytes())
    # One more in the exponent: twice as long.
    longer = {key: value + np.uint16(1 << 7) if key.endswith(BUFFER) else value for key, value in values.items()}
    norms = one.state().moments()
    assert norms == one.read_state(values).moments()
    assert one.read_state(longer).moments() == (norms[0], pytest.approx(2 * norms[1]))
    adamw = loop(ADAMW_CONFIG)
    adamw.run(FLATS, SHARD, first_step=0, steps=1)
    assert len(adamw.state().moments()) == 1


@pytest.mark.parametrize(("config", "kind", "sign"), [(CONFIG, BUFFER, 1 << 15), (ADAMW_CONFIG, MEAN, 1 << 7)])
def test_moments_that_lead_elsewhere_show_whatever_their_norms_are(config, kind, sign):
    one, later = loop(config), loop(config)
    for each, steps in ((one, 5), (later, 6)):
        each.run(FLATS, SHARD, first_step=0, steps=steps)
    values = one.state().values
    turned = {key: value ^ value.dtype.type(sign) if key.endswith(kind) else value for key, value in values.items()}
    forged = one.read_state(turned)
    assert forged.moments() == one.state().moments()
    assert one.state().heading(one.state()) == pytest.approx(1.0)
    assert one.state().heading(forged) < 0.5 < one.state().heading(later.state()) < 1.0


def test_a_state_of_the_other_optimizer_is_refused():
    for one, other in ((CONFIG, ADAMW_CONFIG), (ADAMW_CONFIG, CONFIG)):
        trained, asked = loop(one), loop(other)
        trained.run(FLATS, SHARD, first_step=0, steps=1)
        before = asked.state_bytes()
        with pytest.raises(IntegrityError, match="another model or optimizer"):
            asked.load_state(trained.state_bytes())
        assert asked.state_bytes() == before


def test_squares_that_are_rounded_to_zero_lead_nowhere_else():
    """An author with 8-bit moments loses its smallest squares, and steps as its auditor does elsewhere."""
    one = loop(ADAMW_CONFIG)
    one.run(FLATS, SHARD, first_step=0, steps=5)
    ours = one.state()
    rounded = dict(ours.values)
    for key, codes in ours.values.items():
        if key.endswith(SQUARED):
            rounded[key] = np.where(codes < np.quantile(codes, 0.01), 0, codes).astype(np.uint8)
    assert ours.heading(one.read_state(rounded)) > 0.95


@pytest.mark.parametrize(
    "change", [lambda v: v.astype(np.float32), lambda v: v[:-1], lambda v: np.full_like(v, 0x7F80)]
)
def test_a_momentum_that_no_muon_leaves_behind_is_refused(change):
    one = loop()
    one.run(FLATS, SHARD, first_step=0, steps=1)
    values, _ = decode(one.state_bytes())
    key = next(key for key in sorted(values) if key.endswith(BUFFER))
    with pytest.raises(IntegrityError, match="not finite bfloat16 values"):
        loop().load_state(encode(dict(values) | {key: change(values[key])}))


def test_an_older_torch_is_told_which_one_it_needs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(EnvironmentUnfit, match="Muon") as found:
        loop()
    assert "torch>=2.9" in found.value.hint
    assert loop(ADAMW_CONFIG).state_bytes(), "AdamW does with any"


def test_moments_of_8_bits_are_refused_and_never_chosen():
    with pytest.raises(ConfigError, match="8-bit"):
        InnerLoop(CONFIG, 30, MODEL, device="cpu", seed=5, eight_bit=True)
    for eight_bit in (None, False):
        optimizer = make_optimizer(PathModel(MODEL), CONFIG, eight_bit=eight_bit)
        assert isinstance(optimizer, MuonAndAdamW) and optimizer_name(optimizer).startswith("Muon")


def test_moments_are_to_come_until_the_first_step():
    model = path_model(MODEL)
    optimizer = make_optimizer(model, CONFIG)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    inside = sum(size for name, size in sizes.items() if hidden(name))
    assert moments_bytes_to_come(optimizer) == 4 * inside + 8 * (sum(sizes.values()) - inside)
    model.loss(torch.zeros(1, 8, dtype=torch.long)).backward()
    optimizer.step()
    assert moments_bytes_to_come(optimizer) == 0
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_optimizer_is_signed_where_it_is_another_than_that_of_older_runs():
    assert "optimizer" not in plain(ADAMW_CONFIG) and plain(CONFIG)["optimizer"] == "muon"
    assert load(InnerConfig, plain(CONFIG), where="[inner]") == CONFIG
    with pytest.raises(ConfigError, match="did you mean `muon`|is `moun`"):
        load(InnerConfig, {"optimizer": "moun"}, where="[inner]")


def test_a_plan_counts_the_matrices_that_muon_steps():
    assert hidden_values(MODEL) == sum(p.numel() for n, p in path_model(MODEL).named_parameters() if hidden(n))
