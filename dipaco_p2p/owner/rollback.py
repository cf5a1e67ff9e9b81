"""A rollback: the coordinator's decree becomes a version, made by the module's leader as any other.

It follows the head and has the parameters of an earlier version, as `git revert` does: nothing is taken from the chain.
Outer momentum and residual begin at zero, since what they remember is what was wrong. What is open and began before it
expires. The version shows the decree, so that whoever makes it again needs nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..core.model.layout import decode_module, module_parts
from ..core.outer.outer_step import OuterState, state_parts
from ..errors import IntegrityError, SwarmError
from ..node.ledger import Ledger
from ..node.node import Member, fetch_kept
from ..node.run import Run
from ..protocol.decrees import Decree, Rollback
from ..protocol.documents import BlobRef, Grant, ModuleVersion, Sealed
from ..protocol.signing import PeerId
from .version import Made, made_and_kept

log = logging.getLogger(__name__)


def due(node: Member, ledger: Ledger) -> Sealed[Decree] | None:
    """The decree that is to be carried out next: the newest, if the chain has what it undoes and has not undone it.
    The last version of a run is never undone."""
    return due_after(node, ledger, [])


def due_after(node: Member, ledger: Ledger, versions: Sequence[Sealed[ModuleVersion]]) -> Sealed[Decree] | None:
    """The same, when the chain will have these versions as well."""
    heads = [ledger.head, *(one.document for one in versions)]
    sealed = node.decrees.rollback(node.run.id, ledger.module)
    done = (one.rollback.decree.number for one in heads if one.rollback is not None)
    if sealed is None or sealed.document.number <= max([ledger.rolled_back_by, *done]):
        return None
    is_time = sealed.document.after <= heads[-1].version < node.run.rounds
    return sealed if is_time else None


async def undo(node: Member, ledger: Ledger, grant: Sealed[Grant]) -> Made | None:
    """The version that carries out what is due, not signed yet; its blobs are kept. None if nothing is, or nobody gives
    the parameters of the version that comes back."""
    sealed, parent = due(node, ledger), ledger.head
    if sealed is None:
        return None
    holders = [*node.watch.seeds(), *sorted(node.watch.heartbeats.keys() - {node.peer})]
    try:
        snapshot = await fetch_kept(node, ledger.at(sealed.document.to).snapshot, holders=holders)
    except SwarmError as error:
        log.warning("%s cannot go back yet: %s", ledger.module, error)
        return None
    rollback = Rollback(decree=sealed.document, signature=sealed.signature)

    def make() -> Made:
        term, author = grant.document.term, node.peer
        return make_rollback(node.run, parent, snapshot, rollback=rollback, term=term, grant=grant.id, author=author)

    async with node.averaging:
        return await made_and_kept(make, node.store)


async def undo_again(node: Member, parent: ModuleVersion, version: ModuleVersion, *, source: PeerId) -> Made:
    """The same version once more, for whoever signs that it follows; that its parameters are those of the version that
    its decree names, the ledger has checked. Raises BlobMissing, and IntegrityError if anything is different."""
    snapshot = await fetch_kept(node, version.snapshot, holders=[source])
    async with node.averaging:
        return await made_and_kept(lambda: make_rollback_again(node.run, parent, snapshot, version), node.store)


def make_rollback(
    run: Run,
    parent: ModuleVersion,
    snapshot: bytes,
    *,
    rollback: Rollback,
    term: int,
    grant: str,
    author: PeerId,
) -> Made:
    """The version after `parent` with the parameters in `snapshot`; raises IntegrityError if that is no module."""
    layout, settings = run.layout(parent.module), run.config.outer
    state = OuterState.fresh(decode_module(snapshot, layout))
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


def make_rollback_again(run: Run, parent: ModuleVersion, snapshot: bytes, version: ModuleVersion) -> Made:
    """`version` once more; raises IntegrityError if anything comes out different."""
    assert version.rollback is not None, "only a rollback is made so"
    made = make_rollback(
        run,
        parent,
        snapshot,
        rollback=version.rollback,
        term=version.term,
        grant=version.grant,
        author=version.author,
    )
    if made.version != version:
        raise IntegrityError(f"version {version.version} of {version.module} does not follow from its decree")
    return made
