"""A volunteer's invitations: kept in its home for each run, shown with its work, and handed on to others.

invitations.json     {id of a run's first stage: [the coordinator's invitation, ..., the one for this volunteer]}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dipaco_p2p.config import INVITE, LIST, OPEN
from dipaco_p2p.errors import ConfigError, IntegrityError, Refused
from dipaco_p2p.node.invitations import ASK_HINT, Chain, Code, invite, why_not, write_code
from dipaco_p2p.node.run import Run
from dipaco_p2p.program.files import write_atomically
from dipaco_p2p.protocol.decrees import Decreed
from dipaco_p2p.protocol.documents import run_name, unseal
from dipaco_p2p.protocol.invitations import Invitation
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.identity import KEY_NAME, load_or_create

NAME = "invitations.json"
RUNS_MAX = 64
"""Runs whose invitations one home keeps."""
WORDS = {
    OPEN: "open: anybody may take part",
    INVITE: "by invitation of the coordinator, or of a volunteer whose work counts",
    LIST: "the volunteers on the run's list",
}


def kept(home: Path, run: str) -> Chain:
    """Those that lead to the volunteer of this home in a run; empty without any. Raises IntegrityError."""
    try:
        return tuple(unseal(Invitation, each) for each in _read(home).get(run, ()))
    except (IntegrityError, TypeError) as error:
        hint = "remove the file, and join with --invitation once more"
        raise IntegrityError(f"{home / NAME} was damaged on disk: {error}", hint=hint) from None


def keep(home: Path, run: str, chain: Chain) -> None:
    """From now on it is shown, also after a restart; the runs that were joined longest ago make room."""
    others = [item for item in _read(home).items() if item[0] != run][-(RUNS_MAX - 1) :]
    value = {**dict(others), run: [sealed.to_dict() for sealed in chain]}
    write_atomically(home / NAME, json.dumps(value).encode())


def invitations_for(run: Run, peer: PeerId, home: Path, code: Code | None) -> Chain:
    """What this volunteer shows in `run`: what it was just given, else what it keeps. Raises DipacoError for a code
    that is not one for it."""
    if code is None or run.config.admission.policy != INVITE:
        return kept(home, run.origin)
    chain = code.chain(run)
    if chain[-1].document.peer != peer:
        message = f"the invitation is for {chain[-1].document.peer}, and this volunteer is {peer}"
        raise ConfigError(message, hint="ask for one that names this volunteer, or give the other one's --home")
    return chain


def check_admitted(run: Run, peer: PeerId, chain: Chain, decreed: Decreed) -> None:
    """Raise Refused where leaders would refuse all work of this volunteer, as far as it can tell."""
    words = why_not(run, peer, chain, decreed)
    if words:
        raise Refused(words, reason=Reason.UNINVITED, hint=_what_to_do(run, peer))


def _what_to_do(run: Run, peer: PeerId) -> str:
    if run.config.admission.policy == LIST:
        return f"the list cannot grow once a run has begun: for the next one, tell whoever runs it your id, {peer}"
    return f"send your id, {peer}, to the coordinator or a volunteer of the run, and join with --invitation CODE"


def invite_by(home: Path, text: str, *, run: str | None, at_s: float) -> str:
    """The code that lets the peer `text` in by the word of the volunteer of this home. Raises DipacoError."""
    wanted = (run or "").removeprefix("run:")
    found = [each for each in _read(home) if each.startswith(wanted)]
    if len(found) > 1:
        names = ", ".join(map(run_name, found))
        raise ConfigError(f"this volunteer is invited to {len(found)} runs: {names}", hint="name one with --run")
    if not found:
        what = f"run:{wanted[:8]}" if wanted else "any run"
        hint = "join with one first: `dipaco-peer join TICKET --invitation CODE`; or name its folder with --home"
        raise ConfigError(f"the volunteer in `{home}` was not invited to {what}", hint=hint)
    chain, signer = kept(home, found[0]), load_or_create(home / KEY_NAME)
    if chain[-1].document.peer != signer.peer:
        message = f"the invitation in `{home}` is for {chain[-1].document.peer}, and this volunteer is {signer.peer}"
        raise ConfigError(message, hint=ASK_HINT)
    return write_code(invite(signer, found[0], PeerId(text), at_s=at_s, held=chain))


def _read(home: Path) -> dict[str, Any]:
    """Raises IntegrityError."""
    try:
        value = json.loads((home / NAME).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{home / NAME} cannot be read: {error}") from None
    return value if isinstance(value, dict) else {}
