"""The outer step of one module: weights, average, Nesterov. Every owner computes the same bytes.

Rule 1: element-wise float32 ufuncs in the order of the arguments (callers sort contributions by id); scalars in
float64, sums of scalars by `math.fsum`, rounded to float32 once.
Rule 2: parameters move only by the dequantised update, so that whoever applies it holds the same bits.
Rule 3: an estimate of the next version (`Course`) is where steps begin, and nothing else. Their outer gradient is what
they did from there, counted from the true version once that has come, so no progress counts twice and nothing of the
estimate enters a module.
Sources: DiLoCo (arXiv 2311.08105) algorithm 1; DiPaCo (arXiv 2403.10616) section 2.7 for weights and the norm rule.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

import numpy as np

from ...canonical import Parts
from ...errors import IntegrityError
from ..arrays import Floats, spans, spread, tree_norm
from ..tensor_file import decode, encode_parts
from .blocks import SPAN
from .codec import Compressed
from .compress import CODECS, INT8

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

    @classmethod
    def restored(cls, params: Floats, data: bytes | None) -> Self:
        """With what `state_parts` wrote, fresh without it; raises IntegrityError."""
        if data is None:
            return cls.fresh(params)
        momentum, residual = decode_state(data, params.size)
        return cls(params=params, momentum=momentum, residual=residual)


def outer_gradient(before: Floats, after: Floats) -> Floats:
    """What the inner steps subtracted from the parameters."""
    found = np.empty(before.shape, dtype=np.float32)
    spread(lambda part: np.subtract(before[part], after[part], out=found[part]), spans(0, before.size, SPAN))
    return found


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


class Gradients(Protocol):
    """Contributions by place. Each may be read and decoded whenever it is asked for: none is held on to here, so that
    one at a time is in memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> Compressed: ...


def average(
    contributions: Gradients,
    alphas: Sequence[float],
    *,
    rule: str,
    paths: Sequence[str] | None = None,
    clip_norms: Sequence[float] | None = None,
    norms: Sequence[float] | None = None,
) -> Floats:
    """The module's outer gradient (N,): a weighted mean whose norm does not shrink with the number of paths.

    `sqrt` (the paper's): the mean times sqrt(effective number of paths), 1 / sum of (alpha of a path)^2. `paths` says
    whose each contribution is; None means that all are of different ones. Replicas of one path train on the same text,
    so they agree, and do not make each other shorter: counted as paths they would make too long a step.

    `rda`: the mean of the norms times the direction of the mean of the unit directions; equal to `sqrt` for orthogonal
    gradients and to the mean for equal ones. `mean`: the weighted mean as it is. With `clip_norms`, what is longer is
    first scaled down to its own, which need not be right before it was asked for.

    Every contribution is asked for once, in order; by `rda` twice, unless the `norms` are known already.
    """
    assert len(contributions) == len(alphas) > 0, (len(contributions), len(alphas))

    def shortening(place: int, contribution: Compressed) -> float:
        if clip_norms is None:
            return 1.0
        value = contribution.norm() if norms is None else norms[place]
        return clip_norms[place] / value if clip_norms[place] < value else 1.0

    if rule == "rda":
        return _rda(contributions, alphas, norms, clip_norms)
    assert rule in ("sqrt", "mean"), rule
    root = math.sqrt(_effective_number(alphas, paths) if rule == "sqrt" else 1.0)
    return _weighted_sum(contributions, lambda place, one: alphas[place] * root * shortening(place, one))


def _effective_number(alphas: Sequence[float], paths: Sequence[str] | None) -> float:
    """How many paths of equal weight would be as many as these."""
    of_path: dict[str, list[float]] = defaultdict(list)
    for place, alpha in enumerate(alphas):
        of_path[str(place) if paths is None else paths[place]].append(alpha)
    return 1 / math.fsum(math.fsum(of_one) ** 2 for of_one in of_path.values())


def nesterov(momentum_buffer: Floats, gradient: Floats, *, lr: float, momentum: float) -> tuple[Floats, Floats]:
    """The next momentum buffer and the step to subtract; as `torch.optim.SGD(nesterov=True)`."""
    factor = np.float32(momentum)
    buffer = factor * momentum_buffer
    buffer += gradient
    step = factor * buffer
    step += gradient
    step *= np.float32(lr)
    return buffer, step


def outer_step(
    state: OuterState, gradient: Floats, *, lr: float, momentum: float, codec: str = INT8, is_spent: bool = False
) -> tuple[OuterState, Compressed]:
    """The state after one round, and the update that takes everybody else's parameters there, in the codec.

    With `is_spent` the gradient's memory becomes the momentum's: a module's size less. Raises ValueError if the step is
    not finite, with `state` unchanged.
    """
    after = OuterState(
        params=np.empty_like(state.params),
        momentum=gradient if is_spent else np.empty_like(state.momentum),
        residual=np.empty_like(state.residual),
    )

    def bring(part: slice) -> Floats:
        buffer, step = nesterov(state.momentum[part], gradient[part], lr=lr, momentum=momentum)
        after.momentum[part] = buffer
        return np.add(step, state.residual[part], out=after.residual[part])

    def told(part: slice, update: Compressed) -> None:
        update.less(after.residual[part], out=after.residual[part])
        update.less(state.params[part], out=after.params[part])

    return after, CODECS[codec].make(gradient.size, bring, told)


def apply_update(params: Floats, update: Compressed) -> Floats:
    """The parameters of the next version: the same bytes at the owner and at everybody who follows."""
    after = np.empty_like(params)
    update.less(params, out=after)
    return after


def state_parts(state: OuterState) -> Parts:
    """Momentum and residual as bytes, in the memory of `state`; the parameters are a blob of their own."""
    return encode_parts({"momentum": state.momentum, "residual": state.residual})


def decode_state(data: bytes, size: int) -> tuple[Floats, Floats]:
    """Momentum and residual (N,) each, in the memory of `data`; raises IntegrityError."""
    tensors, _ = decode(data, is_view=True)
    if tensors.keys() != {"momentum", "residual"}:
        raise IntegrityError("an outer state must hold exactly momentum and residual")
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32 or tensor.shape != (size,) or not np.isfinite(tensor).all():
            raise IntegrityError(f"`{name}` of an outer state is not {size} finite float32 values")
    return tensors["momentum"], tensors["residual"]


def _rda(
    contributions: Gradients, alphas: Sequence[float], norms: Sequence[float] | None, clip_norms: Sequence[float] | None
) -> Floats:
    if norms is None:
        norms = [contributions[place].norm() for place in range(len(alphas))]
    # A contribution of norm zero has no direction: it is left out, and the others' weights are normalised again.
    total = math.fsum(alpha for alpha, value in zip(alphas, norms, strict=True) if value > 0)
    if total == 0:
        return np.zeros(contributions[0].size, dtype=np.float32)
    factors = [alpha / total / value if value > 0 else 0.0 for alpha, value in zip(alphas, norms, strict=True)]
    direction = _weighted_sum(contributions, lambda place, one: factors[place])
    length = tree_norm(direction)
    if length < CANCELLED:
        return np.zeros_like(direction)
    capped = norms if clip_norms is None else [*map(min, norms, clip_norms)]
    mean_norm = math.fsum(alpha * cap for alpha, cap in zip(alphas, capped, strict=True)) / total
    direction *= np.float32(mean_norm / length)
    return direction


def _weighted_sum(contributions: Gradients, factor: Callable[[int, Compressed], float]) -> Floats:
    total: Floats | None = None
    for place in range(len(contributions)):
        # Not by a loop over the contributions, whose variable would keep one while the next is decoded.
        total = _plus(total, contributions[place], partial(factor, place))
    assert total is not None
    return total


def _plus(total: Floats | None, contribution: Compressed, factor: Callable[[Compressed], float]) -> Floats:
    """`total` plus a contribution, in place; the first one begins it."""
    if total is None:
        total = np.zeros(contribution.size, dtype=np.float32)
    contribution.add_to(total, factor(contribution))
    return total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course:
    """A module as a trainer sees it move, which says where to train on while outer gradients are on their way; flat
    vectors (N,).

    The module's own outer step is played in advance, with the path's fresh outer gradient in place of the average that
    nobody has yet (eager updates, arXiv 2502.12996; streaming DiLoCo, arXiv 2501.18512, delays in the same way). A step
    without momentum would begin far behind: with a momentum of 0.9 most of a step comes from earlier rounds.

    The owners' momentum is not sent to trainers: a trainer that follows the versions sees each step, lr * (g + mu * b')
    with b' = mu * b + g, so b' = (step / lr + mu * b) / (1 + mu). A trainer that begins in the middle of a run takes
    zeros for it, and that error shrinks to mu / (1 + mu), less than a half, with every version that follows.
    """

    params: Floats
    """Of the newest version that was seen."""
    momentum: Floats
    """What the outer momentum must be, by the steps that were seen."""

    @classmethod
    def begin(cls, params: Floats) -> Self:
        """With the first version that is seen; exact if that is version 0."""
        return cls(params=params, momentum=np.zeros_like(params))

    def follow(self, params: Floats, *, lr: float, momentum: float, is_fresh: bool = False) -> Self:
        """The very next version has these parameters; `is_fresh` if it was made without the momentum before it."""
        if lr == 0:
            return type(self)(params=params, momentum=self.momentum)
        step = (self.params - params) / np.float32(lr)
        if not is_fresh:
            step += np.float32(momentum) * self.momentum
        return type(self)(params=params, momentum=step / np.float32(1 + momentum))

    def ahead(self, own: Floats, *, lr: float, momentum: float) -> Floats:
        """The next version (N,), if everybody's outer gradient were `own`."""
        _, step = nesterov(self.momentum, own, lr=lr, momentum=momentum)
        return self.params - step

    def going_on(self, place: Floats, *, lr: float, momentum: float) -> Floats:
        """Where a path that is at `place` begins, if it goes on from there (compress.beginning): little of what it did
        will be in the next version, of which only the momentum is known."""
        _, step = nesterov(self.momentum, np.zeros_like(place), lr=lr, momentum=momentum)
        return place - step
