"""The checkers find what they are for: each has a hand-made run that breaks its promise, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outcomes import ANNA, BERT, MODULE, PATH, archived, counted, good, link, look, receipt, with_events

from simulation.checks import QUIET_S, REASSIGNED_TTLS, broken
from simulation.history import Event, Link, Outcome


def promises(outcome: Outcome) -> set[int]:
    return {each.promise for each in broken(outcome)}


def test_a_good_run_breaks_nothing() -> None:
    assert broken(good()) == []


def test_a_receipt_of_two_holders_must_be_counted_or_reported() -> None:
    assert promises(with_events(receipt("lost"))) == {1}
    expired = Event(20.0, BERT, "expired", {"id": "lost", "module": MODULE, "reason": "stale-base"})
    assert promises(with_events(receipt("lost"), expired)) == set()


def test_a_receipt_may_be_lost_with_all_disks_that_held_it_and_only_then() -> None:
    lost = [Event(20.0, who, "disk lost", {"peer": peer}) for who, peer in ((ANNA, "id-anna"), (BERT, "id-bert"))]
    assert promises(with_events(receipt("lost"), *lost)) == set()
    assert promises(with_events(receipt("lost"), lost[0])) == {1}
    assert promises(with_events(lost[0], receipt("lost", t_s=25.0))) == {1}, "it was written after the loss"


@pytest.mark.parametrize(
    ("changes", "found"),
    [({}, {10}), ({"tier": 1}, set()), ({"is_counted": False}, set()), ({"owners": ["a", "b"]}, set())],
    ids=["at once", "in turn", "without work in it", "as many as owners"],
)
def test_no_more_turn_to_owners_at_once_than_there_are(changes: dict[str, object], found: set[int]) -> None:
    version = {"module": MODULE, "version": 1, "digest": "d" * 64, "author": "a"}
    facts = version | {"owners": ["a"], "tier": 0, "is_counted": True}
    assert promises(with_events(*(Event(9.0, who, "fetched", facts | changes) for who in (ANNA, BERT)))) == found
    assert promises(with_events(*(Event(t_s, ANNA, "fetched", facts) for t_s in (9.0, 10.0)))) == set()


def test_sure_harm_of_one_author_counts_beside_no_sure_gain() -> None:
    def judged(**changes: frozenset[str]) -> Outcome:
        other = counted("other", peer="id-bert", work="good")
        first = link(1, counted("one", work="bad"), other, **changes)
        return replace(good(), chains={MODULE: (first, *good().chains[MODULE][1:])})

    harmful, gaining = frozenset({"bad"}), frozenset({"id-bert"})
    assert promises(judged(harmful=harmful, gaining=gaining)) == {2}
    assert promises(judged(harmful=harmful)) == set(), "nobody gains: the run has a problem"
    assert promises(judged(harmful=harmful, gaining=frozenset({"id-anna"}))) == set(), "only by other work of its own"
    assert promises(judged(harmful=harmful | {"good"}, gaining=gaining)) == set(), "most do such work"


def test_who_leaves_before_its_audit_is_told_of() -> None:
    left, hindered = Event(1.0, ANNA, "leaves audits", {"peer": "id-anna"}), Event(1.0, "", "fault", {"fault": "loss"})
    chain = [link(1, counted("one", work="first"))]
    chain.append(link(2, counted("two", base=1, base_digest="digest-1"), repeated=frozenset({("id-bert", "other")})))
    late = replace(chain[1], repeated=chain[1].repeated | {("id-anna", "first")})

    def run(*links: Link, events: tuple[Event, ...] = (left,)) -> Outcome:
        outcome = good(chains={MODULE: links})
        return replace(outcome, rounds=len(links), events=(*outcome.events, *events))

    assert promises(run(*chain)) == {2}
    assert promises(run(chain[0], late)) == set()
    assert promises(run(*chain, events=())) == set(), "it was there, and nobody drew its work"
    assert promises(run(*chain, events=(left, hindered))) == set()
    assert promises(run(chain[0], replace(chain[1], repeated=frozenset()))) == set(), "nothing is audited"


def test_nobody_takes_back_a_term_that_an_old_group_has_granted() -> None:
    usurped, again = ({"module": MODULE, "term": term, "peer": "id-liar", "leader": "id-liar"} for term in (4, 6))
    taken = [Event(29.0, "seed", "took_back", facts) for facts in (usurped, again)]
    assert promises(with_events(Event(28.0, "stranger", "usurps", usurped), taken[0])) == set()
    assert promises(with_events(Event(28.0, "stranger", "usurps", usurped), *taken)) == {3}
    assert promises(with_events(*taken)) == set(), "it was idle, and is no usurper"


def test_who_grants_itself_a_module_has_it_for_no_longer_than_the_dead() -> None:
    usurped = {"module": MODULE, "term": 4, "peer": "id-liar"}
    run = with_events(Event(14.0, "stranger", "usurps", usurped))
    assert promises(run) == {5}
    led = Event(14.0 + REASSIGNED_TTLS, "seed", "leads", {"module": MODULE, "term": 5})
    assert promises(replace(run, events=(*run.events, led))) == set()
    assert promises(replace(run, events=(*run.events, replace(led, t_s=led.t_s + 1)))) == {5}
    crash = Event(1.0, "seed", "crashed")
    assert promises(replace(run, events=(*run.events, crash))) == set(), "it is over before the seed has caught up"
    assert promises(replace(run, events=(*run.events, crash), end_s=run.end_s + QUIET_S)) == {5}
    hindered = Event(1.0, "", "fault", {"fault": "partition"})
    assert promises(replace(run, events=(*run.events, hindered), calm_s=15.0)) == set()
    assert promises(replace(run, events=(*run.events, hindered), calm_s=13.0)) == {5}


def test_one_holder_or_the_word_of_a_stranger_promises_nothing() -> None:
    assert promises(with_events(receipt("lost", holders=("id-anna",)))) == set()
    lies = receipt("lost", holders=("id-liar", "id-other-liar"))
    named = Event(1.0, ANNA, "mirrors", {"module": MODULE, "term": 1, "mirrors": ["id-liar", "id-other-liar"]})
    assert promises(with_events(named, lies)) == set()
    assert promises(with_events(lies)) == {1}, "nobody has made them mirrors"


@pytest.mark.parametrize(
    "chain",
    [
        (link(1, counted("one")), link(2, counted("one"), counted("two", base=1, base_digest="digest-1"))),
        (link(1, counted("one"), counted("again")), link(2, counted("two", base=1, base_digest="digest-1"))),
    ],
    ids=["the same contribution", "two of one author for one path and base"],
)
def test_nothing_counts_twice(chain: tuple[object, ...]) -> None:
    assert promises(good(chains={MODULE: chain})) == {2}


@pytest.mark.parametrize(
    ("tokens", "said", "found"),
    [((5, 5), 10, set()), ((10, 10), 10, {2}), ((6, 5), 10, {2}), ((10, 10), 0, set())],
    ids=["shared out", "both in full", "a little more", "of what nobody knows"],
)
def test_a_copy_and_its_original_count_no_more_than_one(tokens: tuple[int, int], said: int, found: set[int]) -> None:
    one, copy = counted("one", tokens=tokens[0], said=10), counted("copy", peer="x", tokens=tokens[1], said=said)
    chain = (link(1, one, copy), link(2, counted("two", base=1, base_digest="digest-1")))
    claimed = Event(1.0, "stranger", "claims", {"peer": "x", "path": PATH})
    copied = Event(2.0, "stranger", "copies", {"id": "copy", "of": "one"})
    outcome = with_events(claimed, copied)
    assert promises(replace(outcome, chains={MODULE: chain})) == found
    assert promises(replace(with_events(claimed), chains={MODULE: chain})) == set(), "nobody copied"


@pytest.mark.parametrize(
    ("audits", "found"),
    [
        (((("one", "x"),), (("two", "x"), ("one", "y"))), set()),
        (((("one", "x"),), (("one", "x"),)), {2}),
        (((), (("three", "x"),)), {2}),
        (((("one", "id-anna"),), ()), {2}),
        (((), (("one", "id-anna"),)), {2}),
    ],
    ids=["each once", "twice", "of no work", "its own", "its own, later"],
)
def test_who_repeats_a_work_is_named_once(audits: tuple[tuple[tuple[str, str], ...], ...], found: set[int]) -> None:
    chain = (
        link(1, counted("one", work="one"), audits=audits[0]),
        link(2, counted("two", base=1, base_digest="digest-1", work="two"), audits=audits[1]),
    )
    assert promises(good(chains={MODULE: chain})) == found


@pytest.mark.parametrize(
    ("second", "broken"),
    [(("failed", "x", "two"), set()), (("failed", "x", "one"), {2}), (("forged", "x", ""), {2})],
    ids=["of each work", "again", "of no work"],
)
def test_what_was_found_of_a_work_stands_once(second: tuple[str, str, str], broken: set[int]) -> None:
    chain = (
        link(1, counted("one"), findings=(("failed", "x", "one"),)),
        link(2, counted("two", base=1, base_digest="digest-1"), findings=(second,)),
    )
    assert promises(good(chains={MODULE: chain})) == broken


@pytest.mark.parametrize(
    ("leaders", "voters", "found", "broken"),
    [
        ("abcde", "abcd", "z", set()),
        ("abcde", "abc", "z", {2}),
        ("abcda", "abcd", "z", {2}),
        ("abcde", "abcf", "z", {2}),
        ("abcde", "abcde", "y", {2}),
    ],
    ids=["four of five", "three of five", "four owners", "a stranger votes", "nothing was found"],
)
def test_owners_expel_together(leaders: str, voters: str, found: str, broken: set[int]) -> None:
    links = [
        link(number, counted(f"{number}", base=number - 1, base_digest=f"digest-{number - 1}"), leader=leader)
        for number, leader in enumerate(leaders, 1)
    ]
    links[0] = replace(links[0], counts=(counted("1"),), found=frozenset(found))
    last = counted("6", base=5, base_digest="digest-5")
    chain = (*links, link(6, last, leader="a", expels="z", voters=frozenset(voters)))
    assert promises(good(chains={MODULE: chain}, events=(), rounds=6)) == broken


FORGED, WITHHELD = {"is_forged": True, "is_withheld": False}, {"is_forged": True, "is_withheld": True}
PASSED = {"is_forged": False, "is_withheld": False}


@pytest.mark.parametrize(
    ("author", "told", "said", "led_s", "found"),
    [
        ("y", (("forged", "x", "one"),), FORGED, 25.0, set()),
        ("y", (("withheld", "x", "one"),), FORGED, 25.0, set()),
        ("y", (), FORGED, 25.0, {2}),
        ("x", (("forged", "x", "one"),), FORGED, 25.0, {2}),
        ("x", (("withheld", "x", "one"),), FORGED, 25.0, {2}),
        ("x", (), PASSED, 25.0, set()),
        ("x", (), FORGED, 19.0, set()),
        ("x", (("withheld", "x", "one"),), WITHHELD, 25.0, set()),
        ("x", (), WITHHELD, 25.0, {2}),
    ],
    ids=["told", "told milder", "not told", "counted", "counted, told milder", "nothing against it", "it led before"]
    + ["withheld, other work", "withheld, not told"],
)
def test_a_new_leader_goes_by_what_auditors_said_to_the_last_one(
    author: str, told: tuple[tuple[str, str, str], ...], said: dict[str, bool], led_s: float, found: set[int]
) -> None:
    last = link(2, counted("two", peer=author, base=1, base_digest="digest-1", work="two"), findings=told)
    assert promises(taken_over(link(1, counted("one", peer="y")), last, said=said, led_s=led_s)) == found


@pytest.mark.parametrize("told", [1, 2])
def test_what_its_author_withheld_counts_only_after_a_version_has_told_of_it(told: int) -> None:
    findings = [(("withheld", "x", "one"),) if version == told else () for version in (1, 2)]
    first = link(1, counted("one", peer="y"), findings=findings[0])
    last = link(2, counted("two", peer="x", base=1, base_digest="digest-1", work="one"), findings=findings[1])
    assert promises(taken_over(first, last, said=WITHHELD)) == ({2} if told == 2 else set())


def taken_over(first: Link, last: Link, *, said: dict[str, bool], led_s: float = 25.0) -> Outcome:
    """Bert is told this of a work of x, leads from then on, and makes the last version."""
    events = (
        Event(1.0, "stranger", "claims", {"peer": "x", "path": PATH}),
        Event(1.0, "stranger", "claims", {"peer": "y", "path": PATH}),
        Event(20.0, BERT, "evidence", {"module": MODULE, "work": "one", "of": "x"} | said),
        Event(led_s, BERT, "leads", {"module": MODULE, "term": 1}),
        Event(30.0, BERT, "version", {"module": MODULE, "version": 2, "contributions": ["two"]}),
    )
    return replace(with_events(*events), chains={MODULE: (first, last)})


def test_who_finds_a_forger_is_named_for_work_that_does_not_count() -> None:
    for found in (frozenset[str](), frozenset({"z"})):
        second = link(2, counted("two", base=1, base_digest="digest-1"), audits=(("forged", "x"),), found=found)
        assert promises(good(chains={MODULE: (link(1, counted("one")), second)})) == (set() if found else {2})


@pytest.mark.parametrize(
    "changes",
    [
        {"base": 3, "base_digest": ""},
        {"base_digest": "another version 1"},
        {"tokens": 11},
        {"path": "P9"},
    ],
    ids=["from the future", "from another branch", "with too many tokens", "of a foreign path"],
)
def test_only_what_may_count_counts(changes: dict[str, object]) -> None:
    fields = {"base": 1, "base_digest": "digest-1"} | changes
    chain = (link(1, counted("one")), link(2, counted("two", **fields)))
    assert promises(good(chains={MODULE: chain})) == {2}


@pytest.mark.parametrize(
    "changes",
    [{"parent": "elsewhere"}, {"term": 0}, {"version": 3}, {"counts": ()}],
    ids=["another parent", "an older term", "a gap", "nothing counted"],
)
def test_a_chain_only_grows(changes: dict[str, object]) -> None:
    last = replace(link(2, counted("two", base=1, base_digest="digest-1")), **changes)
    outcome = good(chains={MODULE: (link(1, counted("one")), last)}, events=())
    assert 3 in promises(outcome)


def test_a_rollback_counts_nothing_and_what_began_before_it_counts_no_more() -> None:
    undone = link(2, digest="digest-1", is_rollback=True)
    events = (receipt("one"), archived(1), archived(2, "digest-1", t_s=12.0), archived(3, t_s=14.0))

    def after(base: int, digest: str) -> set[int]:
        third = link(3, counted("three", base=base, base_digest=digest), parent="digest-1")
        return promises(good(chains={MODULE: (link(1, counted("one")), undone, third)}, events=events, rounds=3))

    assert after(2, "digest-1") == set()
    assert after(1, "digest-1") == {2}


def test_the_archive_never_takes_a_version_back() -> None:
    assert promises(with_events(archived(2, "another"))) == {3}
    assert promises(with_events(archived(3, t_s=20.0))) == {3}
    assert promises(good(problems=("L0.M0: version 2 does not follow from its contributions",))) == {3}


def test_a_module_that_is_not_sound_is_found() -> None:
    assert promises(good(not_finite=("version 2 of L0.M0",))) == {4}


def test_a_module_without_a_leader_for_long_is_found() -> None:
    bare = tuple(look(float(second), led=frozenset()) for second in range(30))
    assert promises(good(looks=bare)) == {5}
    short = tuple(look(float(second), led=frozenset() if second % 7 else frozenset({MODULE})) for second in range(30))
    assert promises(good(looks=short)) == set()


def test_an_orphaned_path_is_found_unless_its_modules_move_or_are_done() -> None:
    bare = [look(float(second), claimed=frozenset()) for second in range(30)]
    assert promises(good(looks=tuple(bare))) == {5}
    done = [look(float(second), claimed=frozenset(), versions={MODULE: 2}) for second in range(30)]
    assert promises(good(looks=tuple(done))) == set()
    moving = [look(float(second), claimed=frozenset(), versions={MODULE: second}) for second in range(2)]
    assert promises(good(looks=tuple(moving))) == set()


def test_whoever_cannot_be_found_for_long_is_named() -> None:
    hidden = tuple(look(float(second), hidden=frozenset({ANNA})) for second in range(30))
    assert promises(good(looks=hidden)) == {5}
    moving = tuple(look(float(second), hidden=frozenset({ANNA}) if second % 7 else frozenset()) for second in range(30))
    assert promises(good(looks=moving)) == set()
    gone = tuple(look(float(second), hidden=frozenset({ANNA}), alive=frozenset({BERT})) for second in range(30))
    assert promises(good(looks=gone)) == set()


def test_a_path_that_a_leader_hides_is_found_where_there_are_enough_to_train_it() -> None:
    outcome = good(looks=tuple(look(float(second), claimed=frozenset()) for second in range(30)))
    lies = Event(1.0, ANNA, "lies", {"lie": "crowded"})
    found = broken(replace(outcome, events=(*outcome.events, lies)))
    assert any("whose leader lies" in str(each) for each in found)
    assert not any("whose leader lies" in str(each) for each in broken(outcome))


def test_nobody_is_asked_to_lead_where_nobody_is() -> None:
    empty = tuple(look(float(second), led=frozenset(), claimed=frozenset(), alive=frozenset()) for second in range(30))
    assert promises(good(looks=empty)) == set()


def test_a_run_that_does_not_end_is_found() -> None:
    assert promises(good(rounds=3)) == {6}
    assert promises(good(unfinished=("volunteer-1: training",))) == {6}
    assert promises(good(behind=("volunteer-1 holds version 1 of L0.M0",))) == {6}


def test_what_a_closed_round_counted_survives_an_outage() -> None:
    outage = Event(10.0, "", "total outage", {})
    single = ("id-anna",)
    events = (receipt("one"), receipt("gone", holders=single), archived(1), outage)
    assert promises(good(events=events)) == {7}
    late = (receipt("one"), archived(1), receipt("gone", t_s=9.5, base=1, holders=single), outage)
    assert promises(good(events=late)) == set(), "its round was still open"


def test_a_bug_is_no_promise_but_fails_a_run() -> None:
    assert [str(each) for each in broken(good(bugs=("seed: KeyError", "seed: KeyError")))] == ["bug: seed: KeyError"]
    assert str(broken(good(not_finite=(PATH,)))[0]).startswith("promise 4: ")


def with_looks(outcome: Outcome, **changes: object) -> Outcome:
    """Every look sees this besides."""
    return replace(outcome, looks=tuple(replace(each, **changes) for each in outcome.looks))


def test_a_holder_keeps_what_it_has_signed_for_until_the_archive_counts_it() -> None:
    kept = {ANNA: frozenset({"one", "two"}), BERT: frozenset({"one"})}
    found = broken(with_looks(good(), kept=kept))
    assert [each.promise for each in found] == [1] and BERT in found[0].what
    assert broken(with_looks(good(), kept=kept, archived={MODULE: 2})) == []
    assert promises(with_looks(good(), kept=kept, archived={MODULE: 1})) == {1}


def test_a_holder_may_let_go_of_what_was_reported_or_what_its_disk_has_lost() -> None:
    kept = {ANNA: frozenset({"one", "two"}), BERT: frozenset({"one"})}
    reported = Event(9.5, ANNA, "expired", {"id": "two", "module": MODULE, "reason": "stale-base"})
    for event in (
        reported,
        Event(9.5, BERT, "disk lost", {"peer": "id-bert"}),
        Event(9.5, BERT, "bit rot", {"file": "open-L0.M0-two.json"}),
    ):
        assert broken(with_looks(with_events(event), kept=kept)) == []
    assert promises(
        with_looks(with_events(Event(2.0, BERT, "bit rot", {"file": "open-L0.M0-two.json"})), kept=kept)
    ) == {1}


def test_who_has_led_a_term_remembers_it() -> None:
    led = with_events(Event(4.0, ANNA, "leads", {"module": MODULE, "term": 3, "version": 0}))
    assert broken(with_looks(led, terms={(ANNA, MODULE): 3, (BERT, MODULE): 1})) == []
    assert promises(with_looks(led, terms={(ANNA, MODULE): 2})) == {3}
    assert promises(with_looks(led, terms={(BERT, MODULE): 3})) == {3}
    assert promises(with_looks(led, terms={})) == {3}  # as where no program writes any


def test_nobody_takes_a_module_from_a_volunteer_that_lives_unless_the_term_was_given_before() -> None:
    bert_leads, anna_leads = (Event(4.0, who, "leads", {"module": MODULE, "term": 3}) for who in (BERT, ANNA))
    anna_again = Event(6.0, ANNA, "leads", {"module": MODULE, "term": 4})
    granted = Event(3.0, "seed", "grants", {"module": MODULE, "term": 3, "to": "id-anna"})
    terms = {(ANNA, MODULE): 4, (BERT, MODULE): 3}
    assert promises(with_looks(with_events(bert_leads, anna_again), terms=terms)) == {5}
    assert promises(with_looks(with_events(granted, bert_leads, anna_again), terms=terms)) == set()
    assert promises(with_looks(with_events(bert_leads, granted, anna_leads), terms=terms)) == {5}, "given after it led"
    left = Event(5.0, BERT, "doing", {"doing": "leaving"})
    assert promises(with_looks(with_events(bert_leads, left, anna_again), terms=terms)) == set()


def test_only_the_leader_of_the_newest_term_is_obeyed() -> None:
    facts = {"module": MODULE, "to": "id-anna", "leader": "id-anna"}
    assert broken(with_events(Event(5.0, BERT, "confirmed", facts))) == []
    assert promises(with_events(Event(5.0, BERT, "confirmed", facts | {"leader": "id-bert"}))) == {3}


def test_a_wait_that_nothing_ends_is_told_with_both_its_sides() -> None:
    found = broken(good(waits=("nothing moved for 90 s", "L0.M0, led by volunteer-1, waits for work of P0")))
    assert {each.promise for each in found} == {6}
    assert str(found[1]) == "promise 6: an endless wait: L0.M0, led by volunteer-1, waits for work of P0"
