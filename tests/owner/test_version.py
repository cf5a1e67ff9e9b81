"""A version is a function of its parent and its contributions, and of nothing else."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tiny_run import contribution_of, gradient_bytes, granted, initial, make_run, signer, tiny_config

from dipaco_p2p.config import OuterConfig
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.model.layout import decode_module, encode_module
from dipaco_p2p.core.outer import copies
from dipaco_p2p.core.outer.codec import Compressed
from dipaco_p2p.core.outer.compress import compress, encode_compressed
from dipaco_p2p.core.outer.outer_step import OuterState, apply_update, decode_state
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.rollback import rebuild
from dipaco_p2p.owner.version import Admitted, Made, made_and_kept, make_again, make_version
from dipaco_p2p.protocol.documents import BlobRef, seal
from dipaco_p2p.protocol.norms import FURTHEST_MULTIPLE
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.standing import Standings
from dipaco_p2p.protocol.versions import Step, check_successor, genesis_version
from dipaco_p2p.topology import ModuleId, PathId

MODULE = ModuleId(1, 0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(Store(tmp_path), tiny_config())


def admitted(run: Run, *, count: int = 3, tokens: int | None = None) -> list[Admitted]:
    found = []
    for number, path in zip(range(1, count + 1), itertools.cycle(run.topology.paths_through(MODULE)), strict=False):
        payload = gradient_bytes(run, MODULE, seed=number)
        document = contribution_of(run, signer(number), payload, module=MODULE, path=path)
        sealed = seal(signer(number), replace(document, tokens=tokens or document.tokens))
        found.append(Admitted(sealed, partial(run.read_contribution, payload, MODULE)))
    return found


def grant_to(run: Run, leader: PeerId) -> str:
    return granted(run, MODULE, term=1, leader=leader).id


def made_of(run: Run, items: list[Admitted], *, clip_norm: float | None = None) -> Made:
    parent, state = genesis_version(run.manifest, MODULE), OuterState.fresh(initial()[0][1])
    grant, author = grant_to(run, signer(9).peer), signer(9).peer
    return make_version(run, parent, state, items, clip_norm=clip_norm, term=1, grant=grant, author=author)


def test_the_order_of_arrival_does_not_matter(run: Run) -> None:
    versions = {
        (made.version.digest, made.version, b"".join(made.update))
        for order in itertools.permutations(admitted(run))
        for made in [made_of(run, list(order))]
    }
    assert len(versions) == 1


def test_the_version_follows_its_parent_and_its_blobs_fit_together(run: Run) -> None:
    made = made_of(run, admitted(run))
    parent, layout = genesis_version(run.manifest, MODULE), run.layout(MODULE)
    check_successor(parent, made.version, run.manifest)
    params = apply_update(initial()[0][1], run.read_update(b"".join(made.update), MODULE))
    assert encode_module(params, layout) == b"".join(made.snapshot)
    assert (decode_module(b"".join(made.snapshot), layout) == made.state.params).all()
    momentum, residual = decode_state(b"".join(made.state_blob), layout.size)
    assert (momentum == made.state.momentum).all() and (residual == made.state.residual).all()


@pytest.mark.parametrize("rule", ["mean", "sqrt"])
def test_a_version_that_is_rebuilt_without_somebody_is_the_one_without_its_work(tmp_path: Path, rule: str) -> None:
    run = make_run(Store(tmp_path), replace(tiny_config(), outer=OuterConfig(norm_rule=rule)))
    items, state = admitted(run), OuterState.fresh(initial()[0][1])
    made, others = made_of(run, items), made_of(run, items[:-1])
    by_id = {item.sealed.id: item for item in items}
    step = Step(version=made.version, base=0, without=frozenset({items[-1].sealed.document.author}))
    found = rebuild(run, state, [step], lambda share: by_id[share.contribution])
    assert np.allclose(found.params, others.state.params, atol=1e-6)
    assert not np.allclose(found.params, made.state.params, atol=1e-4)
    nobody = replace(step, without=frozenset(share.peer for share in made.version.shares))
    assert rebuild(run, state, [nobody], lambda share: by_id[share.contribution]) is state


def test_weights_follow_shards_and_tokens_and_sum_to_one(run: Run) -> None:
    shares = made_of(run, admitted(run, count=2)).version.shares
    assert math.fsum(share.weight for share in shares) == pytest.approx(1.0, abs=1e-12)
    by_path = {share.path: share.weight for share in shares}
    sizes = {path: run.shard(path).sequences for path in by_path}
    assert all(by_path[path] == pytest.approx(sizes[path] / sum(sizes.values())) for path in by_path)


def test_replicas_share_the_weight_of_their_path(run: Run) -> None:
    shares = made_of(run, admitted(run, count=4)).version.shares
    by_path: dict[object, float] = {}
    for share in shares:
        by_path[share.path] = by_path.get(share.path, 0.0) + share.weight
    sizes = {path: run.shard(path).sequences for path in run.topology.paths_through(MODULE)}
    assert all(by_path[path] == pytest.approx(size / sum(sizes.values())) for path, size in sizes.items())


def test_the_first_version_takes_no_longer_step_of_one_author_than_of_others(run: Run) -> None:
    """Attack: three times what the steps came to. It passes the loss gate, and nobody can audit the first round."""
    honest = admitted(run, count=4)
    payload = gradient_bytes(run, MODULE, seed=4, size=3e-3)
    document = replace(honest[3].sealed.document, payload=BlobRef.of(payload))
    long = Admitted(seal(signer(4), document), partial(run.read_contribution, payload, MODULE))
    lengths = sorted(item.read().norm() for item in honest)
    assert long.read().norm() > 2.5 * lengths[-1]
    version = made_of(run, [*honest[:3], long]).version
    assert version.clip_norm == pytest.approx(1.25 * lengths[1], rel=0.05)
    for others in (honest[:1], honest[:2]):
        assert made_of(run, [*others, long]).version.clip_norm == pytest.approx(1.25 * lengths[0], rel=0.05)
    assert made_of(run, [long]).version.clip_norm is None


@pytest.mark.parametrize("rule", ["mean", "sqrt", "rda"])
def test_a_lone_first_step_goes_no_further_than_the_optimiser_can(tmp_path: Path, rule: str) -> None:
    """Attack: the only author of a first version hands in three times its steps, and has no other to be measured by."""
    run = make_run(Store(tmp_path), replace(tiny_config(), outer=OuterConfig(norm_rule=rule)))
    furthest = run.norms(MODULE, ()).furthest(0)
    honest, long, further = (lone(run, furthest / FURTHEST_MULTIPLE * times) for times in (1.0, 3.0, 30.0))
    before = initial()[0][1]
    steps = [np.abs(made_of(run, [item]).state.params - before).max() for item in (honest, long, further)]
    assert steps[1] == pytest.approx(FURTHEST_MULTIPLE * steps[0], rel=0.05)
    assert steps[2] == pytest.approx(steps[1], rel=0.05)
    usual = [made_of(run, [item], clip_norm=1e9).state.params for item in (honest, long)]
    assert np.abs(usual[1] - before).max() == pytest.approx(3 * steps[0], rel=0.05), "later a norm is the measure"


def test_a_first_step_that_is_far_in_one_parameter_shortens_no_other(run: Run) -> None:
    """Attack: a single parameter goes far, so that the norm to which all are scaled down is next to nothing."""
    furthest, layout = run.norms(MODULE, ()).furthest(0), run.layout(MODULE)
    [good, *_], spike = admitted(run, count=1), np.zeros(layout.size, dtype=np.float32)
    spike[0] = 100 * furthest
    paths = run.topology.paths_through(MODULE)
    both = made_of(run, [good, lone(run, values=spike, number=2, path=paths[1])])
    assert [share.norm for share in both.version.shares] == [good.read().norm(), pytest.approx(100 * furthest, rel=0.1)]
    moved = np.abs(both.state.params - initial()[0][1])
    assert np.linalg.norm(moved[1:]) > 0.3 * np.linalg.norm((made_of(run, [good]).state.params - initial()[0][1])[1:])
    assert moved[0] < 3 * furthest


def lone(
    run: Run,
    largest: float = 0.0,
    *,
    values: Floats | None = None,
    number: int = 1,
    path: PathId | None = None,
) -> Admitted:
    """Work of one author whose furthest parameter moves so far."""
    if values is None:
        values = np.random.default_rng(1).normal(0, 1, run.layout(MODULE).size).astype(np.float32)
        values *= np.float32(largest / np.abs(values).max())
    payload = encode_compressed(compress(values, codec=run.config.compression.uplink)[0])
    path = path or run.topology.paths_through(MODULE)[0]
    document = contribution_of(run, signer(number), payload, module=MODULE, path=path)
    return Admitted(seal(signer(number), document), partial(run.read_contribution, payload, MODULE))


def test_a_version_of_nothing_is_a_programmers_error(run: Run) -> None:
    with pytest.raises(AssertionError):
        made_of(run, [])


@pytest.mark.parametrize("rule", ["mean", "sqrt", "rda"])
def test_norms_that_are_known_already_change_nothing(tmp_path: Path, rule: str) -> None:
    run = make_run(Store(tmp_path), replace(tiny_config(), outer=OuterConfig(norm_rule=rule)))
    items = admitted(run)
    lengths = [item.read().norm() for item in items]
    measured = [replace(item, norm=length) for item, length in zip(items, lengths, strict=True)]
    partly = [measured[0], *items[1:]]
    clip_norm = min(lengths) / 2
    made, again, third = (made_of(run, found, clip_norm=clip_norm) for found in (items, measured, partly))
    assert made.version == again.version == third.version and made.update == again.update
    assert made.update != made_of(run, items).update, "it does clip"


def test_each_outer_gradient_is_read_in_its_turn_and_once(run: Run) -> None:
    asked: list[str] = []

    def noted(item: Admitted) -> Compressed:
        asked.append(item.sealed.id)
        return item.read()

    items = admitted(run)
    made = made_of(run, [replace(item, read=partial(noted, item)) for item in items])
    assert asked == [share.contribution for share in made.version.shares]


def test_the_blobs_of_a_version_are_kept_under_the_names_that_it_gives(run: Run, tmp_path: Path) -> None:
    store, made = Store(tmp_path / "other"), made_of(run, admitted(run))
    assert asyncio.run(made_and_kept(lambda: made, store)) is made and len(made.blobs) == 3
    for ref, parts in made.blobs:
        assert store.get(ref.digest) == b"".join(parts) and store.size(ref.digest) == ref.size


def test_of_a_version_only_the_update_stays_in_memory_for_those_who_ask_at_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = dict[str, bool]()
    store, made = Store(tmp_path / "other"), made_of(run, admitted(run))
    keep = store.keep

    def note(ref: BlobRef, *parts: bytes | memoryview, is_cold: bool = False) -> None:
        cold[ref.digest] = is_cold
        keep(ref, *parts, is_cold=is_cold)

    monkeypatch.setattr(store, "keep", note)
    asyncio.run(made_and_kept(lambda: made, store))
    assert made.version.update is not None and len(cold) == 3
    assert [name for name, is_cold in cold.items() if not is_cold] == [made.version.update.digest]


# -- the same work, handed in by several


def handed_in(run: Run, number: int, payload: bytes, *, path: PathId | None = None, **changes: object) -> Admitted:
    """Work of author `number` on the first path, or on another."""
    path = path or run.topology.paths_through(MODULE)[0]
    document = contribution_of(run, signer(number), payload, module=MODULE, path=path)
    sealed = seal(signer(number), replace(document, **changes))  # type: ignore[arg-type]
    return Admitted(sealed, partial(run.read_contribution, payload, MODULE))


def parroted(run: Run, payload: bytes) -> bytes:
    """The same outer gradient in other bytes: a little longer."""
    values = run.read_contribution(payload, MODULE).expand() * 1.0001
    return encode_compressed(compress(values, codec=run.config.compression.uplink)[0])


def shares_of(run: Run, *items: Admitted) -> dict[PeerId, tuple[float, int]]:
    """Weight and tokens of each author."""
    return {share.peer: (share.weight, share.tokens) for share in made_of(run, list(items)).version.shares}


def test_a_copy_and_what_it_repeats_count_as_one_beside_another_replica(run: Run) -> None:
    one, other = gradient_bytes(run, MODULE, seed=1), gradient_bytes(run, MODULE, seed=2)
    honest = [handed_in(run, 1, one), handed_in(run, 2, other)]
    full = run.tokens_full
    assert {tokens for _, tokens in shares_of(run, *honest).values()} == {full}
    for copy in (one, parroted(run, one)):
        found = shares_of(run, *honest, handed_in(run, 3, copy))
        assert [found[signer(number).peer] for number in (1, 2, 3)] == [
            (pytest.approx(0.25), full // 2),
            (pytest.approx(0.5), full),
            (pytest.approx(0.25), full // 2),
        ]
    weighed = made_of(run, [*honest, handed_in(run, 3, one)]).version
    assert weighed.weight == sum(share.tokens for share in weighed.shares) <= 2 * full


def test_the_same_gradient_on_another_path_is_other_work(run: Run) -> None:
    payload, (first, second) = gradient_bytes(run, MODULE, seed=1), run.topology.paths_through(MODULE)
    found = shares_of(run, handed_in(run, 1, payload, path=first), handed_in(run, 2, payload, path=second))
    assert {tokens for _, tokens in found.values()} == {run.tokens_full}


def test_a_copier_that_says_that_it_did_little_takes_little(run: Run) -> None:
    """Else one token would halve the weight of a path."""
    payload, other, full = gradient_bytes(run, MODULE, seed=1), gradient_bytes(run, MODULE, seed=2), run.tokens_full
    second = run.topology.paths_through(MODULE)[1]
    alone = [handed_in(run, 1, payload), handed_in(run, 2, other, path=second)]
    before, after = shares_of(run, *alone), shares_of(run, *alone, handed_in(run, 3, payload, tokens=1))
    assert after[signer(2).peer] == (pytest.approx(before[signer(2).peer][0]), full)
    assert after[signer(1).peer][1] == full - 1 and after[signer(3).peer][1] == 1
    assert after[signer(1).peer][0] + after[signer(3).peer][0] == pytest.approx(before[signer(1).peer][0])


def test_a_late_copy_neither_counts_beside_its_original_nor_makes_the_path_lighter(run: Run) -> None:
    """Late work weighs a quarter, in credit it counts like other."""
    payload, other, full = gradient_bytes(run, MODULE, seed=1), gradient_bytes(run, MODULE, seed=2), run.tokens_full
    parent = made_of(run, admitted(run)).version
    state, second = OuterState.fresh(initial()[0][1]), run.topology.paths_through(MODULE)[1]

    def weights(*items: Admitted) -> dict[PeerId, tuple[float, int]]:
        grant, author = grant_to(run, signer(9).peer), signer(9).peer
        made = make_version(run, parent, state, items, clip_norm=None, term=1, grant=grant, author=author)
        return {share.peer: (share.weight, share.tokens) for share in made.version.shares}

    alone = handed_in(run, 1, payload, base_version=1), handed_in(run, 2, other, path=second, base_version=1)
    before, after = weights(*alone), weights(*alone, handed_in(run, 3, payload, base_version=0))
    assert after[signer(2).peer][0] == pytest.approx(before[signer(2).peer][0])
    assert after[signer(1).peer] == (pytest.approx(0.8 * before[signer(1).peer][0]), full // 2)
    assert after[signer(3).peer] == (pytest.approx(0.2 * before[signer(1).peer][0]), full // 2)


def test_a_leader_that_counts_copies_in_full_is_found_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = gradient_bytes(run, MODULE, seed=1)
    items = [handed_in(run, 1, payload), handed_in(run, 2, payload), handed_in(run, 3, gradient_bytes(run, MODULE))]
    parent, state = genesis_version(run.manifest, MODULE), OuterState.fresh(initial()[0][1])
    again = partial(make_again, run, parent, state, items, norms=run.norms(MODULE, []), standings=Standings())
    fair = made_of(run, items).version
    assert again(fair).version == fair
    with monkeypatch.context() as patched:
        patched.setattr(copies, "counted", lambda amounts, near: list(amounts))
        unfair = made_of(run, items).version
    check_successor(parent, unfair, run.manifest)
    with pytest.raises(IntegrityError, match="does not follow from its contributions"):
        again(unfair)


def test_replicas_that_do_not_fit_into_memory_are_read_twice_and_one_at_a_time(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = run.layout(MODULE).size
    items = admitted(run, count=4)
    kept = made_of(run, items).version
    asked: list[str] = []

    def noted(item: Admitted) -> Compressed:
        asked.append(item.sealed.id)
        return item.read()

    monkeypatch.setattr(copies, "VALUES_MAX", 2 * size)  # the two of the first path
    made = made_of(run, [replace(item, read=partial(noted, item)) for item in items])
    ids = [share.contribution for share in kept.shares]
    assert made.version == kept and asked == [*ids, *ids[2:]]
