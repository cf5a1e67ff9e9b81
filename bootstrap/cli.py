"""`dipaco-bootstrap`: the command line of a coordinator. Heavy imports stay inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dipaco_p2p import __version__
from dipaco_p2p.program.console import LogFormat
from leaderboard.cli import app as leaderboard_app

from .control.cli import add_commands
from .control.decree_cli import add_decrees
from .planning.cli import add_commands as add_planning
from .recovery.cli import add_commands as add_recovery

EPILOG = """Exit codes: 0 done; 1 the demo's promises do not all hold; 2 a wrong flag, run file or corpus;
4 nobody answers; 5 this machine cannot (disk, port, clock); 6 another run or version; 8 damaged data;
130 stopped: the demo by Ctrl-C, others by a second one."""

EXAMPLE = "Example: dipaco-bootstrap init run.toml"

app = typer.Typer(no_args_is_help=True, epilog=EXAMPLE, pretty_exceptions_enable=False)
app.add_typer(leaderboard_app, name="leaderboard")


def print_version(is_asked: bool) -> None:
    """What `--version` does."""
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Say it and leave.")
    ] = False,
) -> None:
    """Describe a run, prepare it, and be the node that volunteers join through."""


@app.command(epilog="Example: dipaco-bootstrap init run.toml --name my-run\n\n" + EPILOG)
def init(
    path: Annotated[Path, typer.Argument(help="The run file to write.")] = Path("run.toml"),
    name: Annotated[str, typer.Option(help="The run's name.")] = "my-run",
) -> None:
    """Write a commented run file, with every key at its default."""
    from dipaco_p2p.program.console import run_program

    async def main() -> None:
        from .runfile import write_template

        write_template(path, name)
        print(f"wrote {path}; change what you like, then: dipaco-bootstrap start {path}")

    raise typer.Exit(run_program(main))


@app.command(epilog="Example: dipaco-bootstrap start run.toml\n\n" + EPILOG)
def start(
    run_file: Annotated[Path, typer.Argument(help="A run file, as `init` writes one.")],
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Where the run is kept. Default: the run file's, else the user's data folder."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(help="Metrics for Prometheus at this port, or HOST:PORT. Default: the run file's, or none."),
    ] = None,
    through: Annotated[
        list[str] | None,
        typer.Option(help="A peer of the run, as address or ticket, if nobody knows this one's address; repeat it."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details to seed.log.")] = False,
    log_format: Annotated[LogFormat, typer.Option(help="Of seed.log; json is one object a line.")] = LogFormat.TEXT,
) -> None:
    """Prepare the run (corpus, tokenizer, warm-up, router, shards), then serve it as the seed node.

    Prints the line that volunteers join with. Ctrl-C hands over and stops; the same command goes on later.
    """
    from dipaco_p2p.program.console import run_program

    async def main() -> None:
        from .control.metrics_page import read_place
        from .runfile import load_run_file, run_folder

        file = load_run_file(run_file)  # before the imports that take seconds
        place = read_place(file.node.metrics if metrics is None else metrics)

        from .seed import Wishes
        from .seed import start as start_seed

        wishes = Wishes(through=through or [], metrics=place, log_format=log_format)
        await start_seed(file, folder or run_folder(file), wishes, verbose=verbose)

    raise typer.Exit(run_program(main))


@app.command(epilog="Example: dipaco-bootstrap ticket my-run --seed /ip4/198.51.100.7/tcp/4001/p2p/12D...\n\n" + EPILOG)
def ticket(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, as given to `start --dir`.")],
    seed: Annotated[list[str] | None, typer.Option(help="A further address of a peer of the run; repeat it.")] = None,
) -> None:
    """Print the run's ticket: the one word that volunteers join with. It is no secret."""
    from dipaco_p2p.program.console import run_program

    async def main() -> None:
        from .ticket import ticket_of

        print(ticket_of(folder, seeds=seed or []))

    raise typer.Exit(run_program(main))


@app.command(epilog="Example: dipaco-bootstrap verify my-run\n\n" + EPILOG)
def verify(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, as given to `start --dir`.")],
) -> None:
    """Recompute every module's chain from genesis to head, from the archived contributions."""
    from dipaco_p2p.program.console import run_program

    async def main() -> None:
        from .report import print_chains, verify_folder

        print_chains(verify_folder(folder))

    raise typer.Exit(run_program(main))


@app.command(
    epilog="Example: dipaco-bootstrap generate my-run 'It was a dark and stormy night' --every 64\n\n" + EPILOG
)
def generate(
    source: Annotated[str, typer.Argument(help="The folder of a run, its ticket, or an address of it.")],
    prompt: Annotated[str | None, typer.Argument(help="Default: the standard input.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token every time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among this many of the likeliest tokens; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed writes the same text.")] = 0,
    path: Annotated[str, typer.Option(help="Take this path, as P0-1-1, instead of routing.")] = "",
    every: Annotated[int, typer.Option(help="Route anew every so many tokens, a multiple of 16; 0: only once.")] = 0,
    version: Annotated[int | None, typer.Option(min=0, help="Of every module. Default: the newest of each.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Each path at its best round on held-out text.")] = False,
    run: Annotated[str | None, typer.Option(help="The run's id, or its start: refuse any other run.")] = None,
) -> None:
    """Route a prompt and let one path write on; only that path is read, never the whole model.

    A prompt of fewer than 32 tokens is routed by those that there are. Which path writes is said on the error stream.
    """
    from dipaco_p2p.program.console import run_program

    async def main() -> None:
        from .generate import Request, generate_from, read_prompt

        request = Request(
            prompt=read_prompt(prompt),
            tokens_max=max_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            path=path,
            version=version,
            best=best,
            every=every,
        )
        await generate_from(source, request, expected=run)

    raise typer.Exit(run_program(main))


@app.command(epilog="Example: dipaco-bootstrap export my-run --path P0-1-0 --to my-path\n\n" + EPILOG)
def export(
    source: Annotated[str, typer.Argument(help="The folder of a run, its ticket, or an address of it.")],
    path: Annotated[str, typer.Option(help="The path to take, as P0-1-1.")],
    to: Annotated[Path, typer.Option(help="A folder that is new or empty.")],
    version: Annotated[int | None, typer.Option(min=0, help="Of every module. Default: the newest of each.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The path at its best round on held-out text.")] = False,
    run: Annotated[str | None, typer.Option(help="The run's id, or its start: refuse any other run.")] = None,
) -> None:
    """Write one path as a Hugging Face checkpoint, with tokenizer, model card and lineage, and the router beside it."""
    from dipaco_p2p.program.console import run_program

    async def main() -> None:
        from .export import export_from

        exported = await export_from(source, path=path, to=to, version=version, best=best, expected=run)
        print(f"wrote {exported.path} to {exported.folder}")

    raise typer.Exit(run_program(main))


@app.command(epilog="Example: dipaco-bootstrap demo --rounds 4 --dir demo\n\n" + EPILOG)
def demo(
    peers: Annotated[int, typer.Option(min=1, max=16, help="Volunteers at the start.")] = 4,
    grid: Annotated[str, typer.Option(help="Modules per level, as in 2x2.")] = "2x2",
    rounds: Annotated[int, typer.Option(min=1, help="Outer rounds.")] = 12,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps per round.")] = 30,
    kills: Annotated[int, typer.Option(min=0, help="Volunteers to kill with SIGKILL, one after the other.")] = 1,
    corpus: Annotated[
        str, typer.Option(help="`found`, a file or folder of text, JSONL or Parquet, or a hub name.")
    ] = "found",
    seed: Annotated[int, typer.Option(min=0, help="Decides weights, shards, order of batches, and who is killed.")] = 0,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Keep everything here. Default: a temporary folder.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here as JSON.")] = None,
    export: Annotated[
        Path | None, typer.Option(help="Leave the leaderboard here, as files that any browser opens.")
    ] = None,
) -> None:
    """Train a small model with a real swarm of processes on this machine, kill a volunteer, show what came of it."""
    from dipaco_p2p.program.console import run_program

    failed: list[str] = []

    async def main() -> None:
        from .demo import DemoConfig, run_demo

        config = DemoConfig(peers=peers, grid=grid, rounds=rounds, steps=steps, kills=kills, corpus=corpus, seed=seed)
        failed.extend(await run_demo(config, folder=folder, json_file=json_file, export=export))

    code = run_program(main)
    raise typer.Exit(code or (1 if failed else 0))


add_commands(app)
add_decrees(app)
add_planning(app)
add_recovery(app)


def main() -> None:
    """The entry point of the `dipaco-bootstrap` script."""
    app()
