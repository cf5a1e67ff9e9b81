"""A client that only reads a swarm: it listens nowhere, says nothing, and forgets its identity afterwards.

A program that generates text from a live run and one that keeps account of it ask the same peers for the same chains.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from ..canonical import digest
from ..clock import Clock, SystemClock
from ..errors import IntegrityError, Refused, SwarmError, Unreachable
from ..protocol.documents import ModuleVersion, Rejection, Sealed, rejected
from ..protocol.judgement import Judgement
from ..protocol.keeping import KeepersCount
from ..protocol.signing import PeerId
from ..protocol.versions import check_chain, up_to_last
from ..swarm.addresses import read_address
from ..swarm.api import Swarm
from ..swarm.identity import KEY_NAME
from ..topology import ModuleId
from .calls import GetChain, GetJudgements, GetKeepers, GetRejections, GetVersions
from .dial import doors, knock
from .entry import read_entry
from .items import Page, read_items
from .node import CALL_TIMEOUT_S, CONTROL_TIMEOUT_S, Observer, ask

Teller = tuple[PeerId, type[GetVersions] | type[GetChain]]
"""Who has a chain, and the call that it answers."""

log = logging.getLogger(__name__)

REJECTIONS_MAX = 1024
"""Of one module: a leader keeps fewer."""
NEAR_MAX = 4
"""Peers that are asked for parameters before the owners are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A place in the network, lent for a while."""

    swarm: Swarm
    host: PeerId
    """Who opened the run."""
    run: str | None
    """The id of the run's first stage, or its start, if it was demanded."""
    clock: Clock
    folder: Path
    """Gone when the connection is."""


@asynccontextmanager
async def open_connection(text: str, *, expected: str | None = None) -> AsyncIterator[Connection]:
    """Join through what `text` leads to (entry.py); `expected` is the start of the run's id. Raises ConfigError,
    Unreachable, EnvironmentUnfit, WrongRun, IntegrityError."""
    from ..swarm.hivemind.libp2p import open_libp2p  # hivemind takes seconds to import

    entry = read_entry(text, run=expected)
    with tempfile.TemporaryDirectory(prefix="dipaco-") as folder:
        clock = SystemClock()
        swarm = await open_libp2p(Path(folder) / KEY_NAME, client_mode=True, clock=clock)

        async def enter(address: str) -> None:
            await swarm.join({address: read_address(address)})

        try:
            opened = await knock(swarm, doors(entry), clock, enter=enter)
            yield Connection(swarm=swarm, host=opened.host, run=entry.run, clock=clock, folder=Path(folder))
        finally:
            await swarm.close()


def chain_tellers(node: Observer, module: ModuleId) -> Iterator[Teller]:
    """Who should have the chain of `module`, and the call that each answers: the leader, seed nodes, mirrors."""
    watch = node.watch
    leader = watch.leader(module)
    if leader is not None:
        yield leader, GetVersions
    for seed in watch.seeds():
        yield seed, GetChain
    grant = node.mandates.grant(module)
    for peer in grant.mirrors if grant is not None else ():
        yield peer, GetChain


async def meet_trainers(node: Observer, module: ModuleId) -> None:
    """In a large swarm, where those who train a module are seldom our neighbours: look some of them up."""
    if not node.watch.neighbourhood.is_all:
        paths = node.run.topology.paths_through(module)
        path = min(paths, key=lambda path: digest(f"{node.peer} {path}".encode()))
        await node.watch.read_claims([path])
        await node.watch.find(*sorted(node.watch.claims[path])[:NEAR_MAX])


def trainers_of(node: Observer, module: ModuleId, version: int) -> set[PeerId]:
    """Who trains from this version by its claim, or is about to train from the next."""
    claims = (claims for path, claims in node.watch.claims.items() if module in path.modules())
    return {peer for each in claims for peer, claim in each.items() if 0 <= claim.round - version <= 1}


def holders_of(node: Observer, module: ModuleId, version: int) -> list[PeerId]:
    """Who may have the parameters of a version: first some who train from it and the module's mirrors, in an order of
    this peer's own, so that many who ask share the work; then its leader and the archives; last who owned it before:
    one that was away may be the only one whose disk still has them."""
    watch, grant, coordinator = node.watch, node.mandates.grant(module), node.run.manifest.author
    mirrors, group = (grant.mirrors, grant.group) if grant is not None else ((), ())
    near = (trainers_of(node, module, version) & watch.heartbeats.keys()).union(mirrors)
    first = sorted(near, key=lambda peer: digest(f"{node.peer} {peer}".encode()))[:NEAR_MAX]
    owners = [*group, *filter(None, [watch.leader(module)])]
    former = sorted(node.mandates.peers(module) & watch.heartbeats.keys())
    return [
        peer for peer in dict.fromkeys([*first, *owners, coordinator, *watch.seeds(), *former]) if peer != node.peer
    ]


def has_full_archive(node: Observer) -> bool:
    """Whether a seed node lives that takes in every contribution, so that others get it there; a light one does not."""
    watch = node.watch
    return any(not watch.heartbeats[seed].light for seed in watch.seeds())


async def ask_chain(
    node: Observer,
    teller: Teller,
    module: ModuleId,
    *,
    after: int,
    timeout_s: float = CALL_TIMEOUT_S,
) -> Page[ModuleVersion]:
    """The first few versions that follow version `after`, as one of `chain_tellers` has them; raises as the call."""
    peer, kind = teller
    is_kept = kind is GetChain
    request = GetChain(module=module, after=after) if is_kept else GetVersions(module=module, after=after, wait_s=0.0)
    return await ask(node, peer, request, timeout_s=timeout_s)


async def versions_after(
    node: Observer, teller: Teller, module: ModuleId, *, after: int, up_to: int
) -> list[Sealed[ModuleVersion]]:
    """What one of `chain_tellers` tells after version `after`, page by page until version `up_to` is on one, or no
    more comes; nothing after the stage's last version. Raises as the call, and IntegrityError for a page that does not
    go on from the one before: whoever answers could page for ever."""
    found: list[Sealed[ModuleVersion]] = []
    while (begin := after + len(found)) < up_to:
        page = await read_items(ModuleVersion, await ask_chain(node, teller, module, after=begin))
        if [sealed.document.version for sealed in page] != list(range(begin + 1, begin + 1 + len(page))):
            raise IntegrityError(f"asked for the versions of {module} after {begin}, it gave others")
        if not page:
            break
        found += page
    return [sealed for sealed in found if sealed.document.version <= node.run.rounds]


async def fetch_chain(node: Observer, module: ModuleId) -> list[ModuleVersion]:
    """All published versions of `module`, checked. Raises what the last peer that was asked
    gave cause for: Unreachable, Refused or IntegrityError."""
    return [sealed.document for sealed in await extend_chain(node, module, [])]


async def extend_chain(
    node: Observer, module: ModuleId, known: Sequence[Sealed[ModuleVersion]]
) -> list[Sealed[ModuleVersion]]:
    """The same, of which `known` need not be told again; what does not follow these is asked for from the start. A
    leader could show a reader parameters of its own making, so versions that only it vouches for are left out. Raises
    as `fetch_chain`."""
    await node.watch.find_leader(module)
    best: list[Sealed[ModuleVersion]] = []
    problem: SwarmError | Refused | IntegrityError = Unreachable(
        f"nobody alive knows {module}", hint="check that the coordinator or a volunteer of this run is up"
    )
    for teller in chain_tellers(node, module):
        try:
            shown = await _checked_chain(node, teller, module, known)
        except (SwarmError, Refused, IntegrityError) as error:
            log.info("%s of %s gave nothing: %s", teller[1].METHOD, module, error)
            problem = error
            continue
        found = vouched(node, shown)
        if len(found) == len(shown):
            return max(best, found, key=len)
        best = max(best, found, key=len)
        problem = IntegrityError(f"nobody but its leader vouches for version {len(shown)} of {module}")
    if best:
        return best
    raise problem


def vouched(node: Observer, versions: Sequence[Sealed[ModuleVersion]]) -> list[Sealed[ModuleVersion]]:
    """Those up to the last that was made again by whoever must: while the coordinator lives, by it or by the mirror
    that it chose; else by any other owner."""
    mandates, has_coordinator = node.mandates, bool(node.watch.coordinators())
    return up_to_last(versions, mandates.is_vouched_from_outside if has_coordinator else mandates.is_vouched)


async def fetch_judgements(node: Observer, *, begin: int = 0) -> list[Judgement]:
    """The coordinator's losses of all rounds from `begin` on, the first one first; raises as `ask`, and
    IntegrityError."""
    run = node.run
    found: list[Judgement] = []
    while len(found) <= run.rounds:
        begin = found[-1].version + 1 if found else begin
        reply = await ask(node, run.manifest.author, GetJudgements(from_=begin))
        page = [sealed.document for sealed in await read_items(Judgement, reply)]
        if any(one.author != run.manifest.author or one.run != run.id or one.version < begin for one in page):
            raise IntegrityError("a judgement that is not of this run's coordinator, or was not asked for")
        if not page:
            break
        found += page
    return found


async def fetch_keepers(node: Observer) -> KeepersCount | None:
    """What the coordinator's challenges of keepers came to; None before it challenged any, or while it is away."""
    manifest = node.run.manifest
    for seed in node.watch.coordinators():
        try:
            reply = await ask(node, seed, GetKeepers(), timeout_s=CONTROL_TIMEOUT_S)
        except (SwarmError, Refused, IntegrityError) as error:
            log.info("no count of keepers: %s", error)
            continue
        count = None if reply.count is None else reply.count.document
        if count is not None and (count.author, count.run) == (manifest.author, node.run.id):
            return count
    return None


async def _checked_chain(
    node: Observer,
    teller: Teller,
    module: ModuleId,
    known: Sequence[Sealed[ModuleVersion]],
) -> list[Sealed[ModuleVersion]]:
    for start in [known, []] if known else [[]]:
        try:
            beyond = node.run.rounds + 1  # asked for once more: who tells all again is refused
            found = [*start, *await versions_after(node, teller, module, after=len(start), up_to=beyond)]
            check_chain(found, node.run.manifest, module)
            for sealed in found[len(start) :]:
                node.run.check_sizes(sealed.document)
            return found
        except (Refused, IntegrityError):
            if not start:
                raise
    raise AssertionError("the last try returns or raises")


async def fetch_rejections(node: Observer, module: ModuleId) -> list[Rejection]:
    """What the module's leader says that it refused lately: its word. Nothing if nobody leads. Raises SwarmError,
    Refused, and IntegrityError for pages that do not go on."""
    leader, found, after = node.watch.leader(module), list[Rejection](), ""
    while leader is not None:
        page = await read_items(Rejection, await ask(node, leader, GetRejections(module=module, after=after)))
        ids = [after, *(rejected(sealed.document).id for sealed in page)]
        if any(one >= following for one, following in itertools.pairwise(ids)):
            raise IntegrityError(f"rejections of {module} that are out of order")
        if not page or len(found) > REJECTIONS_MAX:
            break
        found += [sealed.document for sealed in page]
        after = ids[-1]
    return found
