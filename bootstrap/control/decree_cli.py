"""The commands of `dipaco-bootstrap` that decree something about a run. Heavy imports stay inside."""

from __future__ import annotations

from typing import Annotated

import typer

from .cli import Folder, Json, end

CODES = """Exit codes: 0 done; 2 a wrong word, or one that makes no sense now: nothing is written; 3 no coordinator
runs and no folder is named; 4 it does not answer; 5 this machine cannot (the folder is in use, the disk);
6 it is of another version; 8 damaged data; 130 Ctrl-C."""

Why = Annotated[str, typer.Option("--reason", help="For the volunteers: one line of up to 200 characters.")]
Peer = Annotated[str, typer.Argument(help="The peer's id, or how it ends, as `peers` shows it.")]


def add_decrees(app: typer.Typer) -> None:
    """Put them among the program's own."""
    for command in (ban, admit, freeze, unfreeze, rollback, decrees):
        app.command(epilog=CODES)(command)


def ban(peer: Peer, reason: Why, folder: Folder = None) -> None:
    """Refuse a peer from now on: what it says and contributes counts no more. Its receipts stay good.

    It ends with exit code 7 and the reason. Signed, and known to all within seconds.
    Example: dipaco-bootstrap ban ...8VhWqZ my-run --reason "contributions of noise"
    """
    _decree(folder, act="ban", peer=peer, reason=reason)


def admit(peer: Peer, folder: Folder = None, reason: Why = "") -> None:
    """Undo a ban. Example: dipaco-bootstrap admit ...8VhWqZ my-run"""
    _decree(folder, act="admit", peer=peer, reason=reason)


def freeze(reason: Why, folder: Folder = None) -> None:
    """Stop training everywhere: no version is made, no receipt given, no step computed. Nothing is lost.

    Example: dipaco-bootstrap freeze my-run --reason "a bad shard"
    """
    _decree(folder, act="freeze", reason=reason)


def unfreeze(folder: Folder = None, reason: Why = "") -> None:
    """Let a frozen run go on. Example: dipaco-bootstrap unfreeze my-run"""
    _decree(folder, act="unfreeze", reason=reason)


def rollback(
    module: Annotated[str, typer.Argument(help="The module, as L1.M0.")],
    version: Annotated[int, typer.Argument(min=0, help="The version whose parameters come back.")],
    reason: Why,
    folder: Folder = None,
) -> None:
    """Go back to an earlier version of a module, with a new version that has its parameters: no version is removed.

    Its leader makes it, also while the run is frozen. Outer momentum begins at zero; work from what is undone expires.
    Example: dipaco-bootstrap rollback L1.M0 12 my-run --reason "diverged"
    """
    _decree(folder, act="rollback", module=module, version=version, reason=reason)


def decrees(folder: Folder = None, is_json: Json = False) -> None:
    """List what was decreed, the oldest first, and what holds now.

    Example: dipaco-bootstrap decrees my-run --json
    """
    from . import decree_commands

    end(lambda: decree_commands.show(folder, is_json=is_json))


def _decree(folder: Folder, **order: str | int) -> None:
    def work() -> None:
        from ..decreeing import Order
        from .decree_commands import decree

        decree(folder, Order(**order))  # type: ignore[arg-type]

    end(work)
