"""`dipaco-peer`: the command line of a volunteer. Heavy imports stay inside the commands, so that help is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dipaco_p2p import __version__

EPILOG = """Exit codes: 0 finished; 2 a wrong flag or value; 4 nobody answers; 5 this machine cannot (disk, port,
clock); 6 another run or version; 7 refused by the run; 8 damaged or forged data; 130 second Ctrl-C."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


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
    """Train a part of one large modular language model on this machine."""


@app.command(epilog=EPILOG)
def join(
    address: Annotated[str, typer.Argument(help="What the coordinator gave you: /ip4/.../tcp/.../p2p/...")],
    run: Annotated[str | None, typer.Option(help="The run's id, or its start: refuse any other run.")] = None,
    home: Annotated[
        Path | None,
        typer.Option(
            help="Folder for identity, state and history. Default: $DIPACO_HOME, else the user's data folder."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads for training; 0 lets torch decide.")] = 0,
    listen: Annotated[str, typer.Option(help="Where other peers may reach this one.")] = "/ip4/0.0.0.0/tcp/0",
    no_listen: Annotated[
        bool,
        typer.Option("--no-listen", help="Do not listen, as behind NAT or a firewall; such a peer leads no module."),
    ] = False,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for finishing cleanly after Ctrl-C.")] = 60.0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details to peer.log.")] = False,
) -> None:
    """Join a run: claim a path, train it on its shard, push outer gradients, follow new versions.

    Ctrl-C finishes cleanly: what was trained is pushed, the claim released, led modules are handed over.
    A second Ctrl-C leaves at once.
    """
    from dipaco_p2p.runtime.console import run_program

    from .config import PeerConfig, default_home

    async def main() -> None:
        from dipaco_p2p.swarm.addresses import read_address

        read_address(address)  # before the imports that take seconds

        from .join import join as join_run

        config = PeerConfig(
            home=home or default_home(),
            device=device,
            threads=threads,
            listen=listen,
            is_listening=not no_listen,
            grace_s=grace,
        )
        await join_run(address, config, expected_run=run, verbose=verbose)

    raise typer.Exit(run_program(main))


def main() -> None:
    """The entry point of the `dipaco-peer` script."""
    app()
