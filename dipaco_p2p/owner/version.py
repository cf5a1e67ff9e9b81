"""The one place where a version is made from its parent and its contributions.

The leader makes versions with it, and whoever verifies a chain makes them again: same inputs, same bytes, on any
machine and in any order of arrival (core/outer/outer_step.py says why).
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..canonical import Parts, digest
from ..config import ADAMW
from ..core.arrays import Floats, at_once
from ..core.model.layout import module_parts
from ..core.outer import copies
from ..core.outer import outer_step as outer
from ..core.outer.codec import Compressed
from ..core.outer.compress import compressed_parts
from ..core.outer.outer_step import OuterState, state_parts
from ..errors import IntegrityError
from ..node.run import Run
from ..node.store import Store
from ..protocol.admission import judge_norm
from ..protocol.decrees import ShownDecree
from ..protocol.documents import BlobRef, Contribution, ModuleVersion, Sealed, Share, decreed_by, is_signed
from ..protocol.expulsion import Expulsion, check_expulsion, check_readmission
from ..protocol.norms import Norms, first_clip_norm
from ..protocol.signing import PeerId
from ..protocol.standing import Standings
from ..protocol.verdicts import Verdicts, read_appraisals
from ..protocol.versions import works_of
from ..topology import ModuleId, PathId

AT_ONCE = 1 << 20
"""Values of a module from which on its blobs are named side by side: for fewer, threads that give way to trainers take
longer than one that does not."""
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
    """The outer gradients of contributions in the order of the average, each read whenever it is asked for."""

    def __init__(self, items: Iterable[Admitted], *, furthest: Callable[[int], float] | None = None) -> None:
        """`furthest` says how far any parameter may move by steps from a version (protocol/norms.py)."""
        self.items = sorted(items, key=order)
        self.furthest = furthest
        self.norms = [math.nan if item.norm is None else item.norm for item in self.items]
        """Of each; not a number until it is known or was read."""

        self.limits = [math.inf] * len(self.items)
        """The norm that each is scaled down to, so that no parameter moves further; known once it was read."""
        self._ahead: dict[int, Compressed] = {}
        self._room = copies.VALUES_MAX

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int, /) -> Compressed:
        found = self._ahead.pop(place, None)
        if found is None:
            found = self.items[place].read()
            self._measure(place, found)
        return found

    def _measure(self, place: int, found: Compressed) -> None:
        if math.isnan(self.norms[place]):
            self.norms[place] = found.norm()
        if self.furthest is not None:
            most = self.furthest(self.items[place].sealed.document.base_version)
            largest = float(np.abs(found.expand()).max(initial=0.0))
            if largest > most:
                self.limits[place] = min(self.limits[place], self.norms[place] * (most / largest))

    def ahead(self, place: int) -> Compressed:
        """The same before its turn. A small one stays in memory until then, so that it is read once."""
        found = self[place]
        if found.size <= self._room:
            self._room -= found.size
            self._ahead[place] = found
        return found

    def first_clip_norm(self, *, base: int, tokens_full: int) -> float | None:
        """As long as nothing is usual (protocol/norms.py); whatever nobody has looked at yet is read for it."""
        for place in range(len(self)):
            if math.isnan(self.norms[place]):
                self.ahead(place)
        documents = [item.sealed.document for item in self.items]
        return first_clip_norm(
            (document.author, norm)
            for document, norm in zip(documents, self.norms, strict=True)
            if document.base_version == base and document.tokens >= tokens_full
        )

    def alike(self, *, size: int) -> list[list[int]]:
        """For each the places of those that are the same work on its path, its own among them. Only paths with replicas
        are read for it; each gradient is of `size` values."""
        near = [[place] for place in range(len(self))]
        for _, found in itertools.groupby(range(len(self)), key=lambda place: self.items[place].sealed.document.path):
            if len(places := list(found)) > 1:
                lot = int(digest("".join(self.items[place].sealed.id for place in places).encode()), 16)
                like = copies.alike([partial(self.ahead, place) for place in places], size=size, lot=lot)
                for place, others in zip(places, like, strict=True):
                    near[place] = [places[other] for other in others]
        return near


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A version not yet signed, the outer state after it, and the blobs that it names."""

    version: ModuleVersion
    state: OuterState
    snapshot: Parts
    update: Parts
    state_blob: Parts
    appraisals: Parts = ()

    @property
    def blobs(self) -> list[tuple[BlobRef, Parts]]:
        """Each with its name."""
        version = self.version
        named = zip(
            (version.snapshot, version.update, version.state, version.appraisals),
            (self.snapshot, self.update, self.state_blob, self.appraisals),
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
    verdicts: Verdicts | None = None,
    expels: Expulsion | None = None,
    readmits: ShownDecree | None = None,
) -> Made:
    """Average, outer step, quantised update. `state` holds the parent's parameters. Needs one contribution at least.

    `clip_norm` is the one that is usual, None while nothing is: then they are measured by each other and by the
    learning rates, as protocol/norms.py says.
    `grant` is the id of the grant of `term` to `author`; without `verdicts` all work weighs the same.
    Raises StepNotFinite, and what reading a contribution raises.
    """
    gradients = Gradients(admitted, furthest=None if clip_norm is not None else furthest(run, parent.module))
    ordered = gradients.items
    assert ordered, "a module without contributors gets no step"
    near = gradients.alike(size=run.layout(parent.module).size)
    if clip_norm is None:
        clip_norm = gradients.first_clip_norm(base=parent.version, tokens_full=run.tokens_full)
    # What a copy takes from the work that it repeats rounds down: no more counts than was done.
    tokens = [max(1, int(each)) for each in copies.counted([item.sealed.document.tokens for item in ordered], near)]
    alphas = _alphas(run, ordered, near, parent=parent.version, verdicts=verdicts)
    appraisals = b"" if verdicts is None else verdicts.blob
    settings = run.config.outer
    try:
        after, update = stepped(run, state, gradients, alphas, clip_norm=clip_norm)
    except StepNotFinite as error:
        raise StepNotFinite(f"no version {parent.version + 1} of {parent.module}: {error}") from None
    blobs = module_parts(after.params, run.layout(parent.module)), compressed_parts(update), state_parts(after)
    naming = [partial(BlobRef.of, *parts) for parts in blobs]
    is_large = run.layout(parent.module).size >= AT_ONCE
    snapshot_ref, update_ref, state_ref = at_once(*naming) if is_large else [name() for name in naming]
    share = partial(_share, names_work=run.config.audited > 0)
    shares = tuple(map(share, ordered, alphas, tokens, gradients.norms))
    works = works_of(shares)
    version = ModuleVersion(
        run=run.id,
        module=parent.module,
        version=parent.version + 1,
        parent=parent.digest,
        snapshot=snapshot_ref,
        update=update_ref,
        state=state_ref,
        is_fresh=is_fresh,
        shares=shares,
        clip_norm=clip_norm,
        lr=settings.lr,
        momentum=settings.momentum,
        norm_rule=settings.norm_rule,
        weight=parent.weight + sum(tokens),
        appraisals=BlobRef.of(appraisals) if appraisals else None,
        findings=None if verdicts is None else verdicts.findings(works),
        audits=() if verdicts is None else verdicts.audits(works),
        expels=expels,
        readmits=readmits,
        term=term,
        grant=grant,
        author=author,
    )
    snapshot, update_blob, state_blob = blobs
    return Made(
        version=version,
        state=after,
        snapshot=snapshot,
        update=update_blob,
        state_blob=state_blob,
        appraisals=(appraisals,),
    )


def make_again(
    run: Run,
    parent: ModuleVersion,
    state: OuterState,
    admitted: Iterable[Admitted],
    version: ModuleVersion,
    *,
    norms: Norms,
    standings: Standings,
    appraisals: bytes = b"",
) -> Made:
    """`version` once more from its parent and its contributions; raises IntegrityError if anything comes out different.

    `norms` and `standings` are those of the chain up to the parent: which contributions may count, what longer ones are
    scaled down to, and what they weigh; `appraisals` is the blob that `version` names.
    """
    items, verdicts = list(admitted), run.verdicts(read_appraisals(appraisals), standings)
    made = make_version(
        run,
        parent,
        OuterState.fresh(state.params) if version.is_fresh else state,
        items,
        clip_norm=norms.clip_norm(parent.version),
        term=version.term,
        grant=version.grant,
        author=version.author,
        is_fresh=version.is_fresh,
        verdicts=verdicts,
        expels=version.expels,
        readmits=version.readmits,
    )
    if made.version != version:
        raise IntegrityError(f"version {version.version} of {version.module} does not follow from its contributions")
    _check_counted(run, version, norms=norms, standings=standings)
    for item in items:
        if (reason := verdicts.reason(item.sealed.document)) is not None:
            detail = f"counts {item.sealed.id[:8]}, which its judges found {reason}"
            raise IntegrityError(f"version {version.version} of {version.module} {detail}")
    return made


def updated(run: Run, params: Floats, blob: bytes, version: ModuleVersion) -> tuple[Floats, Parts]:
    """The parameters of `version` and their bytes, from its parent's and its update; raises IntegrityError unless they
    have its digest."""
    params = outer.apply_update(params, run.read_update(blob, version.module))
    snapshot = module_parts(params, run.layout(version.module))
    if digest(*snapshot) != version.digest:
        raise IntegrityError(f"the update to version {version.version} of {version.module} does not give its digest")
    return params, snapshot


def check_told(run: Run, version: ModuleVersion, *, norms: Norms, standings: Standings, verdicts: Verdicts) -> None:
    """Check what a version says of itself, without its contributions: whom it expels or readmits, how many
    contributions it counts of a path, its norms, findings and audits. Raises IntegrityError."""
    _check_counted(run, version, norms=norms, standings=standings)
    name, usual = f"version {version.version} of {version.module}", norms.clip_norm(version.version - 1)
    if usual is not None and version.clip_norm != usual:
        raise IntegrityError(f"{name} has the `clip_norm` {version.clip_norm}, and its chain gives {usual}")
    for share in version.shares:
        if (reason := verdicts.reason_of(share.peer, share.work)) is not None:
            raise IntegrityError(f"{name} counts {share.contribution[:8]}, which its judges found {reason}")
        if share.tokens > run.tokens_full or version.module not in share.path.modules():
            raise IntegrityError(f"{name} counts {share.tokens} tokens of {share.path} in {share.contribution[:8]}")
    works, said = works_of(version.shares), BlobRef.of(verdicts.blob) if verdicts.blob else None
    follows = said, verdicts.findings(works), verdicts.audits(works)
    if (version.appraisals, version.findings, version.audits) != follows:
        raise IntegrityError(f"{name} tells of findings or audits that its appraisals do not give")


def _check_counted(run: Run, version: ModuleVersion, *, norms: Norms, standings: Standings) -> None:
    name = f"version {version.version} of {version.module}"
    if version.expels is not None:
        check_expels(run, version.module, version.expels, standings)
    if version.readmits is not None:
        check_readmits(run, version.readmits, standings)
    places = Counter(share.path for share in version.shares)
    if places and max(places.values()) > run.config.places(version.module):
        raise IntegrityError(f"{name} counts too many contributions of one path")
    for share in version.shares:
        verdict = judge_norm(share.norm, norms, base=share.base_version)
        if verdict.reason is not None:
            raise IntegrityError(f"{name} counts {share.contribution[:8]}: {verdict.detail}")


def check_expels(run: Run, module: ModuleId, expels: Expulsion, standings: Standings) -> None:
    """Raise IntegrityError unless the next version of `module` may show it; `standings` are those up to its parent."""
    charge = expels.charge(run=run.id, module=module)
    check_expulsion(expels, charge, standings, audited=run.config.audited, coordinator=run.manifest.author)


def check_readmits(run: Run, readmits: ShownDecree, standings: Standings) -> None:
    """The same of a readmission."""
    is_decreed = is_signed(decreed_by(readmits))
    check_readmission(readmits, standings, run=run.origin, coordinator=run.manifest.author, is_signed=is_decreed)


def furthest(run: Run, module: ModuleId) -> Callable[[int], float] | None:
    """How far any parameter may move by steps from a version; of Muon's steps no such bound is known."""
    return run.norms(module, ()).furthest if run.config.inner.optimizer == ADAMW else None


def stepped(
    run: Run, state: OuterState, gradients: Gradients, alphas: Sequence[float], *, clip_norm: float | None
) -> tuple[OuterState, Compressed]:
    """The outer state after a step with these contributions, which weigh `alphas`, and the update that leads there;
    raises StepNotFinite."""
    try:
        return outer.outer_step(
            state,
            averaged(run, gradients, alphas, clip_norm=clip_norm),
            lr=run.config.outer.lr,
            momentum=run.config.outer.momentum,
            codec=run.config.compression.downlink,
            is_spent=True,
        )
    except ValueError as error:
        raise StepNotFinite(str(error)) from None


def averaged(run: Run, gradients: Gradients, alphas: Sequence[float], *, clip_norm: float | None) -> Floats:
    """The outer gradient (N,) of contributions in their order; one at a time is in memory, whatever their number."""
    rule, norms, is_measured = run.config.outer.norm_rule, gradients.norms, gradients.furthest is None
    if clip_norm is not None:
        gradients.limits[:] = [min(limit, clip_norm) for limit in gradients.limits]
    return outer.average(
        gradients,
        alphas,
        rule=rule,
        paths=[str(item.sealed.document.path) for item in gradients.items],
        clip_norms=None if clip_norm is None and is_measured else gradients.limits,
        # `rda` needs all of them before it begins; the others ask for each after it was read.
        norms=None if rule == "rda" and (not is_measured or any(map(math.isnan, norms))) else norms,
    )


def _alphas(
    run: Run,
    ordered: Sequence[Admitted],
    near: Sequence[Sequence[int]],
    *,
    parent: int,
    verdicts: Verdicts | None,
) -> tuple[float, ...]:
    documents = [item.sealed.document for item in ordered]
    standing = [1.0 if verdicts is None else verdicts.weight(document) for document in documents]
    # Late ones weigh less before copies are shared out: else a late copy took more from what it repeats than it brings.
    amounts = [
        document.tokens * weight * LATE_WEIGHT ** (parent - document.base_version)
        for document, weight in zip(documents, standing, strict=True)
    ]
    shares = [
        outer.Share(
            path=str(document.path), shard_size=run.shard_tokens(document.path, document.sharding), tokens=amount
        )
        for document, amount in zip(documents, copies.counted(amounts, near), strict=True)
    ]
    return outer.weights(shares, tokens_full=run.tokens_full)


def _share(item: Admitted, alpha: float, tokens: int, norm: float, *, names_work: bool) -> Share:
    document = item.sealed.document
    return Share(
        contribution=item.sealed.id,
        path=document.path,
        peer=document.author,
        base_version=document.base_version,
        weight=alpha,
        tokens=tokens,
        norm=norm,
        loss=document.loss,
        state=document.state,
        work=document.work if names_work else "",
    )
