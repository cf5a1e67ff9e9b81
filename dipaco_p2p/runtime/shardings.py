"""What a peer does about re-sharding: learn of shardings, and score paths for the next one.

All of it goes on without the coordinator: then paths stay on the shards they have.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import strict
from ..canonical import canonical_bytes
from ..errors import ConfigError, IntegrityError, Refused, SwarmError
from ..protocol.admission import Reason
from ..protocol.documents import BlobRef, Scores, Sharding, seal, unseal
from ..protocol.signing import PeerId
from ..swarm.api import Reply
from ..swarm.blobs.blobs import send_blob
from ..topology import PathId
from .items import items_reply, read_items
from .node import CALL_TIMEOUT_S, Node

log = logging.getLogger(__name__)


async def learn_shardings(node: Node, *, of: Sequence[PeerId] | None = None) -> None:
    """Ask the seed nodes, or those named, for what was published since; nothing if none of them answers."""
    known = max((sealed.document.number for sealed in node.run.shardings), default=0)
    if known == len(node.run.config.routing.reshard_rounds):
        return
    for seed in node.watch.seeds() if of is None else of:
        if seed == node.peer:
            continue
        try:
            found = read_items(Sharding, await _ask(node, seed, "run.shardings", {"after": known}))
            for sealed in found:
                node.run.learn(sealed)
                node.store.write_document(f"sharding-{sealed.document.number:04d}", canonical_bytes(sealed.to_dict()))
            if found or seed == node.run.manifest.author:  # another one may not have heard of it yet
                return
        except (SwarmError, Refused, IntegrityError) as error:
            log.info("no shardings from a seed node: %s", error)


def serve_shardings(node: Node) -> None:
    """Tell whoever asks what we have learnt: a seed node that came out of a backup may have forgotten it."""

    async def answer(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        after = header.get("after")
        if type(after) is not int:
            raise Refused(f"`after` is {after!r}", reason=Reason.MALFORMED)
        return items_reply(sealed for sealed in node.run.shardings if sealed.document.number > after)

    node.swarm.serve("run.shardings", answer)


def attached(node: Node, number: int) -> dict[str, Any]:
    """What goes with a contribution, so that a leader can judge it that has not heard of the sharding."""
    sealed = node.run.sharding(number)
    return {} if sealed is None else {"sharding": sealed.to_dict()}


def learn_attached(node: Node, value: object) -> None:
    """What came with a contribution; raises IntegrityError for anything but a sharding of this run."""
    if value is not None:
        node.run.learn(unseal(Sharding, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A path to score for a sharding, composed of these snapshots, from the first level on."""

    sharding: int
    path: PathId
    snapshots: tuple[BlobRef, ...]


def is_scoring_due(node: Node, round_number: int) -> bool:
    """Whether a sharding whose round has come is not published yet."""
    rounds = node.run.config.routing.reshard_rounds
    return any(at <= round_number and node.run.sharding(n) is None for n, at in enumerate(rounds, start=1))


async def ask_work(node: Node, path: PathId | None) -> tuple[Work | None, bool]:
    """A path to score, `path` if it is wanted; and whether there may be more later. Nothing if no seed node answers."""
    for seed in node.watch.seeds():
        header = {"path": "" if path is None else str(path)}
        try:
            reply = await _ask(node, seed, "run.work", header)
            if "path" in reply.header:
                work = strict.load(Work, reply.header, where="this work")
                return (work, True) if _is_sound(node, work) else (None, False)
            return None, reply.header.get("wait") is True
        except (SwarmError, Refused, IntegrityError, ConfigError) as error:
            log.info("no work from a seed node: %s", error)
    return None, False


async def send_scores(node: Node, work: Work, table: bytes) -> bool:
    """Give a seed node what the path made of the router split; whether one took it."""
    scores = Scores(
        run=node.run.id,
        sharding=work.sharding,
        path=work.path,
        modules=tuple(ref.digest for ref in work.snapshots),
        table=BlobRef.of(table),
        author=node.peer,
    )
    header = {"scores": seal(node.swarm.signer, scores).to_dict()}
    for seed in node.watch.seeds():
        try:
            await send_blob(node.swarm, seed, table, timeout_s=CALL_TIMEOUT_S, addresses=node.watch.addresses(seed))
            await _ask(node, seed, "run.scores", header)
            return True
        except (SwarmError, Refused, IntegrityError) as error:
            log.warning("the scores of %s for sharding %d were not taken: %s", work.path, work.sharding, error)
    return False


def _is_sound(node: Node, work: Work) -> bool:
    modules = work.path.modules()
    sizes = [ref.size <= node.run.snapshot_bytes_max(m) for ref, m in zip(work.snapshots, modules, strict=False)]
    return work.path in node.run.topology and len(sizes) == len(modules) == len(work.snapshots) and all(sizes)


async def _ask(node: Node, seed: PeerId, method: str, header: dict[str, Any]) -> Reply:
    addresses = node.watch.addresses(seed)
    return await node.swarm.call(seed, method, header, timeout_s=CALL_TIMEOUT_S, addresses=addresses)
