"""Errors that a programmer could make, planted at run time: each must be found, else the checkers see nothing.

A mutant replaces functions of the programs while the block of `planted` runs, and is undone afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bootstrap.coordinator.terms import Terms
from dipaco_p2p.core.outer import codec, copies
from dipaco_p2p.node.authority import Mandates
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.node.watch import Watch
from dipaco_p2p.owner import intake
from dipaco_p2p.owner import version as recompute
from dipaco_p2p.owner.chain import ModuleChain
from dipaco_p2p.owner.challenges import Answer, Challenges
from dipaco_p2p.owner.intake import Intake
from dipaco_p2p.owner.leader import Leader
from dipaco_p2p.owner.leadership import Leadership
from dipaco_p2p.owner.originals import Originals
from dipaco_p2p.owner.timing import Timing
from dipaco_p2p.owner.trials import Trials
from dipaco_p2p.program import files
from dipaco_p2p.protocol import admission, expulsion, fan_out, gate, owners
from dipaco_p2p.protocol.admission import ADMITTED
from dipaco_p2p.protocol.audits import Audited
from dipaco_p2p.protocol.norms import Norms
from dipaco_p2p.protocol.rounds import Round, RoundEvent, RoundState
from dipaco_p2p.protocol.sightings import Sightings
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.standing import Standings
from dipaco_p2p.protocol.versions import Tally
from dipaco_p2p.swarm.blobs import blobs
from dipaco_p2p.swarm.record_cache import RecordCache
from peers.path.assignment import Assignment
from peers.path.training import Training

from .disk import SimulatedDisk
from .patches import Patches

Plant = Callable[[Patches], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One error, and where to look for it."""

    plant: Plant
    faults: tuple[str, ...] = ()
    """The faults under which it shows soonest; empty for all."""


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, *, faults: tuple[str, ...] = ()) -> Callable[[Plant], Plant]:
    """Register an error under its name."""

    def register(plant: Plant) -> Plant:
        MUTANTS[name] = Mutant(plant=plant, faults=faults)
        return plant

    return register


def replacing(name: str, *changes: tuple[Any, str, Callable[[Any], Any]], faults: tuple[str, ...]) -> None:
    """Register an error that only replaces attributes: of what, under which name, and what `make(original)` gives."""

    def plant(patches: Patches) -> None:
        for home, attribute, make in changes:
            patches.replace(home, attribute, make)

    mutant(name, faults=faults)(plant)


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Let the programs have this error while the block runs; None for none."""
    with contextlib.ExitStack() as stack:
        if name is not None:
            MUTANTS[name].plant(Patches(stack))
        yield


OUTAGES = ("power cut", "total outage", "torn write")
HOSTILE = ("hostile peer",)
BRIBED = ("bribed volunteer",)
FORGING = ("forging volunteer",)
LEADERS_DIE = ("gone for good", "disk loss", "crash")
BRANCHES = ("parted owners",)
"""Under which one side alone has what it counted, in eight of the first 36 seeds. With partitions at random it was one
of 52: mostly one side has no owners, or no time for a version."""


def _nothing(original: Any) -> Callable[..., None]:
    return lambda *parts, **named: None


def _always(value: Any) -> Callable[[Any], Callable[..., Any]]:
    return lambda original: lambda *parts, **named: value


def _property(empty: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda original: property(lambda self: empty())


def _rules(changed: Callable[[Intake], dict[str, Any]]) -> tuple[Any, str, Callable[[Any], Any]]:
    """The rules of admission with these fields of them changed."""

    def make(original: Any) -> Any:
        return lambda self, contribution: replace(original(self, contribution), **changed(self))

    return Intake, "_rules", make


BESIDE_ITS_COPY = (Originals, "copies", _always([]))
FORGETS_COUNTED = (Intake, "has", lambda original: lambda self, contribution: contribution in self.admitted)

# -- disks


replacing("no sync of a file", (SimulatedDisk, "sync", _nothing), faults=OUTAGES)
replacing("no sync of the folder", (SimulatedDisk, "sync_folder", _nothing), faults=OUTAGES)


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


# -- admission


replacing(
    "no dedupe", _rules(lambda self: {"contributed": {}}), FORGETS_COUNTED, (Tally, "check", _nothing), faults=HOSTILE
)
replacing("stale base accepted", (admission, "_judge_base", _always(ADMITTED)), faults=HOSTILE)


@mutant("base digest not compared", faults=HOSTILE)
def base_digest_not_compared(patches: Patches) -> None:
    @patches.wrap(admission, "_judge_base")
    def judge_base(original: Any, contribution: Any, rules: Any) -> Any:
        known = rules.bases.get(contribution.base_version, contribution.base_digest)
        return original(replace(contribution, base_digest=known), rules)


replacing("weight lies accepted", _rules(lambda self: {"tokens_max": 2**40}), faults=HOSTILE)
replacing(
    "path not checked",
    _rules(lambda self: {"paths": frozenset(self._run.topology.paths())}),
    faults=HOSTILE,
)


@mutant("norm check skipped", faults=HOSTILE)
def norm_check_skipped(patches: Patches) -> None:
    patches.replace_everywhere("judge_norm", admission.judge_norm, lambda norm, norms, base: ADMITTED)
    patches.replace(Norms, "clip_norm", _always(None))


replacing("first steps of any length count", (recompute.Gradients, "first_clip_norm", _always(None)), faults=("join",))
replacing("a lone first step goes any distance", (Norms, "furthest", _always(float("inf"))), faults=FORGING)


@mutant("work counts without a claim", faults=HOSTILE)
def work_without_a_claim(patches: Patches) -> None:
    patches.replace_everywhere("require_claim", intake.require_claim, _done)


@mutant("NaN check skipped", faults=HOSTILE)
def nan_check_skipped(patches: Patches) -> None:
    patches.replace_everywhere("check_scales", codec.check_scales, lambda scales: None)
    patches.replace_everywhere("judge_norm", admission.judge_norm, lambda norm, norms, base: ADMITTED)


# -- the loss gate


@mutant("harmful work counts", faults=HOSTILE)
def harmful_work_counts(patches: Patches) -> None:
    patches.replace_everywhere("refused", gate.refused, lambda works, coordinator: {})


@mutant("a single judge decides", faults=BRIBED)
def a_single_judge_decides(patches: Patches) -> None:
    patches.replace(gate, "AGREED", lambda original: 1)
    patches.replace_everywhere("is_split", gate.is_split, lambda appraisals, coordinator: False)


# -- audits


@mutant("forged work counts", faults=FORGING)
def forged_work_counts(patches: Patches) -> None:
    patches.replace(gate, "is_forged", _always(False))


@mutant("forgers do not wait", faults=FORGING)
def forgers_do_not_wait(patches: Patches) -> None:
    @patches.wrap(Standings, "of")
    def of(original: Any, self: Standings, peer: Any) -> Any:
        return replace(original(self, peer), waits=0)


replacing("a new leader forgets what was refused", (Trials, "_recall", _nothing), faults=FORGING)


@mutant("a single auditor decides", faults=BRIBED)
def a_single_auditor_decides(patches: Patches) -> None:
    patches.replace(gate, "is_forged", lambda original: lambda appraisals: gate._repetitions(appraisals)[1] > 0)


@mutant("an audit is credited twice", faults=("slow", "join"))
def an_audit_is_credited_twice(patches: Patches) -> None:
    patches.replace(Audited, "auditors", _always(frozenset()))
    _say_again(patches)


def _say_again(patches: Patches) -> None:
    """Leaders name in each version what the one before it told of audits."""

    @patches.wrap(Trials, "next_round")
    def next_round(original: Any, self: Trials, *, is_made: bool) -> None:
        told = [sealed for audit in self._audits.values() for sealed in audit.said.values()] if is_made else []
        original(self, is_made=is_made)
        self._evidence = [*self._evidence, *told]


@mutant("a finding counts twice", faults=("slow", "join"))
def a_finding_counts_twice(patches: Patches) -> None:
    patches.replace(Standings, "is_noted", _always(False))
    patches.replace(Standings, "check", _nothing)
    _say_again(patches)


@mutant("a single owner expels", faults=("forging volunteer", "seed death"))
def a_single_owner_expels(patches: Patches) -> None:
    patches.replace_everywhere("needed", expulsion.needed, lambda owners: min(owners, 1))


@mutant("steps go on from a state that no version names", faults=("join",))  # enough are there to judge all work
def steps_go_on_from_any_state(patches: Patches) -> None:
    patches.replace(Assignment, "is_named", lambda original: True)


@mutant("an auditor takes another part of the shard", faults=BRIBED)
def an_auditor_takes_another_part(patches: Patches) -> None:
    patches.replace(Training, "_recipe", _moved_part)


def _moved_part(original: Any) -> Any:
    def recipe(training: Any, trainer: Any, replica: Any, *, round_number: int) -> Any:
        return original(training, trainer, (0, replica[1] + 1), round_number=round_number)

    return recipe


# -- rounds and averages


replacing("a copy counts beside its original", BESIDE_ITS_COPY, faults=HOSTILE)
replacing(
    "copies count in full",
    BESIDE_ITS_COPY,
    (copies, "counted", lambda original: lambda amounts, near: list(amounts)),
    faults=HOSTILE,
)


@mutant("order of arrival used", faults=("slow", "crash"))
def order_of_arrival_used(patches: Patches) -> None:
    patches.replace_everywhere("order", recompute.order, lambda item: 0)


@mutant("momentum applied without contributors", faults=("crash", "slow"))
def momentum_without_contributors(patches: Patches) -> None:
    @patches.wrap(Round, "tick")
    def tick(original: Any, self: Round, claims: Any, config: Any, **named: Any) -> Round:
        is_empty = self.state is RoundState.OPEN and any(claims.values())
        return replace(self, state=RoundState.CLOSED) if is_empty else original(self, claims, config, **named)


@mutant("deadline never fires", faults=("idle claimant",))
def deadline_never_fires(patches: Patches) -> None:
    @patches.wrap(Round, "_event")
    def event(original: Any, self: Round, *parts: Any, **named: Any) -> Any:
        found = original(self, *parts, **named)
        return None if found is RoundEvent.DEADLINE else found


@mutant("strangers lead ahead of the seed node", faults=("idle leader",))
def strangers_lead_ahead(patches: Patches) -> None:
    @patches.wrap(owners, "successors")
    def successors(original: Any, module: Any, heartbeats: Any, **named: Any) -> Any:
        order = original(module, heartbeats, **named)
        return sorted(order, key=lambda peer: heartbeats[peer].role == "seed")

    patches.replace(Terms, "_is_stranger", _always(False))  # else the seed grants them nothing, whatever the order


replacing("an idle leader keeps its module", (Terms, "takes_back", _always(False)), faults=("idle leader",))

IDLE = ("idle claimant", "gone for good", "leave", "seed death")
WAITING_FOR_IDLE = (Sightings, "_judge", _always(None)), (Timing, "is_awaited", _always(True))
replacing("a claim alone keeps others from a path", *WAITING_FOR_IDLE, faults=IDLE)
replacing("each new key has a chance of its own", (Sightings, "_rests", _always(False)), faults=IDLE)


@mutant("a keeper that keeps nothing", faults=("lying keeper",))
def a_keeper_that_keeps_nothing(patches: Patches) -> None:
    """Whatever is answered to a challenge counts as a proof."""

    @patches.wrap(Challenges, "challenge")
    async def challenge(original: Any, self: Challenges, *parts: Any) -> Answer:
        answer: Answer = await original(self, *parts)
        return Answer.PROVED if answer is Answer.LIED else answer


replacing("a coordinator signs without a quorum", (Mandates, "has_quorum", _always(True)), faults=("lying leader",))


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
    (Tally, "check", _nothing),
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


async def _done(*parts: Any, **named: Any) -> None:
    """Nothing, and at once."""


replacing("a holder signs for what it does not keep", (ModuleChain, "keep_contribution", _nothing), faults=LEADERS_DIE)


@mutant("takeover forgets open contributions", faults=LEADERS_DIE)
def takeover_forgets(patches: Patches) -> None:
    @patches.wrap(Leader, "_reopen")
    async def reopen(original: Any, self: Leader, **changes: Any) -> None:
        self._ledger.open.clear()
        await original(self, **changes)

    patches.replace(Leadership, "_resubmit", lambda original: _done)


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
replacing("old term's leader obeyed", (ModuleChain, "require_leader", _nothing), faults=OBEYED)


@mutant("newcomer displaces leader", faults=("join",))
def newcomer_displaces(patches: Patches) -> None:
    original = owners.successors

    def successors(module: Any, heartbeats: Mapping[Any, Any], **known: Any) -> Any:
        return original(module, heartbeats, incumbent=None, group=(), workers=frozenset(heartbeats))

    patches.replace_everywhere("successors", original, successors)
    patches.replace(owners, "successors", lambda before: successors)
    patches.replace(Terms, "_depose", lambda before: _done)

    @patches.wrap(Leadership, "_falls_to_us")
    def falls_to_us(before: Any, leadership: Leadership, module: Any) -> bool:
        return leadership._node.watch.falls_to(module, leadership._node.peer)


@mutant("what is not final is forgotten", faults=("seed death", "crash"))
def not_final_forgotten(patches: Patches) -> None:
    @patches.wrap(Ledger, "settle")
    def settle(original: Any, self: Ledger) -> list[str]:
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
    (Tally, "check", _nothing),
    faults=("loss", "slow", "partition"),
)
