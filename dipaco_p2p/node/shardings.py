"""What a peer does about re-sharding: learn of shardings, and score paths for the next one.

All of it goes on without the coordinator: then paths stay on the shards they have.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ..canonical import canonical_bytes
from ..errors import IntegrityError, Refused, SwarmError
from ..protocol.documents import BlobRef, Scores, Sealed, Sharding, seal
from ..protocol.signing import PeerId
from ..swarm.blobs.blobs import send_blob
from ..topology import PathId
from .calls import GetShardings, GetWork, GiveScores
from .items import Page, items_reply, read_items
from .node import CALL_TIMEOUT_S, Reader, ask
from .run import Run

log = logging.getLogger(__name__)


async def learn_shardings(node: Reader, *, of: Sequence[PeerId] | None = None) -> None:
    """Ask the seed nodes, or those named, for what was published since; nothing if none of them answers."""
    known = max((sealed.document.number for sealed in node.run.shardings), default=0)
    if known == len(node.run.config.routing.reshard_rounds):
        return
    for seed in node.watch.seeds() if of is None else of:
        if seed == node.peer:
            continue
        try:
            reply = await ask(node, seed, GetShardings(after=known))
            found = await read_items(Sharding, reply, author=node.run.manifest.author)
            for sealed in found:
                node.run.learn(sealed)
                node.store.write_document(f"sharding-{sealed.document.number:04d}", canonical_bytes(sealed.to_dict()))
            if found or seed == node.run.manifest.author:  # another one may not have heard of it yet
                return
        except (SwarmError, Refused, IntegrityError) as error:
            log.info("no shardings from a seed node: %s", error)


def serve_shardings(node: Reader) -> None:
    """Tell whoever asks what we have learnt: a seed node that came out of a backup may have forgotten it."""

    async def answer(sender: PeerId, request: GetShardings) -> Page[Sharding]:
        return items_reply(sealed for sealed in node.run.shardings if sealed.document.number > request.after)

    GetShardings.serve(node.swarm, answer)


def learn_attached(node: Reader, sharding: Sealed[Sharding] | None) -> None:
    """What came with a contribution; raises IntegrityError for anything but a sharding of this run."""
    if sharding is not None:
        node.run.learn(sharding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A path to score for a sharding, composed of these snapshots, from the first level on."""

    sharding: int
    path: PathId
    snapshots: tuple[BlobRef, ...]


def is_scoring_due(node: Reader, round_number: int) -> bool:
    """Whether a sharding whose round has come is not published yet."""
    rounds = node.run.config.routing.reshard_rounds
    return any(at <= round_number and node.run.sharding(n) is None for n, at in enumerate(rounds, start=1))


async def ask_work(node: Reader, path: PathId | None) -> tuple[Work | None, bool]:
    """A path to score, `path` if it is wanted; and whether there may be more later. Nothing if no seed node answers."""
    for seed in node.watch.seeds():
        try:
            reply = await ask(node, seed, GetWork(path="" if path is None else str(path)))
            if reply.sharding is None or reply.path is None or reply.snapshots is None:
                return None, reply.wait is True
            work = Work(sharding=reply.sharding, path=reply.path, snapshots=reply.snapshots)
            return (work, True) if is_composed_of(node.run, work.path, work.snapshots) else (None, False)
        except (SwarmError, Refused, IntegrityError) as error:
            log.info("no work from a seed node: %s", error)
    return None, False


async def send_scores(node: Reader, work: Work, table: bytes) -> bool:
    """Give a seed node what the path made of the router split; whether one took it."""
    scores = Scores(
        run=node.run.id,
        sharding=work.sharding,
        path=work.path,
        modules=tuple(ref.digest for ref in work.snapshots),
        table=BlobRef.of(table),
        author=node.peer,
    )
    request = GiveScores(scores=seal(node.swarm.signer, scores))
    for seed in node.watch.seeds():
        try:
            await send_blob(node.swarm, seed, table, timeout_s=CALL_TIMEOUT_S, addresses=node.watch.addresses(seed))
            await ask(node, seed, request)
            return True
        except (SwarmError, Refused, IntegrityError) as error:
            log.warning("the scores of %s for sharding %d were not taken: %s", work.path, work.sharding, error)
    return False


def is_composed_of(run: Run, path: PathId, snapshots: Sequence[BlobRef]) -> bool:
    """Whether a path of this run can be composed of blobs that somebody names."""
    modules = path.modules()
    sizes = [ref.size <= run.snapshot_bytes_max(module) for ref, module in zip(snapshots, modules, strict=False)]
    return path in run.topology and len(sizes) == len(modules) == len(snapshots) and all(sizes)
