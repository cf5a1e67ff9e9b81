"""`dipaco-bootstrap`: the command line of a coordinator. Heavy imports stay inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dipaco_p2p.program.console import LogFormat
from dipaco_p2p.program.control.options import Json, Version, end, end_program
from leaderboard.cli import app as leaderboard_app

from .control import cli as control_cli
from .control.cli import Folder
from .use import cli as use_cli

EPILOG = """Exit codes: 0 done; 1 the demo's promises do not all hold; 2 a wrong flag, run file or corpus;
4 nobody answers; 5 a problem on this machine (disk, port, clock); 6 another run or version; 8 damaged data;
130 Ctrl-C before there was a result, or a second one."""

DECREE_CODES = """Exit codes: 0 done; 2 a wrong value, or a decree that makes no sense now: nothing is written;
3 no coordinator runs and no folder is named; 4 it does not answer; 5 a problem on this machine (folder in use, disk);
6 it is of another version; 8 damaged data; 130 Ctrl-C."""
CHECK_CODES = (
    "Exit codes: 0 it can start; a problem with 2 run file or corpus, 5 this machine, 8 the folder; 130 Ctrl-C."
)
PLAN_CODES = "Exit codes: 0 done; 2 a wrong flag, run file or corpus; 5 a problem on this machine; 130 Ctrl-C."
RECOVERY_CODES = """Exit codes: 0 done; 2 a wrong flag, folder or file; 4 nobody answers;
5 a problem on this machine (disk, port, clock); 6 another run or version; 8 damaged data; 130 Ctrl-C."""

Why = Annotated[str, typer.Option("--reason", help="Shown to the volunteers: one line of up to 200 characters.")]
Peer = Annotated[str, typer.Argument(help="The peer's id, or its last four or more characters, as `peers` shows them.")]
Undo = Annotated[bool, typer.Option("--undo", help="Take the peer's work out of each module.")]
RunFilePath = Annotated[Path, typer.Argument(help="A run file, as `init` writes one.")]
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run, as given to `start --dir`.")]
RunFolderOption = Annotated[Path | None, typer.Option("--dir", help="The folder of the run. Default: as for `start`.")]
RunKeys = Annotated[
    list[str] | None, typer.Option("--set", help='A key of the run file: compression.uplink="int2". Repeatable.')
]

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: dipaco-bootstrap init run.toml",
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(leaderboard_app, name="leaderboard")


@app.callback()
def about(version: Version = False) -> None:
    """Describe a run, prepare it, and be the node that volunteers join through."""


@app.command(epilog="Example: dipaco-bootstrap init run.toml --name my-run\n\n" + EPILOG)
def init(
    path: Annotated[Path, typer.Argument(help="The run file to write.")] = Path("run.toml"),
    name: Annotated[str, typer.Option(help="The run's name.")] = "my-run",
) -> None:
    """Write a commented run file, with every key at its default."""

    async def main() -> None:
        from .runfile import write_template

        write_template(path, name)
        print(f"wrote {path}; change what you like, then: dipaco-bootstrap start {path}")

    end_program(main)


@app.command(epilog="Example: dipaco-bootstrap start run.toml\n\n" + EPILOG)
def start(
    run_file: RunFilePath,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Where the run is kept. Default: the run file's, else the user's data folder."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(help="Serve Prometheus metrics at this port or HOST:PORT. Default: as in the run file."),
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(
            help="Write curves of the rounds to tensorboard:DIR, wandb, wandb:PROJECT or csv:FILE. Repeatable. "
            "Default: as in the run file."
        ),
    ] = None,
    through: Annotated[
        list[str] | None,
        typer.Option(help="Rejoin through this peer (address or ticket), if your own address has changed. Repeatable."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details to seed.log.")] = False,
    log_format: Annotated[
        LogFormat, typer.Option(help="Format of seed.log; json writes one object per line.")
    ] = LogFormat.TEXT,
) -> None:
    """Prepare the run (corpus, tokenizer, warm-up, router, shards), then serve it as the seed node.

    Prints the line that volunteers join with. Ctrl-C hands over and stops; run the same command again to continue.
    """

    async def main() -> None:
        from dipaco_p2p.program.curves import open_curves

        from .runfile import load_run_file, read_place, run_folder

        file = load_run_file(run_file)  # before the imports that take seconds
        place = read_place(file.node.metrics if metrics is None else metrics)
        kept = folder or run_folder(file)
        curves = open_curves(log or file.node.log, folder=kept)

        from .coordinator.seed import Wishes
        from .coordinator.seed import start as start_seed

        wishes = Wishes(through=through or [], metrics=place, log_format=log_format, curves=curves)
        with curves:
            await start_seed(file, kept, wishes, verbose=verbose)

    end_program(main)


@app.command(epilog="Example: dipaco-bootstrap ticket my-run --seed /ip4/198.51.100.7/tcp/4001/p2p/12D...\n\n" + EPILOG)
def ticket(
    folder: RunFolder,
    seed: Annotated[list[str] | None, typer.Option(help="Also name the peer at this address. Repeatable.")] = None,
) -> None:
    """Print the run's ticket: the one word that volunteers join with. It is not a secret."""

    async def main() -> None:
        from .folder import ticket_of

        print(ticket_of(folder, seeds=seed or []))

    end_program(main)


@app.command(epilog="Example: dipaco-bootstrap invite my-run 12D3KooW...\n\n" + EPILOG)
def invite(
    folder: RunFolder,
    peer: Annotated[str, typer.Argument(help="The invited peer's id: its `dipaco-peer identity show` prints it.")],
) -> None:
    """Invite a volunteer to a run that requires it: prints a code for `dipaco-peer join --invitation`.

    The code is for that peer alone, and counts until the peer is banned. The coordinator need not be running.
    """

    async def main() -> None:
        from dipaco_p2p.clock import SystemClock

        from .folder import invitation_of

        print(invitation_of(folder, peer, at_s=SystemClock().now_s()))

    end_program(main)


@app.command(epilog="Example: dipaco-bootstrap verify my-run\n\n" + EPILOG)
def verify(
    source: use_cli.Source,
    to: Annotated[
        Path | None,
        typer.Option("--dir", help="Where to keep what it gathers of a live run. Default: a temporary folder."),
    ] = None,
) -> None:
    """Recompute every module's chain, as far back as its contributions are kept.

    With a ticket it gathers them from the archive and from keepers, even if the coordinator is gone.
    """

    async def main() -> None:
        from .archives.gathered import verify_source
        from .archives.verify import print_chains

        print_chains(await verify_source(source, to))

    end_program(main)


@app.command(epilog="Example: dipaco-bootstrap demo --rounds 4 --dir demo\n\n" + EPILOG)
def demo(
    peers: Annotated[int, typer.Option(min=1, max=16, help="Volunteers at the start.")] = 4,
    grid: Annotated[str, typer.Option(help="Modules per level, such as 2x2.")] = "2x2",
    rounds: Annotated[int, typer.Option(min=1, help="Outer rounds.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps per round.")] = 30,
    kills: Annotated[int, typer.Option(min=0, help="Volunteers to kill with SIGKILL, one after another.")] = 1,
    corpus: Annotated[
        str, typer.Option(help="`found`, a file or folder of text, JSONL or Parquet, or a hub name.")
    ] = "found",
    seed: Annotated[int, typer.Option(min=0, help="Decides weights, shards, order of batches, and who is killed.")] = 0,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Keep everything here. Default: a temporary folder.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here as JSON.")] = None,
    export: Annotated[Path | None, typer.Option(help="Write the leaderboard here, as files for any browser.")] = None,
    keys: RunKeys = None,
) -> None:
    """Train a small model with a real swarm of processes on this machine, kill a volunteer, and show the result."""

    async def main() -> int:
        from .demo import DemoConfig, run_demo

        config = DemoConfig(
            peers=peers, grid=grid, rounds=rounds, steps=steps, kills=kills, corpus=corpus, seed=seed, keys=keys or ()
        )
        return 1 if await run_demo(config, folder=folder, json_file=json_file, export=export) else 0

    end_program(main)


use_cli.add_commands(app, epilog=EPILOG)
control_cli.add_commands(app)


# -- decrees


@app.command(
    epilog='Example: dipaco-bootstrap ban ...8VhWqZ my-run --reason "contributions of noise"\n\n' + DECREE_CODES
)
def ban(peer: Peer, reason: Why, folder: Folder = None, undo: Undo = False) -> None:
    """Refuse a peer from now on: nothing that it says or contributes counts. Its receipts stay valid.

    Its program ends with exit code 7 and the reason. The ban is signed, and all peers know of it within seconds.
    """
    _decree(folder, ask="ban", peer=peer, reason=reason, undo=undo)


@app.command(epilog="Example: dipaco-bootstrap admit ...8VhWqZ my-run\n\n" + DECREE_CODES)
def admit(peer: Peer, folder: Folder = None, reason: Why = "") -> None:
    """Undo a ban."""
    _decree(folder, ask="admit", peer=peer, reason=reason)


@app.command(epilog="Example: dipaco-bootstrap appoint ...8VhWqZ my-run\n\n" + DECREE_CODES)
def appoint(peer: Peer, folder: Folder = None, reason: Why = "") -> None:
    """Count a peer's archive beside the coordinator's own: leaders hand it everything, and newcomers read from it.

    The peer runs `dipaco-bootstrap seed`. It grants no terms and makes no version final.
    """
    _decree(folder, ask="appoint", peer=peer, reason=reason)


@app.command(epilog="Example: dipaco-bootstrap dismiss ...8VhWqZ my-run\n\n" + DECREE_CODES)
def dismiss(peer: Peer, folder: Folder = None, reason: Why = "") -> None:
    """Undo `appoint`."""
    _decree(folder, ask="dismiss", peer=peer, reason=reason)


@app.command(epilog='Example: dipaco-bootstrap hide-name ...8VhWqZ my-run --reason "an insult"\n\n' + DECREE_CODES)
def hide_name(peer: Peer, reason: Why, folder: Folder = None) -> None:
    """Show a peer by its id alone from now on, whatever name and team it gives itself. Nothing else changes for it."""
    _decree(folder, ask="hide-name", peer=peer, reason=reason)


@app.command(epilog="Example: dipaco-bootstrap show-name ...8VhWqZ my-run\n\n" + DECREE_CODES)
def show_name(peer: Peer, folder: Folder = None, reason: Why = "") -> None:
    """Undo `hide-name`."""
    _decree(folder, ask="show-name", peer=peer, reason=reason)


@app.command(epilog='Example: dipaco-bootstrap freeze my-run --reason "a bad shard"\n\n' + DECREE_CODES)
def freeze(reason: Why, folder: Folder = None) -> None:
    """Stop training everywhere: no versions, no receipts, no steps. Nothing is lost."""
    _decree(folder, ask="freeze", reason=reason)


@app.command(epilog="Example: dipaco-bootstrap unfreeze my-run\n\n" + DECREE_CODES)
def unfreeze(folder: Folder = None, reason: Why = "") -> None:
    """Let a frozen run go on."""
    _decree(folder, ask="unfreeze", reason=reason)


@app.command(epilog='Example: dipaco-bootstrap rollback L1.M0 12 my-run --reason "diverged"\n\n' + DECREE_CODES)
def rollback(
    module: Annotated[str, typer.Argument(help="The module, such as L1.M0.")],
    version: Annotated[int, typer.Argument(min=0, help="The version to return to.")],
    reason: Why,
    folder: Folder = None,
) -> None:
    """Return a module to an earlier version, by a new version with its parameters: no version is removed.

    The module's leader makes it, even while the run is frozen. Outer momentum starts at zero. Work on undone versions
    expires.
    """
    _decree(folder, ask="rollback", module=module, version=version, reason=reason)


@app.command(
    epilog="Example: dipaco-bootstrap grow my-run --levels 1,2,4 --at-round 12 --corpus cookery.jsonl\n\n"
    + DECREE_CODES
)
def grow(
    levels: Annotated[str, typer.Option("--levels", help="How many modules each level will have, such as 1,2,4.")],
    folder: Folder = None,
    at_round: Annotated[int, typer.Option(min=0, help="The last round before it grows. Default: the earliest.")] = 0,
    corpus: Annotated[str, typer.Option(help="New text for the new paths: whatever `source` of [corpus] may be.")] = "",
    reason: Why = "",
) -> None:
    """Give the grid more modules and paths after a round: each begins as a copy of a module, with its outer state.

    Volunteers continue without a restart, on text that is routed again. With --corpus the new paths get that text, and
    the others keep theirs. The run still ends after the same round.
    """
    _decree(folder, ask="grow", levels=levels, version=at_round, corpus=corpus, reason=reason)


@app.command(epilog="Example: dipaco-bootstrap decrees my-run --json\n\n" + DECREE_CODES)
def decrees(folder: Folder = None, is_json: Json = False) -> None:
    """List all decrees, oldest first, and what is in force."""
    from .control.decrees import show

    end(lambda: show(folder, is_json=is_json))


def _decree(folder: Folder, *, levels: str = "", **asked: str | int) -> None:
    def work() -> None:
        from .control.decrees import decree, read_levels
        from .control.requests import Request

        decree(folder, Request(levels=read_levels(levels), **asked))  # type: ignore[arg-type]

    end(work)


# -- before a run is started


@app.command(epilog=f"Example: dipaco-bootstrap check run.toml\n\n{CHECK_CODES}")
def check(
    run_file: RunFilePath,
    folder: RunFolderOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document: dipaco.check/1.")] = False,
) -> None:
    """Check whether a run can start here, and say how to fix each problem.

    Checks the run file, the folder, the corpus, the tokenizer, disk, ports and clock, and changes nothing.
    """

    async def main() -> int:
        from .planning.examine import examine, show

        return show(await examine(run_file, folder), is_json=as_json)

    end_program(main)


@app.command(epilog=f"Example: dipaco-bootstrap plan run.toml --up-mbit 5\n\n{PLAN_CODES}")
def plan(
    run_file: RunFilePath,
    up_mbit: Annotated[float, typer.Option(min=0.1, help="A volunteer's uplink, in Mbit/s.")] = 10.0,
    down_mbit: Annotated[float, typer.Option(min=0.1, help="A volunteer's downlink, in Mbit/s.")] = 50.0,
    volunteers: Annotated[int, typer.Option(min=0, help="The number of volunteers; 0: one for each path.")] = 0,
    tokens_per_s: Annotated[
        float, typer.Option(min=0, help="A volunteer's speed in tokens per second, as its `status` says; 0: unknown.")
    ] = 0.0,
    with_measure: Annotated[
        bool, typer.Option("--measure", help="Measure that speed here, in some seconds, for machines like this one.")
    ] = False,
    with_probe: Annotated[
        bool, typer.Option("--probe", help="Train here for some minutes: does a grid or DiLoCo suit this text better?")
    ] = False,
    probe_steps: Annotated[int, typer.Option(min=1, help="Steps of the probe's warm-up, and on each cluster.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document: dipaco.plan/1.")] = False,
) -> None:
    """Estimate what a run takes: parameters, traffic by codec, memory, disk, and time.

    It reads the run file alone, and computes with the programs' own functions. Times need --tokens-per-s or --measure.
    --probe also reads the text, and continues a small warm-up on clusters of it: the last line says grid or DiLoCo.
    """

    if with_measure and tokens_per_s:
        raise typer.BadParameter("give only one of the two", param_hint="--measure and --tokens-per-s")

    async def main() -> None:
        from .runfile import load_run_file

        file = load_run_file(run_file)  # before the imports that take seconds

        from .planning.examine import check_checkpoint, planned_of
        from .planning.plan import Line, show_plan

        line = Line(up_mbit=up_mbit, down_mbit=down_mbit)
        check_checkpoint(file)
        pace = tokens_per_s
        if with_measure:
            from .planning.pace import tokens_per_s as measured

            pace = measured(file.run)
        planned = planned_of(file, line, volunteers, tokens_per_s=pace)
        if not with_probe:
            return show_plan(planned, is_json=as_json)

        from .planning.probe import probe

        return show_plan(planned, is_json=as_json, probe=probe(file, steps=probe_steps))

    end_program(main)


@app.command(epilog=f"Example: dipaco-bootstrap backup my-run --to /mnt/safe\n\n{RECOVERY_CODES}")
def backup(
    folder: RunFolder,
    to: Annotated[Path, typer.Option(help="A new file, or a folder for one named after the run and the time.")],
) -> None:
    """Copy a run into one file, even while its coordinator is running.

    THE COORDINATOR'S KEY IS INSIDE: whoever has the file can sign for the run. Only you may read it; keep it so.
    """

    async def main() -> None:
        from dipaco_p2p.clock import SystemClock
        from dipaco_p2p.program.text import in_bytes

        from .recovery.backup import back_up

        written = back_up(folder, to, now_s=SystemClock().now_s())
        print(f"wrote {written.path}: {written.run}, {written.files} files, {in_bytes(written.bytes)}")
        print("the coordinator's key is inside: whoever has this file can sign for the run, so keep it safe")

    end_program(main)


@app.command(epilog=f"Example: dipaco-bootstrap restore my-run.tar --dir my-run\n\n{RECOVERY_CODES}")
def restore(
    backup_file: Annotated[Path, typer.Argument(metavar="BACKUP", help="A file that `backup` wrote.")],
    folder: Annotated[Path, typer.Option("--dir", help="A folder that is new or empty.")],
) -> None:
    """Make a run's folder from a backup, and check every byte. `start` then asks the swarm what came after the backup.

    Make sure that the old coordinator is gone: two coordinators with one key would split the run.
    """

    async def main() -> None:
        import time

        from .recovery.backup import restore as make_folder

        found = make_folder(backup_file, folder)
        made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(found.made_s))
        print(f"restored run:{found.run[:8]} as of {made} to {found.folder}: {found.files} files, all intact")
        print("make sure that the old coordinator never runs again: it has the same key")
        print(f"go on with: dipaco-bootstrap start RUN.toml --dir {found.folder} --through ADDRESS")

    end_program(main)


@app.command(epilog=f"Example: dipaco-bootstrap seed dipaco1... --dir second-seed\n\n{RECOVERY_CODES}")
def seed(
    ticket: Annotated[str, typer.Argument(help="The ticket, a file or link with it, or an address of the run.")],
    folder: Annotated[Path, typer.Option("--dir", help="The folder for its copy of the archive and its own key.")],
    listen: Annotated[str, typer.Option(help="The address to listen at.")] = "/ip4/0.0.0.0/tcp/31337",
    announce: Annotated[
        list[str] | None, typer.Option(help="The address outside, if a router forwards a port. Repeatable.")
    ] = None,
    up_mbit: Annotated[
        float, typer.Option(min=0, help="The most to upload, in Mbit/s, without calls and heartbeats; 0: no limit.")
    ] = 0.0,
    down_mbit: Annotated[float, typer.Option(min=0, help="The most to download, in Mbit/s, likewise.")] = 0.0,
    rounds: Annotated[
        int, typer.Option(min=0, help="Keep everything of this many last rounds, as `rounds` in [archive]; 0: of all.")
    ] = 2,
    snapshots: Annotated[
        int, typer.Option(min=0, help="Keep the parameters of every N-th round for good; 0: of none.")
    ] = 50,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details to seed.log.")] = False,
) -> None:
    """Run a further seed node: newcomers join through it, and it keeps a second archive.

    It needs no key of the coordinator's, and signs nothing for the run. While the coordinator is lost, newcomers join
    here, and a restored coordinator fills its archive from here.
    """

    async def main() -> None:
        from dipaco_p2p.node.entry import read_entry
        from dipaco_p2p.owner.retention import Retention
        from dipaco_p2p.swarm.blobs.bandwidth import Line

        read_entry(ticket)  # before the imports that take seconds
        line = Line(up_mbit=up_mbit or None, down_mbit=down_mbit or None)
        kept, places = Retention(rounds=rounds, snapshots=snapshots), announce or ()

        from .recovery.standby import keep_seed

        await keep_seed(ticket, folder, listen=listen, announce=places, line=line, retention=kept, verbose=verbose)

    end_program(main)


def main() -> None:
    """The entry point of the `dipaco-bootstrap` script."""
    app()
