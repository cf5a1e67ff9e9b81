"""The promises of docs/design.md, in its order, as pure functions of what a run showed.

Each yields what is broken, in words. Safety promises hold in every run, whatever the faults; those of liveness only
say what happens when the faults are over.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from .checks_of_work import (
    audits_earn_once,
    copies_count_once,
    evidence_outlives_leaders,
    findings_count_once,
    forgers_wait,
    harm_counts_nowhere,
    honest_work_passes,
    known_work_is_judged,
    leaving_excuses_nobody,
    originals_count,
    owners_expel_together,
    steps_have_a_measure,
)
from .history import Broken, Event, Look, Outcome

HOLDERS_MIN = 2
QUIET_S = 30.0
"""How long a coordinator that was away waits for the last groups before it grants a module to others (stage.py)."""
PATIENCE = 3
"""Deadlines that a round without a quorum takes: somebody claims a path and never trains it (rounds.py)."""
LOST_CALLS_S = 60.0
"""What a leader that makes no version has at least before it loses the module (terms.py)."""
LED = "leads", "mirrors", "version"
"""What programs tell of a module that they lead."""
REASSIGNED_TTLS = 8.0
"""Lives of a heartbeat until a path has another volunteer, and a module another leader, once nothing hinders them."""


Check = Callable[[Outcome], Iterator[Broken]]


def receipts_are_kept(outcome: Outcome) -> Iterator[Broken]:
    """1: what two peers held is counted, or its loss was reported; unless the disks of all holders were lost."""
    accounted = outcome.counted().keys() | outcome.reported_s().keys()
    for event in outcome.of("receipt"):
        id_, holders = str(event.facts["id"]), [outcome.names.get(peer) for peer in event.facts["holders"]]
        if len(set(holders)) < HOLDERS_MIN or id_ in accounted:
            continue
        if any(holder is not None and _spoiled_s(outcome, holder, id_, event) == float("inf") for holder in holders):
            module, base = event.facts["module"], event.facts["base"]
            names = ", ".join(str(holder) for holder in holders)
            yield Broken(1, f"{id_[:8]} ({module} from {base}, {event.facts['path']}) held by {names} was lost")


def holders_keep(outcome: Outcome) -> Iterator[Broken]:
    """1: until the archive counts it, or its loss was reported, it is on the disk of everyone that the receipt names:
    a peer that keeps less may be the only one that comes back."""
    places, reported_s = outcome.counted(), outcome.reported_s()
    for event in outcome.of("receipt"):
        id_ = str(event.facts["id"])
        module, version = places.get(id_, ("", 0))
        until_s = reported_s.get(id_, outcome.end_s)
        looks = [look for look in outcome.looks if event.t_s < look.t_s < until_s]
        needed = [look for look in looks if not version or look.archived.get(module, 0) < version]
        for holder in filter(None, map(outcome.names.get, event.facts["holders"])):
            spoiled_s = _spoiled_s(outcome, holder, id_, event)
            lacking = [look for look in needed if look.t_s < spoiled_s and id_ not in look.kept.get(holder, {id_})]
            if lacking:
                yield Broken(1, f"{id_[:8]} of {event.facts['module']} left {holder} before {lacking[0].t_s:.0f} s")


def holders_are_named(outcome: Outcome) -> Iterator[Broken]:
    """1: no stranger comes to hold anything by its own word: it is a mirror by a grant, or it is in no receipt."""
    mirrors: dict[str, set[str]] = defaultdict(set)
    for event in outcome.of("mirrors"):
        mirrors[str(event.facts["module"])].update(event.facts["mirrors"])
    for event in outcome.of("receipt"):
        id_, module = str(event.facts["id"]), str(event.facts["module"])
        for holder in event.facts["holders"]:
            if holder not in outcome.names and holder not in mirrors[module]:
                yield Broken(1, f"{id_[:8]} of {module} is with ...{holder[-6:]}, which nobody made its holder")


def _spoiled_s(outcome: Outcome, who: str, id_: str, receipt: Event) -> float:
    """When the disk of `who` lost this contribution, by no fault of the program, since it was put there."""
    confirmed = [event.t_s for event in outcome.of("confirmed") if (event.who, event.facts.get("id")) == (who, id_)]
    since_s = min([receipt.t_s, *confirmed])
    lost = [event.t_s for event in outcome.of("disk lost") if event.who == who]
    # A damaged blob may be its payload: which one that is, nobody notes.
    rotten = [
        event.t_s
        for event in outcome.of("bit rot")
        if event.who == who and (id_ in str(event.facts["file"]) or "-" not in str(event.facts["file"]))
    ]
    return min((t_s for t_s in lost + rotten if t_s >= since_s), default=float("inf"))


def nothing_counts_twice(outcome: Outcome) -> Iterator[Broken]:
    """2: neither a contribution, nor two of one author for the same path and base; only of whom the run knows."""
    for module, chain in outcome.chains.items():
        ids = Counter(each.id for link in chain for each in link.counts)
        bases = Counter((each.peer, each.path, each.base) for link in chain for each in link.counts)
        yield from (Broken(2, f"{module} counts {id_[:8]} {n} times") for id_, n in ids.items() if n > 1)
        yield from (
            Broken(2, f"{module} counts {n} contributions of {outcome.names.get(peer, peer)} to {path} from {base}")
            for (peer, path, base), n in bases.items()
            if n > 1
        )


def bases_are_fresh(outcome: Outcome) -> Iterator[Broken]:
    """2: what counts has a base within the staleness limit, and goes through the module."""
    for module, chain in outcome.chains.items():
        undone = 0
        for link in chain:
            undone = link.version if link.is_rollback else undone
            for each in link.counts:
                if each.base < undone:
                    yield Broken(2, f"version {link.version} of {module} counts {each.id[:8]} from before a rollback")
                if not 0 < link.version - each.base <= 1 + outcome.staleness:
                    yield Broken(2, f"version {link.version} of {module} counts {each.id[:8]} from {each.base}")
                digests = [outcome.genesis[module], *(earlier.digest for earlier in chain)]
                if each.base_digest and each.base_digest not in digests[each.base : each.base + 1]:
                    yield Broken(2, f"version {link.version} of {module} counts {each.id[:8]} from another {each.base}")
                if each.tokens > outcome.tokens_max:
                    yield Broken(2, f"{module} counts {each.id[:8]} with {each.tokens} tokens")
                if module not in outcome.paths.get(each.path, ()):
                    yield Broken(2, f"{module} counts a contribution of {each.path}, which is not its own")


def stages_end_as_decreed(outcome: Outcome) -> Iterator[Broken]:
    """2: no module has a version beyond the one with which its stage ends."""
    for module, chain in sorted(outcome.chains.items()):
        if len(chain) > outcome.rounds:
            yield Broken(2, f"{module} goes on to version {len(chain)}, and its stage ends with {outcome.rounds}")


def claims_come_first(outcome: Outcome) -> Iterator[Broken]:
    """2: work of a stranger counts only on a path that it has claimed."""
    claimed = {(event.facts["peer"], event.facts["path"]) for event in outcome.of("claims")}
    for module, chain in outcome.chains.items():
        for link in chain:
            for each in link.counts:
                if each.peer not in outcome.names and (each.peer, each.path) not in claimed:
                    yield Broken(2, f"version {link.version} of {module} counts {each.id[:8]}, which nobody claimed")


def strangers_lead_last(outcome: Outcome) -> Iterator[Broken]:
    """5: the coordinator, which could lead itself, grants nothing to a stranger that nobody ever counted work of."""
    worked = {each.peer for chain in outcome.chains.values() for link in chain for each in link.counts}
    for event in outcome.of("granted"):
        if event.facts["peer"] not in worked:
            yield Broken(5, f"{event.facts['module']} was granted to a stranger that has not worked")


def usurpers_are_deposed(outcome: Outcome) -> Iterator[Broken]:
    """5: while nothing else hinders them, a stranger that grants itself a module keeps others from it for no longer
    than the dead do."""
    is_alone = {str(event.facts["fault"]) for event in outcome.of("fault")} <= {"usurper"}
    bound_s = REASSIGNED_TTLS * outcome.ttl_s + (QUIET_S if _was_away(outcome) else 0.0)
    for event in outcome.of("usurps"):
        module, until_s = event.facts["module"], event.t_s + bound_s
        archived = [look.archived.get(str(module), 0) for look in outcome.looks if look.t_s <= event.t_s]
        if until_s > outcome.end_s or max(archived, default=0) >= outcome.rounds:
            continue
        led = [each.t_s for ev in LED for each in outcome.of(ev) if each.facts["module"] == module]
        is_hindered = event.t_s < outcome.calm_s and not is_alone
        if not is_hindered and not any(event.t_s < t_s <= until_s for t_s in led):
            yield Broken(5, f"a stranger has had {module} from {event.t_s:.0f} s to {until_s:.0f} s")


def old_groups_lead_no_more(outcome: Outcome) -> Iterator[Broken]:
    """3: what the coordinator grants ends all terms that an older group could grant: nobody follows one of these, and
    nothing has to be taken back from whoever leads in it."""
    usurpers = {event.facts["peer"] for event in outcome.of("usurps")}
    known = {(event.facts["module"], event.facts["term"]) for event in outcome.of("usurps")}
    for event in outcome.of("took_back"):
        module, term = event.facts["module"], event.facts["term"]
        if event.facts["leader"] in usurpers and (module, term) not in known:
            yield Broken(3, f"a stranger led term {term} of {module}, which an old group has granted")


def versions_only_grow(outcome: Outcome) -> Iterator[Broken]:
    """3: a chain has no gap, names its parents, and its terms do not fall; the archive never takes a version back."""
    for module, chain in outcome.chains.items():
        parent, term = outcome.genesis[module], 0
        for number, link in enumerate(chain, start=1):
            if (
                link.version != number
                or link.parent != parent
                or link.term < term
                or not (link.counts or link.is_rollback)
            ):
                yield Broken(3, f"version {link.version} of {module} does not follow")
            parent, term = link.digest, link.term
    yield from _one_digest_each(outcome)
    yield from (Broken(3, problem) for problem in outcome.problems)


def _one_digest_each(outcome: Outcome) -> Iterator[Broken]:
    archived: dict[tuple[str, int], str] = {}
    for event in outcome.of("archived"):
        key = str(event.facts["module"]), int(event.facts["version"])
        digest = str(event.facts["digest"])
        if archived.setdefault(key, digest) != digest:
            yield Broken(3, f"version {key[1]} of {key[0]} was archived with two digests")
    for (module, version), digest in archived.items():
        chain = outcome.chains[module]
        if len(chain) < version or chain[version - 1].digest != digest:
            yield Broken(3, f"version {version} of {module} was archived, and is not on the chain any more")


def latecomers_begin_on_the_chain(outcome: Outcome) -> Iterator[Broken]:
    """3: whoever comes late begins at a version that the coordinator has signed."""
    for event in outcome.of("begins late"):
        module, version = str(event.facts["module"]), int(event.facts["version"])
        chain = outcome.chains[module]
        if len(chain) < version or chain[version - 1].digest != event.facts["digest"]:
            yield Broken(3, f"{event.who} began at a version {version} of {module} that is not on the chain")


def terms_are_remembered(outcome: Outcome) -> Iterator[Broken]:
    """3: who has led a term never forgets it: it would believe a leader that was deposed before."""
    for event in outcome.of("leads"):
        module, term = str(event.facts["module"]), int(event.facts["term"])
        spoils = [other for ev in ("disk lost", "bit rot") for other in outcome.of(ev) if other.who == event.who]
        spoiled_s = min((other.t_s for other in spoils if other.t_s >= event.t_s), default=float("inf"))
        for look in outcome.looks:
            known = term if look.terms is None else look.terms.get((event.who, module), 0)
            if event.t_s < look.t_s < spoiled_s and known < term:
                yield Broken(3, f"{event.who} forgot term {term} of {module}, which it led, before {look.t_s:.0f} s")
                break


def the_deposed_are_refused(outcome: Outcome) -> Iterator[Broken]:
    """3: nobody confirms a contribution to another leader than that of the newest term it knows."""
    for event in outcome.of("confirmed"):
        if event.facts["to"] != event.facts["leader"]:
            names = [outcome.names.get(str(event.facts[key]), "nobody") for key in ("to", "leader")]
            yield Broken(3, f"{event.who} obeyed {names[0]} in {event.facts['module']}, which {names[1]} leads")


def modules_are_sound(outcome: Outcome) -> Iterator[Broken]:
    """4: nothing that is not finite or not of its size got into a module."""
    yield from (Broken(4, f"{module} is not sound") for module in outcome.not_finite)


def the_dead_are_replaced(outcome: Outcome) -> Iterator[Broken]:
    """5: once nothing hinders them, every module has a leader and every path its volunteer within a bound."""
    bound_s = _bound_s(outcome)
    for looks in _calm_windows(outcome, bound_s):
        last = looks[-1]
        for module in sorted(outcome.chains):
            if last.versions.get(module, 0) < outcome.rounds and not any(module in look.led for look in looks):
                yield Broken(5, f"nobody led {module} from {looks[0].t_s:.0f} s to {last.t_s:.0f} s")
        for path, modules in outcome.paths.items():
            if not any(path in look.claimed for look in looks) and _stand_still(modules, looks, outcome.rounds):
                yield Broken(5, f"nobody trained {path} from {looks[0].t_s:.0f} s to {last.t_s:.0f} s")


def _bound_s(outcome: Outcome) -> float:
    """What the rules allow until somebody leads, and until a round closes."""
    faults = {str(event.facts["fault"]) for event in outcome.of("fault")}
    round_s = PATIENCE * outcome.deadline_s if "idle claimant" in faults else 0.0
    if "idle leader" in faults:
        levels = max(map(len, outcome.paths.values()))  # a level that waits for another is not idle
        idle_s = max((PATIENCE + len(outcome.paths)) * outcome.deadline_s, LOST_CALLS_S)
        round_s += levels * (2 * outcome.ttl_s + idle_s)
    return REASSIGNED_TTLS * outcome.ttl_s + round_s + (QUIET_S if _was_away(outcome) else 0.0)


def _was_away(outcome: Outcome) -> bool:
    return any(event.who == "seed" for event in outcome.of("crashed"))


def nobody_is_hidden(outcome: Outcome) -> Iterator[Broken]:
    """5: once nothing hinders them, every volunteer can be found, whatever fills its bucket."""
    for looks in _calm_windows(outcome, _bound_s(outcome)):
        for who in sorted(frozenset.intersection(*(look.hidden & look.alive for look in looks))):
            yield Broken(5, f"nobody could find {who} from {looks[0].t_s:.0f} s to {looks[-1].t_s:.0f} s")


def no_path_is_hidden(outcome: Outcome) -> Iterator[Broken]:
    """5: once nothing hinders them, and they are as many as the paths, somebody trains each, whatever leaders tell."""
    if not any(event.ev == "lies" for event in outcome.events):  # elsewhere a path may be left out for a while
        return
    for looks in _calm_windows(outcome, _bound_s(outcome)):
        if min(len(look.alive) for look in looks) >= len(outcome.paths):
            for path, modules in outcome.paths.items():
                is_over = any(looks[-1].versions.get(module, 0) >= outcome.rounds for module in modules)
                if not is_over and not any(path in look.claimed for look in looks):
                    yield Broken(5, f"nobody trained {path} from {looks[0].t_s:.0f} s on, whose leader lies")


def records_expire(outcome: Outcome) -> Iterator[Broken]:
    """5: nobody believes a record of a peer longer than its author said."""
    for key in sorted(frozenset().union(*(look.outlived for look in outcome.looks))):
        yield Broken(5, f"a record under {key.partition('/')[2]} was shown after its expiry")


def leaders_stay(outcome: Outcome) -> Iterator[Broken]:
    """5: nobody takes a module from a volunteer that lives; told by runs in which people only join."""
    if {str(event.facts["fault"]) for event in outcome.of("fault")} - {"join"}:
        return
    leading: dict[str, str] = {}
    granted: dict[tuple[str, object], str] = {}
    """By module and term: to whom."""
    leaving = {"seed"}  # it gives way to anybody
    for event in outcome.events:
        if event.ev == "doing" and event.facts["doing"] == "leaving":
            leaving.add(event.who)
        elif event.ev == "grants":
            granted[str(event.facts["module"]), event.facts["term"]] = outcome.names.get(str(event.facts["to"]), "")
        elif event.ev == "leads":
            module = str(event.facts["module"])
            # A slow seed had given this term to another: a member that had no answer leads until it hears of that.
            if granted.get((module, event.facts["term"]), event.who) != event.who:
                continue
            last = leading.get(module, event.who)
            leading[module] = event.who
            if last != event.who and last not in leaving:
                yield Broken(5, f"{event.who} took {module} from {last}, which lived")


def _calm_windows(outcome: Outcome, bound_s: float) -> Iterator[list[Look]]:
    """Stretches of that length after the last fault, one after the other, while somebody is there."""
    looks = [look for look in outcome.looks if look.t_s >= outcome.calm_s]
    window: list[Look] = []
    for look in looks:
        window = [*window, look] if look.alive else []
        if window and window[-1].t_s - window[0].t_s >= bound_s:
            yield window
            window = []


def _stand_still(modules: tuple[str, ...], looks: list[Look], rounds: int) -> bool:
    """Whether a path has rounds before it, and none of its modules moved."""
    first, last = looks[0].versions, looks[-1].versions
    is_done = all(last.get(module, 0) >= rounds for module in modules)
    return not is_done and all(first.get(module) == last.get(module) for module in modules)


def all_reach_the_end(outcome: Outcome) -> Iterator[Broken]:
    """6: when faults are over, everybody reaches the newest versions, and the run its end, within a bound."""
    for module, chain in sorted(outcome.chains.items()):
        if len(chain) < outcome.rounds:
            yield Broken(6, f"{module} is at version {len(chain)} of {outcome.rounds} after {outcome.bound_s:.0f} s")
    unfinished = (line.partition(": ") for line in outcome.unfinished)
    yield from (Broken(6, f"{who} has not come to the end: {where}") for who, _, where in unfinished)
    yield from (Broken(6, what) for what in outcome.behind)


def no_wait_is_endless(outcome: Outcome) -> Iterator[Broken]:
    """6: nobody waits for what nothing will bring; who waits for whom."""
    yield from (Broken(6, f"an endless wait: {line}") for line in outcome.waits)


def outages_lose_open_rounds_only(outcome: Outcome) -> Iterator[Broken]:
    """7: what was in a closed round when all died is on the chain afterwards, at least as its contributions."""
    accounted = outcome.counted().keys() | outcome.reported_s().keys()
    for outage in outcome.of("total outage"):
        for event in outcome.of("receipt"):
            if event.t_s < outage.t_s and _was_closed(outcome, event, before_s=outage.t_s):
                id_ = str(event.facts["id"])
                lost = [str(each.facts["peer"]) for each in outcome.of("disk lost")]
                if id_ not in accounted and not set(event.facts["holders"]) & set(lost):
                    yield Broken(7, f"{id_[:8]}, of a closed round, did not survive the outage at {outage.t_s:.0f} s")


def _was_closed(outcome: Outcome, receipt: Event, *, before_s: float) -> bool:
    """Whether the archive had, before that time, the version after the receipt's base."""
    key = receipt.facts["module"], int(receipt.facts["base"]) + 1
    return any(
        (event.facts["module"], event.facts["version"]) == key and receipt.t_s < event.t_s < before_s
        for event in outcome.of("archived")
    )


def what_is_forgotten_is_kept(outcome: Outcome) -> Iterator[Broken]:
    """1: what the archive may forget since others keep it, they keep."""
    yield from (Broken(1, line) for line in outcome.unkept)


def owners_send_to_few(outcome: Outcome) -> Iterator[Broken]:
    """10: of those whose work a version counts no more turn to its owners at once than there are owners. The others get
    it from trainers, as far as these are there."""
    readers: defaultdict[tuple[str, str, str, tuple[str, ...]], set[str]] = defaultdict(set)
    for event in outcome.of("fetched"):
        facts = event.facts
        if facts["is_counted"] and facts["tier"] == 0:
            readers[facts["module"], facts["digest"], facts["author"], tuple(facts["owners"])].add(event.who)
    for (module, digest, _, owners), found in readers.items():
        if len(found) > len(owners):
            yield Broken(10, f"{len(found)} turned at once to {len(owners)} owners of {module} for {digest[:8]}")


def programs_do_not_fail(outcome: Outcome) -> Iterator[Broken]:
    """No promise, but the ground of all: no assertion and no unexpected exception in any program."""
    yield from (Broken(0, bug) for bug in dict.fromkeys(outcome.bugs))


SAFETY: tuple[Check, ...] = (
    receipts_are_kept,
    holders_keep,
    holders_are_named,
    nothing_counts_twice,
    bases_are_fresh,
    stages_end_as_decreed,
    claims_come_first,
    harm_counts_nowhere,
    known_work_is_judged,
    leaving_excuses_nobody,
    honest_work_passes,
    forgers_wait,
    evidence_outlives_leaders,
    audits_earn_once,
    findings_count_once,
    steps_have_a_measure,
    owners_expel_together,
    copies_count_once,
    originals_count,
    strangers_lead_last,
    old_groups_lead_no_more,
    versions_only_grow,
    latecomers_begin_on_the_chain,
    terms_are_remembered,
    the_deposed_are_refused,
    modules_are_sound,
    records_expire,
    leaders_stay,
    outages_lose_open_rounds_only,
    what_is_forgotten_is_kept,
    owners_send_to_few,
    programs_do_not_fail,
)
LIVENESS: tuple[Check, ...] = (
    the_dead_are_replaced,
    usurpers_are_deposed,
    nobody_is_hidden,
    no_path_is_hidden,
    no_wait_is_endless,
    all_reach_the_end,
)


def broken(outcome: Outcome, checks: tuple[Check, ...] = (*SAFETY, *LIVENESS)) -> list[Broken]:
    """Everything that a run broke."""
    return [each for check in checks for each in check(outcome)]
