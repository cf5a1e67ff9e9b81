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

EPILOG = """Exit codes: 0 finished; 1 a published loss is not what was measured here; 2 a wrong flag or value;
3 no volunteer runs here; 4 nobody answers; 5 this machine cannot (disk, port, clock); 6 another run or version;
7 refused or banned by the run; 8 damaged or forged data; 130 second Ctrl-C."""

Ticket = Annotated[
    str | None,
    typer.Argument(
        help="The ticket, a file or link with it, or an address of the run. Default: $DIPACO_TICKET, else the run that"
        " was joined last."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
EXAMPLE = "Example: dipaco-peer join --help"

app = typer.Typer(no_args_is_help=True, epilog=EXAMPLE, pretty_exceptions_enable=False)


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
        bool, typer.Option("--dry-run", help="Say what would be used and which path claimed, and leave.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details to peer.log.")] = False,
    log_format: Annotated[LogFormat, typer.Option(help="Of peer.log; json is one object a line.")] = LogFormat.TEXT,
    invitation: Annotated[
        str | None, typer.Option(help="A code that begins with invite1, for a run of the invited; kept from then on.")
    ] = None,
    **flags: Any,
) -> None:
    """Join a run: claim a path, train it on its shard, push outer gradients, follow new versions.

    A ticket is all it needs, and the run is remembered: later starts need none. If others cannot reach this machine,
    you are told; it then trains and leads no module.

    Ctrl-C finishes cleanly: what was trained is pushed, the claim released, led modules are handed over.
    A second Ctrl-C leaves at once. Every flag below may stand in a file, see `dipaco-peer config`.
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
    """Print a ticket of the run that was joined last, to pass on: it also works while the coordinator is away.

    Besides the seeds it names volunteers that others can dial, and it is renewed as these come and go.
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
    peer: Annotated[str, typer.Argument(help="The peer id of who is invited: `dipaco-peer identity show` prints it.")],
    run: RunId = None,
    home: Home = None,
) -> None:
    """Invite somebody to the run that this volunteer was invited to: prints a code for `join --invitation`.

    It counts once work of this volunteer is counted, and for as long as nobody in its chain is banned.
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
    """Say what this volunteer's work has come to: its receipts, held against the published versions, and its standing.

    The versions are asked of the swarm and checked here; the figures are those of the leaderboard.
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
    listen: Annotated[str, typer.Option(help="Where other peers shall reach this one.")] = "/ip4/0.0.0.0/tcp/0",
    no_listen: Annotated[bool, typer.Option("--no-listen", help="Do not ask whether it can be reached.")] = False,
    machine: Annotated[bool, typer.Option("--machine", help="Look at the machine only, and at no run.")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Remove what dead processes of this program left.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document: dipaco.doctor/1.")] = False,
) -> None:
    """Say whether this machine is fit for a run, with one remedy for each problem.

    Looks at clock, versions, GPU, memory, disk, identity, file limits, port, leftovers; of the run, if there is one, at
    each seed, the way back from it, and the line.
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
    path: Annotated[str | None, typer.Option(help="Only this path, as P0-1. Default: all that have a loss.")] = None,
    run: RunId = None,
    home: Home = None,
    device: Device = "auto",
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure the losses of a judged round again, on this machine, and print them beside the published ones.

    Needs no key and says nothing to the swarm. The exit code is 1 if a figure differs by more than machines do.
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
            help="The ticket or an address of the run, or the folder of its coordinator. Default: $DIPACO_TICKET, else"
            " the run that was joined last."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; others than this machine need --key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes any free one.")] = 8080,
    key: Annotated[
        str, typer.Option(envvar="DIPACO_KEY", help="What every request must bear; safer in the environment.")
    ] = "",
    memory: Annotated[float, typer.Option(min=0.0, help="In GB, for the paths and the texts.")] = 4.0,
    streams: Annotated[int, typer.Option(min=1, max=1024, help="Texts written at the same time.")] = 16,
    run: RunId = None,
    home: Home = None,
    device: Device = "auto",
) -> None:
    """Serve the run's newest model to any client of OpenAI's API, on this machine, and a page to talk with it.

    Each prompt is routed to its path; modules are fetched when they are first used, and new versions without a restart.
    Claims and says nothing. Ctrl-C stops.
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
