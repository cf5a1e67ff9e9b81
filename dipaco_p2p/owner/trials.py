"""The work that waits for a module's next version, and what judges say of it; kept by the module's leader.

As soon as a contribution is in, its leader asks judges: peers whose work any chain counts, so that no crowd of new
keys comes to judge. Their order follows from the signatures of all leaders of the path's modules under the work, each
given only after it has taken the work: so all ask the same judges, who measure once, and nobody can choose them.
Where they do not agree, or are too few, the coordinator's seed node is asked. A round that could close waits for them
as long as rounds wait for a path, not longer. What judges are silent about counts if the chain knows its author, or if
nobody lives who could have measured it.

Meanwhile one of the same peers repeats the work, if it is its turn, and others do where that comes to something else.
The round waits for it while the author is on probation (standing.py). Else a later version says what came of it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from ..errors import DipacoError, Refused
from ..node.calls import Appraise, GetDraw
from ..node.node import CALL_TIMEOUT_S, ask, silent_s
from ..program.tasks import done_or_later
from ..protocol import gate
from ..protocol.documents import Contribution, Sealed
from ..protocol.gate import Appraisal
from ..protocol.reasons import Reason
from ..protocol.rounds import VERSIONS_TOLD, Entry
from ..protocol.signing import PeerId, short, verify
from ..protocol.standing import Standing
from ..protocol.verdicts import Verdicts, in_order, require_drawn
from ..topology import ModuleId
from .auditing import AGAIN, ALONE_SHARE, RETRY_S, Audit, have_repeated, is_drawn, is_open
from .chain import ModuleChain
from .evidence import EVIDENCE_MAX
from .intake import Key, key_of

log = logging.getLogger(__name__)

HEDGE_S, HEDGE_SHARE, DRAW_SHARE = 3.0, 0.1, 0.2
"""After so long, or so much of the time that a work may wait, without an answer somebody else is asked as well; and how
much of it the other leaders' parts of its draw may take: the rest is for judges."""
SLOW_ROUNDS = 16
"""For so many rounds such a judge comes after all others: its line may be slow, and better used for its own work."""
ASKING_MAX = 8
"""At once, about one work."""


class Trials:
    """Of one module, while this peer leads it."""

    def __init__(
        self, chain: ModuleChain, *, limit_s: Callable[[], float], on_over: Callable[[], None] = lambda: None
    ) -> None:
        """`limit_s` says how long a work may wait for its judges; `on_over` is told when it does no more."""
        self._node = chain.node
        self._chain = chain
        self._limit_s = limit_s
        self._on_over = on_over
        self._asking: dict[str, asyncio.Task[None]] = {}
        """By contribution."""
        self._said: dict[str, dict[PeerId, Sealed[Appraisal]]] = {}
        """By work, then by judge."""
        self._unheard: set[str] = set()
        """Works that somebody alive should have measured, and nobody has."""
        self._lacking = set[tuple[str, PeerId]]()  # works, with judges that answered that a part is not to be had
        self._unseen: dict[str, Sealed[Contribution]] = {}
        """Contributions of works that nobody has measured, because nobody was there."""
        self._barred: dict[Key, tuple[float, Reason]] = {}
        """Until when who was refused is refused again, and why."""
        self._slow: dict[PeerId, int] = {}
        """For how many rounds judges come last."""
        self._refused: dict[Entry, int] = {}
        """Whose work was refused last when the module had which version."""
        self._audits: dict[str, Audit] = {}
        self._draws: dict[str, asyncio.Task[str]] = {}
        self._taken: dict[str, int] = {}
        """The works that were taken lately, and after which version."""
        self._evidence: list[Sealed[Appraisal]] = []
        """What was said of refused works, of which no version tells yet."""
        self._caught: set[PeerId] = set()
        """Who forged one of these."""
        self._recalled = self.verdicts([])
        """What follows from those that a former leader left."""

    @property
    def is_on(self) -> bool:
        return self._node.run.config.judging.judges > 0

    def require(self, contribution: Contribution) -> None:
        """Raise Refused for work in place of what was refused a moment ago: judges have better to do. Later it may be
        tried again, for they may have been wrong."""
        author = contribution.author
        if author in self._caught | self._chain.chains.forgers or self._standing(author).is_out:
            # It is told of at once, so that others train the path meanwhile.
            self._refused[Entry(path=contribution.path, peer=author)] = self._chain.ledger.head.version
            raise Refused("auditors could not repeat what you handed in lately", reason=Reason.NOT_REPEATED)
        until_s, reason = self._barred.get(key_of(contribution), (0.0, Reason.HARMFUL))
        if self._node.clock.now_s() < until_s:
            raise Refused(f"{contribution.path} was refused: {reason}; try again later", reason=reason)
        topology = self._node.run.topology
        if self.is_on and len(contribution.parts) != len(topology.widths):
            detail = f"it names the parts of {len(contribution.parts)} modules of {len(topology.widths)}"
            raise Refused(detail, reason=Reason.MALFORMED)
        if self._node.run.config.audited and (contribution.recipe is None or contribution.state is None):
            raise Refused("it does not say what it takes to repeat it", reason=Reason.MALFORMED)

    def require_unrefused(self, contribution: Contribution) -> None:
        """Raise Refused for what a former leader refused, if we come to the same by what was said of it."""
        if (reason := self._recalled.reason(contribution)) is not None:
            raise Refused(f"others measured it, and it was refused: {reason}", reason=reason)

    def begin(self, sealed: Sealed[Contribution]) -> None:
        """Have it measured, and repeated if it is its turn."""
        if not self.is_on or sealed.id in self._asking:
            return
        work, until_s = sealed.document.work, self._node.clock.now_s() + self._limit_s()
        said = self._said.setdefault(work, {})
        self._taken[work] = self._chain.ledger.head.version
        if work not in self._draws:
            self._draws[work] = asyncio.create_task(self._joint_draw(sealed.document))
            self._audits[work] = Audit(asyncio.create_task(self._audit(sealed, said)), said)
            self._audits[work].task.add_done_callback(self._ended)
        task = self._asking[sealed.id] = asyncio.create_task(self._ask(sealed, said, until_s))
        task.add_done_callback(self._ended)

    def draw(self, work: str) -> str:
        """Our part of the draw that says who judges this work; raises Refused unless we have taken it: whoever knew it
        before could choose among many works."""
        if work not in self._taken:
            raise Refused("no contribution of this work has come", reason=Reason.CONTRIBUTION_MISSING)
        return self._node.swarm.signer.sign(gate.DRAW, work.encode())

    def is_over(self, contributions: Iterable[str]) -> bool:
        """Whether none of these waits for a judge. What nobody could measure when it came is measured now if somebody
        is there: the coordinator may be back, or others have work that counts."""
        wanted = list(contributions)
        for id_ in [id_ for id_ in wanted if id_ in self._unseen]:
            document = self._unseen[id_].document
            if self._next_judges(document, self._draws[document.work].result(), {}, {}):
                del self._asking[id_]
                self.begin(self._unseen.pop(id_))
        return all(id_ not in self._asking or self._asking[id_].done() for id_ in wanted)

    def verdicts(self, contributions: Iterable[Sealed[Contribution]]) -> Verdicts:
        """Of a round with these contributions, and of earlier works whose audits are over since."""
        run, works = self._node.run, {sealed.document.work for sealed in contributions} if self.is_on else set()
        said = [sealed for work in works for sealed in self._said.get(work, {}).values()]
        for audit in self._audits.values():
            said += (late := audit.found)
            audit.is_told = bool(late)
        return run.verdicts([*said, *self._evidence], self._chain.ledger.standings)

    def refused(self, contributions: Iterable[Sealed[Contribution]], verdicts: Verdicts) -> dict[str, Reason]:
        """Which of these do not count by `verdicts`, and why. They are barred for a while."""
        version, found = self._chain.ledger.head.version, {}
        for sealed in contributions if self.is_on else ():
            document = sealed.document
            reason = verdicts.reason(document)
            if reason is None and document.work in self._unheard:
                is_taken = verdicts.is_known(document.author) and not self._is_hidden(self._lack(document.work))
                reason = None if is_taken else Reason.UNJUDGED
            entry = Entry(path=document.path, peer=document.author)
            if reason is None:
                self._refused.pop(entry, None)
            else:
                found[sealed.id] = reason
                self._refused[entry] = version
                self._barred[key_of(document)] = self._node.clock.now_s() + self._limit_s(), reason
        return found

    def refused_lately(self) -> list[Entry]:
        """Whose work was refused since the versions that are told of, and of which paths through the module: their
        claims weigh nothing. Nor does any claim of who forged, whatever path it goes to."""
        ledger, watch = self._chain.ledger, self._node.watch
        oldest = ledger.head.version - VERSIONS_TOLD
        self._refused = {entry: version for entry, version in self._refused.items() if version >= oldest}
        found = dict.fromkeys(self._refused)
        for peer in self._caught | self._chain.chains.forgers:
            if (path := watch.sightings.claimed(peer)) is not None and self._chain.module in path.modules():
                found[Entry(path=path, peer=peer)] = None
        return list(found)

    def caught(self, contributions: Iterable[Sealed[Contribution]]) -> list[Entry]:
        """Whose work of these enough auditors could not repeat: it is refused when the round could close."""
        forged = {work for work, said in self._said.items() if gate.is_forged(one.document for one in said.values())}
        documents = (sealed.document for sealed in contributions)
        return [Entry(path=one.path, peer=one.author) for one in documents if one.work in forged]

    def _lack(self, work: str) -> set[PeerId]:
        """The judges that answered last that a part of it is not to be had."""
        return {judge for each, judge in self._lacking if each == work}

    def _is_hidden(self, lacking: Collection[PeerId]) -> bool:
        """Whether so many judges lack a part: leaders have all parts, unless the author keeps some back."""
        return len(lacking) >= gate.AGREED or self._node.run.manifest.author in lacking

    def expel(self, sealed: Sealed[Contribution], reason: Reason) -> None:
        """It was refused; the next version tells why, unless it is a copy: what is said of that is the original's."""
        document = sealed.document
        if reason == Reason.COPIED:
            self._refused[Entry(path=document.path, peer=document.author)] = self._chain.ledger.head.version
            self._said.pop(document.work, None)
        if not self.is_on:
            return
        self._asking.pop(sealed.id).cancel()
        self._unseen.pop(sealed.id, None)
        said = list(self._said.pop(document.work, {}).values())
        self._chain.evidence.keep(said)
        self._evidence = [*self._evidence, *said][-EVIDENCE_MAX:]
        if reason == Reason.NOT_REPEATED:
            self._caught.add(document.author)
        self._unheard.discard(document.work)
        self._draws.pop(document.work).cancel()
        self._audits.pop(document.work).task.cancel()

    def next_round(self, *, is_made: bool) -> None:
        """The round is over, and perhaps a version of it `is_made`."""
        audits, self._audits = self._audits, {}
        for work, audit in audits.items():
            if not (is_made and audit.is_told) and (audit.is_in_time or audit.found):
                self._audits[work] = audit
                audit.late += is_made
            else:
                audit.task.cancel()
        if is_made:
            self._evidence, self._caught = [], set()
        self._forget()

    def clear(self) -> None:
        """Nothing waits any more. What was said against work is on this disk, from former leaders, too."""
        self.close()
        self._audits = {}
        self._forget()
        self._recall()

    def close(self) -> None:
        """Ask nobody any more."""
        for task in (*self._asking.values(), *(audit.task for audit in self._audits.values()), *self._draws.values()):
            task.cancel()

    def _forget(self) -> None:
        now_s = self._node.clock.now_s()
        for task in self._asking.values():
            task.cancel()
        self._barred = {key: bar for key, bar in self._barred.items() if bar[0] > now_s}
        for work in self._draws.keys() - self._audits.keys():
            self._draws.pop(work).cancel()
        oldest = self._chain.ledger.head.version - VERSIONS_TOLD
        self._taken = {work: version for work, version in self._taken.items() if version >= oldest}
        self._asking, self._said, self._unheard, self._lacking, self._unseen = {}, {}, set(), set(), {}
        self._slow = {judge: rounds - 1 for judge, rounds in self._slow.items() if rounds > 1}

    def _recall(self) -> None:
        """What leaders before us heard of works counts like what we hear: from those whom they could have asked."""
        coordinator, is_proven = self._node.run.manifest.author, self._chain.chains.is_proven
        said = self._chain.evidence.said()
        self._evidence = [one for one in said if one.document.author == coordinator or is_proven(one.document.author)]
        self._recalled = self.verdicts([])
        self._caught = set(self._recalled.forgers)

    def _standing(self, peer: PeerId) -> Standing:
        return self._chain.ledger.standings.of(peer)

    def _chain_word(self) -> Verdicts:
        """What the chain alone says of peers, before any appraisal of this round."""
        return self._node.run.verdicts([], self._chain.ledger.standings)

    def _ended(self, task: asyncio.Task[None]) -> None:
        for audit in self._audits.values():
            if audit.found and not gate.is_repeated(sealed.document for sealed in audit.found):
                self._chain.evidence.keep(audit.found)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: asking judges failed", self._chain.module, exc_info=error)
        self._on_over()

    async def _ask(self, sealed: Sealed[Contribution], said: dict[PeerId, Sealed[Appraisal]], until_s: float) -> None:
        """Until judges have said enough, or nobody is left who lives and has said nothing. Whoever does not answer is
        asked again: the author may still be sending its other parts, and a heartbeat outlives its peer for a while. A
        newcomer of whose work judges cannot have a part gets half of the time: its path is not trained meanwhile."""
        document, silent, lacked, is_hidden = sealed.document, Counter[PeerId](), set[PeerId](), False
        is_known = self._chain_word().is_known(document.author)
        hidden_until_s = until_s if is_known else until_s - self._limit_s() / 2
        asking: dict[asyncio.Task[Sealed[Appraisal] | None], PeerId] = {}
        try:
            draw = await asyncio.shield(self._draws[document.work])
            while asked := self._next_judges(document, draw, said, silent):
                lacked |= self._lack(document.work)
                is_hidden = self._is_hidden(lacked)
                if self._node.clock.now_s() >= (hidden_until_s if is_hidden and not said else until_s):
                    break
                for judge in asked if len(asking) < ASKING_MAX else ():
                    if judge not in asking.values():
                        asking[asyncio.create_task(self._appraised(judge, sealed, until_s))] = judge
                await self._answered(asking, said, silent)
            is_new = self._standing(document.author).is_on_probation(self._node.run.config.audited)
            if is_new and (said or not is_hidden) and (audit := self._audits.get(document.work)) is not None:
                while self._node.clock.now_s() < until_s and not audit.task.done() and is_open(said):
                    await done_or_later(audit.task, self._node.clock, RETRY_S)
        except Exception:  # what others sent may have led to a fault of ours, which must not make it count
            self._unheard.add(document.work)
            raise
        finally:
            for task in asking:
                task.cancel()
        if asked and not said:
            self._unheard.add(document.work)
        elif not said:
            self._unseen[sealed.id] = sealed

    async def _answered(
        self,
        asking: dict[asyncio.Task[Sealed[Appraisal] | None], PeerId],
        said: dict[PeerId, Sealed[Appraisal]],
        silent: Counter[PeerId],
    ) -> None:
        """Note what the next of these says. One that says nothing for a while goes on, and counts as silent meanwhile:
        a line that is cut takes as long as a call may."""
        waiting = asyncio.ensure_future(self._node.clock.sleep(self._hedge_s()))
        try:
            done, _ = await asyncio.wait({*asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        is_in_vain = any(task.result() is None for task in done & asking.keys())
        for task in [task for task in asking if task in done]:
            judge, found = asking.pop(task), task.result()
            if found is None:
                silent[judge] += 1
            elif judge not in said:  # it may have repeated the work meanwhile
                said[judge] = found
        if waiting in done:
            silent.update(asking.values())
            self._slow |= dict.fromkeys(asking.values(), SLOW_ROUNDS)
        if is_in_vain:
            await self._node.clock.sleep(RETRY_S)

    def _next_judges(
        self,
        document: Contribution,
        draw: str,
        said: Mapping[PeerId, Sealed[Appraisal]],
        silent: Mapping[PeerId, int],
    ) -> list[PeerId]:
        """Which judges to ask next, never ourselves: nobody once they have said enough; the coordinator if they are too
        few, silent or differ; while it is away, the next in order. `silent` counts tries in vain: others come first."""
        coordinator, wanted = self._node.run.manifest.author, self._node.run.config.judging.judges
        heard = [sealed.document for sealed in said.values()]
        is_split = gate.is_split(heard, coordinator=coordinator)
        if coordinator in said or (len(said) >= wanted and not is_split):
            return []
        others = [one for one in self._candidates(document, draw) if one not in said and one != self._node.peer]
        others.sort(key=lambda judge: (judge in self._slow, silent.get(judge, 0)))
        willing = [judge for judge in others if judge not in self._slow and not silent.get(judge)]
        has_coordinator = coordinator != document.author and self._lives(coordinator)
        missing = max(wanted - len(said), 0)
        if has_coordinator and (is_split or len(willing) < missing):
            return [*willing[:missing], coordinator]
        return others[: max(missing, int(is_split))]

    async def _audit(self, sealed: Sealed[Contribution], said: dict[PeerId, Sealed[Appraisal]]) -> None:
        """Have the work repeated if it is its turn, and now and then once more, since an auditor may not even have
        looked. What ends after the round is told of in a later version."""
        document, clock = sealed.document, self._node.clock
        limit_s, least_s = self._limit_s(), 2 * silent_s(self._node.run.config.rounds)
        until_s = clock.now_s() + limit_s + max(limit_s, least_s)
        draw = await asyncio.shield(self._draws[document.work])
        if self._is_audited(document, draw):
            await have_repeated(
                said,
                partial(self._audited, sealed=sealed, until_s=until_s),
                candidates=partial(self._candidates, document, draw),
                late=lambda: self._audits[document.work].late,
                least=2 if is_drawn(f"again {draw}", AGAIN) else 1,
                alone_s=ALONE_SHARE * limit_s,
                until_s=until_s,
                clock=clock,
            )

    async def _audited(
        self, judge: PeerId, *, sealed: Sealed[Contribution], until_s: float
    ) -> Sealed[Appraisal] | None:
        """What comes of it when this one repeats the work, whenever that is; None if it does not, if it cannot have all
        of it by then, or if its word does not count. Raises Refused if it repeats another one now."""
        while True:
            try:
                found = await self._appraised(judge, sealed, math.inf, is_audit=True)
            except Refused as refused:
                if refused.reason == Reason.FULL:
                    raise
                is_missing = refused.reason == Reason.PAYLOAD_MISSING and self._node.clock.now_s() < until_s
                if refused.reason != Reason.BUSY and not is_missing:
                    return None
                await self._node.clock.sleep(RETRY_S)
            else:
                is_heard = found is not None and found.document.repeated and self._chain_word().believes(found.document)
                return found if is_heard else None

    def _is_audited(self, document: Contribution, draw: str) -> bool:
        """By its author's standing, and the draw."""
        audited = self._node.run.config.audited
        return audited > 0 and is_drawn(f"audit {draw}", self._standing(document.author).audit_chance(audited))

    async def _joint_draw(self, document: Contribution) -> str:
        """Of all leaders of the path that give their part of it soon: a slow one is left out."""
        node, work = self._node, document.work
        led = ((node.watch.leader(module), module) for module in document.path.modules())
        asked = {peer: module for peer, module in led if peer is not None and peer != node.peer}
        until_s = node.clock.now_s() + min(HEDGE_S, DRAW_SHARE * self._limit_s())
        parts = await asyncio.gather(*(self._part(peer, module, work, until_s) for peer, module in asked.items()))
        own = node.peer, node.swarm.signer.sign(gate.DRAW, work.encode())
        return " ".join(signature for _, signature in sorted([own, *filter(None, parts)]))

    async def _part(self, leader: PeerId, module: ModuleId, work: str, until_s: float) -> tuple[PeerId, str] | None:
        """One leader's; None if it does not give it by then: the author may still be sending the work."""
        clock = self._node.clock
        while (left_s := until_s - clock.now_s()) > 0:
            try:
                part = await ask(self._node, leader, GetDraw(module=module, work=work), timeout_s=left_s)
                return (leader, part.signature) if verify(leader, gate.DRAW, work.encode(), part.signature) else None
            except DipacoError as error:
                if not isinstance(error, Refused) or error.reason != Reason.CONTRIBUTION_MISSING:
                    return None
            await clock.sleep(RETRY_S)
        return None

    def _hedge_s(self) -> float:
        return max(HEDGE_S, HEDGE_SHARE * self._limit_s())

    def _lives(self, peer: PeerId) -> bool:
        return peer == self._node.peer or peer in self._node.watch.heartbeats

    def _candidates(self, document: Contribution, draw: str) -> list[PeerId]:
        """Who may judge or repeat it, the first choice first. Leaders of the path's other modules last, since these do
        not ask themselves; not the coordinator, who has the last word, and nobody whose word does not count. We among
        them: else each leader of the path would ask others, and have the work repeated more than once."""
        watch, without = self._node.watch, {document.author, self._node.run.manifest.author}
        alive = {peer for peer, beat in watch.heartbeats.items() if beat.owns and peer not in without}
        alive |= {self._node.peer} - without
        leaders = {watch.leader(module) for module in document.path.modules()}
        heard = (peer for peer in alive if self._chain.chains.is_proven(peer) and self._standing(peer).is_heard)
        return sorted(in_order(heard, draw), key=lambda peer: peer in leaders)

    async def _appraised(
        self, judge: PeerId, sealed: Sealed[Contribution], until_s: float, *, is_audit: bool = False
    ) -> Sealed[Appraisal] | None:
        """What this judge says; None if it says nothing of use now. Of an audit raises Refused."""
        node, document = self._node, sealed.document
        self._lacking.discard((document.work, judge))  # the author may have been uploading then
        try:
            if judge == node.peer:
                return await self._chain.chains.appraise(document, is_audit=is_audit)
            sharding = node.run.sharding(document.sharding)
            request = Appraise(contribution=sealed, sharding=sharding, is_audit=is_audit)
            timeout_s = min(CALL_TIMEOUT_S, max(until_s - node.clock.now_s(), RETRY_S))
            found = (await ask(node, judge, request, timeout_s=timeout_s)).appraisal
            require_drawn(found.document)
        except DipacoError as error:
            log.info("%s: ...%s gave no appraisal of %s: %s", self._chain.module, short(judge), sealed.id[:8], error)
            if isinstance(error, Refused) and error.reason == Reason.PAYLOAD_MISSING:
                self._lacking.add((document.work, judge))
            if is_audit and isinstance(error, Refused):
                raise
            return None
        said = found.document
        meant = node.run.id, document.work, document.author, document.tokens, node.run.lr_percent(document), judge
        # Nobody names itself an auditor: whose turn it is, the draw says.
        is_asked_for = is_audit or said.repeated is None
        is_meant = (said.run, said.work, said.of, said.tokens, said.lr_percent, said.author) == meant
        return found if is_meant and is_asked_for else None
