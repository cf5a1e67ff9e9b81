"""Parameters rebuilt without the contributions of peers that were banned (owner/rollback.py): computed by the
coordinator from its archive before it decrees them, and once more by whoever verifies the archive.

    documents/rebuilt-L1.M0-<digest>.json     the blobs that a decree names; no version may name them for long
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dipaco_p2p.canonical import Parts, canonical_bytes
from dipaco_p2p.core.model.layout import module_parts
from dipaco_p2p.core.outer.outer_step import OuterState, state_parts
from dipaco_p2p.errors import DipacoError, IntegrityError
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.owner.rollback import rebuild
from dipaco_p2p.owner.version import Admitted, stored
from dipaco_p2p.protocol.decrees import WITHOUT_MAX, Rebuilt
from dipaco_p2p.protocol.documents import BlobRef, ModuleVersion, Share
from dipaco_p2p.protocol.versions import Damage, Step, rebuilt_from, steps_without
from dipaco_p2p.strict import plain
from dipaco_p2p.topology import ModuleId

log = logging.getLogger(__name__)

VERSIONS_MAX = 16
"""As many are rebuilt at most. The gradients of others were made on versions with the damage: the more versions, the
less they fit."""


def make_rebuilt(run: Run, store: Store, archive: SeedArchive, damage: Damage) -> Rebuilt | None:
    """What a decree can bring back in place of version `damage.to`; its blobs are in `store`. None where a rollback is
    the better choice: nothing of others would be kept, too many versions are to be rebuilt, or the archive lacks some
    of what they were made of."""
    versions = [sealed.document for sealed in archive.ledgers[damage.module].versions[: damage.after]]
    steps = steps_without(versions, damage.peers, after=damage.to)
    if not damage.others or len(steps) > VERSIONS_MAX or len(damage.peers) > WITHOUT_MAX:
        return None
    try:
        state = _rebuilt(run, store, archive, archive.state(damage.module, damage.to), steps)
    except DipacoError as error:
        log.warning("%s is not rebuilt, but goes back to version %d: %s", damage.module, damage.to, error)
        return None
    (snapshot, parts), (outer, state_blob) = _named(run, damage.module, state)
    found = Rebuilt(without=tuple(sorted(damage.peers)), snapshot=snapshot, state=outer)
    # A program that starts drops blobs which no document names, and those of the decree before may still be needed.
    store.write_document(f"rebuilt-{damage.module}-{snapshot.digest}", canonical_bytes(plain(found)))
    store.keep(snapshot, *parts, is_cold=True)
    store.keep(outer, *state_blob, is_cold=True)
    return found


def check_rebuilt(
    run: Run,
    store: Store,
    archive: SeedArchive,
    versions: Sequence[ModuleVersion],
    version: ModuleVersion,
    before: OuterState,
) -> None:
    """Raise IntegrityError unless `version`, which a decree has rebuilt, is what follows from `before`, the state after
    the version that the decree goes back to, without the peers that it names. `versions` are its chain's."""
    assert version.rollback is not None and version.state is not None, "only a rollback is rebuilt"
    decree = version.rollback.decree
    state = _rebuilt(run, store, archive, before, rebuilt_from(versions, decree))
    if [ref for ref, _ in _named(run, version.module, state)] != [version.snapshot, version.state]:
        raise IntegrityError(f"version {version.version} of {version.module} is not what decree {decree.number} says")


def _rebuilt(run: Run, store: Store, archive: SeedArchive, state: OuterState, steps: Sequence[Step]) -> OuterState:
    def admitted(share: Share) -> Admitted:
        sealed = archive.contribution(share.contribution)
        return stored(run, store, sealed.document.module, sealed, norm=share.norm)

    return rebuild(run, state, steps, admitted)


def _named(run: Run, module: ModuleId, state: OuterState) -> list[tuple[BlobRef, Parts]]:
    """Its parameters, and the rest, each as a blob with its name."""
    blobs = module_parts(state.params, run.layout(module)), state_parts(state)
    return [(BlobRef.of(*parts), parts) for parts in blobs]
