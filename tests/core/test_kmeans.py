"""k-means and product k-means: the groups they find, balance, no empty path, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dipaco_p2p.core.routing.kmeans import fit_kmeans, fit_product_kmeans
from dipaco_p2p.core.routing.router import encode_router
from dipaco_p2p.errors import CorpusError
from dipaco_p2p.topology import Topology


def blobs(counts: list[int], *, seed: int = 0, width: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Groups of points around distant centres, and the group of each point."""
    generator = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(counts)), counts)
    centres = generator.standard_normal((len(counts), width)) * 5
    return (centres[groups] + generator.standard_normal((len(groups), width))).astype(np.float32), groups


def test_separate_groups_of_equal_size_become_the_paths():
    points, groups = blobs([100, 100, 100, 100])
    labels = fit_kmeans(points, path_count=4, seed=0).assign(points)
    pairs = set(zip(labels.tolist(), groups.tolist(), strict=True))
    assert len(pairs) == 4


@pytest.mark.parametrize("path_count", [2, 4, 16])
@pytest.mark.parametrize("counts", [[900, 60, 40], [400, 300, 200, 100]])
def test_shards_are_near_balanced_and_never_empty(path_count, counts):
    points, _ = blobs(counts, seed=1)
    sizes = np.bincount(fit_kmeans(points, path_count=path_count, seed=0).assign(points), minlength=path_count)
    assert sizes.min() > 0
    assert sizes.max() <= 1.3 * sizes.mean()


def test_balanced_shards_stay_balanced_on_new_documents():
    points, _ = blobs([900, 60, 40], seed=1)
    router = fit_kmeans(points[::2], path_count=4, seed=0)
    sizes = np.bincount(router.assign(points[1::2]), minlength=4)
    assert sizes.max() <= 1.6 * sizes.mean()


def test_without_balance_the_groups_keep_their_sizes():
    points, groups = blobs([300, 60, 40], seed=1)
    labels = fit_kmeans(points, path_count=3, seed=0, balance=False).assign(points)
    assert sorted(np.bincount(labels).tolist()) == [40, 60, 300]


@pytest.mark.parametrize("balance", [True, False])
def test_as_many_documents_as_paths_give_each_its_own(balance):
    points, _ = blobs([5, 4], seed=2)
    labels = fit_kmeans(points, path_count=9, seed=0, balance=balance).assign(points)
    assert sorted(labels.tolist()) == list(range(9))


@pytest.mark.parametrize("balance", [True, False])
def test_many_copies_of_few_documents_leave_no_path_empty(balance):
    few, _ = blobs([3], seed=2)
    points = np.concatenate([np.repeat(few[:1], 500, axis=0), few])
    labels = fit_kmeans(points, path_count=3, seed=0, balance=balance).assign(points)
    assert set(labels.tolist()) == {0, 1, 2}


def test_features_without_spread_or_of_very_different_scales_are_standardised():
    points, groups = blobs([100, 100])
    stretched = points * np.array([1e4, *[1e-3] * 7], dtype=np.float32) + 1e3
    stretched[:, 3] = 7
    labels = fit_kmeans(stretched, path_count=2, seed=0).assign(stretched)
    assert len(set(zip(labels.tolist(), groups.tolist(), strict=True))) == 2


@pytest.mark.parametrize("count", [0, 3, 100])
def test_fewer_distinct_documents_than_paths_are_refused(count):
    points = np.tile(np.arange(3, dtype=np.float32)[:, None], (max(count // 3, 1), 4))[:count]
    with pytest.raises(CorpusError, match=f"{min(count, 3)} distinct documents cannot be split over 4 paths"):
        fit_kmeans(points.astype(np.float32), path_count=4, seed=0)


def test_the_seed_decides_the_router():
    points, _ = blobs([300, 60, 40], seed=1)
    assert encode_router(fit_kmeans(points, path_count=4, seed=5)) == encode_router(
        fit_kmeans(points, path_count=4, seed=5)
    )


def test_the_router_is_the_nearest_centroid():
    points, _ = blobs([60, 50, 40], seed=3)
    router = fit_kmeans(points, path_count=3, seed=0, balance=False)
    standard = (points - points.mean(axis=0)) / points.std(axis=0)
    labels = router.assign(points)
    centroids = np.stack([standard[labels == path].mean(axis=0) for path in range(3)])
    nearest = np.argmin(np.square(standard[:, None] - centroids).sum(axis=2), axis=1)
    assert labels.tolist() == nearest.tolist()
    np.testing.assert_allclose(router.weights, 2 * centroids, atol=1e-4)


def test_features_that_are_not_finite_are_refused():
    points, _ = blobs([30, 30])
    points[7, 3] = np.nan
    with pytest.raises(CorpusError, match="not finite"):
        fit_kmeans(points, path_count=2, seed=0)


@pytest.mark.parametrize("widths", [(2, 2), (3, 4), (2, 3, 2)])
def test_a_product_path_is_the_tuple_of_independent_clusters(widths):
    points = np.random.default_rng(4).standard_normal((500, 12)).astype(np.float32)
    router = fit_product_kmeans(points, widths=widths, seed=0, balance=False)
    parts = np.split(points, len(widths), axis=1)
    clusters = [
        fit_kmeans(part, path_count=width, seed=0, balance=False).assign(part)
        for part, width in zip(parts, widths, strict=True)
    ]
    topology = Topology(widths)
    found = [topology.path(number).indices for number in router.assign(points)]
    assert found == list(zip(*(each.tolist() for each in clusters), strict=True))


def test_levels_of_one_module_take_no_part_of_the_features():
    points = np.random.default_rng(4).standard_normal((100, 7)).astype(np.float32)
    plain = fit_product_kmeans(points, widths=(2, 3), seed=0)
    assert encode_router(fit_product_kmeans(points, widths=(1, 2, 1, 3), seed=0)) == encode_router(plain)
    assert fit_product_kmeans(points, widths=(1, 1), seed=0).assign(points).tolist() == [0] * 100


@pytest.mark.parametrize("widths", [(2, 2), (4, 4), (2, 2, 2)])
def test_product_shards_are_near_equal_even_when_the_parts_are_copies_of_each_other(widths):
    half, _ = blobs([300, 200, 70, 30], seed=1, width=4)
    points = np.concatenate([half, half + 0.3 * np.random.default_rng(0).standard_normal(half.shape)], axis=1)
    router = fit_product_kmeans(points.astype(np.float32), widths=widths, seed=0)
    sizes = np.bincount(router.assign(points.astype(np.float32)), minlength=router.path_count)
    assert sizes.min() >= 0.5 * sizes.mean()
    assert sizes.max() <= 1.3 * sizes.mean()


def test_a_product_that_cannot_fill_its_paths_is_refused():
    rows = np.array([[0, 0], [0, 0.1], [9, 5], [9, 5.1]], np.float32)
    points = np.repeat(rows, 20, axis=0)
    with pytest.raises(CorpusError, match="path . of 9 gets none of 80 documents|2 distinct documents"):
        fit_product_kmeans(points, widths=(3, 3), seed=0)
    with pytest.raises(CorpusError, match="path . of 8 gets none of 80 documents"):
        fit_product_kmeans(points, widths=(2, 4), seed=0)


@pytest.mark.parametrize("seed", [6, 9, 13, 21])
def test_where_every_iteration_ends_with_an_empty_path_centroids_far_apart_fill_them_all(seed):
    points = np.exp(5 * np.random.default_rng(seed).standard_normal((50, 2))).round().astype(np.float32)
    router = fit_kmeans(points, path_count=7, seed=0)
    assert np.bincount(router.assign(points), minlength=7).all()


@settings(max_examples=25)
@given(
    seed=st.integers(0, 999),
    documents=st.integers(20, 120),
    path_count=st.integers(1, 9),
    places=st.integers(0, 2),
    skew=st.floats(0, 3),
)
def test_a_balanced_fit_leaves_no_path_empty_or_is_refused(seed, documents, path_count, places, skew):
    generator = np.random.default_rng(seed)
    points = np.exp(skew * generator.standard_normal((documents, 4))).round(places).astype(np.float32)
    enough = len(np.unique(points, axis=0)) >= path_count
    try:
        router = fit_kmeans(points, path_count=path_count, seed=seed)
    except CorpusError:
        assert not enough
    else:
        assert np.bincount(router.assign(points), minlength=path_count).all()


@settings(max_examples=25)
@given(seed=st.integers(0, 999), documents=st.integers(30, 120), skew=st.floats(0.1, 2))
def test_a_balanced_product_leaves_no_path_empty(seed, documents, skew):
    points = np.exp(skew * np.random.default_rng(seed).standard_normal((documents, 4))).astype(np.float32)
    sizes = np.bincount(fit_product_kmeans(points, widths=(2, 3), seed=seed).assign(points), minlength=6)
    assert sizes.all()
