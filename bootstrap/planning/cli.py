"""The commands of `dipaco-bootstrap` that look at a run before it is started. Heavy imports stay inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFilePath = Annotated[Path, typer.Argument(help="A run file, as `init` writes one.")]
Folder = Annotated[
    Path | None,
    typer.Option("--dir", help="Where the run is or would be kept. Default: as `start` would choose."),
]
CHECK_EPILOG = """Exit codes: 0 it can start; 2 the run file or the corpus; 5 this machine (disk, port); 8 damaged data;
130 Ctrl-C."""
PLAN_EPILOG = "Exit codes: 0 done; 2 a wrong flag or run file."


def add_commands(app: typer.Typer) -> None:
    """Put them among the program's own."""
    app.command(epilog=f"Example: dipaco-bootstrap check run.toml\n\n{CHECK_EPILOG}")(check)
    app.command(epilog=f"Example: dipaco-bootstrap plan run.toml --up-mbit 5\n\n{PLAN_EPILOG}")(plan)


def check(
    run_file: RunFilePath,
    folder: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document: dipaco.check/1.")] = False,
) -> None:
    """Say whether a run can start here, with one remedy for each problem.

    Looks at the run file, the folder, the corpus, the tokenizer, disk, ports and clock; makes and changes nothing.
    """
    from dipaco_p2p.program.console import run_program

    codes: list[int] = []

    async def main() -> None:
        from .examine import examine
        from .show import show_findings

        codes.append(show_findings(await examine(run_file, folder), is_json=as_json))

    raise typer.Exit(run_program(main) or codes[0])


def plan(
    run_file: RunFilePath,
    up_mbit: Annotated[float, typer.Option(min=0.1, help="A volunteer's uplink, in Mbit/s.")] = 10.0,
    down_mbit: Annotated[float, typer.Option(min=0.1, help="Its downlink.")] = 50.0,
    volunteers: Annotated[int, typer.Option(min=0, help="How many; 0: one for each path.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document: dipaco.plan/1.")] = False,
) -> None:
    """Say what a run takes: parameters, bytes on the line by codec, memory, disk, time on a line of this speed.

    Worked out from the run file alone, with the functions that the programs use; how fast volunteers train is not said.
    """
    from dipaco_p2p.program.console import run_program

    async def main() -> None:
        from ..runfile import load_run_file

        file = load_run_file(run_file)  # before the imports that take seconds

        from .examine import planned_of
        from .plan import Line
        from .show import show_plan

        line = Line(up_mbit=up_mbit, down_mbit=down_mbit)
        show_plan(planned_of(file, line, volunteers), is_json=as_json)

    raise typer.Exit(run_program(main))
