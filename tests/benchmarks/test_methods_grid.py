"""The experiment's rounds: what the swarm's owners make of the same contributions, to the byte; and its variations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from methods_harness import PRIVATE, TinyJob, made_up_shards, start, tiny_job
from tiny_run import MODEL, contribution_of, granted, initial, make_run, signer, tiny_config

from benchmarks.methods import repair
from benchmarks.methods.grid import Arrived, Contribution, Grid, Sender, next_state, received
from benchmarks.methods.jobs import Job
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.core.model.shards import Shard, decode_shard
from dipaco_p2p.core.outer.compress import compress, encode_compressed
from dipaco_p2p.core.outer.outer_step import OuterState, Share, outer_step
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.version import Admitted, Made, make_version
from dipaco_p2p.protocol.documents import seal
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.topology import ModuleId


def tiny_grid(job: TinyJob, shards: Sequence[Shard] | None = None) -> Grid:
    return Grid(job, start(), made_up_shards(job) if shards is None else shards, fast=False)


def rounds(job: TinyJob) -> list[np.ndarray]:
    grid = tiny_grid(job)
    for number in range(job.rounds):
        grid.round(number)
    return [state.params for state in grid.states.values()]


def same(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> list[bool]:
    return [a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True)]


def made_by_owners(run: Run, arrived: Arrived, before: dict[ModuleId, Made | None]) -> dict[ModuleId, Made]:
    """What the swarm's owners make of the contributions that arrived, whoever sent them and in whatever order."""
    versions = {}
    for module, contributions in arrived.items():
        genesis = genesis_version(run.manifest, module)
        last = before.get(module)
        items = []
        for author, contribution in enumerate(reversed(contributions), start=1):
            payload = encode_compressed(contribution.gradient)
            path = next(path for path in run.topology.paths() if str(path) == contribution.share.path)
            document = contribution_of(
                run, signer(author), payload, module=module, path=path, tokens=contribution.share.tokens
            )
            items.append(Admitted(seal(signer(author), document), partial(run.read_contribution, payload, module)))
        leader = signer(9).peer
        versions[module] = make_version(
            run,
            last.version if last else genesis,
            last.state if last else OuterState.fresh(initial()[0][module.level]),
            items,
            clip_norm=None,
            term=1,
            grant=granted(run, module, term=1, leader=leader).id,
            author=leader,
        )
    return versions


def test_the_same_contributions_give_the_bytes_that_owners_make(tmp_path: Path):
    store = Store(tmp_path)
    run = make_run(store, tiny_config(rounds=2, steps=2))
    data = [store.get(ref.blob.digest) for ref in run.manifest.shards]
    shards = [decode_shard(blob or b"", vocab_size=MODEL.vocab_size, context=MODEL.context) for blob in data]
    outer, codecs = run.config.outer, run.config.compression
    job = tiny_job(lr=outer.lr, momentum=outer.momentum, codec=codecs.uplink, down=codecs.downlink)
    grid = tiny_grid(job, shards)
    made: dict[ModuleId, Made] = {}
    for number in range(2):
        arrived = grid.train(number)
        made = made_by_owners(run, arrived, dict(made))
        grid.step(arrived, number)
        for module, version in made.items():
            ours, theirs = grid.states[module], version.state
            assert all(
                same([ours.params, ours.momentum, ours.residual], [theirs.params, theirs.momentum, theirs.residual])
            )


def test_a_job_is_repeatable_and_its_settings_matter():
    arrived = tiny_grid(tiny_job()).train(0)

    def stepped(**changes: object) -> list[np.ndarray]:
        grid = tiny_grid(tiny_job(**changes))
        grid.step(arrived, 0)
        return [state.params for state in grid.states.values()]

    assert all(same(stepped(), stepped()))
    assert all(same(rounds(tiny_job()), rounds(tiny_job())))
    for change in ({"lr": 0.5}, {"rule": "rda"}, {"rule": "mean"}, {"outer": "single"}):
        assert not any(same(stepped(), stepped(**change))), change
    for change in ({"weighted": False}, {"codec": "int4"}, {"seed": 4}):
        assert not any(same(rounds(tiny_job()), rounds(tiny_job(**change)))), change


def test_without_outer_step_a_dense_model_is_what_adamw_left():
    job = tiny_job(path_model=MODEL.one_path(), outer="none", codec="fp32")
    grid = tiny_grid(job)
    before = grid.flats(0)
    arrived = grid.train(0)
    grid.step(arrived, 0)
    after = [old - received(arrived[m][0].gradient) for old, m in zip(before, arrived, strict=True)]
    assert all(same(after, grid.flats(0)))


def test_private_modules_can_be_left_to_adamw():
    with_step, without = rounds(tiny_job(path_model=PRIVATE)), rounds(tiny_job(path_model=PRIVATE, outer="shared"))
    assert not any(same(with_step[-4:], without[-4:]))
    # After one round, before private modules have acted on the shared ones, only they differ.
    one, other = (tiny_grid(tiny_job(path_model=PRIVATE, outer=outer)) for outer in ("all", "shared"))
    for grid in (one, other):
        grid.round(0)
    differ = [not equal for equal in same(*([s.params for s in grid.states.values()] for grid in (one, other)))]
    assert differ == [module.level == 2 for module in one.states]


def test_lost_contributions_leave_modules_without_a_step():
    grid = tiny_grid(tiny_job(drop=0.999999))
    before = [state.params for state in grid.states.values()]
    grid.round(0)
    assert all(same(before, [state.params for state in grid.states.values()]))


def test_the_norms_of_equal_outer_gradients_agree():
    grid = tiny_grid(tiny_job())
    values = np.ones(module_layout(MODEL, 1).size, dtype=np.float32)
    share = Share(path="P0-0-0", shard_size=1, tokens=1)
    grid.step({ModuleId(1, 0): [Contribution(share=share, gradient=compress(values)[0])] * 2}, 0)
    assert grid.agreement == {2: [pytest.approx(1.0)]}


def test_replicas_train_disjoint_parts_and_count_as_one_path():
    job = tiny_job(path_model=MODEL.one_path(), replicas=3, rule="mean")
    arrived = tiny_grid(job).train(0)
    assert {len(contributions) for contributions in arrived.values()} == {3}
    contributions = arrived[ModuleId(0, 0)]
    state = OuterState.fresh(initial()[0][0])
    mean = np.mean([received(c.gradient) for c in contributions], axis=0, dtype=np.float64).astype(np.float32)
    expected, _ = outer_step(state, mean, lr=job.lr, momentum=job.momentum)
    np.testing.assert_allclose(next_state(state, contributions, job).momentum, expected.momentum, rtol=1e-5, atol=1e-9)


def test_an_attackers_contribution_is_clipped_to_twice_the_median():
    attacked = tiny_grid(tiny_job(attack=True)).train(0)
    honest = tiny_grid(tiny_job()).train(0)
    module = ModuleId(1, 0)
    sent, bad = received(honest[module][0].gradient), received(attacked[module][0].gradient)
    np.testing.assert_allclose(bad, -10 * sent, atol=np.abs(bad).max() / 100)
    plain, clipped = (tiny_grid(tiny_job(clip=clip)) for clip in (False, True))
    moved = []
    for grid in (plain, clipped):
        before = grid.states[module].params
        grid.step({module: attacked[module]}, 0)
        moved.append(float(np.linalg.norm(grid.states[module].params - before)))
    assert moved[1] < moved[0] / 2


@pytest.mark.parametrize(
    ("codec", "error"), [("fp32", 1e-6), ("int8", 0.01), ("int4", 0.2), ("int2", 0.9), ("top3", 1.0)]
)
def test_codecs_lose_less_the_more_they_send_and_feedback_pays_it_back(codec: str, error: float):
    values = np.random.default_rng(1).standard_normal(5000).astype(np.float32)

    def lost(total: np.ndarray, count: int) -> float:
        return float(np.linalg.norm(total / count - values) / np.linalg.norm(values))

    forgetful = Sender(codec, feedback=False)
    assert lost(received(forgetful.send(values)), 1) <= error
    paying = Sender(codec, feedback=True)
    total = np.sum([received(paying.send(values)) for _ in range(40)], axis=0)
    assert lost(total, 40) <= error / 2


def test_the_key_names_what_decides_the_result():
    job = Job(method="one name", seed=0)
    assert job.key == replace(job, method="another name").key
    assert len({job.key, replace(job, seed=1).key, replace(job, lr=0.5).key, replace(job, drop=0.3).key}) == 4
    assert job.to_dict() == {"method": "one name", "seed": 0}
    assert job.key == "496ee52e26e86cb8", "finished experiments find their results by it"
    faster = replace(job, inner_lr=2.0)
    assert faster.key != job.key and faster.inner.lr == 2 * job.inner.lr
    larger = replace(job, batch=32)
    assert larger.key not in (job.key, faster.key) and larger.inner.batch == 32 != job.inner.batch


def test_places_can_be_chosen_in_each_tensor_with_norms_as_whole_numbers():
    layout = module_layout(MODEL, 1)
    values = np.random.default_rng(1).standard_normal(layout.size).astype(np.float32)
    found = layout.split(received(Sender("ternary640", feedback=False, layout=layout).send(values)))
    for name, tensor in layout.split(values).items():
        if tensor.ndim == 1:
            np.testing.assert_allclose(found[name], tensor, atol=float(np.abs(tensor).max()) / 200)
        else:
            assert np.count_nonzero(found[name]) == -(-tensor.size * 640 // 4096), name


def test_each_level_can_have_a_codec_of_its_own():
    grid = tiny_grid(tiny_job(codecs=("ternary640", "top128", "top128")))
    grid.round(0)
    first, *others = (sender.told[0].captured for sender in grid._workers[0][0].senders)
    assert first > 1.5 * max(others)


def test_what_was_captured_and_is_owed_is_kept_for_each_round():
    grid = tiny_grid(tiny_job(codec="top128"))
    for number in range(grid.job.rounds):
        grid.round(number)
    assert len(grid.sent) == grid.job.rounds == 2 and all(0 < one.captured < 0.9 for one in grid.sent)
    owed = [one.owed for one in grid.sent]
    assert owed == sorted(owed), "it grows at first"
    assert tiny_grid(tiny_job(codec="fp32")).sent == []


def repaired(what: str, factor: float = 1.0) -> list[np.ndarray]:
    job = tiny_job(forged=factor, repair=what, codec="int8")
    grid = repair.RepairedGrid(job, start(), made_up_shards(job), fast=False)
    for number in range(job.rounds):
        grid.round(number)
    return [state.params for state in grid.states.values()]


def test_forged_work_is_kept_rolled_back_or_left_out_of_what_is_made_once_more(monkeypatch):
    monkeypatch.setattr(repair, "FIRST", 1)
    monkeypatch.setattr(repair, "ROUNDS", 1)
    one_round = tiny_grid(tiny_job(codec="int8"))
    one_round.round(0)
    before = [state.params for state in one_round.states.values()]
    assert all(same(repaired(repair.ROLLED_BACK), before))
    assert all(same(repaired(repair.REBUILT, 3.0), repaired(repair.REFUSED))), "in the first forged round all fits"
    forged = same(repaired(repair.KEPT), repaired(repair.REFUSED))
    topology = one_round.topology
    through = [topology.path(0) in topology.paths_through(module) for module in topology.modules()]
    assert forged == [not is_forged for is_forged in through]


def test_an_update_of_the_gradient_lets_everybody_make_the_step():
    """Of a gradient that the codec says exactly it is the same step; what it cannot say comes with the next one."""
    exact, coarse = (tiny_job(codec="int8", down=down, down_of="gradient") for down in ("fp32", "top128"))
    state = OuterState.fresh(np.zeros(4096, np.float32))
    gradient = compress(np.linspace(-1, 1, 4096, dtype=np.float32))[0]
    sent = [Contribution(share=Share(path="P0-0-0", shard_size=1, tokens=1), gradient=gradient)]
    stepped, told = (next_state(state, sent, job) for job in (exact, coarse))
    np.testing.assert_allclose(stepped.momentum, gradient.expand(), rtol=1e-6)
    assert np.count_nonzero(told.params) == np.count_nonzero(told.momentum) == 128
    np.testing.assert_allclose(told.momentum + told.residual, gradient.expand(), atol=1e-6)
