"""From an address to a checked run: the first thing a newcomer does, and the last it has to believe unseen.

A run is known by the id of its first stage. Whoever asks gets the manifests of all stages so far, the first one first;
a later stage is believed because the same coordinator signed it and it names the one before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..config import RunConfig
from ..errors import ConfigError, IntegrityError, Refused, WrongRun
from ..protocol.documents import Manifest, Sealed
from ..protocol.manifest import STAGES, WARMUP
from ..protocol.signing import PeerId
from ..swarm.api import Reply, Swarm
from .calls import GetManifests
from .node import CALL_TIMEOUT_S
from .run import Run, read_run

ASK_HINT = "ask the coordinator for the line to join with; `dipaco-bootstrap start` prints it"


class Stages:
    """The stages of a run that this peer knows, told to whoever asks."""

    def __init__(self, swarm: Swarm) -> None:
        self._known: list[Sealed[Manifest]] = []
        GetManifests.serve(swarm, self._answer)

    def add(self, run: Run) -> None:
        """From now on this stage is served, too."""
        if run.id not in self.ids:
            self._known.append(run.sealed)

    @property
    def ids(self) -> list[str]:
        """Of the stages that are known."""
        return [sealed.id for sealed in self._known]

    async def _answer(self, sender: PeerId, request: GetManifests) -> Reply:
        return Reply({}, b"[" + b",".join(sealed.to_bytes() for sealed in self._known) + b"]")


async def fetch_stages(
    swarm: Swarm,
    seed: PeerId,
    *,
    expected: str | None,
    author: PeerId | None = None,
    addresses: Sequence[str] = (),
) -> list[Run]:
    """The stages of the run that `seed` serves, the newest last.

    Trust starts at the ticket or the address that the volunteer typed: without `expected` (the id of any stage, or its
    start), the manifest must be signed by the very peer that the address names; `author` is who must have signed it in
    any case. Raises WrongRun, IntegrityError, Unreachable.
    """
    try:
        reply = await GetManifests().call(swarm, seed, timeout_s=CALL_TIMEOUT_S, addresses=addresses)
    except Refused:
        raise WrongRun("this address is a node of another program, not of a dipaco-p2p run", hint=ASK_HINT) from None
    stages = _read_stages(reply.body)
    run = stages[-1]
    if expected is not None and not any(stage.id.startswith(expected.removeprefix("run:")) for stage in stages):
        raise WrongRun(
            f"this address serves {run.name}, not run:{expected.removeprefix('run:')[:8]}",
            hint="ask the coordinator for the line to join with; an address without --run joins what is there",
        )
    if author is not None and run.manifest.author != author:
        raise IntegrityError(
            f"{run.name} was signed by another coordinator than the ticket names", hint="ask for a ticket once more"
        )
    if expected is None and run.manifest.author != seed:
        raise WrongRun(
            f"{run.name} was signed by another peer than the one at this address",
            hint="join with the coordinator's ticket, or name the run: `--run ...`",
        )
    for stage in stages:
        stage.check_genesis()
    return stages


def _read_stages(body: bytes) -> list[Run]:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or not 1 <= len(values) <= len(STAGES):
        raise WrongRun("this address serves something that is no run", hint=ASK_HINT)
    stages = [read_run(value) for value in values]
    for before, after in zip(stages, stages[1:], strict=False):
        check_next_stage(before, after)
    return stages


def check_next_stage(before: Run, after: Run) -> None:
    """Raise IntegrityError unless `after` goes on where `before` ends: same coordinator, same run, named as the stage
    that it follows; the same configuration too, but for more modules where it grew as decreed, if we know of that."""
    old, new = before.manifest, after.manifest
    is_next = STAGES.index(new.stage) == STAGES.index(old.stage) + 1
    same = (old.author, before.origin, before.id) == (new.author, new.origin, new.before)
    if not same or not is_next or new.config != _config_after(before, after):
        raise IntegrityError(f"a stage that does not follow from {before.name}")


def _config_after(before: Run, after: Run) -> RunConfig | None:
    """What the configuration of `after` has to be; None if it may not follow."""
    config, growth, spent = before.manifest.config, before.growth, after.manifest.spent
    if before.manifest.stage == WARMUP:
        return config
    widths = after.manifest.config.topology.widths
    if growth is not None and (growth.levels, growth.to) != (widths, spent - before.manifest.spent):
        return None
    if not before.manifest.spent < spent:
        return None
    try:
        return config.grown(widths)
    except ConfigError:
        return None


def stages_after(run: Run, stages: Sequence[Run]) -> list[Run]:
    """Those of `stages`, which follow each other, that come after `run`; raises IntegrityError if it is not among
    them."""
    places = [place for place, stage in enumerate(stages) if stage.id == run.id]
    if not places:
        raise IntegrityError(f"stages that do not go on from {run.name}")
    for after in stages[places[0] + 1 : places[0] + 2]:
        check_next_stage(run, after)
    return list(stages[places[0] + 1 :])
