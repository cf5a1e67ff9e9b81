"""`dipaco-peer me`: what this volunteer's work has come to. Its receipts are held against the published versions, which
are asked of the swarm and checked: nobody's account is believed, the coordinator's neither.

A receipt is *counted* in a version, *waiting* for the next one, or *not counted*, which a leader owes a reason for.
Credit is that of protocol/credit.py, so the sum is the leaderboard's. Standing follows from the versions as well
(protocol/standing.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dipaco_p2p.clock import Clock
from dipaco_p2p.errors import DipacoError, SwarmError
from dipaco_p2p.node.node import Observer, open_observer
from dipaco_p2p.node.reading import fetch_chain, fetch_judgements, fetch_keepers, fetch_rejections, open_connection
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.program.history import HISTORY_NAME, read_history
from dipaco_p2p.program.text import duration
from dipaco_p2p.protocol.audits import Audit
from dipaco_p2p.protocol.credit import Earned, recent_credit, share_credit
from dipaco_p2p.protocol.decrees import Decreed
from dipaco_p2p.protocol.documents import ModuleVersion, Share, rejected
from dipaco_p2p.protocol.judgement import Judgement
from dipaco_p2p.protocol.keeping import KeepersCount
from dipaco_p2p.protocol.liveness import Heartbeat, shown_names
from dipaco_p2p.protocol.names import name_words
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.standing import (
    DOUBTED,
    DOUBTED_FOR,
    EXPELLED,
    FORGERS_WAIT,
    PROBATION,
    UNHEARD,
    UNHEARD_FOR,
    WAITS,
    Standing,
)
from dipaco_p2p.protocol.versions import Tally
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import ModuleId
from dipaco_p2p.words import printable

from .control.home import peer_of
from .decrees import ask_first

Chains = Mapping[ModuleId, Sequence[ModuleVersion]]
"""The versions of each module from the first one on."""

LOOK = "Test this machine's memory and GPU, and check its packages with `dipaco-peer doctor`."
AGAIN = f"Once may be chance. If it happens again: {LOOK[0].lower()}{LOOK[1:]}"
WORDS: Mapping[str, str] = {
    Reason.HARMFUL: f"other volunteers measured that it makes its path worse. {AGAIN}",
    Reason.NOT_REPEATED: f"other volunteers took its steps again and got another result. {LOOK} For {FORGERS_WAIT}"
    " versions no work of this identity counts.",
    Reason.COPIED: "another volunteer handed in the same work earlier, and that counts. Two who take a path at the same"
    " moment may do the same work once; if it happens again, somebody reads this disk, or this key is used twice.",
    Reason.LITTLE_GAIN: f"other volunteers measured that it gains far less than others' work. {AGAIN}",
    Reason.UNJUDGED: "judges could not get a part of it from this machine. Or, while no version counts earlier work of"
    " yours: nobody could measure it, or results differed. Stay: the path is trained again, and counts once measured.",
    Reason.NORM: "its outer gradient is too long or too short compared with others'. The path starts over by itself.",
    Reason.COVERED: "others were training the path when this volunteer came. It begins with the next round.",
}
OTHERWISE = "docs/protocol.md, section 7, says what this means."

LESS_THAN_FULL: Mapping[str, str] = {
    EXPELLED: "other volunteers repeated work of yours and got another result, and while the coordinator was away the"
    f" owners of the module voted that your work no longer counts. Ask the coordinator to admit you. {LOOK}",
    WAITS: f"other volunteers repeated work of yours and got another result. After the wait you are a newcomer. {LOOK}",
    DOUBTED: f"work of yours was refused. For {DOUBTED_FOR} versions your work weighs half as much, but earns its whole"
    f" credit. {AGAIN}",
    UNHEARD: "most others who repeated a work contradict what this volunteer found. For"
    f" {UNHEARD_FOR} versions nobody asks it. {LOOK}",
    PROBATION: "other volunteers repeat everybody's first works. Until then yours weighs a quarter, or in full if"
    " repeated in time; it earns its whole credit. If you stay online, probation ends by itself.",
}
"""What a standing means, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """One contribution in one version."""

    version: int
    share: Share
    earned: Earned | None
    """None before its round was judged: until then nobody has said when it was."""
    credit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """One work of another volunteer that this one has repeated, and earns credit for."""

    version: int
    audit: Audit
    earned: Earned | None
    credit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleAccount:
    """One volunteer's work for one module."""

    module: ModuleId
    counted: tuple[Counted, ...]
    waiting: tuple[str, ...]
    """Ids of contributions with a receipt, whose round is still open."""
    not_counted: tuple[str, ...]
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why, as the module's leader says, of those that it has a note on."""
    standing: Standing = Standing()
    audited: tuple[Audited, ...] = ()

    @property
    def credit(self) -> float:
        """Tokens, as the chain has taken them in, and those of works that were audited."""
        return math.fsum(one.credit for one in self.counted) + self.audit_credit

    @property
    def audit_credit(self) -> float:
        return math.fsum(one.credit for one in self.audited)


async def show_me(text: str, home: Path, *, expected: str | None, is_whole: bool, clock: Clock) -> None:
    """Print the account of the volunteer at `home` in the run that `text` leads to; each contribution if `is_whole`.

    Raises ConfigError if no volunteer lives there, and as joining does.
    """
    me = peer_of(home)
    async with open_connection(text, expected=expected) as connection:
        stages = await fetch_stages(connection.swarm, connection.host, expected=connection.run)
        nodes = [open_observer(run, ScopedSwarm(connection.swarm, run.id), clock) for run in stages]
        accounts = [await _account(node, me, home) for node in nodes]
        await ask_first(nodes[-1])
        decreed, beat = nodes[-1].decrees.state, nodes[-1].watch.heartbeats.get(me)
        keeping = await fetch_keepers(nodes[-1])
    console = Console()
    console.print(f"volunteer {me}")
    print_name(me, beat, decreed, console)
    print_accounts(stages, accounts, console, is_whole=is_whole, now_s=clock.now_s())
    if line := keeping_line(keeping, me, now_s=clock.now_s()):
        console.print(line)


def print_accounts(
    stages: Sequence[Run], accounts: Sequence[list[ModuleAccount]], console: Console, *, is_whole: bool, now_s: float
) -> None:
    """Those of each stage, what explains them, and their sum. Reasons are leaders' words, which are no markup."""
    modules = [module for found in accounts for module in found]
    for run, found in zip(stages, accounts, strict=True):
        console.print(_table(run, found, is_whole=is_whole), markup=False)
    # Of the standings in earlier stages nothing follows.
    for line in (*explained(modules), *standings_explained(accounts[-1], audited=stages[-1].config.audited)):
        console.print(line, markup=False)
    _print_sum(modules, stages[-1], console, now_s=now_s)


def print_name(me: PeerId, beat: Heartbeat | None, decreed: Decreed, console: Console) -> None:
    """What others are shown beside the id, as the live heartbeat says, or why they are not; and an empty line."""
    words = "" if beat is None else name_words(*shown_names(me, beat, decreed))
    line = f"shown beside this id: {words}" if words else ""
    if me in decreed.nameless:
        line = f"shown without a name by the coordinator's decree: {decreed.nameless[me]}"
    if line:
        console.print(Text(printable(line)))  # words of the volunteer and of the coordinator are no markup
    console.print()


def keeping_line(count: KeepersCount | None, me: PeerId, *, now_s: float) -> str:
    """What keeping old versions for others came to, as the coordinator has signed it; empty for who keeps none."""
    found = [one for one in count.keepers if one.peer == me] if count is not None else []
    if not found:
        return ""
    if found[0].barred_until_s > now_s:
        left = duration(found[0].barred_until_s - now_s)
        return f"barred as a keeper for {left}: it could not show what it offers to keep. Look at this machine's disk."
    proofs = found[0].proofs
    return f"keeps old versions for others: {proofs} challenge{'' if proofs == 1 else 's'} answered right"


def account(
    run: Run, chains: Chains, judgements: Iterable[Judgement], receipts: Mapping[str, tuple[ModuleId, int]], me: PeerId
) -> list[ModuleAccount]:
    """What `chains` count of `me`; `receipts` gives the module and base of the contributions that have one."""
    judged_s = {judgement.version: judgement.at_s for judgement in judgements}
    return [_module_account(run, module, chain, judged_s, receipts, me) for module, chain in chains.items()]


def _module_account(
    run: Run,
    module: ModuleId,
    chain: Sequence[ModuleVersion],
    judged_s: Mapping[int, float],
    receipts: Mapping[str, tuple[ModuleId, int]],
    me: PeerId,
) -> ModuleAccount:
    counted = tuple(
        _counted(run, version, share, judged_s.get(version.version))
        for version in chain
        for share in version.shares
        if share.peer == me
    )
    ids = {one.share.contribution for one in counted}
    left = {id_: base for id_, (of, base) in receipts.items() if of == module and id_ not in ids}
    head, rounds = (chain[-1].version if chain else 0), run.config.rounds
    waiting = {id_ for id_, base in left.items() if head <= base + rounds.staleness and head < run.rounds}
    tally = Tally()
    for version in chain:
        tally.add(version)
    return ModuleAccount(
        module=module,
        counted=counted,
        waiting=tuple(sorted(waiting)),
        not_counted=tuple(sorted(left.keys() - waiting)),
        standing=tally.standings.of(me),
        audited=tuple(
            _audited(run, version, audit, judged_s.get(version))
            for version, audit in tally.standings.earned(run.config.audited)
            if audit.by == me
        ),
    )


def _counted(run: Run, version: ModuleVersion, share: Share, at_s: float | None) -> Counted:
    credit, earned = _credit(run, share.tokens, at_s)
    return Counted(version=version.version, share=share, earned=earned, credit=credit)


def _audited(run: Run, version: int, audit: Audit, at_s: float | None) -> Audited:
    credit, earned = _credit(run, audit.tokens, at_s)
    return Audited(version=version, audit=audit, earned=earned, credit=credit)


def _credit(run: Run, tokens: int, at_s: float | None) -> tuple[float, Earned | None]:
    credit = share_credit(tokens, tokens_full=run.tokens_full, levels=len(run.config.model.levels))
    return credit, Earned(credit=credit, at_s=at_s) if at_s is not None else None


async def _account(node: Observer, me: PeerId, home: Path) -> list[ModuleAccount]:
    run = node.run
    receipts = read_receipts(home / "runs" / run.id[:16] / HISTORY_NAME)
    await node.watch.refresh()
    chains = {module: await fetch_chain(node, module) for module in run.topology.modules()}
    try:
        judgements = await fetch_judgements(node)
    except SwarmError:  # only the coordinator has them; credit does without
        judgements = []
    return [
        replace(one, reasons=await _reasons(node, one.module, me) if one.not_counted or one.waiting else {})
        for one in account(run, chains, judgements, receipts, me)
    ]


async def _reasons(node: Observer, module: ModuleId, me: PeerId) -> dict[str, str]:
    """What the module's leader says of our work that it refused lately."""
    try:
        found = await fetch_rejections(node, module)
    except DipacoError:  # its notes are lost with it; what is counted is known without
        return {}
    return {rejected(one).id: one.reason for one in found if one.contribution.author == me}


def read_receipts(history: Path) -> dict[str, tuple[ModuleId, int]]:
    """The receipts in a volunteer's history: module and base version, by contribution."""
    events = read_history(history) if history.exists() else []
    return {
        event["id"]: (ModuleId.parse(event["module"]), event["base"]) for event in events if event["ev"] == "receipt"
    }


def _table(run: Run, modules: Sequence[ModuleAccount], *, is_whole: bool) -> Table:
    table = Table(title=f"{run.name}, {run.manifest.stage}", title_justify="left")
    for name in ("module", "counted", "waiting", "not counted", "credit", "standing"):
        table.add_column(name, justify="left" if name in {"module", "standing"} else "right")
    for one in modules:
        numbers = (len(one.counted), len(one.waiting), len(one.not_counted))
        standing = one.standing.describe(run.config.audited)
        table.add_row(str(one.module), *map(str, numbers), f"{one.credit:,.0f}", standing)
        for counted in one.counted if is_whole else ():
            share = counted.share
            what = f"  version {counted.version}: {share.contribution[:12]} of {share.path}, weight {share.weight:.3f}"
            table.add_row(what, "", "", "", f"{counted.credit:,.0f}")
        for audited in one.audited if is_whole else ():
            table.add_row(
                f"  version {audited.version}: audit of {audited.audit.work[:12]}", "", "", "", f"{audited.credit:,.0f}"
            )
        for id_ in (*one.waiting, *one.not_counted) if is_whole else ():
            what = "waiting" if id_ in one.waiting and id_ not in one.reasons else "not counted"
            reason = f", {one.reasons[id_]}" if id_ in one.reasons else ""
            table.add_row(f"  {id_[:12]}: {what}{reason}", "", "", "", "")
    return table


def explained(modules: Sequence[ModuleAccount]) -> list[str]:
    """A line for each reason why work was refused lately: how often, what it means, and what to do."""
    counts = Counter(reason for one in modules for reason in one.reasons.values())
    return [f"{count} refused as {reason}: {WORDS.get(reason, OTHERWISE)}" for reason, count in sorted(counts.items())]


def standings_explained(modules: Sequence[ModuleAccount], *, audited: int) -> list[str]:
    """A line for each kind of standing that is less than full: in how many modules, what it means, and what to do."""
    counts = Counter(kind for one in modules for kind in one.standing.limits(audited))
    return [
        f"{kind} in {counts[kind]} module{'s' if counts[kind] > 1 else ''}: {meaning}"
        for kind, meaning in LESS_THAN_FULL.items()
        if counts[kind]
    ]


def _print_sum(modules: Sequence[ModuleAccount], run: Run, console: Console, *, now_s: float) -> None:
    every = [one.earned for module in modules for one in module.counted]
    every += [one.earned for module in modules for one in module.audited]
    earned = [one for one in every if one is not None]
    total = math.fsum(module.credit for module in modules)
    recent = recent_credit(earned, now_s=now_s)
    console.print(f"credit {total:,.0f}, recently {recent:,.0f} per day (credit from 7 days ago counts half)")
    if count := sum(len(module.audited) for module in modules):
        audits, credit = f"{count} audit{'s' if count > 1 else ''}", math.fsum(one.audit_credit for one in modules)
        console.print(f"of it {credit:,.0f} for {audits}: works of others that this volunteer repeated")
    console.print(
        f"Credit counts tokens that entered a published version, divided by the {len(run.config.model.levels)} levels"
        " of the grid, since a round is contributed once to each; --all shows every contribution."
    )
