"""A rollback: the coordinator's decree becomes a version, made by the module's leader as any other.

It follows the head and has the parameters of an earlier version, as `git revert` does: nothing is taken from the chain.
Outer momentum and residual begin at zero, since what they remember is what was wrong, unless the decree brings others.
What is open and began before it expires. The version shows the decree, so that whoever makes it again needs nothing
else.

A decree may bring **rebuilt** parameters in place of an earlier version's: the steps of the versions since, once more,
without the contributions of a peer that was banned. The outer gradients of the others were made on versions that have
the damage, so they only nearly fit; that still costs less than to lose them (docs/judging.md). The coordinator computes
this and signs what comes out; whoever has the contributions finds out whether it is true (`rebuild`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from ..core.model.layout import decode_module, module_parts
from ..core.outer.outer_step import OuterState, state_parts
from ..errors import IntegrityError, SwarmError
from ..node.ledger import Ledger
from ..node.node import Member, fetch_kept
from ..node.run import Run
from ..protocol.decrees import Decree, ShownDecree
from ..protocol.documents import BlobRef, Grant, ModuleVersion, Sealed, Share
from ..protocol.signing import PeerId
from ..protocol.versions import Step
from ..topology import PathId
from .version import Admitted, Gradients, Made, furthest, made_and_kept, stepped

log = logging.getLogger(__name__)


def due(node: Member, ledger: Ledger) -> Sealed[Decree] | None:
    """The decree that is to be carried out next: the newest, if the chain has what it undoes and has not undone it.
    The last version of a run is never undone."""
    return due_after(node, ledger, [])


def due_after(node: Member, ledger: Ledger, versions: Sequence[Sealed[ModuleVersion]]) -> Sealed[Decree] | None:
    """The same, when the chain will have these versions as well."""
    heads = [ledger.head, *(one.document for one in versions)]
    sealed = ledger.due(node.decrees)
    done = (one.rollback.decree.number for one in heads if one.rollback is not None)
    if sealed is None or sealed.document.number <= max(done, default=0):
        return None
    is_time = sealed.document.after <= heads[-1].version < node.run.rounds
    return sealed if is_time else None


async def prepare(node: Member, ledger: Ledger) -> bool:
    """Have the blobs that carry out what is due; whether anything is, and somebody gave them."""
    if (sealed := due(node, ledger)) is None:
        return False
    rebuilt = sealed.document.rebuilt
    # What was rebuilt only the coordinator's archive has, or whoever has carried it out before.
    others = node.watch.heartbeats if rebuilt is None else node.mandates.peers(ledger.module)
    try:
        if rebuilt is not None:
            node.run.check_rebuilt(ledger.module, rebuilt)
        for ref in _made_of(sealed.document, ledger.at(sealed.document.to)):
            await fetch_kept(node, ref, holders=[*node.watch.seeds(), *sorted(set(others) - {node.peer})])
    except (SwarmError, IntegrityError) as error:
        log.warning("%s cannot go back yet: %s", ledger.module, error)
        return False
    return True


async def undo(node: Member, ledger: Ledger, grant: Sealed[Grant]) -> Made | None:
    """The version that carries out what is due, not signed yet; its blobs are kept. None if nothing is, or what
    `prepare` brought is not here any more."""
    sealed, parent = due(node, ledger), ledger.head
    if sealed is None:
        return None
    found = [node.store.get(ref.digest) for ref in _made_of(sealed.document, ledger.at(sealed.document.to))]
    blobs = [blob for blob in found if blob is not None]
    if len(blobs) < len(found):
        return None
    rollback = ShownDecree(decree=sealed.document, signature=sealed.signature)

    def make() -> Made:
        term, author = grant.document.term, node.peer
        return make_rollback(node.run, parent, *blobs, rollback=rollback, term=term, grant=grant.id, author=author)

    async with node.averaging:
        return await made_and_kept(make, node.store)


async def undo_again(node: Member, parent: ModuleVersion, version: ModuleVersion, *, source: PeerId) -> Made:
    """The same version once more, for whoever signs that it follows; that its parameters are those of the version that
    its decree names, or those that it has rebuilt, the ledger has checked. Raises BlobMissing, and IntegrityError if
    anything is different."""
    blobs = [await fetch_kept(node, ref, holders=[source]) for ref in brought(version)]
    async with node.averaging:
        return await made_and_kept(lambda: make_rollback_again(node.run, parent, blobs, version), node.store)


def brought(version: ModuleVersion) -> list[BlobRef]:
    """The blobs that a rollback is made of; empty for any other version."""
    return [] if version.rollback is None else _made_of(version.rollback.decree, version)


def _made_of(decree: Decree, same: ModuleVersion) -> list[BlobRef]:
    """Without rebuilt parameters those of `same`: the version that is gone back to, or one that went back to it."""
    rebuilt = decree.rebuilt
    return [same.snapshot] if rebuilt is None else [rebuilt.snapshot, rebuilt.state]


def make_rollback(
    run: Run,
    parent: ModuleVersion,
    snapshot: bytes,
    rebuilt_state: bytes | None = None,
    *,
    rollback: ShownDecree,
    term: int,
    grant: str,
    author: PeerId,
) -> Made:
    """The version after `parent` with the parameters in `snapshot`; raises IntegrityError if that is no module."""
    layout, settings = run.layout(parent.module), run.config.outer
    state = OuterState.restored(decode_module(snapshot, layout), rebuilt_state)
    snapshot_parts, state_blob = module_parts(state.params, layout), state_parts(state)
    version = ModuleVersion(
        run=run.id,
        module=parent.module,
        version=parent.version + 1,
        parent=parent.digest,
        snapshot=BlobRef.of(*snapshot_parts),
        update=None,
        state=BlobRef.of(*state_blob),
        rollback=rollback,
        shares=(),
        clip_norm=None,
        lr=settings.lr,
        momentum=settings.momentum,
        norm_rule=settings.norm_rule,
        weight=parent.weight,
        term=term,
        grant=grant,
        author=author,
    )
    return Made(version=version, state=state, snapshot=snapshot_parts, update=[], state_blob=state_blob)


def make_rollback_again(run: Run, parent: ModuleVersion, blobs: Sequence[bytes], version: ModuleVersion) -> Made:
    """`version` once more, of what it has `brought`; raises IntegrityError if anything comes out different."""
    assert version.rollback is not None, "only a rollback is made so"
    made = make_rollback(
        run,
        parent,
        *blobs,
        rollback=version.rollback,
        term=version.term,
        grant=version.grant,
        author=version.author,
    )
    if made.version != version:
        raise IntegrityError(f"version {version.version} of {version.module} does not follow from its decree")
    return made


def rebuild(run: Run, state: OuterState, steps: Sequence[Step], admitted: Callable[[Share], Admitted]) -> OuterState:
    """The outer state after these steps from `state`, each with the contributions that are in it. A path keeps its
    weight where somebody else has trained it as well. Raises StepNotFinite, and what `admitted` raises."""
    for step in steps:
        if shares := [share for share in step.shares if share.weight > 0]:
            alphas = _weights(step.version.shares, shares)
            gradients = Gradients(map(admitted, shares), furthest=furthest(run, step.version.module))
            state, _ = stepped(run, state, gradients, alphas, clip_norm=step.version.clip_norm)
    return state


def _weights(counted: Sequence[Share], shares: Sequence[Share]) -> list[float]:
    """Of `shares`, which stay of those that the version counted; they sum to 1."""
    before, now = (_weights_of_paths(each) for each in (counted, shares))
    raw = [share.weight * before[share.path] / now[share.path] for share in shares]
    total = math.fsum(raw)
    return [weight / total for weight in raw]


def _weights_of_paths(shares: Sequence[Share]) -> dict[PathId, float]:
    paths = {share.path for share in shares}
    return {path: math.fsum(share.weight for share in shares if share.path == path) for path in paths}
