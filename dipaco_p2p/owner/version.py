"""The one place where a version is made from its parent and its contributions.

The leader makes versions with it, and whoever verifies a chain makes them again: same inputs, same bytes, on any
machine and in any order of arrival (core/outer/outer_step.py says why).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ..canonical import Parts
from ..core.arrays import Floats, at_once
from ..core.model.layout import module_parts
from ..core.outer import outer_step as outer
from ..core.outer.codec import Compressed
from ..core.outer.compress import compressed_parts
from ..core.outer.outer_step import OuterState, state_parts
from ..errors import IntegrityError
from ..node.run import Run
from ..node.store import Store
from ..protocol.documents import BlobRef, Contribution, ModuleVersion, Sealed, Share
from ..protocol.signing import PeerId
from ..topology import ModuleId, PathId

LATE_WEIGHT = 0.25
"""What a contribution weighs, over one in time, for each version that its base is behind: its path has trained again
meanwhile, so that at full weight the same progress would count twice (docs/lost_work.md)."""


class StepNotFinite(IntegrityError):
    """These contributions give an outer step that the codec cannot say: it is not finite, or too large."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A contribution, and how its outer gradient is read: it need not be in memory."""

    sealed: Sealed[Contribution]
    read: Callable[[], Compressed]
    norm: float | None = None
    """Of the outer gradient; None if nobody has looked at it yet."""


class PayloadLost(IntegrityError):
    """The payload of a contribution that should be in the store is not there any more, or was damaged."""

    def __init__(self, message: str, *, contribution: str) -> None:
        super().__init__(message)
        self.contribution = contribution


def stored(
    run: Run, store: Store, module: ModuleId, sealed: Sealed[Contribution], *, norm: float | None = None
) -> Admitted:
    """A contribution to `module` whose outer gradient is read from `store` each time; reading raises PayloadLost."""
    return Admitted(sealed, partial(read_gradient, run, store, module, sealed), norm)


def read_gradient(run: Run, store: Store, module: ModuleId, sealed: Sealed[Contribution]) -> Compressed:
    """Raises PayloadLost, and IntegrityError for what is no outer gradient of `module`."""
    return run.read_contribution(read_payload(store, sealed), module)


def read_payload(store: Store, sealed: Sealed[Contribution]) -> bytes:
    """Raises PayloadLost."""
    name = sealed.document.payload.digest
    try:
        payload = store.get(name)
    except IntegrityError as error:  # damaged on disk, and removed
        raise PayloadLost(str(error), contribution=sealed.id) from None
    if payload is None:
        raise PayloadLost(f"blob {name[:8]} is missing", contribution=sealed.id)
    return payload


class Gradients:
    """The outer gradients of contributions by place, each read whenever it is asked for."""

    def __init__(self, items: Sequence[Admitted]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, place: int, /) -> Compressed:
        return self._items[place].read()


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A version not yet signed, the outer state after it, and the blobs that it names."""

    version: ModuleVersion
    state: OuterState
    snapshot: Parts
    update: Parts
    state_blob: Parts

    @property
    def blobs(self) -> list[tuple[BlobRef, Parts]]:
        """Each with its name."""
        named = zip(
            (self.version.snapshot, self.version.update, self.version.state),
            (self.snapshot, self.update, self.state_blob),
            strict=True,
        )
        return [(ref, blob) for ref, blob in named if ref is not None]


async def made_and_kept(make: Callable[[], Made], store: Store) -> Made:
    """What `make` makes, its blobs in `store`. They may be large: made and written beside the event loop, or heartbeats
    would come late, and all at once, for the disk takes more than one writer brings."""
    made = await asyncio.to_thread(make)
    await kept(made.version, made.blobs, store)
    return made


async def kept(version: ModuleVersion, blobs: Sequence[tuple[BlobRef, Parts]], store: Store) -> None:
    """Return when all these blobs of `version` are on the disk; raises EnvironmentUnfit. Of them only the update is
    what others ask for at once."""
    keep = [partial(store.keep, ref, *parts, is_cold=ref != version.update) for ref, parts in blobs]
    await asyncio.gather(*map(asyncio.to_thread, keep))


def order(item: Admitted) -> tuple[PathId, str]:
    """By path before all else, so that the same work gives the same bytes whoever did it."""
    return item.sealed.document.path, item.sealed.id


def make_version(
    run: Run,
    parent: ModuleVersion,
    state: OuterState,
    admitted: Iterable[Admitted],
    *,
    clip_norm: float | None,
    term: int,
    grant: str,
    author: PeerId,
    is_fresh: bool = False,
) -> Made:
    """Average, outer step, quantised update. `state` holds the parent's parameters. Needs one contribution at least.

    `grant` is the id of the grant of `term` to `author`. Raises StepNotFinite, and what reading a contribution raises.
    """
    ordered = sorted(admitted, key=order)
    assert ordered, "a module without contributors gets no step"
    alphas = _alphas(run, ordered, parent=parent.version)
    settings = run.config.outer
    try:
        after, update = outer.outer_step(
            state,
            averaged(run, ordered, alphas, clip_norm=clip_norm),
            lr=settings.lr,
            momentum=settings.momentum,
            codec=run.config.compression.downlink,
            is_spent=True,
        )
    except ValueError as error:
        raise StepNotFinite(f"no version {parent.version + 1} of {parent.module}: {error}") from None
    blobs = module_parts(after.params, run.layout(parent.module)), compressed_parts(update), state_parts(after)
    snapshot_ref, update_ref, state_ref = at_once(*(partial(BlobRef.of, *parts) for parts in blobs))
    version = ModuleVersion(
        run=run.id,
        module=parent.module,
        version=parent.version + 1,
        parent=parent.digest,
        snapshot=snapshot_ref,
        update=update_ref,
        state=state_ref,
        is_fresh=is_fresh,
        shares=tuple(_share(item, alpha) for item, alpha in zip(ordered, alphas, strict=True)),
        clip_norm=clip_norm,
        lr=settings.lr,
        momentum=settings.momentum,
        norm_rule=settings.norm_rule,
        weight=parent.weight + sum(item.sealed.document.tokens for item in ordered),
        term=term,
        grant=grant,
        author=author,
    )
    snapshot, update_blob, state_blob = blobs
    return Made(version=version, state=after, snapshot=snapshot, update=update_blob, state_blob=state_blob)


def make_again(
    run: Run, parent: ModuleVersion, state: OuterState, admitted: Iterable[Admitted], version: ModuleVersion
) -> Made:
    """`version` once more from its parent and its contributions; raises IntegrityError if anything comes out different.

    The clipping norm is taken from the version: it depends on what its leader has seen, and is part of what it signs.
    """
    made = make_version(
        run,
        parent,
        OuterState.fresh(state.params) if version.is_fresh else state,
        admitted,
        clip_norm=version.clip_norm,
        term=version.term,
        grant=version.grant,
        author=version.author,
        is_fresh=version.is_fresh,
    )
    if made.version != version:
        raise IntegrityError(f"version {version.version} of {version.module} does not follow from its contributions")
    return made


def averaged(run: Run, ordered: Sequence[Admitted], alphas: Sequence[float], *, clip_norm: float | None) -> Floats:
    """The outer gradient (N,) of contributions in their order; one at a time is in memory, whatever their number."""
    norms = [item.norm for item in ordered if item.norm is not None]
    return outer.average(
        Gradients(ordered),
        alphas,
        rule=run.config.outer.norm_rule,
        paths=[str(item.sealed.document.path) for item in ordered],
        clip_norm=clip_norm,
        norms=norms if len(norms) == len(ordered) else None,
    )


def _alphas(run: Run, ordered: Sequence[Admitted], *, parent: int) -> tuple[float, ...]:
    shares = []
    for document in (item.sealed.document for item in ordered):
        shard_size = run.shard_tokens(document.path, document.sharding)
        tokens = document.tokens * LATE_WEIGHT ** (parent - document.base_version)
        shares.append(outer.Share(path=str(document.path), shard_size=shard_size, tokens=tokens))
    return outer.weights(shares, tokens_full=run.tokens_full)


def _share(item: Admitted, alpha: float) -> Share:
    document = item.sealed.document
    return Share(
        contribution=item.sealed.id,
        path=document.path,
        peer=document.author,
        base_version=document.base_version,
        weight=alpha,
        tokens=document.tokens,
        loss=document.loss,
        state=document.state,
    )
