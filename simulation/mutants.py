"""Errors that a programmer could make, planted at run time: each must be found, else the checkers see nothing.

A mutant replaces functions of the programs while the block of `planted` runs, and is undone afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bootstrap.coordinator.terms import Terms
from dipaco_p2p.node import authority
from dipaco_p2p.node.authority import Mandates
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.node.watch import Watch
from dipaco_p2p.owner.chain import ModuleChain
from dipaco_p2p.owner.challenges import Answer, Challenges
from dipaco_p2p.owner.follower import Follower
from dipaco_p2p.owner.leader import Leader
from dipaco_p2p.owner.leadership import Leadership
from dipaco_p2p.owner.timing import Timing
from dipaco_p2p.program import files
from dipaco_p2p.protocol import fan_out, owners
from dipaco_p2p.protocol.sightings import Sightings
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.versions import Tally
from dipaco_p2p.swarm.blobs import blobs
from dipaco_p2p.swarm.record_cache import RecordCache

from .disk import SimulatedDisk
from .mutants_of_work import FORGETS_COUNTED
from .patches import MUTANTS, Patches, always, done, mutant, nothing, replacing

__all__ = ["MUTANTS", "planted"]

OUTAGES = ("power cut", "total outage", "torn write")
LEADERS_DIE = ("gone for good", "disk loss", "crash")
BRANCHES = ("parted owners",)
"""Under which one side alone has what it counted, in eight of the first 36 seeds. With partitions at random it was one
of 52: mostly one side has no owners, or no time for a version."""


def _property(empty: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda original: property(lambda self: empty())


# -- disks


replacing("no sync of a file", (SimulatedDisk, "sync", nothing), faults=OUTAGES)
replacing("no sync of the folder", (SimulatedDisk, "sync_folder", nothing), faults=OUTAGES)


@mutant("written in place, not renamed", faults=("torn write", "crash at a point"))
def written_in_place(patches: Patches) -> None:
    def write(path: Path, *parts: bytes | memoryview, is_cold: bool = False) -> None:
        with path.open("wb") as file:
            for part in parts:
                files.disk.write(file, part)
            files.disk.sync(file)

    patches.replace_everywhere("write_atomically", files.write_atomically, write)


@mutant("receipt before the disk", faults=("crash", "total outage"))
def receipt_before_the_disk(patches: Patches) -> None:
    @patches.wrap(Ledger, "add")
    def add(original: Any, self: Ledger, sealed: Any) -> None:
        if sealed.id not in self.open and sealed.id not in self.counted:
            self.open[sealed.id] = sealed


@mutant("digest not checked", faults=("bit rot", "crash"))
def digest_not_checked(patches: Patches) -> None:
    @patches.wrap(Store, "get")
    def get(original: Any, self: Store, name: str) -> bytes | None:
        path = self._blob_path(name)
        return path.read_bytes() if path.exists() else None

    patches.replace(blobs, "digest_of", lambda original: _Same)


class _Same(str):
    """A digest that equals every other."""

    def __new__(cls, data: object) -> _Same:
        return super().__new__(cls, "")

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0


# -- leading and waiting


def _by_terms(original: Any) -> Callable[..., Any]:
    """The later term leads, whatever the coordinator has granted since the mandate began."""
    return lambda mandate: (0, *original(mandate)[1:])


@mutant("strangers lead ahead of the seed node", faults=("idle leader",))
def strangers_lead_ahead(patches: Patches) -> None:
    @patches.wrap(owners, "successors")
    def successors(original: Any, module: Any, heartbeats: Any, **named: Any) -> Any:
        order = original(module, heartbeats, **named)
        return sorted(order, key=lambda peer: heartbeats[peer].role == "seed")

    patches.replace(Terms, "_is_stranger", always(False))  # else the seed grants them nothing, whatever the order


replacing("an idle leader keeps its module", (Terms, "takes_back", always(False)), faults=("idle leader",))

USURPED = ("usurper",)
replacing("a stranger in a group grants itself the module", (Terms, "_is_usurped", always(False)), faults=USURPED)
replacing("an old group's terms count beside a later grant", (authority, "seniority", _by_terms), faults=USURPED)

IDLE = ("idle claimant", "gone for good", "leave", "seed death")
WAITING_FOR_IDLE = (Sightings, "_judge", always(None)), (Timing, "is_awaited", always(True))
replacing("a claim alone keeps others from a path", *WAITING_FOR_IDLE, faults=IDLE)
replacing("each new key has a chance of its own", (Sightings, "_rests", always(False)), faults=IDLE)


@mutant("a keeper that keeps nothing", faults=("lying keeper",))
def a_keeper_that_keepsnothing(patches: Patches) -> None:
    """Whatever is answered to a challenge counts as a proof."""

    @patches.wrap(Challenges, "challenge")
    async def challenge(original: Any, self: Challenges, *parts: Any) -> Answer:
        answer: Answer = await original(self, *parts)
        return Answer.PROVED if answer is Answer.LIED else answer


replacing("a checkpoint of another branch", (Follower, "_is_checkpoint", always(True)), faults=("lying leader",))
replacing("a coordinator signs without a quorum", (Mandates, "has_quorum", always(True)), faults=("lying leader",))


def _all_that_say_so(watch: Watch) -> list[PeerId]:
    return sorted(peer for peer, beat in watch.heartbeats.items() if beat.role == "seed")


replacing("whoever says so is a seed", (Watch, "seeds", lambda original: _all_that_say_so), faults=("false seed",))


# -- records


def _immortal(kind: str) -> tuple[tuple[Any, str, Callable[[Any], Any]], ...]:
    """Records under keys of this kind never expire for their reader."""

    def showing(field: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def live(self: RecordCache, key: str) -> Any:
                is_meant = kind in key and key in self._rows
                return dict(getattr(self._rows[key], field)) if is_meant else original(self, key)

            return live

        return make

    return (RecordCache, "live", showing("records")), (RecordCache, "_live", showing("held"))


replacing("expired claims kept for ever", *_immortal("/claims"), faults=("gone for good",))
replacing("heartbeat of the dead believed", *_immortal("/peers"), faults=("gone for good",))
replacing("head of the dead believed", *_immortal("/heads"), faults=("gone for good",))
replacing(
    "chain not checked for what counts twice",
    (Tally, "check", nothing),
    (Ledger, "counted", _property(dict)),
    faults=("duplication", "partition"),
)
replacing(
    "owners send to everybody",
    (fan_out, "tiers", lambda original: lambda members, *, owners: [members] if members else []),
    faults=("slow", "join"),
)

# -- decrees


replacing(
    "what began before a rollback counts",
    *((kind, "base_min", _property(int)) for kind in (Tally, Ledger)),
    faults=("rollback", "slow", "loss"),
)
replacing("what a rollback undoes is not reported", (Ledger, "undone", _property(list)), faults=("rollback",))
replacing(
    "a stage goes on after the round of growth",
    (Run, "rounds", lambda original: property(lambda run: run.config.rounds.rounds)),
    faults=("growth",),
)

# -- owner groups: receipts, takeovers, branches, mandates


replacing("a holder signs for what it does not keep", (ModuleChain, "keep_contribution", nothing), faults=LEADERS_DIE)


@mutant("takeover forgets open contributions", faults=LEADERS_DIE)
def takeover_forgets(patches: Patches) -> None:
    @patches.wrap(Leader, "_reopen")
    async def reopen(original: Any, self: Leader, **changes: Any) -> None:
        self._ledger.open.clear()
        await original(self, **changes)

    patches.replace(Leadership, "_resubmit", lambda original: done)


@mutant("merge drops the losing branch's contributions", faults=BRANCHES)
def merge_drops(patches: Patches) -> None:
    @patches.wrap(ModuleChain, "_leave")
    def leave(original: Any, self: ModuleChain, version: int) -> None:
        ledger = self.ledger
        given_up = [share.contribution for sealed in ledger.versions[version:] for share in sealed.document.shares]
        original(self, version)
        for contribution in given_up:
            ledger.drop(contribution)


OBEYED = "freeze", "partition", "one-way cut"
replacing("old term's leader obeyed", (ModuleChain, "require_leader", nothing), faults=OBEYED)


@mutant("newcomer displaces leader", faults=("join",))
def newcomer_displaces(patches: Patches) -> None:
    original = owners.successors

    def successors(module: Any, heartbeats: Mapping[Any, Any], **known: Any) -> Any:
        return original(module, heartbeats, incumbent=None, group=(), workers=frozenset(heartbeats))

    patches.replace_everywhere("successors", original, successors)
    patches.replace(owners, "successors", lambda before: successors)
    patches.replace(Terms, "_depose", lambda before: done)

    @patches.wrap(Leadership, "_falls_to_us")
    def falls_to_us(before: Any, leadership: Leadership, module: Any) -> bool:
        return leadership._node.watch.falls_to(module, leadership._node.peer)


@mutant("what is not final is forgotten", faults=("seed death", "crash"))
def not_final_forgotten(patches: Patches) -> None:
    @patches.wrap(Ledger, "settle")
    def settle(original: Any, self: Ledger, until: int) -> list[str]:
        settled = list(self.spent.values())
        for sealed in settled:
            self.drop(sealed.id)
        return [sealed.document.payload.digest for sealed in settled]


@mutant("mandate not on disk", faults=("seed death", "total outage"))
def mandate_not_on_disk(patches: Patches) -> None:
    @patches.wrap(Mandates, "__init__")
    def init(original: Any, self: Mandates, run: Any, store: Any = None, **known: Any) -> None:
        original(self, run, None, **known)


replacing(
    "counted again after it was submitted again",
    FORGETS_COUNTED,
    (Tally, "check", nothing),
    faults=("loss", "slow", "partition"),
)


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Let the programs have this error while the block runs; None for none."""
    with contextlib.ExitStack() as stack:
        if name is not None:
            MUTANTS[name].plant(Patches(stack))
        yield
