"""Promises about work: what is judged, audited, copied or forged, and what chains say of it. As in checks.py."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from dipaco_p2p.protocol.expulsion import OWNERS_MIN
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.standing import FORGERS_WAIT

from .history import Broken, Counted, Outcome

FAULTS_OF_WORK = (Reason.HARMFUL, Reason.LITTLE_GAIN, Reason.NOT_REPEATED)


def harm_counts_nowhere(outcome: Outcome) -> Iterator[Broken]:
    """2: where judges live, no stranger's work counts that makes its path worse."""
    harmful = {event.facts["id"] for event in outcome.of("harms")}
    for module, chain in outcome.chains.items():
        known: set[str] = set()
        for link in chain:
            for each in link.counts:
                if link.is_judged and each.id in harmful and each.peer not in known:
                    yield Broken(2, f"version {link.version} of {module} counts {each.id[:8]}, which does harm")
            known.update(each.peer for each in link.counts)


def known_work_is_judged(outcome: Outcome) -> Iterator[Broken]:
    """2: work that surely makes its path worse counts beside work that surely gains only where most of those authors
    whom the chain knows do such work."""
    for module, chain in outcome.chains.items():
        for link in chain:
            harmful = [each for each in link.counts if each.work in link.harmful]
            if len({each.peer for each in harmful}) == 1 and link.gaining - {harmful[0].peer}:
                yield Broken(2, f"version {link.version} of {module} counts {harmful[0].id[:8]}, which does sure harm")


def honest_work_passes(outcome: Outcome) -> Iterator[Broken]:
    """2: no judge, and no crowd of strangers, has a volunteer's work refused."""
    forging = {event.who for ev in ("forges", "spoils") for event in outcome.of(ev)}
    honest = {event.facts["id"] for event in outcome.of("receipt") if event.who not in forging}
    for event in outcome.of("ban_proposed"):
        if (name := outcome.names.get(event.facts["peer"], "")) and name not in forging:
            yield Broken(2, f"the coordinator is to ban {name}, whose work is good")
    for event in outcome.of("expired"):
        if event.facts["id"] in honest and event.facts["reason"] in FAULTS_OF_WORK:
            yield Broken(2, f"{event.facts['module']} refused {event.facts['id'][:8]} as {event.facts['reason']}")


def forgers_wait(outcome: Outcome) -> Iterator[Broken]:
    """2: whoever forged work, as all found who repeated it, has none in the version that says so and the next ones."""
    for module, chain in outcome.chains.items():
        until: dict[str, int] = {}
        for link in chain:
            until |= dict.fromkeys(link.forgers, link.version + FORGERS_WAIT)
            for each in link.counts:
                if link.version <= until.get(each.peer, 0):
                    detail = f"counts {each.id[:8]}, whose author forged work"
                    yield Broken(2, f"version {link.version} of {module} {detail}")


def leaving_excuses_nobody(outcome: Outcome) -> Iterator[Broken]:
    """2: where nothing else hinders auditors, and they tell of others' work, one module's chain at least tells of each
    work that counts, but the last, of an author that leaves whenever it is audited: it stays on probation."""
    if not {str(event.facts["fault"]) for event in outcome.of("fault")} <= {"leaving forger"}:
        return
    told = {one for chain in outcome.chains.values() for link in chain for one in link.repeated}
    for leaver in {event.facts["peer"] for event in outcome.of("leaves audits")}:
        if not {author for author, _ in told} - {leaver}:
            continue
        for module, chain in outcome.chains.items():
            counted = ((link.version, each.work) for link in chain[:-1] for each in link.counts if each.peer == leaver)
            for version, work in counted:
                if (leaver, work) not in told:
                    yield Broken(2, f"version {version} of {module} counts {work[:8]}, whose author left its audit")


def evidence_outlives_leaders(outcome: Outcome) -> Iterator[Broken]:
    """2: whoever takes a module over, and was given before what auditors said against somebody's work, tells of it in
    the first version that it makes, and counts nothing of that author there. Who only withheld what they needed may
    have other work there, and this one too, if a version before told of it and auditors have had everything since."""
    spoiled = {event.who for ev in ("disk lost", "bit rot") for event in outcome.of(ev)}
    for event in outcome.of("evidence"):
        who, module, of, work = event.who, event.facts["module"], event.facts["of"], event.facts["work"]
        leads = [one.t_s for one in outcome.of("leads") if (one.who, one.facts["module"]) == (who, module)]
        since_s = min((t_s for t_s in leads if t_s > event.t_s), default=float("inf"))
        made = [one for one in outcome.of("version") if (one.who, one.facts["module"]) == (who, module)]
        made = [one for one in made if one.t_s > since_s]
        if who in spoiled or not event.facts["is_forged"] or not made:
            continue
        chain = outcome.chains[str(module)][: int(made[0].facts["version"])]
        if not chain or {each.id for each in chain[-1].counts} != set(made[0].facts["contributions"]):
            continue  # its branch was given up
        told = {finding for link in chain for finding in link.findings}
        if not told & {("forged", of, work), ("withheld", of, work)}:
            yield Broken(2, f"version {chain[-1].version} of {module} does not tell who forged {work[:8]}")
        if event.facts["is_withheld"]:
            is_told_now = ("withheld", of, work) in chain[-1].findings
            is_counted = is_told_now and any(each.work == work for each in chain[-1].counts)
        else:
            is_counted = any(each.peer == of for each in chain[-1].counts)
        if is_counted:
            yield Broken(2, f"version {chain[-1].version} of {module} counts work of who forged {work[:8]}")


def audits_earn_once(outcome: Outcome) -> Iterator[Broken]:
    """2: who repeated a work is named for it once in a chain, of work that this chain counts or finds forged."""
    for module, chain in outcome.chains.items():
        named = Counter(audit for link in chain for audit in link.audits)
        for (work, peer), times in named.items():
            if times > 1:
                name = outcome.names.get(peer, peer)
                yield Broken(2, f"{module} names {name} {times} times for repeating {work[:8]}")
        authors: dict[str, str] = {}
        for link in chain:
            authors |= {each.work: each.peer for each in link.counts}
            if len({work for work, _ in link.audits} - authors.keys()) > len(link.found):
                yield Broken(2, f"version {link.version} of {module} names audits of work that does not count")
            yield from (
                Broken(2, f"version {link.version} of {module} names the author of {work[:8]} as its auditor")
                for work, peer in link.audits
                if authors.get(work) == peer
            )


def findings_count_once(outcome: Outcome) -> Iterator[Broken]:
    """2: what was found of a work stands once in a chain, and is told of a work."""
    for module, chain in outcome.chains.items():
        named = Counter(finding for link in chain for finding in link.findings)
        for (kind, peer, work), times in named.items():
            if times > 1 or not work:
                name = outcome.names.get(peer, peer)
                yield Broken(2, f"{module} calls {name} {kind} {times} times for work {work[:8]}")


def steps_have_a_measure(outcome: Outcome) -> Iterator[Broken]:
    """2: no author moves a module further than others, or than its learning rates can, from the first version on."""
    for module, chain in outcome.chains.items():
        for link in chain:
            if link.is_unmeasured:
                yield Broken(2, f"version {link.version} of {module} counts work of any length")
            if link.is_far:
                yield Broken(2, f"version {link.version} of {module} moves a parameter further than it can be trained")


def owners_expel_together(outcome: Outcome) -> Iterator[Broken]:
    """2: only two thirds of five leaders of a module, or of more, expel a peer, and only one that it found a forger."""
    for module, chain in outcome.chains.items():
        for place, link in enumerate(chain):
            before, name = chain[:place], outcome.names.get(link.expels, link.expels)
            if not link.expels:
                continue
            owners = {earlier.leader for earlier in before}
            if not link.voters <= owners or len(owners) < OWNERS_MIN or 3 * len(link.voters) < 2 * OWNERS_MIN:
                yield Broken(2, f"{len(link.voters)} peers expel {name} from {module}, which {len(owners)} have led")
            if not any(link.expels in earlier.found for earlier in before):
                yield Broken(2, f"{name} is expelled from {module}, which has found nothing")


def copies_count_once(outcome: Outcome) -> Iterator[Broken]:
    """2: work of somebody and what a stranger hands in as its own, and took from there, count no more than the work."""
    originals = {event.facts["id"]: event.facts["of"] for event in outcome.of("copies")}
    for module, chain in outcome.chains.items():
        for link in chain:
            works: dict[str, list[Counted]] = defaultdict(list)
            for each in link.counts:
                works[originals.get(each.id, each.id)].append(each)
            for id_, found in works.items():
                tokens, most = sum(each.tokens for each in found), max(each.said for each in found)
                if len(found) > 1 and all(each.said for each in found) and tokens > most:
                    yield Broken(
                        2, f"version {link.version} of {module} counts {tokens} tokens of {id_[:8]}, not {most}"
                    )


def originals_count(outcome: Outcome) -> Iterator[Broken]:
    """2: who has taken somebody's work, and then a stranger's copy of it, counts nothing of the copy."""
    signed: dict[tuple[str, object], float] = {}
    for event in outcome.of("receipt_signed"):
        signed.setdefault((event.who, event.facts["id"]), event.t_s)
    originals = {event.facts["id"]: event.facts["of"] for event in outcome.of("copies")}
    counted, leads = outcome.counted(), list(outcome.of("leads"))
    for made in outcome.of("version"):
        for copy in originals.keys() & set(made.facts["contributions"]):
            place, original = (str(made.facts["module"]), int(made.facts["version"])), originals[copy]
            if counted.get(str(copy)) == place and str(original) in counted:
                led_s = max(lead.t_s for lead in leads if lead.facts["module"] == place[0] and lead.t_s <= made.t_s)
                if led_s <= signed.get((made.who, original), 0.0) < signed.get((made.who, copy), 0.0):
                    yield Broken(2, f"version {place[1]} of {place[0]} counts {copy[:8]}, a copy of {original[:8]}")
