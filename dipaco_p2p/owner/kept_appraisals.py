"""The appraisals that versions name (protocol/verdicts.py), as peers keep them: until a version is final, somebody may
have to make it again, and cannot judge without them."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

from ..errors import BlobMissing, DipacoError, Refused, Unreachable
from ..node.node import Member, fetch_kept
from ..protocol.documents import Contribution, ModuleVersion, Sealed
from ..protocol.gate import Appraisal
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId


async def read_kept(node: Member, version: ModuleVersion, *, holders: Sequence[PeerId]) -> bytes:
    """What judges said, from our store or from `holders`, and kept; nothing if it names none. Raises Refused as for a
    contribution that is not here: then whoever asks looks for it."""
    if version.appraisals is None:
        return b""
    try:
        return await fetch_kept(node, version.appraisals, holders=holders)
    except BlobMissing as error:
        raise Refused(f"what judges said is not here: {error}", reason=Reason.CONTRIBUTION_MISSING) from None


async def copy_kept(node: Member, versions: Sequence[Sealed[ModuleVersion]], peer: PeerId) -> None:
    """Have those of versions that were taken over ready made, from `peer`; without them whoever has to make the
    versions final asks others."""
    for sealed in versions:
        try:
            await read_kept(node, sealed.document, holders=[peer])
        except Unreachable:  # it would be as slow with the next one
            return
        except DipacoError:
            continue


class Appraiser(Protocol):
    """A judge, as `Judge.appraise`."""

    def __call__(self, contribution: Contribution, *, is_audit: bool = False) -> Awaitable[Sealed[Appraisal]]: ...


async def measure_nothing(contribution: Contribution, *, is_audit: bool = False) -> Sealed[Appraisal]:
    """In place of a judge, at a peer that has none."""
    raise Refused("nothing is measured here", reason=Reason.OTHER)


def names_of(versions: Sequence[Sealed[ModuleVersion]]) -> set[str]:
    """The blobs that hold what judges said of these versions."""
    return {sealed.document.appraisals.digest for sealed in versions if sealed.document.appraisals is not None}
