"""The mutants of disks, admission, averages and records (mutants.py says what a mutant is)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dipaco_p2p.core import blocks
from dipaco_p2p.protocol import admission
from dipaco_p2p.protocol.admission import ADMITTED
from dipaco_p2p.protocol.rounds import Round, RoundEvent, RoundState
from dipaco_p2p.protocol.versions import Tally
from dipaco_p2p.runtime import intake, ledger, recompute, store
from dipaco_p2p.runtime.intake import Intake
from dipaco_p2p.runtime.ledger import Ledger
from dipaco_p2p.runtime.store import Store
from dipaco_p2p.runtime.watch import Watch
from dipaco_p2p.swarm.blobs import blobs
from dipaco_p2p.swarm.record_cache import RecordCache

from .disk import SimulatedDisk
from .mutants import Soil, mutant

OUTAGES = ("power cut", "total outage", "torn write")
HOSTILE = ("hostile peer",)


def _nothing(original: Any) -> Callable[..., None]:
    return lambda *parts, **named: None


def _always(value: Any) -> Callable[[Any], Callable[..., Any]]:
    return lambda original: lambda *parts, **named: value


# -- disks


@mutant("no sync of a file", faults=OUTAGES)
def no_sync(soil: Soil) -> None:
    soil.replace(SimulatedDisk, "sync", _nothing)


@mutant("no sync of the folder", faults=OUTAGES)
def no_sync_of_the_folder(soil: Soil) -> None:
    soil.replace(SimulatedDisk, "sync_folder", _nothing)


@mutant("written in place, not renamed", faults=("torn write", "crash at a point"))
def written_in_place(soil: Soil) -> None:
    def write(path: Path, *parts: bytes | memoryview, is_cold: bool = False) -> None:
        with path.open("wb") as file:
            for part in parts:
                store.disk.write(file, part)
            store.disk.sync(file)

    soil.replace_everywhere("write_atomically", store.write_atomically, write)


@mutant("receipt before the disk", faults=("crash", "total outage"))
def receipt_before_the_disk(soil: Soil) -> None:
    def make(original: Any) -> Any:
        def add(self: Ledger, sealed: Any) -> None:
            if sealed.id not in self.open and sealed.id not in self.counted:
                self.open[sealed.id] = sealed

        return add

    soil.replace(Ledger, "add", make)


@mutant("digest not checked", faults=("bit rot", "crash"))
def digest_not_checked(soil: Soil) -> None:
    def make(original: Any) -> Any:
        def get(self: Store, name: str) -> bytes | None:
            path = self._blob_path(name)
            return path.read_bytes() if path.exists() else None

        return get

    soil.replace(Store, "get", make)
    soil.replace(blobs, "digest_of", lambda original: _Same)


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


@mutant("no dedupe", faults=HOSTILE)
def no_dedupe(soil: Soil) -> None:
    def make(original: Any) -> Any:
        def rules(self: Intake, contribution: str) -> Any:
            return replace(original(self, contribution), contributed={})

        return rules

    soil.replace(Intake, "_rules", make)
    soil.replace(Intake, "has", lambda original: lambda self, contribution: contribution in self.admitted)
    soil.replace(Tally, "check", _nothing)


@mutant("stale base accepted", faults=HOSTILE)
def stale_base_accepted(soil: Soil) -> None:
    soil.replace(admission, "_judge_base", _always(ADMITTED))


@mutant("base digest not compared", faults=HOSTILE)
def base_digest_not_compared(soil: Soil) -> None:
    def make(original: Any) -> Any:
        def judge_base(contribution: Any, rules: Any) -> Any:
            known = rules.bases.get(contribution.base_version, contribution.base_digest)
            return original(replace(contribution, base_digest=known), rules)

        return judge_base

    soil.replace(admission, "_judge_base", make)


@mutant("weight lies accepted", faults=HOSTILE)
def weight_lies_accepted(soil: Soil) -> None:
    def make(original: Any) -> Any:
        def rules(self: Intake, contribution: str) -> Any:
            return replace(original(self, contribution), tokens_max=2**40)

        return rules

    soil.replace(Intake, "_rules", make)


@mutant("path not checked", faults=HOSTILE)
def path_not_checked(soil: Soil) -> None:
    def make(original: Any) -> Any:
        def rules(self: Intake, contribution: str) -> Any:
            return replace(original(self, contribution), paths=frozenset(self._run.topology.paths()))

        return rules

    soil.replace(Intake, "_rules", make)


@mutant("norm check skipped", faults=HOSTILE)
def norm_check_skipped(soil: Soil) -> None:
    soil.replace(intake, "judge_norm", _always(ADMITTED))
    soil.replace(Intake, "clip_norm", _always(None))


@mutant("NaN check skipped", faults=HOSTILE)
def nan_check_skipped(soil: Soil) -> None:
    soil.replace_everywhere("check_scales", blocks.check_scales, lambda scales: None)
    soil.replace(intake, "judge_norm", _always(ADMITTED))


# -- rounds and averages


@mutant("order of arrival used", faults=("slow", "crash"))
def order_of_arrival_used(soil: Soil) -> None:
    soil.replace_everywhere("order", recompute.order, lambda item: 0)


@mutant("momentum applied without contributors", faults=("crash", "slow"))
def momentum_without_contributors(soil: Soil) -> None:
    def make(original: Any) -> Any:
        def tick(self: Round, claims: Any, config: Any, **named: Any) -> Round:
            is_empty = self.state is RoundState.OPEN and any(claims.values())
            return replace(self, state=RoundState.CLOSED) if is_empty else original(self, claims, config, **named)

        return tick

    soil.replace(Round, "tick", make)


@mutant("deadline never fires", faults=("idle claimant",))
def deadline_never_fires(soil: Soil) -> None:
    def make(original: Any) -> Any:
        def event(self: Round, *parts: Any, **named: Any) -> Any:
            found = original(self, *parts, **named)
            return None if found is RoundEvent.DEADLINE else found

        return event

    soil.replace(Round, "_event", make)


@mutant(
    "a claim alone keeps others from a path",
    faults=("idle claimant", "gone for good", "leave", "seed death"),
    seeds=(85,),
)
def a_claim_is_enough(soil: Soil) -> None:
    soil.replace(Watch, "still_s", _always(0.0))


# -- records


def _immortal(kind: str) -> Callable[[Any], Any]:
    """Records under keys of this kind never expire for their reader."""

    def make(original: Any) -> Any:
        def live(self: RecordCache, key: str) -> Any:
            return self._rows[key].records if kind in key and key in self._rows else original(self, key)

        return live

    return make


@mutant("expired claims kept for ever", faults=("gone for good",))
def expired_claims_kept(soil: Soil) -> None:
    soil.replace(RecordCache, "_live", _immortal("/claims"))


@mutant("heartbeat of the dead believed", faults=("gone for good",))
def heartbeat_of_the_dead_believed(soil: Soil) -> None:
    soil.replace(RecordCache, "_live", _immortal("/peers"))


@mutant("head of the dead believed", faults=("gone for good",))
def head_of_the_dead_believed(soil: Soil) -> None:
    soil.replace(RecordCache, "_live", _immortal("/heads"))


@mutant("chain not checked for what counts twice", faults=("duplication", "partition"))
def truncated_ledger(soil: Soil) -> None:
    soil.replace(Tally, "check", _nothing)
    soil.replace(ledger.Ledger, "counted", lambda original: property(lambda self: {}))
