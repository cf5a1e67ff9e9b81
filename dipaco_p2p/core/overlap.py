"""Where a path's next inner steps begin while the outer gradients of its last ones are still on their way.

Theory. Training on, rather than waiting, needs an estimate of the next version. The module's own outer step is played
in advance, with the path's fresh outer gradient in place of the average that nobody has yet (the idea of eager updates,
arXiv 2502.12996; streaming DiLoCo, arXiv 2501.18512, delays in the same way). A step without momentum would begin far
behind: with a momentum of 0.9 most of a step comes from earlier rounds, and that part is known.

The owners' momentum is not sent to trainers, and needs not be: who follows the versions sees each step, and a step is
lr * (g + mu * b') with b' = mu * b + g, so b' = (step / lr + mu * b) / (1 + mu). Who begins in the middle of a run
takes zeros for it, and what that makes wrong shrinks to mu / (1 + mu), less than a half, with every version that
follows.

Rule: the estimate is where steps begin, and nothing else. Their outer gradient is what they did from there, counted
from the true version once that has come, so no progress counts twice and nothing of the estimate enters a module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from .arrays import Floats
from .outer import nesterov


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course:
    """A module as a trainer sees it move; flat vectors (N,)."""

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
