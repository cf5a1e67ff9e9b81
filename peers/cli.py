"""`dipaco-peer`: the command line of a volunteer. Heavy imports stay inside the commands, so that help is instant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dipaco_p2p.program.console import LogFormat
from dipaco_p2p.program.control.options import Version, end_program

from .control.cli import add_commands
from .preferences.commands import ConfigFile, Home, RunId, config_app, preference_flags
from .service import service_app

if TYPE_CHECKING:
    from .joining.choice import Choice
    from .serving.terms import Terms

EPILOG = """Exit codes: 0 finished; 1 a published loss differs from the one measured here; 2 a wrong flag or value;
4 nobody answers; 5 a problem on this machine (disk, port, clock); 6 another run or version;
7 refused or banned by the run; 8 damaged or forged data; 130 Ctrl-C before there was a result, or a second one."""

Ticket = Annotated[
    str | None,
    typer.Argument(
        help="The ticket, a file or link that holds it, or a peer's address. Default: $DIPACO_TICKET, else the run that"
        " was joined last."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
EXAMPLE = "Example: dipaco-peer join --help"

app = typer.Typer(no_args_is_help=True, epilog=EXAMPLE, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.callback()
def about(version: Version = False) -> None:
    """Train a part of one large modular language model on this machine."""


@app.command(epilog="Example: dipaco-peer join dipaco1... --up-mbit 15\n\n" + EPILOG)
@preference_flags
def join(
    ticket: Ticket = None,
    run: RunId = None,
    config: ConfigFile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what it would use and which path it would claim, then exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details to peer.log.")] = False,
    log_format: Annotated[
        LogFormat, typer.Option(help="Format of peer.log; json: one object per line.")
    ] = LogFormat.TEXT,
    invitation: Annotated[
        str | None, typer.Option(help="The code (invite1...), for a run that requires one. Kept for later starts.")
    ] = None,
    **flags: Any,
) -> None:
    """Join a run: claim a path, train it on its shard, push outer gradients, follow new versions.

    A ticket is all it needs; later starts remember the run. A machine that others can reach neither directly nor
    through a relay trains, but leads no module.

    Ctrl-C finishes cleanly: it hands in what was trained, releases the claim and hands over the modules that it leads.
    A second Ctrl-C exits at once. You can set every flag below in a file, too: see `dipaco-peer config`.
    """
    from .config import PeerConfig
    from .preferences.layers import resolve

    async def main() -> None:
        from dipaco_p2p.program.curves import open_curves

        # All that may be wrong with the command is said before the imports that take seconds.
        wishes = PeerConfig.of(resolve(flags, config=config).preferences)
        with open_curves(wishes.log, folder=wishes.home) as curves, _chosen(ticket, wishes.home, run) as choice:
            from .joining.join import join as join_run

            await join_run(
                choice,
                wishes,
                verbose=verbose,
                is_dry=dry_run,
                log_format=log_format,
                invitation=invitation,
                curves=curves,
            )

    end_program(main)


@app.command(epilog="Example: dipaco-peer ticket\n\n" + EPILOG)
def ticket(run: RunId = None, home: Home = None) -> None:
    """Print a ticket for the run joined last, to pass on. It works even while the coordinator is away.

    Besides the seed nodes it names volunteers that others can dial. These come and go: print a new one now and then.
    """
    from .config import default_home

    async def main() -> None:
        place = home or default_home()
        with _chosen(None, place, run) as choice:
            from .joining.passing_on import ticket_of

            print(ticket_of(choice, place))

    end_program(main)


@app.command(epilog="Example: dipaco-peer invite 12D3KooW...\n\n" + EPILOG)
def invite(
    peer: Annotated[str, typer.Argument(help="The invited peer's id: its `dipaco-peer identity show` prints it.")],
    run: RunId = None,
    home: Home = None,
) -> None:
    """Invite somebody to the run that this volunteer was invited to: prints a code for `join --invitation`.

    The invitation counts once a version counts this volunteer's work, and as long as nobody in its chain is banned.
    """
    from .config import default_home

    async def main() -> None:
        from dipaco_p2p.clock import SystemClock

        from .invitations import invite_by

        print(invite_by(home or default_home(), peer, run=run, at_s=SystemClock().now_s()))

    end_program(main)


@app.command(epilog="Example: dipaco-peer me dipaco1...\n\n" + EPILOG)
def me(
    ticket: Ticket = None,
    run: RunId = None,
    home: Home = None,
    is_whole: Annotated[bool, typer.Option("--all", help="Show every contribution.")] = False,
) -> None:
    """Show what became of this volunteer's work: its receipts beside the published versions, and its standing.

    It fetches the versions from the swarm and checks them here. The leaderboard shows the same figures.
    """
    from .config import default_home

    async def main() -> None:
        from dipaco_p2p.clock import SystemClock

        place = home or default_home()
        with _chosen(ticket, place, run) as choice:
            from .me import show_me

            await show_me(choice.text, place, expected=choice.run, is_whole=is_whole, clock=SystemClock())

    end_program(main)


@app.command(epilog="Example: dipaco-peer doctor dipaco1... --fix\n\n" + EPILOG)
def doctor(
    ticket: Ticket = None,
    run: RunId = None,
    home: Home = None,
    device: Device = "auto",
    listen: Annotated[
        str, typer.Option(help="The address to listen at; port 0 takes any free one.")
    ] = "/ip4/0.0.0.0/tcp/0",
    no_listen: Annotated[
        bool, typer.Option("--no-listen", help="Do not check whether others can dial this machine.")
    ] = False,
    machine: Annotated[bool, typer.Option("--machine", help="Check the machine only, without a run.")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Remove what dead processes of this program left behind.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document: dipaco.doctor/1.")] = False,
) -> None:
    """Check whether this machine is fit for a run, and say how to fix each problem.

    Checks clock, versions, GPU, memory, disk, identity, file limits, port and leftovers; of a run also each seed node,
    whether it can dial this machine back, and the speed of the line.
    """
    from .config import PeerConfig, default_home

    async def main() -> int:
        from .doctor.examine import examine, show
        from .joining.choice import find_choice, tell

        config = PeerConfig(home=home or default_home(), device=device, listen=listen, is_listening=not no_listen)
        choice = None if machine else find_choice(ticket, config.home, run=run)
        tell(choice)
        return show(await examine(choice, config, is_fixing=fix), is_json=as_json)

    end_program(main)


@app.command(epilog="Example: dipaco-peer evaluate dipaco1... --path P0-1\n\n" + EPILOG)
def evaluate(
    ticket: Ticket = None,
    round_number: Annotated[
        int | None, typer.Option("--round", min=0, help="The round to measure. Default: the newest judged one.")
    ] = None,
    path: Annotated[
        str | None, typer.Option(help="Measure only this path, such as P0-1. Default: all that have a loss.")
    ] = None,
    run: RunId = None,
    home: Home = None,
    device: Device = "auto",
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure the losses of a judged round on this machine, and print them beside the published ones.

    Needs no key and announces nothing. The exit code is 1 if a loss differs by more than 0.002 nats per token, the most
    that two honest machines may differ.
    """

    from .config import default_home, torch_device

    async def main() -> int:
        with _chosen(ticket, home or default_home(), run) as choice:
            from .evaluation.evaluate import print_evaluation

            differs = await print_evaluation(
                choice.text, round_number, path, expected=choice.run, device=torch_device(device), is_json=is_json
            )
        return 1 if differs else 0

    end_program(main)


@app.command(epilog="Example: dipaco-peer serve dipaco1... --memory 8\n\n" + EPILOG)
def serve(
    source: Annotated[
        str | None,
        typer.Argument(
            help="The ticket, a peer's address, or the folder of the run's coordinator. Default: $DIPACO_TICKET, else"
            " the run that was joined last."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen at; one that other machines can reach needs --key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="The port; 0 takes any free one.")] = 8080,
    key: Annotated[
        str,
        typer.Option(
            envvar="DIPACO_KEY", help="The key that every request must carry; safer in the environment than in a flag."
        ),
    ] = "",
    memory: Annotated[float, typer.Option(min=0.0, help="The most memory for modules and texts, in GB.")] = 4.0,
    streams: Annotated[int, typer.Option(min=1, max=1024, help="How many texts it may write at the same time.")] = 16,
    run: RunId = None,
    home: Home = None,
    device: Device = "auto",
) -> None:
    """Serve the run's newest model on this machine: OpenAI's API for any client, and a page to talk with it.

    Each prompt is routed to its path. Modules are fetched when first used, and new versions without a restart.
    Claims no path and announces nothing. Ctrl-C stops it.
    """
    from .config import default_home, torch_device

    async def main() -> None:
        from dipaco_p2p.node.entry import is_entry

        from .serving.terms import Terms

        terms = Terms(
            host=host,
            port=port,
            key=key,
            memory_bytes=int(memory * 1e9),
            streams_max=streams,
            device=device,
        )
        # A folder is no ticket; what is neither is explained as a ticket is.
        if source is not None and not is_entry(source) and Path(source).exists():
            await work(source, run, terms)
            return
        with _chosen(source, home or default_home(), run) as choice:
            await work(choice.text, choice.run, terms)

    async def work(text: str, expected: str | None, terms: Terms) -> None:
        from .serving.serve import serve as serve_run

        await serve_run(text, replace(terms, device=torch_device(device)), expected=expected)

    end_program(main)


@contextmanager
def _chosen(ticket: str | None, home: Path, run: str | None) -> Iterator[Choice]:
    """The run that a command is about, checked before the imports that take seconds."""
    from .joining.choice import LOST, choose, tell

    choice = choose(ticket, home, run=run)
    tell(choice)
    with choice.explained(*LOST):
        yield choice


add_commands(app)
app.add_typer(config_app, name="config")
app.add_typer(service_app, name="service")


def main() -> None:
    """The entry point of the `dipaco-peer` script."""
    app()
