"""Where text goes that comes with a growth: to the paths that it opens, while the others keep what they have."""

from __future__ import annotations

import numpy as np
import pytest

from dipaco_p2p.config import LevelConfig, ModelConfig, RoutingConfig, RunConfig
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.routing.features import with_counts
from dipaco_p2p.core.routing.grown import continued, labels_beside, opened, router_beside, top_beside
from dipaco_p2p.topology import Topology

BEFORE, AFTER = Topology((1, 2)), Topology((1, 5))
WIDTH, VOCABULARY = 8, 300
CENTRES = np.random.default_rng(5).normal(size=(5, WIDTH)) * 8


def config(first: str = "kmeans") -> RunConfig:
    levels = LevelConfig(embedding=True, head=True), LevelConfig(modules=5, blocks=1)
    model = ModelConfig(vocab_size=VOCABULARY, width=WIDTH, heads=2, ffn_width=8, context=72, levels=levels)
    return RunConfig(model=model, routing=RoutingConfig(first=first))


def cloud(cluster: int, count: int, *, seed: int) -> Floats:
    points: Floats = (CENTRES[cluster] + np.random.default_rng(seed).normal(size=(count, WIDTH))).astype(np.float32)
    return points


def tokens_of(cluster: int, count: int, *, seed: int) -> Floats:
    return np.random.default_rng(seed).integers(8 * cluster, 8 * cluster + 8, (count, 40)).astype(np.int32)


OLD, NEW = (150, 90), (60, 40, 30)
POINTS = np.concatenate([cloud(number, count, seed=number) for number, count in enumerate((*OLD, *NEW))])
TOKENS = np.concatenate([tokens_of(number, count, seed=number) for number, count in enumerate((*OLD, *NEW))])
PARENTS = np.repeat([0, 1], OLD)


def labels() -> np.ndarray:
    return labels_beside(POINTS, PARENTS, before=BEFORE, after=AFTER, seed=0)


@pytest.mark.parametrize(
    ("before", "after"), [((1, 2), (1, 5)), ((2, 2), (2, 3)), ((1, 1), (2, 4)), ((3, 2, 1), (4, 2, 2))]
)
def test_as_many_paths_go_on_as_there_were_each_from_its_own_parent_and_all_others_are_new(
    before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    old, grown = Topology(before), Topology(after)
    own, new = continued(before=old, after=grown), opened(before=old, after=grown)
    assert sorted([*own, *new]) == list(range(grown.path_count)) and len(new)
    assert [grown.parent_path(grown.path(number), old) for number in own] == list(old.paths())


def test_old_text_stays_with_what_its_path_became_and_new_text_is_split_among_the_new_paths() -> None:
    found = labels()
    own, new = continued(before=BEFORE, after=AFTER), opened(before=BEFORE, after=AFTER)
    np.testing.assert_array_equal(found[: len(PARENTS)], own[PARENTS])
    fresh = found[len(PARENTS) :]
    assert set(fresh) == set(new)
    assert np.bincount(fresh, minlength=5)[new].min() >= sum(NEW) / len(new) / 2, "balanced, as every k-means"


@pytest.mark.parametrize("first", ["kmeans", "product", "tiny"])
def test_the_router_learns_which_text_is_new_whatever_it_looks_at(first: str) -> None:
    features = with_counts(POINTS, TOKENS, vocab_size=VOCABULARY) if first == "tiny" else POINTS
    router = router_beside(config(first), features, TOKENS, labels())
    assert router.width == features.shape[1] and router.path_count == 5
    held = [cloud(number, 50, seed=10 + number) for number in range(5)]
    rows = [tokens_of(number, 50, seed=10 + number) for number in range(5)]
    if first == "tiny":
        held = [with_counts(points, each, vocab_size=VOCABULARY) for points, each in zip(held, rows, strict=True)]
    is_new = [np.isin(router.assign(each), opened(before=BEFORE, after=AFTER)).mean() for each in held]
    assert max(is_new[:2]) <= 0.02 and min(is_new[2:]) >= 0.98, is_new


def test_whoever_shares_text_shares_it_with_paths_of_the_same_text_only() -> None:
    found, new = labels(), opened(before=BEFORE, after=AFTER)
    top = top_beside(router_beside(config(), POINTS, TOKENS, found), POINTS, found, 3, new=new)
    np.testing.assert_array_equal(top[:, 0], found)
    old = np.arange(len(found)) < len(PARENTS)
    assert not np.isin(top[old], new).any() and np.isin(top[~old], new).all()
    assert {len(set(row)) for row in top[old]} == {2} and {len(set(row)) for row in top[~old]} == {3}


def test_no_path_is_without_text_though_all_of_it_begins_alike() -> None:
    same = np.ones((40, WIDTH), dtype=np.float32)
    parents = np.zeros(24, dtype=np.int64)  # nothing was routed to the second path
    found = labels_beside(same, parents, before=BEFORE, after=AFTER, seed=0)
    assert set(found) == set(range(5))
    assert np.isin(found[24:], opened(before=BEFORE, after=AFTER)).all()
    router_beside(config(), same, np.ones((40, 40), dtype=np.int32), found)
