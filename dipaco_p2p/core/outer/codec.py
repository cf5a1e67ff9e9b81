"""The codecs of outer gradients and updates: what a `Codec` is, which makes and reads `Compressed` vectors.

Whole numbers of 8 or 4 bits are in blocks.py, two bits for every value in two_bits.py, and the largest values of each
chunk in sparse.py. A new codec is a pair of classes, a line in compress.py, its name in config.py, and its bound in
copies.py.

Rule 1: the reader trusts nothing: every length, place, code and scale is checked, and wrong ones are an IntegrityError.
Rule 2: the norm is from exact sums, so that every owner computes the same one.
Rule 3: floats are made a part at a time, in what a core's own cache holds: a whole vector takes a module's memory.
Rule 4: an update has the same bytes at every owner, so what makes them is exact, or rounds each value on its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import numpy as np

from ...errors import IntegrityError
from ..arrays import Array, Floats

# A scale is zero or a normal float32: some machines flush smaller ones to zero. And `128 * scale` must not overflow.
SCALE_MIN = np.finfo(np.float32).tiny
SCALE_MAX = np.finfo(np.float32).max / 128


class Compressed(ABC):
    """`size` values in the codec of that name."""

    __slots__ = ()
    size: int

    @property
    @abstractmethod
    def codec(self) -> str:
        """The name of its codec."""

    @abstractmethod
    def expand(self) -> Floats:
        """The float32 values (N,) that it stands for: the same bits on every machine."""

    @abstractmethod
    def add_to(self, total: Floats, factor: float) -> None:
        """`total += expand() * factor` to the bit, with `factor` as float32, and without a second vector."""

    @abstractmethod
    def less(self, before: Floats, *, out: Floats) -> None:
        """`before - expand()` goes to `out`, which may be `before`: the bits of adding it with the factor -1."""

    @abstractmethod
    def norm(self) -> float:
        """Euclidean norm of `expand()`, from exact sums and therefore the same on every machine."""

    @abstractmethod
    def dot(self, other: Self) -> float:
        """The scalar product with another vector of the same size and codec; from exact sums too."""

    @abstractmethod
    def thinned(self, every: int, first: int) -> Self:
        """Of each `every` blocks or chunks one, from number `first` on, in memory of its own."""

    @abstractmethod
    def tensors(self) -> dict[str, Array]:
        """What goes over the wire."""


class Dense(Compressed):
    """One whose every value has a code: floats are made a part at a time."""

    __slots__ = ()

    @abstractmethod
    def each_part(self, take: Callable[[slice, Floats], object]) -> None:
        """Call `take` with every part and its values, which may lie where those of the next one will."""

    def expand(self) -> Floats:
        values = np.empty(self.size, dtype=np.float32)
        self.each_part(lambda part, found: np.copyto(values[part], found))
        return values

    def add_to(self, total: Floats, factor: float) -> None:
        def add(part: slice, values: Floats) -> None:
            values *= np.float32(factor)
            total[part] += values

        self.each_part(add)

    def less(self, before: Floats, *, out: Floats) -> None:
        self.each_part(lambda part, values: np.subtract(before[part], values, out=out[part]))


class Codec(ABC):
    """How a vector gets into few bits and out again."""

    name: str
    """As in a run file."""
    metadata: Mapping[str, str]
    """What says in a file how it is to be read."""
    goes_on: ClassVar[bool] = False
    """Whether so much stays unsent that a path goes on from where it was, and not from the version: it would do what
    waits again, round after round until its turn comes, and send it that many times over."""

    @abstractmethod
    def make(
        self, size: int, bring: Callable[[slice], Floats], told: Callable[[slice, Compressed], None]
    ) -> Compressed:
        """`size` values. `bring` gives those of a part, and `told` hears right after that what they came out as; on
        more than one core, and in parts that the caches hold, if each can be compressed alone. Raises ValueError for
        values that are not finite or too large to scale."""

    @abstractmethod
    def read(self, tensors: dict[str, Array], *, size: int) -> Compressed:
        """The inverse of `tensors()`; takes what it reads out of the mapping. Raises IntegrityError."""

    @abstractmethod
    def tensor_bytes(self, size: int) -> int:
        """Of the tensors of `size` values, at most."""


def take(tensors: dict[str, Array], name: str, dtype: np.dtype[np.generic], length: int | None) -> Array:
    """The tensor of this name, which must be flat, of this type and, if that is known, length; raises
    IntegrityError."""
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise IntegrityError(f"a compressed vector without `{name}`")
    expected = (tensor.size if length is None else length,)
    if tensor.dtype != dtype or tensor.shape != expected:
        raise IntegrityError(f"`{name}` is {tensor.dtype} of shape {tensor.shape}, expected {dtype} of {expected}")
    return tensor


def check_scales(scales: Floats) -> None:
    """Raise IntegrityError unless each is zero or in range."""
    # Written so that NaN fails too.
    if not ((scales == 0) | ((scales >= SCALE_MIN) & (scales <= SCALE_MAX))).all():
        raise IntegrityError("a compressed vector with a scale that is negative, not finite or out of range")


def check_range(scales: Floats) -> None:
    """Raise ValueError for scales of values that are too large."""
    if (scales > SCALE_MAX).any():
        raise ValueError(f"values above {SCALE_MAX * 127:.3g} cannot be compressed")


def require_finite(values: Floats) -> Floats:
    """`values`; raises ValueError unless all of them are finite."""
    if not np.isfinite(values).all():
        raise ValueError("values that are not finite cannot be compressed")
    return values
