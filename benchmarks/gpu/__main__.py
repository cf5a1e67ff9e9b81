"""`python -m benchmarks.gpu`: all that a GPU can say about this project; the same command goes on where it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

EPILOG = """Exit codes: 0 all that was asked is known; 1 some of it is not, and the same command goes on; 2 a wrong flag
or folder; 130 stopped."""


def main(
    minutes: Annotated[
        float, typer.Option(min=0.1, help="What is not begun by then is left for the next command.")
    ] = 8.0,
    parts: Annotated[
        str, typer.Option(help="Only these, with commas between: right,fast,cards,beside,swarm,method.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Everything is kept here, and goes on from here.")] = Path("gpu"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    small: Annotated[bool, typer.Option("--small", help="Everything at small size, on a CPU: for trying.")] = False,
) -> None:
    """Ask a GPU, question by question, and write results.json and page.md after each."""
    from dipaco_p2p.errors import DipacoError, Interrupted
    from dipaco_p2p.program.console import print_error
    from peers.config import torch_device

    from .case import Bench
    from .parts import NAMES, part
    from .runner import run

    try:
        bench = Bench(folder=out, device=torch_device("cpu" if small else device), is_small=small)
        wanted, every = chosen(parts, NAMES), [part(name) for name in NAMES]
        asked = [one for one in every if one.name in wanted]
        is_done = run(bench, asked, every=every, minutes=minutes, say=lambda text: print(text, flush=True))
    except DipacoError as error:
        print_error(error)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        interrupted = Interrupted("stopped", hint="the same command goes on")
        print_error(interrupted)
        raise typer.Exit(interrupted.exit_code) from None
    print((out / "page.md").read_text("utf-8"))
    raise typer.Exit(0 if is_done else 1)


def chosen(names: str, known: Sequence[str]) -> list[str]:
    """Those of `known` that are named; all if none is. Raises ConfigError."""
    from dipaco_p2p.errors import ConfigError

    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"`{name}` is no part", hint="one of: " + ", ".join(known))
    return [name for name in known if not wanted or name in wanted]


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=EPILOG)(main)
    app()
