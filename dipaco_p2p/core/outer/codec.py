"""The codecs of outer gradients and updates: a `Codec` makes and reads `Compressed` vectors.

`IntBlocks`: whole numbers of 8 or 4 bits. Blocks of 256 values share a scale, the largest magnitude over the largest
code (127 or 7); codes are rounded half to even.
`Top128`: the largest values of each chunk at two bits each, for runs of many rounds over a slow line. Of each chunk of
4096 values the 128 largest are kept (of a shorter last chunk the same share), each as its sign and one of two
magnitudes of its chunk. What is left out comes back as the residual; without it, this codec loses most of its input.
A new codec is a pair of classes here, a line in compress.py, and its name in config.py.

Rule 1: the reader trusts nothing: every length, place, code and scale is checked, and wrong ones are an IntegrityError.
Rule 2: the norm is from exact sums, so that every owner computes the same one.
Rule 3: floats are made a part at a time, in what a core's own cache holds: a whole vector takes a module's memory.
Sources: SparseLoCo (arXiv 2508.15706): top-k in chunks, 2-bit values, error feedback. Elias and Fano for the places: of
each the low 5 bits, and for each group of 32 values in unary how many are in it. One in 32 is kept: 7 bits a place.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from ...errors import IntegrityError
from ..arrays import Array, Floats, spans, spread

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


class Codec(ABC):
    """How a vector gets into few bits and out again."""

    name: str
    """As in a run file."""
    metadata: Mapping[str, str]
    """What says in a file how it is to be read."""
    goes_on: ClassVar[bool] = False
    """Whether so much stays unsent that a path goes on from where it was, and not from the version."""

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
        """Of the tensors of `size` values."""


def take(tensors: dict[str, Array], name: str, dtype: np.dtype[np.generic], length: int) -> Array:
    """The tensor of this name, which must be flat, of this type and length; raises IntegrityError."""
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise IntegrityError(f"a compressed vector without `{name}`")
    if tensor.dtype != dtype or tensor.shape != (length,):
        raise IntegrityError(f"`{name}` is {tensor.dtype} of shape {tensor.shape}, expected {dtype} of ({length},)")
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


BLOCK = 256
PART = 256 * BLOCK
"""Values that are expanded at a time: whole blocks, 256 KiB as float32."""
SPAN = 4 * PART
"""Values that one core works on at a time."""
CODE_MAX = {8: 127, 4: 7}
"""The largest code, by bits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks(Compressed):
    """`size` values as codes (N,) of int8, whatever they take on the wire, and float32 scales (ceil(N / BLOCK),)."""

    bits: int
    size: int
    codes: npt.NDArray[np.int8]
    scales: Floats

    def cut(self, part: slice) -> Blocks:
        """The same memory from `part.start`, where a block begins, up to `part.stop`."""
        codes, scales = self.codes[part], self.scales[_blocks_of(part)]
        return Blocks(bits=self.bits, size=codes.size, codes=codes, scales=scales)

    @property
    def codec(self) -> str:
        return f"int{self.bits}"

    def expand(self) -> Floats:
        values = np.empty(self.size, dtype=np.float32)
        self._each_part(lambda part, found: np.copyto(values[part], found))
        return values

    def add_to(self, total: Floats, factor: float) -> None:
        def add(part: slice, values: Floats) -> None:
            values *= np.float32(factor)
            total[part] += values

        self._each_part(add)

    def less(self, before: Floats, *, out: Floats) -> None:
        self._each_part(lambda part, values: np.subtract(before[part], values, out=out[part]))

    def norm(self) -> float:
        return math.sqrt(self.dot(self))

    def dot(self, other: Blocks) -> float:
        terms: list[float] = []
        for part in spans(0, self.size, PART):
            # Whole numbers: as float32 they are exact up to 2^24, four times what 256 squares of 128 come to.
            ours, our_scales = self._wide(part)
            theirs, their_scales = (ours, our_scales) if other is self else other._wide(part)
            terms += (np.einsum("ij,ij->i", ours, theirs) * (our_scales * their_scales)).tolist()
        return math.fsum(terms)

    def _wide(self, part: slice) -> tuple[Array, Array]:
        """Codes in rows of a block, and scales, as floats that keep products exact."""
        return _in_blocks(self.codes[part]).astype(np.float32), self.scales[_blocks_of(part)].astype(np.float64)

    def thinned(self, every: int, first: int) -> Blocks:
        codes, scales = _in_blocks(self.codes)[first::every].reshape(-1), self.scales[first::every].copy()
        return Blocks(bits=self.bits, size=codes.size, codes=codes, scales=scales)

    def tensors(self) -> dict[str, Array]:
        return {"codes": self.codes if self.bits == 8 else _pack(self.codes), "scales": self.scales}

    def _each_part(self, take: Callable[[slice, Floats], object]) -> None:
        """Call `take` with every part and its values, which lie where those of the next one will."""

        def expand(span: slice) -> None:
            rows = _scratch(span)
            for part in spans(span.start, span.stop, PART):
                take(part, self._values(part, rows))

        spread(expand, spans(0, self.size, SPAN))

    def _values(self, part: slice, rows: Floats) -> Floats:
        scales = self.scales[_blocks_of(part)]
        blocks = rows[: scales.size]
        values = blocks.reshape(-1)
        count = part.stop - part.start
        values[:count] = self.codes[part]
        values[count:] = 0
        blocks *= scales[:, None]
        return values[:count]


class IntBlocks(Codec):
    """Codes of `bits` bits."""

    def __init__(self, bits: int) -> None:
        self.name = f"int{bits}"
        self.metadata = {"codec": self.name, "block": str(BLOCK)}
        self._bits = bits

    def make(
        self, size: int, bring: Callable[[slice], Floats], told: Callable[[slice, Compressed], None]
    ) -> Compressed:
        scales = np.empty(-(-size // BLOCK), dtype=np.float32)
        blocks = Blocks(bits=self._bits, size=size, codes=np.empty(size, dtype=np.int8), scales=scales)

        def make(span: slice) -> None:
            rows = _scratch(span)
            for part in spans(span.start, span.stop, PART):
                found = blocks.cut(part)
                _quantise(bring(part), found, rows)
                told(part, found)

        spread(make, spans(0, size, SPAN))
        return blocks

    def read(self, tensors: dict[str, Array], *, size: int) -> Compressed:
        if self._bits == 8:
            codes = take(tensors, "codes", np.dtype(np.int8), size)
        else:
            codes = _unpack(take(tensors, "codes", np.dtype(np.uint8), -(-size // 2)), size)
        scales = take(tensors, "scales", np.dtype(np.float32), -(-size // BLOCK))
        if codes.min(initial=0) < -CODE_MAX[self._bits]:
            raise IntegrityError(f"a compressed vector with the code {-CODE_MAX[self._bits] - 1}")
        check_scales(scales)
        return Blocks(bits=self._bits, size=size, codes=codes, scales=scales)

    def tensor_bytes(self, size: int) -> int:
        return -(-size * self._bits // 8) + 4 * -(-size // BLOCK)


def _scratch(span: slice) -> Floats:
    """Rows of a block for one part of `span`: made once for all its parts, so that they stay in the cache."""
    return np.empty((-(-min(PART, span.stop - span.start) // BLOCK), BLOCK), dtype=np.float32)


def _blocks_of(part: slice) -> slice:
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


def _quantise(values: Floats, into: Blocks, rows: Floats) -> None:
    """`values` (N,) of one part, of which `into` is to be the codes and scales; `rows` is room to work in.

    Raises ValueError for values that are not finite or too large to scale.
    """
    blocks, steps = _in_blocks(values), rows[: into.scales.size]
    np.abs(blocks, out=steps)
    scales = into.scales
    np.divide(steps.max(axis=1, initial=0), np.float32(CODE_MAX[into.bits]), out=scales)
    if not np.isfinite(scales).all():  # the largest magnitude of a block is not, if any of its values is not
        raise ValueError("values that are not finite cannot be compressed")
    check_range(scales * np.float32(CODE_MAX[into.bits] / 127))
    scales[scales < SCALE_MIN] = 0
    # A block without a scale has values so small that they round to zero as they are.
    np.divide(blocks, np.where(scales == 0, np.float32(1), scales)[:, None], out=steps)
    np.rint(steps, out=steps)
    # No clipping: a normal scale is exact to 1e-7, so that no step can round beyond the largest code.
    np.copyto(into.codes, steps.reshape(-1)[: into.size], casting="unsafe")


def _in_blocks(values: Array) -> Array:
    """Rows (ceil(N / BLOCK), BLOCK), the last one filled up with zeros."""
    missing = -values.size % BLOCK
    return (np.pad(values, (0, missing)) if missing else values).reshape(-1, BLOCK)


def _pack(codes: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Two codes to a byte, the first in its lower half, each plus 8; a code that is missing at the end is 0."""
    shifted = (np.pad(codes, (0, codes.size % 2)) + 8).astype(np.uint8)
    return (shifted[0::2] | (shifted[1::2] << 4)).astype(np.uint8)


def _unpack(packed: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.int8]:
    codes = np.empty(2 * packed.size, dtype=np.int8)
    codes[0::2] = (packed & 15).view(np.int8) - 8
    codes[1::2] = (packed >> 4).view(np.int8) - 8
    if size % 2 and codes[-1] != 0:
        raise IntegrityError("a compressed vector with a code beyond its end")
    return codes[:size]


TOP128 = "top128"
CHUNK = 4096
KEPT = 128
LOW_BITS = 5
GROUP = CHUNK // KEPT
"""One value in this many is kept."""
LEVELS = 2
assert GROUP == 1 << LOW_BITS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sparse(Compressed):
    """`size` values of which K are not zero: places (K,) in the vector, rising; codes (K,): sign and magnitude, and
    float32 magnitudes (chunks, 2), the smaller one first."""

    size: int
    places: npt.NDArray[np.int64]
    codes: npt.NDArray[np.uint8]
    """0 and 1: plus the smaller and the greater magnitude of the chunk; 2 and 3: minus them."""
    scales: Floats

    @property
    def codec(self) -> str:
        return TOP128

    def expand(self) -> Floats:
        values = np.zeros(self.size, dtype=np.float32)
        values[self.places] = self.kept()
        return values

    def add_to(self, total: Floats, factor: float) -> None:
        # What is zero changes nothing.
        total[self.places] += self.kept() * np.float32(factor)

    def less(self, before: Floats, *, out: Floats) -> None:
        if out is not before:
            out[:] = before
        out[self.places] -= self.kept()

    def kept(self) -> Floats:
        """The values (K,) at `places`."""
        magnitudes = self.scales[self.places // CHUNK, self.codes & 1]
        return np.where(self.codes >= LEVELS, -magnitudes, magnitudes)

    def norm(self) -> float:
        cells = self.places // CHUNK * LEVELS + (self.codes & 1)
        counts = np.bincount(cells, minlength=self.scales.size).tolist()
        scales = self.scales.ravel().tolist()
        return math.sqrt(math.fsum(n * (scale * scale) for n, scale in zip(counts, scales, strict=True)))

    def dot(self, other: Sparse) -> float:
        _, ours, theirs = np.intersect1d(self.places, other.places, assume_unique=True, return_indices=True)
        # As float64 a product of two float32 is exact.
        return math.fsum((self.kept()[ours].astype(np.float64) * other.kept()[theirs]).tolist())

    def thinned(self, every: int, first: int) -> Sparse:
        chosen = self.places // CHUNK % every == first
        return Sparse(size=self.size, places=self.places[chosen], codes=self.codes[chosen], scales=self.scales)

    def tensors(self) -> dict[str, Array]:
        """Places in 7 bits, four codes to a byte."""
        return {
            "counts": _pack_counts(self.places // GROUP),
            "lows": _pack_lows((self.places % GROUP).astype(np.uint8)),
            "codes": _pack_codes(self.codes),
            "scales": self.scales.ravel(),
        }


class Top128(Codec):
    """What top128 has not sent yet is most of what a path did. A path that began every round at the version would do it
    again, round after round until its turn comes, and send it that many times over: so it goes on from where it was."""

    name = TOP128
    metadata = {"codec": TOP128, "chunk": str(CHUNK), "kept": str(KEPT)}
    goes_on: ClassVar[bool] = True

    def make(
        self, size: int, bring: Callable[[slice], Floats], told: Callable[[slice, Compressed], None]
    ) -> Compressed:
        whole = slice(0, size)
        sparse = sparsify(require_finite(bring(whole)))
        told(whole, sparse)
        return sparse

    def read(self, tensors: dict[str, Array], *, size: int) -> Compressed:
        total, chunks = kept_count(size), -(-size // CHUNK)
        groups = _unpack_counts(take(tensors, "counts", np.dtype(np.uint8), -(-total // 4)), total)
        lows = take(tensors, "lows", np.dtype(np.uint8), -(-total * LOW_BITS // 8))
        places = groups * GROUP + _unpack_lows(lows, total)
        codes = _unpack_codes(take(tensors, "codes", np.dtype(np.uint8), -(-total // 4)), total)
        scales = take(tensors, "scales", np.dtype(np.float32), LEVELS * chunks)
        check_scales(scales)
        if (scales[0::LEVELS] > scales[1::LEVELS]).any():
            raise IntegrityError("a compressed vector whose two magnitudes of a chunk are not in order")
        if total and (places[-1] >= size or (np.diff(places) <= 0).any()):
            raise IntegrityError("a compressed vector whose places do not rise, or lie beyond its end")
        if (np.bincount(places // CHUNK, minlength=chunks)[: size // CHUNK] != KEPT).any():
            raise IntegrityError(f"a compressed vector with a chunk of which not {KEPT} values are kept")
        return Sparse(size=size, places=places, codes=codes, scales=scales.reshape(chunks, LEVELS))

    def tensor_bytes(self, size: int) -> int:
        kept = kept_count(size)
        return 2 * -(-kept // 4) + -(-kept * LOW_BITS // 8) + 4 * LEVELS * -(-size // CHUNK)


def sparsify(values: Floats) -> Sparse:
    """The largest of finite `values`; raises ValueError for values too large to scale."""
    places, codes, scales = [], [], np.zeros((-(-values.size // CHUNK), LEVELS), dtype=np.float32)
    full = values.size // CHUNK
    if full:
        found = _largest(values[: full * CHUNK].reshape(full, CHUNK))
        places.append((found[0] + np.arange(full)[:, None] * CHUNK).ravel())
        codes.append(found[1].ravel())
        scales[:full] = found[2]
    if values.size > full * CHUNK:
        found = _largest(values[None, full * CHUNK :])
        places.append(found[0].ravel() + full * CHUNK)
        codes.append(found[1].ravel())
        scales[full:] = found[2]
    nothing = np.zeros(0, dtype=np.int64)
    return Sparse(
        size=values.size,
        places=np.concatenate([nothing, *places]),
        codes=np.concatenate([nothing.astype(np.uint8), *codes]),
        scales=scales,
    )


def kept_count(size: int) -> int:
    """How many values are kept, of a vector of this size: one of each group, on average."""
    return -(-size // GROUP)


def _largest(rows: Floats) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], Floats]:
    """Of each row (R, L): places (R, K), rising; codes (R, K); magnitudes (R, 2)."""
    length = rows.shape[1]
    kept = kept_count(length)
    sizes = np.abs(rows)
    places = np.sort(np.argpartition(sizes, length - kept, axis=1)[:, length - kept :], axis=1)
    found = np.take_along_axis(rows, places, axis=1)
    ranked = np.sort(np.abs(found), axis=1).astype(np.float64)
    half = kept // 2
    high = ranked[:, half:].mean(axis=1)
    low = ranked[:, :half].mean(axis=1) if half else high
    scales = np.stack([low, high], axis=1).astype(np.float32)
    check_range(scales)
    scales[scales < SCALE_MIN] = 0
    is_high = np.abs(found) > ((low + high) / 2)[:, None]
    codes = (is_high + LEVELS * (found < 0)).astype(np.uint8)
    return places, codes, scales


def _pack_counts(groups: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """By the group (K,) of each place: for each of the K groups a 1 for each of its places, then a 0."""
    bits = np.zeros(2 * groups.size, dtype=np.uint8)
    bits[groups + np.arange(groups.size)] = 1
    return np.packbits(bits, bitorder="little")


def _unpack_counts(packed: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.int64]:
    found = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
    if found.size != count or (count and found[-1] >= 2 * count - 1):
        raise IntegrityError(f"a compressed vector whose groups have not {count} places in all")
    return found - np.arange(count)


def _pack_lows(lows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    bits = np.unpackbits(lows[:, None], axis=1, count=LOW_BITS, bitorder="little")
    return np.packbits(bits.ravel(), bitorder="little")


def _unpack_lows(packed: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.int64]:
    bits = np.unpackbits(packed, bitorder="little")
    if bits[count * LOW_BITS :].any():
        raise IntegrityError("a compressed vector with a place beyond its end")
    rows = bits[: count * LOW_BITS].reshape(count, LOW_BITS)
    return np.packbits(rows, axis=1, bitorder="little").ravel().astype(np.int64)


def _pack_codes(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    rows = np.pad(codes, (0, -codes.size % 4)).reshape(-1, 4)
    return (rows[:, 0] | (rows[:, 1] << 2) | (rows[:, 2] << 4) | (rows[:, 3] << 6)).astype(np.uint8)


def _unpack_codes(packed: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.uint8]:
    codes = np.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1).ravel()
    if codes[count:].any():
        raise IntegrityError("a compressed vector with a code beyond its end")
    return codes[:count]
