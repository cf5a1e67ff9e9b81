"""`python -m benchmarks.limits`: whether a volunteer keeps its owner's limits within a tenth, with real processes."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from .cases import Row

EPILOG = """Exit codes: 0 every limit holds; 1 one does not; 2 a wrong flag."""


def main(
    case: Annotated[list[str] | None, typer.Option(help="cpu, ram, rates, disk or schedule; default: all.")] = None,
    seconds: Annotated[float, typer.Option(min=5, help="How long a mean is taken over.")] = 60.0,
    folder: Annotated[Path | None, typer.Option("--dir", help="Where the homes are; default: temporary.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Start a coordinator and one volunteer after the other, each with a limit, and measure it from outside."""
    from dipaco_p2p.program.console import run_program

    from .cases import CASES, HELD_MAX

    names = case or list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        raise typer.BadParameter(f"no case `{unknown[0]}`; there are {', '.join(CASES)}")
    rows: list[Row] = []

    async def play(place: Path) -> None:
        from .processes import Scene

        async with Scene(place) as scene:
            for name in names:
                typer.echo(f"{name} ...", err=True)
                rows.extend(await CASES[name](scene, seconds))
                typer.echo(f"{rows[-1].limit}: {rows[-1].measured:.3f} of {rows[-1].wished:.3f}", err=True)

    with tempfile.TemporaryDirectory() as made:
        place = folder or Path(made)
        place.mkdir(parents=True, exist_ok=True)
        code = run_program(lambda: play(place))
    _print(rows, HELD_MAX)
    if json_file is not None:
        json_file.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    raise typer.Exit(code or int(not all(row.is_held for row in rows)))


def _print(rows: Sequence[Row], held_max: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("limit", "wished", "measured", "unit", f"ratio (up to {held_max:g})", "note")
    for row in rows:
        ratio = f"{row.ratio:.2f}" + ("" if row.is_held else " NOT HELD")
        table.add_row(row.limit, f"{row.wished:.3f}", f"{row.measured:.3f}", row.unit, ratio, row.note)
    Console().print(table)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=EPILOG)(main)
    app()
