"""The version gate: what is said when a run speaks another protocol than this program, and which command helps.

How the program was installed is read off where it lies: uv and pipx keep every tool in a folder of their own, and an
editable installation says so in its `direct_url.json` (PEP 610).
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import PurePath

from . import __version__
from .config import PROTOCOL_VERSION
from .errors import WrongRun

PACKAGE = "dipaco-p2p"


def check_protocol(said: int, *, who: str, ours: int = PROTOCOL_VERSION) -> None:
    """Raise WrongRun unless the protocol that `who` speaks is ours."""
    if said != ours:
        message = f"{who} speaks protocol {said}, this program ({PACKAGE} {__version__}) speaks {ours}"
        raise WrongRun(message, hint=upgrade_hint() if said > ours else older_hint())


def upgrade_hint() -> str:
    """What to do when the other side is newer."""
    return f"it is newer; upgrade this program: {upgrade_command()}"


def older_hint() -> str:
    """What to do when the other side is older: nobody can tell from here which version it runs."""
    command = install_command(sys.prefix, is_editable=_is_editable())
    return f"it is older; install the version that its coordinator names: {command}"


def upgrade_command() -> str:
    """The command that renews this very installation."""
    return upgrade_of(sys.prefix, is_editable=_is_editable())


def upgrade_of(prefix: str, *, is_editable: bool) -> str:
    """As `upgrade_command`, for a Python environment at `prefix`."""
    if is_editable:
        return "git pull, then make venv"
    tool = _tool_at(prefix)
    return {"uv": f"uv tool upgrade {PACKAGE}", "pipx": f"pipx upgrade {PACKAGE}"}.get(
        tool, f"pip install -U {PACKAGE}"
    )


def install_command(prefix: str, *, is_editable: bool) -> str:
    """The command that puts a named version in the place of this installation."""
    if is_editable:
        return "git checkout VERSION, then make venv"
    word = {"uv": "uv tool install", "pipx": "pipx install --force"}.get(_tool_at(prefix), "pip install")
    return f"{word} '{PACKAGE}==VERSION'"


def _tool_at(prefix: str) -> str:
    """`uv`, `pipx`, or nothing: the folders are .../uv/tools/NAME and .../pipx/venvs/NAME."""
    place = "/".join(PurePath(prefix).parts[-3:-1])
    return {"uv/tools": "uv", "pipx/venvs": "pipx"}.get(place, "")


def _is_editable() -> bool:
    try:
        text = metadata.distribution(PACKAGE).read_text("direct_url.json")
        return bool(json.loads(text or "{}").get("dir_info", {}).get("editable"))
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return False
