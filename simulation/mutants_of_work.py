"""Errors in how work is taken in, judged, audited and averaged; the others are in mutants.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dipaco_p2p.canonical import digest
from dipaco_p2p.core.outer import codec, copies
from dipaco_p2p.errors import Unreachable
from dipaco_p2p.owner import intake
from dipaco_p2p.owner import version as recompute
from dipaco_p2p.owner.intake import Intake
from dipaco_p2p.owner.originals import Originals
from dipaco_p2p.owner.trials import Trials
from dipaco_p2p.protocol import admission, expulsion, gate
from dipaco_p2p.protocol.admission import ADMITTED
from dipaco_p2p.protocol.audits import Audited
from dipaco_p2p.protocol.documents import Sealed, seal
from dipaco_p2p.protocol.gate import Appraisal, Repetition
from dipaco_p2p.protocol.norms import Norms
from dipaco_p2p.protocol.rounds import Round, RoundEvent, RoundState
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.protocol.standing import Standings
from dipaco_p2p.protocol.verdicts import Verdicts
from dipaco_p2p.protocol.versions import Tally
from peers.path.assignment import Assignment
from peers.path.repeating import Repeater
from peers.path.training import Training

from .patches import Change, Patches, always, done, mutant, nothing, replacing

HOSTILE = ("hostile peer",)
BRIBED = ("bribed volunteer",)
FORGING = ("forging volunteer",)


def _rules(changed: Callable[[Intake], dict[str, Any]]) -> Change:
    """The rules of admission with these fields of them changed."""

    def make(original: Any) -> Any:
        return lambda self, contribution: replace(original(self, contribution), **changed(self))

    return Intake, "_rules", make


BESIDE_ITS_COPY = (Originals, "copies", always([]))
FORGETS_COUNTED = (Intake, "has", lambda original: lambda self, contribution: contribution in self.admitted)

# -- admission


replacing(
    "no dedupe", _rules(lambda self: {"contributed": {}}), FORGETS_COUNTED, (Tally, "check", nothing), faults=HOSTILE
)
replacing("stale base accepted", (admission, "_judge_base", always(ADMITTED)), faults=HOSTILE)


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
    patches.replace(Norms, "clip_norm", always(None))


replacing("first steps of any length count", (recompute.Gradients, "first_clip_norm", always(None)), faults=("join",))
replacing("a lone first step goes any distance", (Norms, "furthest", always(float("inf"))), faults=FORGING)


@mutant("work counts without a claim", faults=HOSTILE)
def work_without_a_claim(patches: Patches) -> None:
    patches.replace_everywhere("require_claim", intake.require_claim, done)


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


@mutant("who leaves when audited is excused", faults=("leaving forger",))
def who_leaves_is_excused(patches: Patches) -> None:
    @patches.wrap(Repeater, "_state")
    async def state(original: Any, self: Repeater, work: Any, ref: Any) -> bytes | None:
        given: bytes | None = await original(self, work, ref)
        if given is None and work.author not in self._node.watch.heartbeats:
            raise Unreachable("the author of a work has left")
        return given


replacing("the only known author is immune", (gate, "_surely_gains", always(False)), faults=("spoiling volunteer",))


# -- audits


@mutant("forged work counts", faults=FORGING)
def forged_work_counts(patches: Patches) -> None:
    patches.replace(gate, "is_forged", always(False))


@mutant("forgers do not wait", faults=FORGING)
def forgers_do_not_wait(patches: Patches) -> None:
    @patches.wrap(Standings, "of")
    def of(original: Any, self: Standings, peer: Any) -> Any:
        return replace(original(self, peer), waits=0)


replacing("a new leader forgets what was refused", (Trials, "_recall", nothing), faults=FORGING)


@mutant("a single auditor decides", faults=BRIBED)
def a_single_auditor_decides(patches: Patches) -> None:
    patches.replace(gate, "is_forged", lambda original: lambda appraisals: gate._repetitions(appraisals)[1] > 0)


@mutant("an audit is credited twice", faults=("slow", "join"))
def an_audit_is_credited_twice(patches: Patches) -> None:
    patches.replace(Audited, "auditors", always(frozenset()))
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
    patches.replace(Standings, "is_noted", always(False))
    patches.replace(Standings, "check", nothing)
    _say_again(patches)


@mutant("strangers' word on repeated steps counts", faults=("slow", "join"))
def strangers_word_counts(patches: Patches) -> None:
    patches.replace(Verdicts, "believes", always(True))

    @patches.wrap(Trials, "next_round")
    def next_round(original: Any, self: Trials, *, is_made: bool) -> None:
        original(self, is_made=is_made)
        self._evidence += [
            _lie(self, number, share.peer) for share in self._chain.ledger.head.shares for number in (1, 2)
        ]


def _lie(trials: Trials, number: int, of: PeerId) -> Sealed[Appraisal]:
    """That work of this peer is forged which it never made, by a key that the leader has made."""
    friend, work = Signer(number.to_bytes(32, "big")), digest(f"never made by {of}".encode())
    said = Appraisal(
        run=trials._node.run.id,
        work=work,
        of=of,
        tokens=1,
        gain=1.0,
        error=0.1,
        draw=friend.sign(gate.DRAW, work.encode()),
        repeated=Repetition(cosine=0.0, ratio=1.0, moments=1.0),
        author=friend.peer,
    )
    return seal(friend, said)


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


@mutant("deadline never fires", faults=("idle worker",))
def deadline_never_fires(patches: Patches) -> None:
    @patches.wrap(Round, "_event")
    def event(original: Any, self: Round, *parts: Any, **named: Any) -> Any:
        found = original(self, *parts, **named)
        return None if found is RoundEvent.DEADLINE else found
