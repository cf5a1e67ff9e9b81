"""What a leader tells of its rounds and versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..node.node import Member
from ..protocol.documents import ModuleVersion, Sealed, Share
from ..protocol.rounds import UPLOAD_SILENCE_S, VERSIONS_TOLD, Entry, OpenRound, Round
from ..topology import ModuleId
from .timing import Timing


def told_round(
    node: Member,
    open_: Round,
    versions: Sequence[Sealed[ModuleVersion]],
    *,
    published: int,
    timing: Timing,
    refused: Iterable[Entry] = (),
) -> OpenRound:
    """What is in, of the version that trainers may see, and what that one and those before it counted. If it is not
    the head, its round is closed, and the next version is not cosigned yet."""
    told = reversed(versions[max(0, published - VERSIONS_TOLD) : published])
    entries = tuple(open_.entries)
    if published < len(versions):
        entries = _entries(share for share in versions[-1].document.shares if share.base_version == published)
    rounds, now_s, deadline_s = node.run.config.rounds, node.clock.now_s(), timing.deadline_s()
    return OpenRound(
        version=published,
        entries=entries,
        counted=tuple(_entries(sealed.document.shares) for sealed in told),
        sending=tuple(node.uploads.arriving(UPLOAD_SILENCE_S)),
        deadline_s=deadline_s,
        left_s=open_.left_s(
            node.watch.claims,
            rounds,
            now_s=now_s,
            deadline_s=deadline_s,
            replicas_s=timing.replicas_s(),
            elsewhere=node.watch.paths.elsewhere(),
        ),
        refused=tuple(refused),
    )


def told_paths(node: Member, module: ModuleId, open_: Callable[[], Round]) -> str:
    """What the head of a module tells of the paths through it."""
    return node.watch.paths.tell(module, open_().paths, version=open_().number)


def _entries(shares: Iterable[Share]) -> tuple[Entry, ...]:
    return tuple(Entry(path=share.path, peer=share.peer) for share in shares)


def told_version(version: ModuleVersion) -> dict[str, Any]:
    """What its leader's history says of a version."""
    decree = None if version.rollback is None else version.rollback.decree
    by_decree: dict[str, Any] = {} if decree is None else {"rollback": decree.to}
    if decree is not None and decree.rebuilt is not None:
        by_decree["without"] = list(decree.rebuilt.without)
    return by_decree | {
        "module": str(version.module),
        "version": version.version,
        "digest": version.digest,
        "contributions": [share.contribution for share in version.shares],
        "weights": [round(share.weight, 4) for share in version.shares],
        "term": version.term,
    }
