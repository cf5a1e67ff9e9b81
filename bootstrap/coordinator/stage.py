"""One stage of a run on the seed node: the archive, the owner of last resort, the evaluator of versions.

Training goes on without it; joining, handing over and the archive wait until it is back. Terms and chains are on disk,
so a restart goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dipaco_p2p.clock import Clock
from dipaco_p2p.core.model.engine import spare_device
from dipaco_p2p.errors import DipacoError, EnvironmentUnfit, IntegrityError
from dipaco_p2p.node.authority import Decrees
from dipaco_p2p.node.calls import GetServing, Serving
from dipaco_p2p.node.decree_news import serve_decrees
from dipaco_p2p.node.node import open_member, serve_store
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import ArchiveChains, SeedArchive
from dipaco_p2p.owner.challenges import Challenges
from dipaco_p2p.owner.judge import Judge, Measure
from dipaco_p2p.owner.leadership import Leadership
from dipaco_p2p.owner.retention import Retention
from dipaco_p2p.program.curves import Curves, Subject
from dipaco_p2p.program.files import write_atomically
from dipaco_p2p.program.history import History
from dipaco_p2p.program.tasks import keep_going
from dipaco_p2p.protocol.decrees import Rebuilt
from dipaco_p2p.protocol.documents import ModuleVersion
from dipaco_p2p.protocol.liveness import Heartbeat, heartbeat_interval_s
from dipaco_p2p.protocol.manifest import GRID, WARMUP
from dipaco_p2p.protocol.signing import PeerId, short
from dipaco_p2p.protocol.verdicts import auditors_against, read_appraisals
from dipaco_p2p.protocol.versions import Damage
from dipaco_p2p.swarm.api import Swarm
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import ModuleId, PathId
from dipaco_p2p.use.best_rounds import number_of, read_evaluations, serving_header

from ..archives.early_stopping import jump
from ..archives.evaluator import Evaluator, PathLosses, RoundEvaluation, append_evaluation, judge_finished, told_texts
from ..archives.rebuild import make_rebuilt
from ..archives.records import Checks, PublicRecords
from ..archives.writing import PageWords
from ..control.view import Seen
from ..recovery.catching_up import CatchingUp
from ..recovery.rejoin import Met
from ..text.sequences import Sequences
from .measurements import Measurements
from .resharding import Resharding
from .terms import Terms

log = logging.getLogger(__name__)

SIGNS_FIRST_S = 60.0
"""How long after its start, at most, the coordinator measures nothing while versions wait for its signature."""
BEHIND_POLL_S = 0.5

INCOMPARABLE = "the text that is held out has grown with the run: figures before and after are not of the same text"


class There(NamedTuple):
    """Who was there at some moment."""

    volunteers: int
    covered: int
    paths: int

    def __str__(self) -> str:
        words = "1 volunteer" if self.volunteers == 1 else f"{self.volunteers} volunteers"
        return f"{words} alive, {self.covered} of {self.paths} paths covered"


class SeedStage:
    """One stage, served until `end`. What it knows it still tells to latecomers when the next stage is open."""

    def __init__(
        self,
        run: Run,
        swarm: Swarm,
        store: Store,
        *,
        sequences: Callable[[], Sequences],
        clock: Clock,
        make_evaluator: Callable[..., Evaluator] = Evaluator,
        measure: Measure | None = None,
        on_failure: Callable[[], None] = lambda: None,
        decrees: Decrees | None = None,
        follows: SeedStage | None = None,
        curves: Curves | None = None,
        words: PageWords | None = None,
        retention: Retention | None = None,
        texts: Sequence[int] = (),
    ) -> None:
        """`on_failure` is called when the disk has refused a write: `failure` says what. `decrees` are those of the
        whole run; without, those that this stage's store keeps. Rounds are judged, and told, after those of the stage
        that this one `follows`; `curves` show them, and `words` what the model writes after them. The archive
        keeps what `retention` says, without one everything. `texts` says at which validation sequence each text
        begins that came with a growth."""
        retention = retention or Retention()
        self.run = run
        self._words = words
        self._on_failure = on_failure
        self._folder = folder = store.folder
        scoped = ScopedSwarm(swarm, run.id)
        self._node = open_member(
            run,
            scoped,
            clock,
            store,
            heartbeat=Heartbeat(role="seed", owns=True, doing="serving", light=retention.is_light),
            history=self._begin_history(folder / "history.jsonl", clock, swarm.peer, curves or Curves()),
            upload_bytes_max=2 * max(map(run.snapshot_bytes_max, run.topology.modules())),
            decrees=decrees,
        )
        self._archive = SeedArchive(run, store)
        self._archive.thinning.retention, self._archive.thinning.needed = retention, self._needed
        wanted = retention.keepers
        self._challenges = Challenges(self._node, self._archive, wanted=wanted)
        if run.is_last_stage:
            self._archive.thinning.kept_elsewhere = self._challenges.kept
        elif wanted:  # keepers move on to the grid with everybody else, so of the warm-up nothing is forgotten
            self._archive.thinning.kept_elsewhere = lambda module: 0
        self._chains = ArchiveChains(self._node, self._archive, is_closed=lambda: self._catching_up.is_going_on)
        self._judge = Judge(self._node, device=spare_device(), measure=measure)
        self._chains.appraise = self._judge.appraise
        self._node.watch.workers = lambda: self.workers
        self._catching_up = CatchingUp(self._chains, folder.parent, tell=partial(print, flush=True))
        self._terms = Terms(self._chains, on_deposed=self._on_deposed, is_closed=lambda: self._catching_up.is_going_on)
        self._ownership = Leadership(self._chains, self._terms, may_take=lambda: not self._terms.is_catching_up)
        self._met = Met(folder.parent, scoped.peer)
        self._new_version = asyncio.Event()
        self._evaluator = make_evaluator(run, store, self._archive, device=spare_device(), texts=texts)
        self._records = PublicRecords(store, self._archive)
        self._checks = Checks(
            run,
            store,
            self._archive,
            judged=self._records.judgement,
            is_alive=lambda peer: peer in self._node.watch.heartbeats,
            was_asked=lambda sender, check: self._measurements.take(sender, check),
        )
        self._measurements = Measurements(
            self._node,
            self._evaluator,
            share=retention.measured,
            workers=lambda: self.workers,
            trainers=self._archive.trainers,
            is_over=lambda: self.told.is_set(),
        )
        self._resharding = Resharding(self._node, self._evaluator, sequences, workers=lambda: self.workers)
        self.complete = asyncio.Event()
        """Every module of this stage has its last version, and it is in the archive."""
        self.told = asyncio.Event()
        """The last round of this stage is judged and told."""
        self._follows = follows
        self._tasks: list[asyncio.Task[Any]] = []
        self._serving = serving_header([])
        self._judged: dict[str, Any] | None = None
        """The evaluator's newest row."""
        self._best = -1
        """The judged round with the smallest loss."""
        self._begun_s = self._advanced_s = clock.now_s()
        self._round = self._archive.complete_version
        self._proposed: set[PeerId] = set()
        """Whom to ban we have proposed on the screen."""
        self._closed: dict[int, There] = {}
        """Who was there when a round closed: it is judged later, and they may have left by then. Rounds that closed
        before a restart are not in it."""

    @property
    def workers(self) -> frozenset[PeerId]:
        """Whose work the last versions count, but those who forged some."""
        return frozenset(self._archive.workers())

    def begin(self) -> None:
        """Answer, lead, evaluate."""
        serve_store(self._node.swarm, self._node.store)
        serve_decrees(self._node.swarm, self._node.decrees, self._node.presence)
        self._terms.serve()
        self._judge.serve()
        self._challenges.serve()
        self._chains.listen(self._on_version)
        self._resharding.serve()
        self._measurements.serve()
        self._records.serve(self._node.swarm)
        self._checks.serve(self._node.swarm)
        GetServing.serve(self._node.swarm, self._on_serving)
        loops = (
            self._node.presence.run,
            self._watch_swarm,
            self._ownership.run,
            self._catching_up.run,
            partial(self._once_caught_up, self._evaluate),
            partial(self._once_caught_up, self._resharding.run),
            partial(self._once_caught_up, self._challenges.run),
            self._challenges.take_down,
        )
        self._tasks = [asyncio.create_task(keep_going(loop, self._node.clock)) for loop in loops]
        self._note_complete()

    async def end(self) -> None:
        """Hand over what is led here, and fall silent; the archive still answers."""
        await self._ownership.leave()
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._node.presence.leave()

    async def say(self) -> None:
        """Put our heartbeat out now: it tells that there is a further decree."""
        await self._node.presence.say()

    def rebuild(self, damage: Damage) -> Rebuilt | None:
        """What a decree can bring back without the work of a banned peer; takes seconds, so for a thread."""
        return make_rebuilt(self.run, self._node.store, self._archive, damage)

    def seen(self) -> Seen:
        """How this stage stands now, for whoever asks its coordinator."""
        return Seen(
            run=self.run,
            watch=self._node.watch,
            mandates=self._node.mandates,
            decrees=self._node.decrees,
            ledgers=self._archive.ledgers,
            thinned=self._archive.thinning.of,
            judged=self._judged,
            round=self._round,
            round_age_s=self._node.clock.now_s() - self._advanced_s,
            line=self._node.swarm.statistics(),
            now_s=self._node.clock.now_s(),
            is_catching_up=self._catching_up.is_going_on,
            keepers=self._challenges.tested,
        )

    @property
    def failure(self) -> EnvironmentUnfit | None:
        """What the disk refused, if it did."""
        return self._node.store.failure

    def cancel(self) -> None:
        """Let everything go at once."""
        self._ownership.cancel()
        for task in self._tasks:
            task.cancel()

    async def _on_deposed(self, module: ModuleId, holder: PeerId) -> None:
        if holder == self._node.peer:
            await self._ownership.drop(module)
            await self._node.presence.resign(module)

    def _on_version(self, version: ModuleVersion) -> None:
        self._node.history.add(
            "archived", module=str(version.module), version=version.version, digest=version.digest, term=version.term
        )
        self._challenges.on_version()
        self._propose_bans(version)
        if (complete := self._archive.complete_version) > self._round:
            self._closed |= dict.fromkeys(range(self._round + 1, complete + 1), self._who_is_there())
            self._round, self._advanced_s = complete, self._node.clock.now_s()
        self._new_version.set()
        self._note_complete()

    def _needed(self, module: ModuleId) -> set[int]:
        """Versions whose parameters are still read: of rounds that are to be judged, of the last one that was, which
        others measure again, of those that paths are served with, of the best one, which a rollback is proposed to, and
        of one that a decree goes back to."""
        ledger, judged = self._archive.ledgers[module], -1 if self._judged is None else int(self._judged["version"])
        served = self._serving["rounds"].items()
        found = {version for path, version in served if module in PathId.parse(path).modules()}
        if (sealed := ledger.due(self._node.decrees)) is not None:
            found.add(sealed.document.to)
        return found | {self._best} | set(range(max(judged, 0), ledger.head.version + 1))

    def _propose_bans(self, version: ModuleVersion) -> None:
        """Of those whose work two volunteers could not repeat: the version names what they have signed, so that anybody
        can see it. To ban is the coordinator's own decision."""
        if version.appraisals is None or version.findings is None or not version.findings.forged:
            return
        try:
            said = read_appraisals(self._archive.blob(version.appraisals.digest))
        except IntegrityError as error:  # of a disk that changes bytes; `verify` tells of it
            log.warning("what judges said of version %d of %s: %s", version.version, version.module, error)
            return
        for peer in sorted(set(version.findings.forged)):
            auditors = auditors_against(peer, said)
            where = {"module": str(version.module), "version": version.version}
            self._node.history.add("ban_proposed", peer=peer, auditors=auditors, **where)
            if peer not in self._proposed and peer not in self._node.decrees.state.banned:
                self._proposed.add(peer)
                found = f"{len(auditors)} volunteers could not repeat ({version.module}, version {version.version})"
                advice = f"`dipaco-bootstrap ban ...{short(peer)}` ends its part"
                print(f"...{short(peer)} handed in work that {found}: {advice}", flush=True)

    def _note_complete(self) -> None:
        is_whole = all(ledger.is_complete for ledger in self._archive.ledgers.values())
        if is_whole and not self._catching_up.is_going_on:  # what follows a stage is signed
            self.complete.set()

    def _who_is_there(self) -> There:
        watch = self._node.watch
        return There(watch.volunteers_alive, watch.paths.covered(), len(watch.claims))

    def _begin_history(self, path: Path, clock: Clock, me: PeerId, curves: Curves) -> History:
        history = History(path, clock)
        curves.follow(
            history, Subject(run=self.run.name, run_id=self.run.origin, stage=self.run.manifest.stage, peer=me)
        )
        history.listen(_print_stopped)
        return history

    def _note_judged(self, row: Mapping[str, Any]) -> None:
        there = self._closed.get(row["version"])
        self._node.history.add(
            "judged",
            round=row["version"],
            loss=row["loss"],
            perplexity=row["perplexity"],
            path_losses={path: found["loss"] for path, found in row["paths"].items()},
            volunteers=None if there is None else there.volunteers,
            covered=None if there is None else there.covered,
        )

    def _print_judged(self, row: Mapping[str, Any]) -> None:
        version, rounds, stage = row["version"], self.run.rounds, self.run.manifest.stage
        name = {WARMUP: "warm-up round", GRID: "round"}.get(stage, f"{stage} round")
        when = f"{name} {version} of {rounds}" if version else f"before {name} 1"
        there = f", {self._closed[version]}" if version in self._closed else ""
        of_texts = told_texts(row)
        if of_texts and not version:
            print(INCOMPARABLE, flush=True)
        print(f"{when}: validation perplexity {row['perplexity']:.1f}{of_texts}{there}", flush=True)
        if version == rounds and self.run.is_last_stage:
            end = f"{self.run.manifest.spent + rounds} rounds, perplexity {row['perplexity']:.1f}"
            print(f"the run is complete: {end}; still serving, Ctrl-C stops", flush=True)

    def _propose_rollback(self, rows: Sequence[dict[str, Any]]) -> None:
        """Where the last round did damage. To go back is the coordinator's own decision, as a ban is."""
        if (found := jump(rows)) is None:
            return
        modules = {module: round(nats, 3) for module, nats in found.modules.items()}
        thinning = self._archive.thinning  # without the parameters of each round it goes back a little further
        of_worst = [thinning.of(ModuleId.parse(module)) for module in modules]
        kept = min((thinned.kept_before(found.best) for thinned in of_worst), default=found.best)
        self._node.history.add(
            "rollback_proposed", version=found.version, to=kept, nats=round(found.nats, 3), modules=modules
        )
        worst = ", ".join(f"{module} by {nats:.2f}" for module, nats in list(found.modules.items())[:3])
        print(
            f"round {found.version} did damage: the held-out loss is {found.nats:.2f} nats above round {found.best}'s "
            f"({worst}); `dipaco-bootstrap rollback MODULE {kept}` goes back",
            flush=True,
        )

    async def _once_caught_up(self, loop: Callable[[], Awaitable[None]]) -> None:
        """What signs waits until a coordinator that came out of a backup knows what it has signed."""
        await self._catching_up.is_over.wait()
        self._note_complete()
        await loop()

    async def _watch_swarm(self) -> None:
        while True:
            await self._node.watch.refresh()
            self._met.note(self._node.watch, workers=self.workers)
            if self._node.store.failure is not None:
                self._on_failure()
            await self._node.clock.sleep(heartbeat_interval_s(self.run.config.liveness) / 2)

    async def _evaluate(self) -> None:
        """Judge every round that is complete and not judged yet, the oldest first; at the end the finished model."""
        path = self._folder / "evaluations.jsonl"
        rows = read_evaluations(path)
        judged = {row["version"] for row in rows}
        self._note_rows(rows)
        if rows:
            self._print_judged(rows[-1])
        if self._follows is not None:
            await self._follows.told.wait()
        while True:
            self._new_version.clear()
            for version in sorted(set(range(self._evaluator.complete_version() + 1)) - judged):
                await self._sign_first()
                try:
                    known = self._records.judgement(version)  # who died after signing did not write it down
                    signed = None if known is None else known.sharding
                    evaluation = await self._measured(version, signed=signed)
                    self._sign(evaluation)
                    append_evaluation(path, evaluation)
                    rows.append(evaluation.to_dict())
                    self._note_rows(rows)
                    self._print_judged(rows[-1])
                    self._note_judged(rows[-1])
                    self._propose_rollback(rows)
                    await self._let_write(evaluation)
                except IntegrityError as error:
                    log.warning("round %d was not evaluated: %s", version, error)
                except DipacoError:
                    raise
                except Exception:  # a model can be worse than we thought of: later rounds must be judged all the same
                    log.exception("round %d was not evaluated", version)
                judged.add(version)
            if self.run.rounds in judged:
                self.told.set()
                if self.run.is_last_stage:
                    await self._judge_finished()
            await self._new_version.wait()

    async def _sign_first(self) -> None:
        """What was made while the coordinator was away is signed before any of it is measured: owners keep what these
        versions were made of until then. Leaders say how many there are, so this has an end of its own."""
        clock, until_s = self._node.clock, self._begun_s + SIGNS_FIRST_S
        while self._is_behind() and clock.now_s() < until_s:
            await clock.sleep(BEHIND_POLL_S)

    def _is_behind(self) -> bool:
        usual = self.run.config.rounds.unsigned_usual
        heads = {module: ledger.head.version for module, ledger in self._archive.ledgers.items()}
        return any(self._node.watch.reached(module) > head + usual for module, head in heads.items())

    async def _measured(self, version: int, *, signed: int | None) -> RoundEvaluation:
        """What the genesis predicts is always measured here: its parameters are."""
        if not (version and self._measurements.is_on):
            return await asyncio.to_thread(self._evaluator.evaluate, version, signed=signed)
        sharding = self._evaluator.sharding(version, signed=signed)
        found = await self._measurements.of(version, sharding)
        paths = {path: PathLosses(validation=found.get(path), holdout=None) for path in self.run.topology.paths()}
        return self._evaluator.summary(version, sharding, paths)

    def _note_rows(self, rows: list[dict[str, Any]]) -> None:
        if rows:
            self._serving, self._judged = serving_header(rows), rows[-1]
            self._best = min(rows, key=lambda row: number_of(row["loss"]))["version"]

    async def _let_write(self, judged: RoundEvaluation) -> None:
        """For the page, and only after the newest round: texts must not keep the judging from catching up."""
        is_late = judged.version < self._evaluator.complete_version()
        if self._words is None or is_late or (judged.version and self._measurements.is_on):
            return
        try:
            await asyncio.to_thread(self._words.add, self._evaluator, judged)
        except Exception:  # whatever a model writes, and wherever: rounds must be judged all the same
            log.exception("no text of round %d is shown", judged.version)

    def _sign(self, evaluation: RoundEvaluation) -> None:
        now_s = self._node.clock.now_s()
        self._records.judge(self._node.swarm.signer, self._evaluator, evaluation, at_s=now_s)
        self._checks.take_asked(self._measurements.checks)

    async def _on_serving(self, sender: PeerId, request: GetServing) -> Serving:
        """The round that each path is served with (early_stopping.py); none before the first was judged."""
        return Serving(**self._serving)

    async def _judge_finished(self) -> None:
        """Once all shardings are there, every way to route the finished model, side by side."""
        path = self._folder / "finished.json"
        if path.exists():
            return
        await self._resharding.done.wait()
        rows = read_evaluations(self._folder / "evaluations.jsonl")
        finished = await asyncio.to_thread(judge_finished, self._evaluator, rows)
        write_atomically(path, json.dumps(finished, indent=1).encode())
        for name, found in finished["routing"].items():
            print(f"finished model, {name}: validation perplexity {found['perplexity']:.1f}", flush=True)


def _print_stopped(event: Mapping[str, Any]) -> None:
    if event["ev"] == "curves_stopped":
        print(f"curves to {event['to']} have stopped: {event['detail']}; the run goes on", flush=True)
