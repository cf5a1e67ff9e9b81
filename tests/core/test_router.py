"""Features and the router: balance, no empty path, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dipaco_p2p.config import PREFIX_TOKENS, ModelConfig
from dipaco_p2p.core.codec import encode
from dipaco_p2p.core.features import features
from dipaco_p2p.core.model import PathModel, initial_modules, load_modules
from dipaco_p2p.core.router import Router, decode_router, encode_router, fit_kmeans
from dipaco_p2p.errors import CorpusError, IntegrityError


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


def test_assignment_is_the_least_distance_plus_bias():
    router = Router(
        centroids=np.array([[0, 0], [4, 0]], np.float32),
        bias=np.array([0, 8], np.float32),
        mean=np.array([10, 0], np.float32),
        scale=np.array([2, 1], np.float32),
    )
    # Standardised to x = 2.5, 2.9 and 3.1: squared distances differ by 8x - 16, and the bias moves the border to 3.
    assert router.assign(np.array([[15, 0], [15.8, 9], [16.2, 9]], np.float32)).tolist() == [0, 0, 1]


def test_a_router_survives_its_bytes_and_bad_bytes_are_refused():
    points, _ = blobs([30, 20])
    router = fit_kmeans(points, path_count=2, seed=0)
    again = decode_router(encode_router(router))
    assert encode_router(again) == encode_router(router)
    assert again.assign(points).tolist() == router.assign(points).tolist()
    good = {name: getattr(router, name) for name in ("centroids", "bias", "mean", "scale")}
    bad = [
        {"bias": np.zeros(3, np.float32)},
        {"mean": np.zeros(7, np.float32)},
        {"centroids": np.zeros(8, np.float32)},
        {"scale": np.zeros(8, np.float32)},
        {"bias": np.full(2, np.nan, np.float32)},
        {"bias": np.zeros(2, np.float16)},
        {"extra": np.zeros(2, np.float32)},
    ]
    for change in bad:
        with pytest.raises(IntegrityError, match="router"):
            decode_router(encode(good | change))


def test_features_are_the_mean_of_the_last_blocks_output_in_any_batching():
    config = ModelConfig(vocab_size=300, width=16, ffn_width=24, context=80)
    model = PathModel(config)
    load_modules(model, list(initial_modules(config, seed=0).values()))
    prefixes = np.random.default_rng(0).integers(0, 300, (7, PREFIX_TOKENS)).astype(np.int32)
    expected = model.hidden(torch.from_numpy(prefixes.astype(np.int64))).mean(dim=1).detach().numpy()
    np.testing.assert_allclose(features(model, prefixes), expected, atol=1e-6)
    np.testing.assert_allclose(features(model, prefixes, batch=3), expected, atol=1e-6)
    assert features(model, prefixes[:0]).shape == (0, 16)
