"""From a world whose time is over to what the checkers judge: the disks are read as anybody would read them."""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from bootstrap.archives.verify import verify_run
from dipaco_p2p.canonical import is_digest
from dipaco_p2p.core.model.layout import decode_module
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.authority import Decrees
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.owner.keeper import FOLDER as KEEP_FOLDER
from dipaco_p2p.owner.ranges import refs_of_version
from dipaco_p2p.protocol.documents import ModuleVersion, Sealed, Share
from dipaco_p2p.protocol.gate import AGREED, HARM_ERRORS, NOTHING_TO_COMPARE, Appraisal, Repetition
from dipaco_p2p.protocol.norms import FURTHEST_MULTIPLE
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.verdicts import read_appraisals
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.topology import ModuleId
from dipaco_p2p.use.folder import open_stage

from .history import Counted, Link, Outcome
from .plan import Plan
from .speed import remembered_signatures
from .world import World, disks_folder, perform

NORM_MAX = 1e4
FAR = 1.1
"""Over what is possible: the update is quantised."""


def simulate(plan: Plan, *, with_log: bool = False) -> tuple[Outcome, World]:
    """Play one run; what it showed (on request with what the programs logged), and the world itself."""
    with (
        tempfile.TemporaryDirectory(prefix="dipaco-simulation-", dir=disks_folder()) as name,
        remembered_signatures(),
    ):
        world = World(plan, Path(name))
        perform(world, with_log=with_log)
        return outcome_of(world), world


def outcome_of(world: World) -> Outcome:
    """What a run showed."""
    run, rounds = world.run, world.plan.config.rounds
    chains, problems, unsound = _archive(world)
    return Outcome(
        events=tuple(world.events),
        genesis={str(module): genesis_version(run.manifest, module).digest for module in run.topology.modules()},
        chains=chains,
        looks=tuple(world.looks),
        paths={str(path): tuple(map(str, path.modules())) for path in run.topology.paths()},
        names={machine.peer: machine.name for machine in world.machines},
        rounds=_rounds(world),
        staleness=rounds.staleness,
        tokens_max=run.tokens_full,
        ttl_s=world.plan.ttl_s,
        deadline_s=rounds.deadline_s,
        calm_s=world.calm_s,
        bound_s=world.bound_s,
        end_s=world.end_s,
        problems=problems,
        not_finite=unsound,
        unkept=tuple(_unkept(world)),
        behind=tuple(_others(world, chains)),
        bugs=tuple(world.bugs),
        waits=world.waits,
        unfinished=tuple(
            f"{machine.name}: {machine.errors[-1:] or _last(world, machine.name)}"
            for machine in world.volunteers
            if not machine.is_done and not machine.is_gone
        ),
    )


def _rounds(world: World) -> int:
    """With which version the stage ends: an earlier one than the configuration says, if a growth is decreed."""
    decrees = Decrees(world.run, Store(world.seed.folder))
    number = decrees.state.growths.get(world.run.id)
    return world.plan.config.rounds.rounds if number is None else decrees.log[number - 1].document.to


def _archive(world: World) -> tuple[dict[str, tuple[Link, ...]], tuple[str, ...], tuple[str, ...]]:
    """The chains, what recomputing them found, and which modules are not sound."""
    store = Store(world.seed.folder)
    try:
        run = open_stage(store)
        assert run is not None
        Decrees(run, store)
        archive = SeedArchive(run, store)
        reports = verify_run(run, store, archive)
        if world.plan.remade < 1:  # its archive has no contributions; the witness has them
            whole = world.witness.beside(store.folder, world.folder / "witness")
            store, archive = whole, SeedArchive(run, whole)
            reports += verify_run(run, whole, archive)
    except DipacoError as error:
        empty: dict[str, tuple[Link, ...]] = {str(module): () for module in world.run.topology.modules()}
        return empty, (f"the archive cannot be opened: {error}",), ()
    chains = {str(module): tuple(_links(run, ledger.versions, archive)) for module, ledger in archive.ledgers.items()}
    unsound = [
        f"version {sealed.document.version} of {module}"
        for module, ledger in archive.ledgers.items()
        for sealed in ledger.versions
        if not _is_sound(run, store, sealed.document)
    ]
    return chains, tuple(f"{report.module}: {report.problem}" for report in reports if report.problem), tuple(unsound)


def _others(world: World, chains: dict[str, tuple[Link, ...]]) -> Iterator[str]:
    """Where the disk of a volunteer that came to the end after the faults holds another chain than the archive's, as
    far as it believes it final: of modules that it follows no more, a branch that was given up may be left."""
    for volunteer in world.volunteers:
        left = [event for event in world.events if event.who == volunteer.name and event.ev == "left"]
        if not volunteer.is_done or left[-1].t_s < world.calm_s:
            continue
        store = Store(volunteer.folder / "runs" / world.run.id[:16])
        for module in world.run.topology.modules():
            chain, ledger = chains[str(module)], Ledger(world.run, store, module)
            for sealed, link in zip(ledger.versions[: ledger.final], chain, strict=False):
                if sealed.document.digest != link.digest:
                    yield f"{volunteer.name} ended with another version {link.version} of {module}"
                    break


def _unkept(world: World) -> Iterator[str]:
    """Where a keeper proved that it has what makes a version again, and its disk, which lost nothing, has less."""
    told = [event for event in world.events if event.ev == "kept_elsewhere"]
    spoiled = {event.who for event in world.events if event.ev in ("disk lost", "bit rot", "crashed", "struck")}
    stores = {
        volunteer.peer: Store(volunteer.folder / "runs" / world.run.id[:16] / KEEP_FOLDER, is_read_only=True)
        for volunteer in world.volunteers
        if volunteer.name not in spoiled
    }
    archive = SeedArchive(world.run, Store(world.seed.folder), must_be_whole=False) if told else None
    for event in told:
        assert archive is not None
        module, version = ModuleId.parse(event.facts["module"]), int(event.facts["version"])
        known = version <= archive.ledgers[module].head.version
        refs = (refs_of_version(archive, module, version) if known else None) or ()
        for peer in filter(stores.get, event.facts["by"]):
            if any(stores[peer].size(ref.digest) != ref.size for ref in refs):
                yield f"version {version} of {module} would be forgotten for ...{peer[-6:]}, which does not have it"


def _is_unmeasured(version: ModuleVersion, tokens_full: int) -> bool:
    base = version.version - 1
    whole = [share for share in version.shares if (share.base_version, share.tokens) == (base, tokens_full)]
    return version.clip_norm is None and len({share.peer for share in whole}) >= 2


def _is_far(run: Run, version: ModuleVersion, archive: SeedArchive) -> bool:
    """Of the first version, whose momentum is nothing but its own outer gradient."""
    module = version.module
    try:
        both = version.snapshot, archive.ledgers[module].genesis.snapshot
        after, before = (decode_module(archive.blob(ref.digest), run.layout(module)) for ref in both)
    except DipacoError:  # rot: the checks of the disk tell of it
        return False
    paths = len({share.path for share in version.shares})  # averages of several are made as long as one
    most = FURTHEST_MULTIPLE * run.norms(module, ()).lr_sum(0) * math.sqrt(paths)
    return float(np.abs(after - before).max()) > FAR * version.lr * (1 + version.momentum) * most


def _links(run: Run, versions: Sequence[Sealed[ModuleVersion]], archive: SeedArchive) -> Iterator[Link]:
    unheard: set[PeerId] = set()
    for sealed in versions:
        yield _link(run, sealed.document, archive, unheard=frozenset(unheard))
        if sealed.document.findings is not None:
            unheard.update(sealed.document.findings.contradicted)


def _link(run: Run, version: ModuleVersion, archive: SeedArchive, *, unheard: frozenset[PeerId]) -> Link:
    counts = tuple(_counted(share, archive) for share in version.shares)
    said = [one for one in _said(version, archive) if one.author not in unheard]
    return Link(
        version=version.version,
        digest=version.digest,
        parent=version.parent,
        term=version.term,
        counts=counts,
        is_rollback=version.rollback is not None,
        is_judged=version.appraisals is not None,
        forgers=_forgers(said),
        repeated=frozenset((one.of, one.work) for one in said if one.repeated is not None),
        harmful=frozenset(_surely(said, lambda one: one.gain < -HARM_ERRORS * one.error, judges=AGREED)),
        gaining=frozenset(_surely(said, lambda one: one.gain > HARM_ERRORS * one.error).values()),
        audits=tuple((audit.work, audit.by) for audit in version.audits),
        found=frozenset(version.findings.forged if version.findings is not None else ()),
        is_unmeasured=_is_unmeasured(version, run.tokens_full),
        is_far=version.version == 1 and _is_far(run, version, archive),
        findings=tuple(version.findings.named() if version.findings is not None else ()),
        leader=version.author,
        expels="" if version.expels is None else version.expels.peer,
        voters=frozenset(() if version.expels is None else (vote.owner for vote in version.expels.votes)),
    )


def _said(version: ModuleVersion, archive: SeedArchive) -> list[Appraisal]:
    try:
        said = read_appraisals(b"" if version.appraisals is None else archive.blob(version.appraisals.digest))
    except DipacoError:  # rot: the checks of the disk tell of it
        said = []
    return [sealed.document for sealed in said]


def _surely(said: Sequence[Appraisal], is_so: Callable[[Appraisal], bool], *, judges: int = 1) -> dict[str, str]:
    """The works of which so many say so, and nobody anything else, each with its author."""
    works: dict[str, list[Appraisal]] = defaultdict(list)
    for one in said:
        works[one.work].append(one)
    return {work: of[0].of for work, of in works.items() if len(of) >= judges and all(map(is_so, of))}


def _forgers(said: Sequence[Appraisal]) -> frozenset[str]:
    """As `Link.forgers`. Where most authors' work comes out different, none has to be refused."""
    found: dict[tuple[str, str], list[Repetition]] = defaultdict(list)
    for document in said:
        if document.repeated is not None:
            found[document.of, document.work].append(document.repeated)
    authors = {author for author, _ in found}
    forgers = {
        author
        for (author, _), heard in found.items()
        if not any(one.is_same for one in heard) and sum(one not in NOTHING_TO_COMPARE for one in heard) > 1
    }
    return frozenset() if len(authors) > 2 and 2 * len(forgers) > len(authors) else frozenset(forgers)


def _counted(share: Share, archive: SeedArchive) -> Counted:
    try:
        document = archive.contribution(share.contribution).document
        base_digest, said = document.base_digest, document.tokens
        work = document.work
    except DipacoError:
        base_digest, said, work = "", 0, ""
    return Counted(
        id=share.contribution,
        peer=share.peer,
        path=str(share.path),
        base=share.base_version,
        base_digest=base_digest,
        tokens=share.tokens,
        said=said,
        work=work,
    )


def _is_sound(run: Run, store: Store, version: ModuleVersion) -> bool:
    try:
        data = store.get(version.snapshot.digest)
        params = decode_module(data or b"", run.layout(version.module))
    except DipacoError:
        return False
    return bool(np.isfinite(params).all() and np.linalg.norm(params) < NORM_MAX)


def _last(world: World, name: str) -> str:
    """What a volunteer did last, for people."""
    events = [event for event in world.events if event.who == name]
    if not events:
        return "nothing"
    return f"{events[-1].ev} at {events[-1].t_s:.0f} s, {dict(events[-1].facts)}"


def narrate(outcome: Outcome, world: World) -> None:
    """Print the plan, all events and the chains, for whoever looks for the cause of a broken promise."""
    plan, config = world.plan, world.plan.config
    print(f"{plan.volunteers} volunteers, grid {config.topology}, {config.rounds}, {config.liveness}")
    print(f"delay {plan.delay_s}, loss {plan.loss}, faults until {plan.faulty_s:.1f} s")
    print("faults:", ", ".join(f"{fault.name} at {fault.at_s:.1f}" for fault in plan.faults))
    for event in outcome.events:
        facts = " ".join(f"{name}={_shown(value, outcome)}" for name, value in event.facts.items())
        print(f"{event.t_s:8.2f} {event.who:14} {event.ev:16} {facts}")
    for module, chain in outcome.chains.items():
        for link in chain:
            counts = " ".join(f"{each.id[:6]}({each.path}@{each.base})" for each in link.counts)
            print(f"{module} {link.version} {link.digest[:8]} term {link.term}: {counts}")
    for name, where in world.where.items():
        print(f"{name} waits in {where}")
    print(*world.tracebacks, sep="\n")


def _shown(value: object, outcome: Outcome) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + " ".join(_shown(item, outcome) for item in value) + "]"
    if is_digest(value):
        return str(value)[:8]
    return outcome.names.get(str(value), str(value))
