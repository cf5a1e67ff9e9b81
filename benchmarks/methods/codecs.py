"""How outer gradients are sent in the experiment: the swarm's codecs, and others to compare them with.

All but fp32 are `Compressed` values, so that the swarm's own averaging takes them.
"""

from __future__ import annotations

import numpy as np

from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.blocks import BLOCK, Blocks
from dipaco_p2p.core.compress import CODECS, Compressed, beginning, compress, expand

LEVELS = {"int2": 1}
"""Greatest code of coarser integers than the swarm's."""
TOP_SHARE = 0.03

Gradient = Compressed | Floats


class Sender:
    """What one worker sends of one module, round after round; with `feedback` nothing is lost for good."""

    def __init__(self, codec: str, *, feedback: bool, decay: float = 1.0, goes_on: bool = True) -> None:
        """`decay` is the share of what was lost that is tried again; without `goes_on` rounds begin at the versions."""
        self._codec = codec
        self._feedback = feedback
        self._goes_on = goes_on
        self._decay = np.float32(decay)
        self._residual: Floats | None = None

    def beginning(self, version: Floats) -> Floats:
        """Where the inner steps begin."""
        return beginning(version, self._residual, codec=self._codec) if self._goes_on else version

    def send(self, values: Floats) -> Gradient:
        """The outer gradient `values` (N,) as it arrives."""
        if self._codec == "fp32":
            return values
        if self._codec in CODECS:
            sent, residual = compress(values, self._residual, codec=self._codec)
        else:
            wanted = values if self._residual is None else values + self._residual
            sent = _coarse(wanted, LEVELS[self._codec]) if self._codec in LEVELS else _largest(wanted)
            residual = wanted - expand(sent)
        self._residual = residual * self._decay if self._feedback else None
        return sent


def received(gradient: Gradient) -> Floats:
    """The values (N,) that a gradient stands for."""
    return expand(gradient) if isinstance(gradient, Compressed) else gradient


def _coarse(values: Floats, level: int) -> Compressed:
    """Codes from -level to level, the largest value of a block being `level`."""
    blocks = np.pad(values, (0, -values.size % BLOCK)).reshape(-1, BLOCK)
    scales = (np.abs(blocks).max(axis=1) / np.float32(level)).astype(np.float32)
    codes = np.rint(blocks / np.where(scales == 0, np.float32(1), scales)[:, None])
    return Blocks(bits=8, size=values.size, codes=codes.astype(np.int8).reshape(-1)[: values.size], scales=scales)


def _largest(values: Floats) -> Compressed:
    """The largest `TOP_SHARE` of the values, in int8."""
    kept = values.copy()
    kept[np.argsort(np.abs(values), kind="stable")[: -max(1, int(TOP_SHARE * values.size))]] = 0
    return compress(kept)[0]
