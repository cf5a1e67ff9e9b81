"""Who may lead a module: whoever holds the coordinator's signature for the term, and nobody else.

The archive signs one grant per term; heads and versions carry it. So a peer that merely says that it leads is not
believed by anyone, and a chain shows of every version that its maker was entitled to make it.
"""

from __future__ import annotations

from .. import strict
from ..canonical import canonical_bytes
from ..topology import ModuleId
from .documents import Grant, ModuleVersion, Sealed, seal
from .liveness import Head
from .signing import PeerId, Signer, verify


def sign_grant(signer: Signer, *, run: str, module: ModuleId, term: int, leader: PeerId) -> str:
    """The coordinator's signature that `leader` leads `module` in `term`."""
    grant = Grant(run=run, module=module, term=term, leader=leader, author=signer.peer)
    sealed: Sealed[Grant] = seal(signer, grant)
    return sealed.signature


def may_lead(grant: Grant, signature: str) -> bool:
    """Whether `signature` is the coordinator's under `grant`."""
    return verify(grant.author, Grant.KIND, canonical_bytes(strict.plain(grant)), signature)


def is_head_granted(head: Head, *, run: str, module: ModuleId, leader: PeerId, coordinator: PeerId) -> bool:
    """Whether a head was put out by the peer that leads in its term."""
    grant = Grant(run=run, module=module, term=head.term, leader=leader, author=coordinator)
    return may_lead(grant, head.grant)


def is_version_granted(version: ModuleVersion, *, coordinator: PeerId) -> bool:
    """Whether a version was made by the peer that led in its term."""
    grant = Grant(run=version.run, module=version.module, term=version.term, leader=version.author, author=coordinator)
    return may_lead(grant, version.grant)
