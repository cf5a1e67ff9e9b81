"""From an address to a checked run: the first thing a newcomer does, and the last it has to believe unseen."""

from __future__ import annotations

import json
from typing import Any

from ..canonical import canonical_bytes
from ..errors import Refused, WrongRun
from ..protocol.documents import Manifest, Sealed
from ..protocol.signing import PeerId
from ..swarm.api import Reply, Swarm
from .node import CALL_TIMEOUT_S
from .run import Run, open_run

ASK_HINT = "ask the coordinator for the line to join with; `dipaco-bootstrap start` prints it"


def serve_manifest(swarm: Swarm, sealed: Sealed[Manifest]) -> None:
    """Tell whoever asks which run this is."""

    async def answer(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        return Reply({}, canonical_bytes(sealed.to_dict()))

    swarm.serve("run.manifest", answer)


async def fetch_run(swarm: Swarm, seed: PeerId, *, expected: str | None) -> Run:
    """The run that `seed` serves.

    Trust starts at the address that the volunteer typed: without `expected` (the run's id, or its start), the
    manifest must be signed by the very peer that the address names. Raises WrongRun, IntegrityError, Unreachable.
    """
    try:
        reply = await swarm.call(seed, "run.manifest", {}, timeout_s=CALL_TIMEOUT_S)
    except Refused:
        raise WrongRun("this address is a node of another program, not of a dipaco-p2p run", hint=ASK_HINT) from None
    try:
        value = json.loads(reply.body)
    except ValueError:
        raise WrongRun("this address serves something that is no run", hint=ASK_HINT) from None
    run = open_run(value, expected=expected)
    if expected is None and run.manifest.author != seed:
        raise WrongRun(
            f"{run.name} was signed by another peer than the one at this address",
            hint="join with the coordinator's own line, which names the run: `--run ...`",
        )
    return run
