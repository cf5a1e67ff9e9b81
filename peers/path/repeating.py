"""An auditor's part of the gate: takes another volunteer's inner steps again, and compares what they come to.

Where its author says that they began has to be what the module's chain says, or else any outer gradient could be
explained by a state that was made up for it. Compared is what the steps came to before compression, that is what was
sent and what is left unsent, without what was owed before: an auditor's own compression would add its error, and what
was owed makes any two vectors look alike.

What is left unsent is the author's word, so it has to be what the codec leaves. Else whoever sends anything at all may
call its distance from the steps a debt, and the two together come to the steps. The optimizer's moments after the steps
are its word as well, and the next round begins with them: so they have to lead where the auditor's own lead.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.model.inner import StepReport
from dipaco_p2p.core.model.shards import Shard
from dipaco_p2p.core.outer.codec import Compressed
from dipaco_p2p.core.outer.compress import compress
from dipaco_p2p.core.outer.outer_step import outer_gradient
from dipaco_p2p.errors import EnvironmentUnfit, IntegrityError, Refused, SwarmError, Unreachable
from dipaco_p2p.node.node import CALL_TIMEOUT_S, Given, Member, fetch_given
from dipaco_p2p.node.reading import chain_tellers, versions_after
from dipaco_p2p.node.sizes import state_bytes_max
from dipaco_p2p.program.tasks import in_time
from dipaco_p2p.protocol.documents import BlobRef, Contribution, ModuleVersion, Recipe
from dipaco_p2p.protocol.gate import GAIN_MAX, GIVEN_SLOWLY, MADE_UP, NOTHING_GIVEN, Repetition
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.versions import genesis_version, up_to_last
from dipaco_p2p.topology import ModuleId

from .shard_source import ShardSource
from .trainer import OuterGradient, PathTrainer

log = logging.getLogger(__name__)

Doubles = NDArray[np.float64]

TINY = 1e-9
"""As near to 0 as a ratio of norms counts."""
UNLIKE_MAX = 0.02
"""How far what was sent may be from what the codec makes, as a share of the squared norm: as for a cosine of 0.99. What
is left is kept in bfloat16, which moves it by up to 0.0006."""
HEADING_MIN = 0.9
"""The least cosine of the ways that both states lead (core/model/optimizer.py): else an author could choose the next
round's way by the state after this one, and both would come out the same."""
TRIES = 3
"""To get a state from its author, who may be sending much else."""
OVER_VERSIONS = 3
"""After so many more versions than a work's base its author need not have its states any more: two rounds after it."""
LOOK_S = 10.0
"""Between two looks whether it is so."""


class Repeater:
    """Repeats works for one peer's judge (owner/judge.py, `Repeat`)."""

    def __init__(self, node: Member, *, make_trainer: Callable[..., PathTrainer]) -> None:
        """`make_trainer` as PathTrainer, with this machine's device."""
        self._node = node
        self._make_trainer = make_trainer
        self._supplies = ShardSource(node, on_wait=lambda: None)
        self._is_closed = False

    async def __call__(
        self, work: Contribution, before: Sequence[Floats], sent: Sequence[Compressed], shard: Shard
    ) -> Repetition:
        """Raises DipacoError if it cannot be done here; what its author withholds is a repetition that failed."""
        recipe = work.recipe
        if recipe is None or work.state is None or not self._is_possible(work, recipe):
            return MADE_UP
        if recipe.start is not None and not await self._is_named(work, recipe, recipe.start):
            return MADE_UP
        start = None if recipe.start is None else await self._state(work, recipe.start)
        if isinstance(start, Repetition):
            return start
        run, optimizer = self._node.run, await self._supplies.optimizer()
        trainer = self._make_trainer(run, work.path, shard, sharding=work.sharding, optimizer=optimizer)
        try:
            if start is not None:
                trainer.load_state(start)
        except IntegrityError as error:
            return self._useless(work, error)

        def on_step(report: StepReport) -> bool:
            return not self._is_closed

        flats = trainer.beginning(before)
        place = recipe.place, recipe.replicas
        try:
            result = await trainer.train(
                flats, round_number=recipe.round, replica=place, steps=work.steps, on_step=on_step
            )
            made = await asyncio.to_thread(trainer.outer_gradients, flats, result.flats)
        except Exception as error:
            if start is None or isinstance(error, (EnvironmentUnfit, MemoryError, OSError)):
                raise
            trainer.start_over()  # what fails without the state, too, is a fault of ours
            await trainer.train(flats, round_number=recipe.round, replica=place, steps=1, on_step=on_step)
            return self._useless(work, error)
        if result.steps_done != work.steps:
            raise Refused(f"{result.steps_done} of {work.steps} steps were taken here", reason=Reason.OTHER)
        left = await self._left(work, work.state, trainer, made)
        if isinstance(left, Repetition):
            return left
        try:
            unsent, theirs = await asyncio.to_thread(trainer.read_state, left)
        except IntegrityError as error:
            return self._useless(work, error)
        ours = trainer.inner_state()
        own = [outer_gradient(old, new) for old, new in zip(flats, result.flats, strict=True)]
        claimed = claims(sent, left=unsent, owed=trainer.owed())
        found = compared(claimed, own, moments=farthest(theirs.moments(), ours.moments()))
        is_sound = await asyncio.to_thread(ours.heading, theirs) >= HEADING_MIN
        is_sound &= await asyncio.to_thread(is_by_codec, sent, left=unsent)  # it compresses the whole path once more
        return found if is_sound else replace(found, cosine=-1.0)

    async def _left(
        self, work: Contribution, ref: BlobRef, trainer: PathTrainer, made: Sequence[OuterGradient]
    ) -> bytes | Repetition:
        """The state after the steps, as its author has it. Where ours has the same digest, as on like machines, nothing
        needs to be fetched: it is half of what an audit costs the author's line."""
        ours = await asyncio.to_thread(trainer.state_bytes, made)
        return ours if BlobRef.of(ours) == ref else await self._state(work, ref)

    def _is_possible(self, work: Contribution, recipe: Recipe) -> bool:
        """Whether anybody could have taken its steps: a round has no more, each has the same number of tokens, and its
        version was there. Otherwise no auditor could repeat them, and their author would never be found."""
        inner, model = self._node.run.config.inner, self._node.run.config.model
        is_whole = work.steps <= inner.steps and work.tokens == work.steps * inner.batch * model.context
        return is_whole and recipe.round <= work.base_version <= self._node.run.rounds

    @staticmethod
    def _useless(work: Contribution, error: Exception) -> Repetition:
        log.info("a state of %s is of no use: %s", work.path, error)
        return MADE_UP

    def close(self) -> None:
        """Take no further step: its owner wants the machine."""
        self._is_closed = True

    async def _is_named(self, work: Contribution, recipe: Recipe, start: BlobRef) -> bool:
        """Whether a version that somebody made again counts this state of the path. Raises Refused if those who answer
        have not all that the author could have seen: after an outage an archive comes up to the others.

        It has seen the version that its round began with, whatever it calls the one before `start`. Another module of
        the path may be ahead of the one that the work is for, and alone have counted what the path did before: so the
        versions that its steps began with have to be among what is told. Those of a leader whose mirrors are away are
        vouched for later."""
        is_all_told, after = True, max(0, min(recipe.since, recipe.round - 1))
        bases = {module: part.base_digest for module, part in zip(work.path.modules(), work.parts, strict=False)}
        for module in sorted(work.path.modules(), key=lambda each: each != work.module):  # mostly it has what is sought
            reached = work.base_version if module == work.module else await self._reached(module)
            found = await self._versions(module, after=after, up_to=max(work.base_version, reached))
            if any(share.path == work.path and share.state == start for each in found for share in each.shares):
                return True
            known = {genesis_version(self._node.run.manifest, module).digest, *(each.digest for each in found)}
            is_all_told &= bool(found) and found[-1].version >= recipe.round and bases.get(module) in known
        if not is_all_told:
            raise Refused(f"nobody told all versions after {recipe.since}", reason=Reason.OTHER)
        return False

    async def _versions(self, module: ModuleId, *, after: int, up_to: int) -> list[ModuleVersion]:
        """The longest chain after `after` that anybody tells, as far as others than its leader vouch for it; of the
        first who tells version `up_to`. Each has its part of the time for all: a forger that leads a module, or whose
        friend does, could tell its chain so slowly that nobody else is asked."""
        most, node, tellers = list[ModuleVersion](), self._node, list(chain_tellers(self._node, module))
        limit_s = max(node.run.config.rounds.deadline_s, 2 * CALL_TIMEOUT_S) / len(node.run.topology.widths)
        for teller in tellers:
            try:
                telling = versions_after(node, teller, module, after=after, up_to=up_to)
                told = await in_time(telling, node.clock, limit_s / len(tellers), what="a chain")
            except (SwarmError, Refused, IntegrityError) as error:
                log.info("...%s told nothing more of %s: %s", teller[0][-8:], module, error)
                continue
            vouched = up_to_last(told, node.mandates.is_vouched)
            most = max(most, [sealed.document for sealed in vouched], key=len)
            if after + len(most) >= up_to:
                break
        return most

    async def _state(self, work: Contribution, ref: BlobRef) -> bytes | Repetition:
        """One of its author's, or what is to be said if the author does not give it, or next to nothing of it, or not
        as long as it has to. That it has left the swarm is no excuse: a forger could leave whenever it is asked, and
        come back."""
        if ref.size > state_bytes_max(self._node.run.config, work.path):
            return b""  # which is no state
        await self._node.watch.find(work.author)  # in a large swarm its heartbeat is not among those that we read
        given = Given()
        coming, over = asyncio.ensure_future(self._given(work, ref, given)), asyncio.ensure_future(self._over(work))
        try:
            await asyncio.wait({coming, over}, return_when=asyncio.FIRST_COMPLETED)
            if coming.done() and (data := coming.result()) is not None:
                return data
            is_slow = over.done() and not given.is_next_to_nothing(self._node.run.config.rounds)
            return GIVEN_SLOWLY if is_slow else NOTHING_GIVEN
        finally:
            for task in (coming, over):
                task.cancel()
            await asyncio.gather(coming, over, return_exceptions=True)

    async def _given(self, work: Contribution, ref: BlobRef, given: Given) -> bytes | None:
        """What its author gives; None if that is not all of it in time."""
        for _ in range(TRIES):
            try:
                return await fetch_given(self._node, ref, given, holders=[work.author])
            except (SwarmError, IntegrityError) as error:
                log.info("no state %s from its author: %s", ref.digest[:8], error)
                if isinstance(error, Unreachable):  # it had the time for all tries, and others wait for us
                    return None
                await self._node.clock.sleep(1.0)
        return None

    async def _over(self, work: Contribution) -> None:
        """Return once its author need not have the states any more: two more versions are there than the one that could
        count the work, and one more than when we asked. No leader alone can say so."""
        node, module, base = self._node, work.module, work.base_version
        wanted = max(base + OVER_VERSIONS, node.watch.reached(module) + 1)
        found = base
        while found < wanted:
            await node.clock.sleep(LOOK_S)
            if await self._reached(module) >= wanted:
                found = base + len(await self._versions(module, after=base, up_to=wanted))

    async def _reached(self, module: ModuleId) -> int:
        """The version that its leader announces, as of now."""
        with contextlib.suppress(SwarmError):
            await self._node.watch.read_heads(module)
        return self._node.watch.reached(module)


def claims(
    sent: Sequence[Compressed], *, left: Sequence[Floats | None], owed: Sequence[Floats | None]
) -> Iterator[Doubles]:
    """For each module what an author says that its steps came to: what it sent and has `left` to send, without what it
    owed from before."""
    for payload, after, before in zip(sent, left, owed, strict=True):
        claimed = payload.expand().astype(np.float64)
        claimed += 0.0 if after is None else after
        claimed -= 0.0 if before is None else before
        yield claimed


def is_by_codec(sent: Sequence[Compressed], *, left: Sequence[Floats | None]) -> bool:
    """Whether the codec makes this of what was sent and what is `left` together. It chooses what leaves least, so that
    whoever sends something else has more left. Where values are alike it may choose others here, which leaves as much:
    so what is left is compared, and not what was sent."""
    for payload, after in zip(sent, left, strict=True):
        if after is None:
            continue
        try:
            due, least = compress(payload.expand() + after, codec=payload.codec)
        except ValueError:  # more than the codec can say
            return False
        more = float(np.square(after, dtype=np.float64).sum() - np.square(least, dtype=np.float64).sum())
        if more > UNLIKE_MAX * due.norm() ** 2:
            return False
    return True


def compared(claimed: Iterable[Doubles], own: Iterable[Floats], *, moments: float) -> Repetition:
    """What steps are said to have come to beside what our own came to, a vector for each module. The module that is
    farthest off counts: beside all others together, nobody would notice what is put in place of a small one's."""
    cosines, theirs, ours = list[float](), list[float](), list[float]()
    for one, other in zip(claimed, own, strict=True):
        theirs.append(math.sqrt(float(one @ one)))
        ours.append(math.sqrt(float(np.square(other, dtype=np.float64).sum())))
        lengths = theirs[-1] * ours[-1]
        cosines.append(float(one @ other) / lengths if lengths else float(theirs[-1] == ours[-1]))
    cosine = min(1.0, max(-1.0, min(cosines)))
    return Repetition(cosine=cosine, ratio=farthest(theirs, ours), moments=moments)


def farthest(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Of the ratios of several norms that which is farthest from 1; as many come from both."""
    if len(theirs) != len(ours):
        return GAIN_MAX
    return max(
        itertools.starmap(ratio, zip(theirs, ours, strict=True)), key=lambda found: abs(math.log(max(found, TINY)))
    )


def ratio(theirs: float, ours: float) -> float:
    """1 for two that are nothing; within what a document can say."""
    if not ours:
        return GAIN_MAX if theirs else 1.0
    return min(GAIN_MAX, theirs / ours)
