"""`python -m benchmarks.transfer`: from the first push until all have the next version, beside hivemind's averager."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

VALUES, QUICK_VALUES = 25_000_000, 1_000_000
QUICK_RUNS, QUICK_UP_TO = 2, 4


def main(
    up_to: Annotated[int, typer.Option(min=2, max=64, help="Fan-ins are 2, 4, 8 and so on up to this.")] = 8,
    codec: Annotated[list[str] | None, typer.Option(help="Of the uplink; default: the run file's and int8.")] = None,
    rival: Annotated[str, typer.Option(help="hivemind's compression; `none` measures ours alone.")] = "8-bit blockwise",
    runs: Annotated[int, typer.Option(min=1, help="Counted rounds of each, in turns.")] = 5,
    processes: Annotated[int, typer.Option(min=1, help="Processes that the contributors share.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="4 MB, two rounds, up to 4 contributors: for trying.")] = False,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Where the peers' disks are; default: temporary.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Play rounds of a run whose only module has 100 MB, and all-reduces of the same tensors, in turns."""
    from dipaco_p2p.config import CompressionConfig
    from dipaco_p2p.core.compress import CODECS
    from dipaco_p2p.program.console import run_program

    from .measure import Wish, fan_ins
    from .report import run
    from .rival import COMPRESSIONS

    codecs = tuple(dict.fromkeys(codec or (CompressionConfig().uplink, "int8")))
    if unknown := [name for name in codecs if name not in CODECS]:
        raise typer.BadParameter(f"no codec `{unknown[0]}`; there are {', '.join(CODECS)}")
    if rival not in (*COMPRESSIONS, "none"):
        raise typer.BadParameter(f"no compression `{rival}`; there are {', '.join(COMPRESSIONS)}, and none")
    wish = Wish(
        values=QUICK_VALUES if quick else VALUES,
        fan_ins=fan_ins(min(up_to, QUICK_UP_TO) if quick else up_to),
        codecs=codecs,
        rival="" if rival == "none" else rival,
        runs=QUICK_RUNS if quick else runs,
        processes=processes,
    )
    raise typer.Exit(run_program(lambda: run(wish, folder=folder, json_file=json_file)))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
