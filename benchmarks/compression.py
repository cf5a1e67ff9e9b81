"""`python -m benchmarks.compression`: bytes and speed of every codec, as the programs run it.

What a codec costs in loss: `python -m benchmarks.methods --compare compression`, or `compression-long`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from benchmarks.report import MB, JsonFile, run_benchmark, seconds_of, show, table, write_json
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.outer.compress import CODECS, compress, decode_compressed, encode_compressed

RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Medians of `RUNS`; megabytes are those of the float32 values."""

    codec: str
    bytes: int
    ratio: float
    """Of the float32 values' bytes to its own."""
    encode_mb_s: float
    decode_mb_s: float


def main(
    values: Annotated[int, typer.Option(min=1, help="Length of the vector.")] = 25_000_000,
    quick: Annotated[bool, typer.Option("--quick", help="A vector of 2 million values: for trying.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Encode and decode a large vector with every codec."""
    count = 2_000_000 if quick else values
    found = speeds(count)
    show(speed_table(found, count))
    write_json(json_file, {"values": count, "codecs": [asdict(speed) for speed in found]})


def speeds(count: int) -> list[Speed]:
    """Of every codec, on `count` values of a normal distribution with a residual of the round before."""
    lots = np.random.default_rng(0)
    values, before = (lots.standard_normal(count).astype(np.float32) * np.float32(1e-3) for _ in range(2))
    return [_speed(codec, values, compress(before, codec=codec)[1]) for codec in CODECS]


def _speed(codec: str, values: Floats, residual: Floats) -> Speed:
    def encode() -> bytes:
        return encode_compressed(compress(values, residual, codec=codec)[0])

    size, data = values.nbytes, encode()
    encode_s = _median_s(encode)
    decode_s = _median_s(lambda: decode_compressed(data, size=values.size, codec=codec).expand())
    return Speed(
        codec=codec,
        bytes=len(data),
        ratio=size / len(data),
        encode_mb_s=size / MB / encode_s,
        decode_mb_s=size / MB / decode_s,
    )


def _median_s(work: Callable[[], object]) -> float:
    return statistics.median(seconds_of(work) for _ in range(RUNS))


def speed_table(found: Sequence[Speed], count: int) -> Table:
    """Bytes and megabytes a second."""
    rows = [
        (one.codec, f"{one.bytes:,}", f"{one.ratio:.1f}x", f"{one.encode_mb_s:.0f}", f"{one.decode_mb_s:.0f}")
        for one in found
    ]
    return table(f"{count:,} values, one thread", ("codec", "bytes", "smaller", "encode MB/s", "decode MB/s"), rows)


if __name__ == "__main__":
    run_benchmark(main)
