"""The linear router: what its scores are, that they do not depend on company, its bytes, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dipaco_p2p.core.routing.router import Router, decode_router, encode_router
from dipaco_p2p.core.tensor_file import encode
from dipaco_p2p.errors import IntegrityError


def random_router(*, paths: int, width: int, seed: int = 0) -> Router:
    """A router of random values, and no scale near zero."""
    generator = np.random.default_rng(seed)
    weights, bias, mean, scale = (
        generator.standard_normal(shape).astype(np.float32) for shape in ((paths, width), paths, width, width)
    )
    return Router(weights=weights, bias=bias, mean=mean, scale=np.abs(scale) + np.float32(0.1))


def tensors_of(router: Router) -> dict[str, np.ndarray]:
    return {name: getattr(router, name) for name in ("weights", "bias", "mean", "scale")}


def test_scores_are_affine_in_the_standardised_features():
    router = random_router(paths=5, width=7)
    points = np.random.default_rng(1).standard_normal((40, 7)).astype(np.float32)
    standard = (points.astype(np.float64) - router.mean) / router.scale
    scores = router.scores(points)
    assert scores.dtype == np.float64
    np.testing.assert_allclose(scores, standard @ router.weights.T.astype(np.float64) + router.bias, rtol=1e-12)
    assert (router.path_count, router.width) == (5, 7)


def test_least_distance_plus_bias_is_a_router():
    centroids, price = np.array([[0, 0], [4, 0]], np.float32), np.array([0, 8], np.float32)
    router = Router(
        weights=2 * centroids,
        bias=-np.square(centroids).sum(axis=1) - price,
        mean=np.array([10, 0], np.float32),
        scale=np.array([2, 1], np.float32),
    )
    # Standardised to x = 2.5, 2.9 and 3.1: squared distances differ by 8x - 16, and the price moves the border to 3.
    assert router.assign(np.array([[15, 0], [15.8, 9], [16.2, 9]], np.float32)).tolist() == [0, 0, 1]


@pytest.mark.parametrize("paths", [1, 3, 256])
def test_a_document_gets_the_same_bits_alone_and_among_others(paths):
    router = random_router(paths=paths, width=9)
    points = np.random.default_rng(1).standard_normal((301, 9)).astype(np.float32)
    together = router.scores(points)
    alone = np.concatenate([router.scores(points[row : row + 1]) for row in range(len(points))])
    assert together.tobytes() == alone.tobytes()
    assert router.scores(points[::-1])[::-1].tobytes() == together.tobytes()


def test_no_documents_have_no_paths():
    router = random_router(paths=4, width=3)
    nothing = np.empty((0, 3), np.float32)
    assert router.assign(nothing).shape == (0,)
    assert router.top(nothing, 2).shape == (0, 2)


@settings(max_examples=30)
@given(seed=st.integers(0, 99), paths=st.integers(1, 12), levels=st.integers(1, 4))
def test_the_top_paths_are_best_first_and_start_with_the_assigned_one(seed, paths, levels):
    points = np.random.default_rng(seed).integers(0, levels, (20, 3)).astype(np.float32)
    # Small whole numbers, so that ties are many.
    router = Router(
        weights=np.random.default_rng(seed + 1).integers(0, levels, (paths, 3)).astype(np.float32),
        bias=np.zeros(paths, np.float32),
        mean=np.zeros(3, np.float32),
        scale=np.ones(3, np.float32),
    )
    top, scores = router.top(points, paths), router.scores(points)
    assert np.array_equal(np.sort(top, axis=1), np.tile(np.arange(paths), (20, 1)))
    assert (np.diff(np.take_along_axis(scores, top, axis=1), axis=1) <= 0).all()
    for count in range(1, paths + 1):
        assert np.array_equal(router.top(points, count)[:, 0], router.assign(points))
        assert np.array_equal(router.top(points, count), top[:, :count])


@settings(max_examples=30)
@given(seed=st.integers(0, 99), paths=st.integers(1, 9), width=st.integers(1, 9))
def test_a_router_survives_its_bytes(seed, paths, width):
    router = random_router(paths=paths, width=width, seed=seed)
    again = decode_router(encode_router(router), path_count=paths, width=width)
    assert encode_router(again) == encode_router(router)
    points = np.random.default_rng(seed).standard_normal((20, width)).astype(np.float32)
    assert again.scores(points).tobytes() == router.scores(points).tobytes()


@pytest.mark.parametrize(
    "change",
    [
        {"bias": np.zeros(3, np.float32)},
        {"mean": np.zeros(7, np.float32)},
        {"weights": np.zeros(8, np.float32)},
        {"weights": np.zeros((2, 0), np.float32)},
        {"scale": np.zeros(8, np.float32)},
        {"bias": np.full(2, np.nan, np.float32)},
        {"weights": np.full((2, 8), np.inf, np.float32)},
        {"bias": np.zeros(2, np.float16)},
        {"extra": np.zeros(2, np.float32)},
    ],
)
def test_bytes_that_are_no_router_are_refused(change):
    good = tensors_of(random_router(paths=2, width=8))
    with pytest.raises(IntegrityError, match="router"):
        decode_router(encode(good | change))


def test_a_router_with_a_tensor_missing_is_refused():
    good = tensors_of(random_router(paths=2, width=8))
    for name in good:
        with pytest.raises(IntegrityError, match="exactly weights, bias, mean, scale"):
            decode_router(encode({other: tensor for other, tensor in good.items() if other != name}))


def test_a_router_of_another_run_is_refused():
    data = encode_router(random_router(paths=4, width=8))
    with pytest.raises(IntegrityError, match="another run: it has 4 paths, expected 16"):
        decode_router(data, path_count=16)
    with pytest.raises(IntegrityError, match="another run: it has 8 features, expected 64"):
        decode_router(data, path_count=4, width=64)
