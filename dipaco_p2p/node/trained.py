"""Which paths were ever trained, and routing among those only.

A path whose volunteers all failed has modules that others trained, or private ones that are still what the run began
with; either way nobody has seen its text. Then its documents are better read by their next best path
(docs/lost_work.md has the figures). A path counts as trained as soon as a version counts a contribution of it; while
none has one, all are as good.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ..core.routing.router import Router, best
from ..protocol.documents import ModuleVersion
from ..topology import ModuleId, PathId, Topology


def witnesses(topology: Topology) -> list[ModuleId]:
    """The modules whose chains say it of all paths: those of the narrowest level, since a path has one of each."""
    narrowest = topology.widths.index(min(topology.widths))
    return [module for module in topology.modules() if module.level == narrowest]


def trained_paths(topology: Topology, versions: Iterable[ModuleVersion]) -> list[PathId]:
    """The paths that these versions of the witnesses count; all if they count none."""
    counted = {share.path for version in versions for share in version.shares}
    return [path for path in topology.paths() if path in counted] or list(topology.paths())


def assign(router: Router, vectors: NDArray[np.float32], usable: Iterable[int]) -> NDArray[np.int64]:
    """The path number (n,) of each of `vectors` (n, D): the best by score of those in `usable`."""
    scores = router.scores(vectors)
    barred = np.ones(scores.shape[1], dtype=bool)
    barred[list(usable)] = False
    scores[:, barred] = -np.inf
    return best(scores)
