"""The outer step of one module: weights, average, Nesterov. Every owner computes the same bytes.

Rule 1: element-wise float32 ufuncs in the order of the arguments (callers sort contributions by id); scalars in
float64, sums of scalars by `math.fsum`, rounded to float32 once.
Rule 2: parameters move only by the dequantised update, so that whoever applies it holds the same bits.
Sources: DiLoCo (arXiv 2311.08105) algorithm 1; DiPaCo (arXiv 2403.10616) section 2.7 for weights and the norm rule.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ..errors import IntegrityError
from .arrays import Floats, tree_norm
from .codec import decode, encode
from .compress import Compressed, compress, expand, norm

CANCELLED = 1e-4
"""Below this norm a mean of unit directions is rounding noise, not a direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a contribution's weight depends on."""

    path: str
    shard_size: int
    """Tokens in the shard of the path."""
    tokens: float
    """Tokens trained to make this contribution; of a late one only a part counts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OuterState:
    """What an owner keeps of a module; each a flat vector (N,)."""

    params: Floats
    momentum: Floats
    residual: Floats
    """What quantising the updates has lost so far, and the next update brings."""

    @classmethod
    def fresh(cls, params: Floats) -> Self:
        """No momentum, nothing lost."""
        return cls(params=params, momentum=np.zeros_like(params), residual=np.zeros_like(params))


def outer_gradient(before: Floats, after: Floats) -> Floats:
    """What the inner steps subtracted from the parameters."""
    return before - after


def weights(shares: Sequence[Share], *, tokens_full: int) -> tuple[float, ...]:
    """The alpha of each contribution, summing to 1 over the module's own contributors (DiPaCo section 2.7).

    Proportional to the size of the path's shard; replicas of a path share its weight by the tokens they trained, and
    a path that trained less than `tokens_full` counts proportionally less.
    """
    path_tokens: dict[str, float] = defaultdict(float)
    for share in shares:
        path_tokens[share.path] += share.tokens
    raw = [share.shard_size * share.tokens / max(tokens_full, path_tokens[share.path]) for share in shares]
    total = math.fsum(raw)
    assert total > 0, "contributions without shard or tokens are refused at admission"
    return tuple(value / total for value in raw)


def average(
    contributions: Sequence[Compressed],
    alphas: Sequence[float],
    *,
    rule: str,
    paths: Sequence[str] | None = None,
    clip_norm: float | None = None,
) -> Floats:
    """The module's outer gradient (N,): a weighted mean whose norm does not shrink with the number of paths.

    `sqrt` (the paper's): the mean times sqrt(effective number of paths), 1 / sum of (alpha of a path)^2. `paths` says
    whose each contribution is; None means that all are of different ones. Replicas of one path train on the same text,
    so they agree, and do not make each other shorter: counted as paths they would make too long a step.

    `rda`: the mean of the norms times the direction of the mean of the unit directions; equal to `sqrt` for orthogonal
    gradients and to the mean for equal ones. `mean`: the weighted mean as it is. With `clip_norm`, longer contributions
    are first scaled down to it.
    """
    assert contributions and len(contributions) == len(alphas), (len(contributions), len(alphas))
    norms = [norm(contribution) for contribution in contributions]
    capped = [value if clip_norm is None else min(value, clip_norm) for value in norms]
    if rule == "rda":
        return _rda(contributions, alphas, norms, capped)
    assert rule in ("sqrt", "mean"), rule
    effective_number = _effective_number(alphas, paths) if rule == "sqrt" else 1.0
    factors = [
        alpha * math.sqrt(effective_number) * (cap / value if cap < value else 1.0)
        for alpha, value, cap in zip(alphas, norms, capped, strict=True)
    ]
    return _weighted_sum(contributions, factors)


def _effective_number(alphas: Sequence[float], paths: Sequence[str] | None) -> float:
    """How many paths of equal weight would be as many as these."""
    of_path: dict[str, list[float]] = defaultdict(list)
    for place, alpha in enumerate(alphas):
        of_path[str(place) if paths is None else paths[place]].append(alpha)
    return 1 / math.fsum(math.fsum(of_one) ** 2 for of_one in of_path.values())


def nesterov(momentum_buffer: Floats, gradient: Floats, *, lr: float, momentum: float) -> tuple[Floats, Floats]:
    """The next momentum buffer and the step to subtract; as `torch.optim.SGD(nesterov=True)`."""
    factor = np.float32(momentum)
    buffer = factor * momentum_buffer + gradient
    return buffer, np.float32(lr) * (gradient + factor * buffer)


def outer_step(state: OuterState, gradient: Floats, *, lr: float, momentum: float) -> tuple[OuterState, Compressed]:
    """The state after one round, and the update that takes everybody else's parameters there.

    Raises ValueError if the step is not finite, with `state` unchanged.
    """
    buffer, step = nesterov(state.momentum, gradient, lr=lr, momentum=momentum)
    update, residual = compress(step, state.residual)
    return OuterState(params=apply_update(state.params, update), momentum=buffer, residual=residual), update


def apply_update(params: Floats, update: Compressed) -> Floats:
    """The parameters of the next version: the same bytes at the owner and at everybody who follows."""
    return params - expand(update)


def encode_state(state: OuterState) -> bytes:
    """Momentum and residual; the parameters are a blob of their own."""
    return encode({"momentum": state.momentum, "residual": state.residual})


def decode_state(data: bytes, size: int) -> tuple[Floats, Floats]:
    """Momentum and residual (N,) each; raises IntegrityError."""
    tensors, _ = decode(data)
    if tensors.keys() != {"momentum", "residual"}:
        raise IntegrityError("an outer state must hold exactly momentum and residual")
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32 or tensor.shape != (size,) or not np.isfinite(tensor).all():
            raise IntegrityError(f"`{name}` of an outer state is not {size} finite float32 values")
    return tensors["momentum"], tensors["residual"]


def _rda(
    contributions: Sequence[Compressed], alphas: Sequence[float], norms: Sequence[float], capped: Sequence[float]
) -> Floats:
    # A contribution of norm zero has no direction: it is left out, and the others' weights are normalised again.
    total = math.fsum(alpha for alpha, value in zip(alphas, norms, strict=True) if value > 0)
    if total == 0:
        return np.zeros(contributions[0].size, dtype=np.float32)
    factors = [alpha / total / value if value > 0 else 0.0 for alpha, value in zip(alphas, norms, strict=True)]
    direction = _weighted_sum(contributions, factors)
    length = tree_norm(direction)
    if length < CANCELLED:
        return np.zeros_like(direction)
    mean_norm = math.fsum(alpha * cap for alpha, cap in zip(alphas, capped, strict=True)) / total
    return direction * np.float32(mean_norm / length)


def _weighted_sum(contributions: Sequence[Compressed], factors: Sequence[float]) -> Floats:
    total = np.zeros(contributions[0].size, dtype=np.float32)
    for contribution, factor in zip(contributions, factors, strict=True):
        total += expand(contribution) * np.float32(factor)
    return total
