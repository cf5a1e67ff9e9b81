"""Which claims weigh: work is what counts, a chance is given once, and nobody gains by what it writes into a claim."""

from __future__ import annotations

import math

import pytest
from sightings_scene import DEADLINE_S, EARLIER, HERE, HONEST, IDLE, ME, NEW, PLACES, THERE, TTL_S, Scene

from dipaco_p2p.protocol.liveness import Claim
from dipaco_p2p.protocol.rounds import Entry, OpenRound, Standing
from dipaco_p2p.protocol.sightings import (
    CHANCE_DEADLINES,
    CHANCE_ROUNDS,
    FIRST_CHANCE_DEADLINES,
    GONE_MAX,
    REST_ROUNDS,
    SENDING_DEADLINES,
    Sightings,
)
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import ModuleId, PathId


@pytest.mark.parametrize(("has_worked", "deadlines"), [(False, FIRST_CHANCE_DEADLINES), (True, CHANCE_DEADLINES)])
def test_a_claim_weighs_until_its_chance_is_over(has_worked: bool, deadlines: float) -> None:
    scene = Scene()
    scene.claim(IDLE)
    assert scene.weighing() == {IDLE}
    scene.tell()
    if has_worked:
        scene.works({HERE: [IDLE]})
        scene.tell()
        scene.publish()
        scene.tell()
    scene.tell(after_s=deadlines * DEADLINE_S - 0.1)
    assert scene.weighing() == {IDLE}
    scene.tell(after_s=0.1)
    assert scene.weighing() == set(), "its path could be trained all the time, and nobody did"


def test_a_newcomer_that_was_there_before_us_has_its_chance_like_any_other() -> None:
    """Those who came to a run that was about to begin saw nobody, went to one path together, and waited for others."""
    scene = Scene(there=[HONEST])
    scene.tell()
    assert scene.weighing() == {HONEST}
    scene.tell(after_s=0.9 * FIRST_CHANCE_DEADLINES * DEADLINE_S)
    assert scene.weighing() == {HONEST}
    scene.tell(after_s=0.1 * FIRST_CHANCE_DEADLINES * DEADLINE_S)
    assert not scene.weighing()
    scene = Scene(there=[IDLE])
    scene.tell()
    scene.works({HERE: [HONEST]})
    scene.tell()
    scene.publish()
    scene.tell()
    assert not scene.weighing(), "that round began and ended without it"


def test_a_new_key_for_each_life_of_a_heartbeat_has_no_chance_without_an_end() -> None:
    """Attack: keys are free, and each new claim weighed for two deadlines, so the path was nobody's for ever."""
    scene, weighed = Scene(), 0
    for number in range(40):
        scene.claim(PeerId(f"key-{number}"))
        weighed += bool(scene.weighing())
        scene.tell(after_s=TTL_S)
    assert weighed <= 1 + FIRST_CHANCE_DEADLINES * DEADLINE_S / TTL_S
    scene.claim(HONEST)
    assert not scene.weighing(), "a newcomer is not told from those keys before it has worked"
    scene.works({HERE: [HONEST]})
    scene.tell()
    assert scene.weighing() == {HONEST}


def test_work_that_some_modules_have_gives_newcomers_no_new_chance() -> None:
    """Attack: a volunteer took a path over from idle claims, and one leader accepted its work. The other leaders then
    gave those claims a second chance, and refused the work as covered until the volunteer gave up."""
    scene = Scene()
    scene.claim(IDLE)
    scene.tell()
    scene.tell(after_s=0.8 * FIRST_CHANCE_DEADLINES * DEADLINE_S)
    scene.only = HERE.modules()[1]
    scene.works({HERE: [HONEST]})
    scene.tell()
    assert scene.weighing() == {IDLE}
    scene.tell(after_s=0.2 * FIRST_CHANCE_DEADLINES * DEADLINE_S)
    assert not scene.weighing()


def test_work_that_is_refused_gives_newcomers_no_new_chance() -> None:
    """Attack: beside ten idle claims a stranger brings what is refused, and the path waits as if it were in; then those
    claims had half a deadline again."""
    scene = Scene()
    scene.claim(IDLE)
    scene.tell()
    scene.works({HERE: [HONEST]})
    scene.tell(after_s=0.9 * FIRST_CHANCE_DEADLINES * DEADLINE_S)
    scene.works({HERE: []})
    scene.tell()
    assert scene.weighing() == {IDLE}
    scene.tell(after_s=0.1 * FIRST_CHANCE_DEADLINES * DEADLINE_S)
    assert not scene.weighing()


def test_a_round_that_goes_on_gives_newcomers_their_chance() -> None:
    scene = Scene()
    scene.works({HERE: [HONEST]})
    scene.tell()
    scene.claim(IDLE)
    scene.tell(after_s=3 * DEADLINE_S)
    assert scene.weighing() == {IDLE}, "its path is in: nobody could train it"
    scene.publish()
    scene.tell()
    scene.tell(after_s=0.9 * FIRST_CHANCE_DEADLINES * DEADLINE_S)
    assert scene.weighing() == {IDLE}
    scene.tell(after_s=0.1 * FIRST_CHANCE_DEADLINES * DEADLINE_S)
    assert not scene.weighing()


def test_a_newcomer_beside_others_has_its_chance_in_the_first_round_that_it_sees_begin() -> None:
    """Attack: idle claims beside those who trained the first round had half a deadline of the second one, too, on each
    path whose volunteer had moved on."""
    scene = Scene()
    scene.claim(IDLE)
    scene.tell(after_s=TTL_S)
    scene.works({HERE: [HONEST]})
    scene.tell(after_s=1.0)
    scene.claim(SLOW := PeerId("slow"))
    scene.tell()
    assert scene.weighing() == {IDLE, SLOW}, "the round is not over"
    scene.publish()
    scene.tell(after_s=TTL_S)
    assert scene.weighing() == {SLOW}, "which came when the round had begun"
    scene.works({HERE: [HONEST]})
    scene.tell()
    scene.publish()
    scene.tell(after_s=1.0)
    assert not scene.weighing(), "that round began and ended without it"
    scene.counted[0] = {HERE: [HONEST, SLOW]}
    scene.publish()
    scene.tell()
    assert scene.weighing() == {SLOW}, "it comes a round late"


def test_who_worked_in_the_stage_before_is_no_newcomer() -> None:
    scene = Scene()
    for peer in (IDLE, EARLIER):
        scene.claim(peer)
    scene.tell()
    scene.tell(after_s=FIRST_CHANCE_DEADLINES * DEADLINE_S)
    assert scene.weighing() == {EARLIER}, "nor does it share the chance of newcomers"
    scene.tell(after_s=(CHANCE_DEADLINES - FIRST_CHANCE_DEADLINES) * DEADLINE_S)
    assert not scene.weighing()


def test_where_not_all_claimants_train_each_round_a_newcomer_has_its_chance_in_later_ones() -> None:
    scene, crowd = Scene(), {PeerId(f"one-{number}") for number in range(PLACES // 2)}
    for peer in crowd:
        scene.claim(peer)
    for _ in range(CHANCE_ROUNDS):
        assert scene.weighing() == crowd
        scene.tell(after_s=1.0)
        scene.works({HERE: [HONEST]})
        scene.publish()
    scene.tell()
    assert not scene.weighing()


def test_newcomers_have_a_chance_again_when_their_path_has_gone_on_for_long() -> None:
    scene, works = Scene(), {path: [HONEST] for path in (HERE, THERE)}
    scene.claim(IDLE)
    scene.tell()
    scene.tell(after_s=FIRST_CHANCE_DEADLINES * DEADLINE_S)
    for number in range(REST_ROUNDS + 1):
        newcomer = PeerId(f"newcomer-{number}")
        scene.claim(newcomer)
        assert (newcomer in scene.weighing()) == (number == REST_ROUNDS), number
        scene.works(works)
        scene.publish()
        scene.tell()


def test_newcomers_that_waste_their_chance_on_half_of_the_paths_have_none_on_the_others() -> None:
    """Attack: new keys on every path. Whenever a volunteer had moved on, they kept others from the path that it left,
    for half a deadline each time."""
    paths = [PathId((level, index)) for level in range(2) for index in range(2)]
    for wasted, weighs in ((1, True), (2, False)):
        scene = Scene(paths)
        for path in paths[:wasted]:
            scene.claim(PeerId(f"key on {path}"), path)
        scene.tell()
        scene.tell(after_s=FIRST_CHANCE_DEADLINES * DEADLINE_S)
        scene.claim(IDLE, paths[3])
        assert (IDLE in scene.weighing(paths[3])) is weighs
        scene.works({paths[3]: [IDLE]})
        scene.tell()
        assert scene.weighing(paths[3]) == {IDLE}, "it has worked"
        for _ in range(REST_ROUNDS):
            scene.works({path: [HONEST] for path in paths})
            scene.publish()
            scene.tell()
        scene.claim(NEW, paths[3])
        assert scene.weighing(paths[3]) >= {NEW}, "the paths have gone on for long"


def test_who_has_worked_keeps_its_chance_while_newcomers_have_none() -> None:
    scene = Scene()
    scene.claim(HONEST, THERE)
    scene.works({THERE: [HONEST]})
    scene.tell()
    scene.claim(IDLE)
    scene.tell(after_s=FIRST_CHANCE_DEADLINES * DEADLINE_S)
    scene.claim(HONEST)
    assert scene.weighing() == {HONEST}


def test_a_claim_beside_work_has_its_chance_in_rounds() -> None:
    """A replica need not be in while the round can go on without it; but it cannot be out for ever."""
    scene = Scene()
    for peer in (HONEST, IDLE):
        scene.claim(peer)
    scene.tell()
    for number in range(CHANCE_ROUNDS):
        assert scene.weighing() == {HONEST, IDLE}, number
        scene.works({HERE: [HONEST]})
        scene.tell(after_s=DEADLINE_S)
        scene.publish()
    scene.tell(after_s=DEADLINE_S)
    assert scene.weighing() == {HONEST}


def test_work_makes_an_idle_claim_weigh_again() -> None:
    scene = Scene()
    scene.claim(IDLE)
    scene.tell()
    scene.tell(after_s=CHANCE_DEADLINES * DEADLINE_S)
    assert not scene.weighing()
    scene.works({HERE: [IDLE]})
    scene.tell()
    assert scene.weighing() == {IDLE}
    scene.publish()
    scene.tell(after_s=DEADLINE_S)
    scene.tell(after_s=CHANCE_DEADLINES * DEADLINE_S)
    assert not scene.weighing(), "once does not suffice for ever, although the last versions still name it"


def test_a_working_claimant_weighs_however_seldom_its_leaders_are_asked() -> None:
    scene = Scene()
    scene.claim(HONEST)
    for _ in range(9):
        for _ in range(5):
            scene.works({HERE: [HONEST]})
            scene.publish()
        scene.tell(after_s=3 * CHANCE_DEADLINES * DEADLINE_S)
        assert scene.weighing() == {HONEST}


def test_who_moves_on_without_work_takes_the_used_chance_along() -> None:
    scene = Scene()
    scene.claim(IDLE)
    scene.tell()
    for number in range(12):
        scene.claim(IDLE, (THERE, HERE)[number % 2])
        scene.tell(after_s=0.25 * CHANCE_DEADLINES * DEADLINE_S)
    assert not scene.weighing(HERE) and not scene.weighing(THERE)


def test_who_moves_on_from_work_has_a_new_chance() -> None:
    """Rotation: few volunteers over many paths come to one that nobody has trained for long."""
    scene = Scene()
    scene.claim(HONEST)
    scene.tell()
    scene.works({HERE: [HONEST]})
    scene.tell(after_s=3 * CHANCE_DEADLINES * DEADLINE_S)
    scene.claim(HONEST, THERE)
    scene.tell(after_s=0.5 * CHANCE_DEADLINES * DEADLINE_S)
    assert scene.weighing(THERE) == {HONEST}
    scene.tell(after_s=CHANCE_DEADLINES * DEADLINE_S)
    assert not scene.weighing(THERE)


def test_work_elsewhere_does_not_hold_a_path() -> None:
    scene = Scene()
    scene.claim(IDLE)
    for _ in range(6):
        scene.works({THERE: [IDLE]})
        scene.tell(after_s=0.5 * DEADLINE_S)
        scene.publish()
    assert not scene.weighing(HERE)


def test_one_peer_weighs_on_one_path() -> None:
    scene = Scene()
    scene.claim(IDLE)
    scene.look()
    scene.live[THERE][IDLE] = Claim(path=THERE, since_s=scene.now_s + 1.0)
    scene.look()
    assert (scene.weighing(HERE), scene.weighing(THERE)) == (set(), {IDLE}), "the newest"


def test_nobody_is_older_than_it_was_seen() -> None:
    scene = Scene()
    scene.claim(HONEST)
    scene.look()
    scene.now_s += 100.0
    scene.claim(IDLE, since_s=0.0)
    found = scene.look()[HERE]
    assert found[HONEST].since_s == 1000.0
    assert found[IDLE].since_s == scene.now_s - TTL_S, "it may have been said a life of a record before"


def test_claims_from_before_we_looked_have_the_age_that_they_say() -> None:
    sightings = Sightings(ME, ttl_s=TTL_S, deadline_max_s=DEADLINE_S, places=PLACES)
    claims = {HONEST: Claim(path=HERE, since_s=500.0)}
    assert sightings.weighing(HERE, claims, now_s=1000.0)[HONEST].since_s == 500.0


def test_time_without_leaders_is_nobodys_fault() -> None:
    scene = Scene()
    scene.claim(HONEST)
    scene.tell()
    scene.sightings.excuse(HERE, now_s=scene.now_s, ask_s=scene.now_s)
    scene.tell(after_s=CHANCE_DEADLINES * DEADLINE_S)
    assert scene.weighing() == {HONEST}
    scene.tell(after_s=CHANCE_DEADLINES * DEADLINE_S)
    assert not scene.weighing()


def test_a_module_that_changes_hands_gives_newcomers_no_new_chance() -> None:
    """Attack: idle claims whose chance was nearly over had all of it again when a leader handed over."""
    scene, chance_s = Scene(), FIRST_CHANCE_DEADLINES * DEADLINE_S
    scene.claim(IDLE)
    scene.tell()
    scene.now_s += 0.9 * chance_s
    for _ in range(2):
        scene.sightings.excuse(HERE, now_s=scene.now_s, ask_s=scene.now_s)
        scene.now_s += chance_s
    scene.tell()
    assert scene.weighing() == {IDLE}, "what was left of it is not over"
    scene.tell(after_s=0.1 * chance_s)
    assert not scene.weighing()


def test_a_slow_line_has_more_time_and_not_for_ever() -> None:
    scene = Scene()
    scene.claim(HONEST)
    scene.sending = (HONEST,)
    scene.tell()
    for _ in range(int(SENDING_DEADLINES) - 1):
        scene.tell(after_s=DEADLINE_S)
        assert scene.weighing() == {HONEST}
    scene.tell(after_s=DEADLINE_S)
    assert not scene.weighing()


def test_a_leader_that_names_versions_out_of_reach_hides_nobodys_work() -> None:
    """Its module's word is lost; the leaders of the other modules of the path still tell."""
    scene = Scene()
    scene.claim(HONEST)
    liar, other = HERE.modules()
    rounds = {
        liar: OpenRound(version=2**40, entries=(Entry(path=HERE, peer=HONEST),)),
        other: OpenRound(version=0, entries=()),
    }
    standings = {HERE: Standing(progress=0, is_due=True)}
    scene.sightings.told(rounds, standings, deadlines_s={HERE: DEADLINE_S}, now_s=scene.now_s)
    for number in range(9):
        scene.now_s += 1.5 * DEADLINE_S
        rounds[other] = OpenRound(version=number, entries=(Entry(path=HERE, peer=HONEST),))
        standings = {HERE: Standing(progress=number, is_due=True)}
        scene.sightings.told(rounds, standings, deadlines_s={HERE: DEADLINE_S}, now_s=scene.now_s)
        assert scene.weighing() == {HONEST}


def test_whom_most_leaders_refuse_holds_no_path_though_earlier_work_counts() -> None:
    """Attack: a forger's first work counts, since nobody could audit; so its path looked trained a round longer."""
    scene = Scene()
    scene.claim(IDLE)
    one, other = HERE.modules()
    entry = Entry(path=HERE, peer=IDLE)

    def told(*, refused_by: tuple[ModuleId, ...]) -> set[PeerId]:
        rounds = {
            module: OpenRound(version=3, counted=((entry,), ()), refused=(entry,) if module in refused_by else ())
            for module in (one, other)
        }
        standings = {HERE: Standing(progress=3, is_due=True)}
        scene.sightings.told(rounds, standings, deadlines_s={HERE: DEADLINE_S}, now_s=scene.now_s)
        return scene.weighing()

    assert told(refused_by=(one,)) == {IDLE}, "one leader that lies"
    assert told(refused_by=(one, other)) == set()


def test_who_is_refused_by_its_judges_holds_no_path_with_more_of_the_same() -> None:
    """Attack: what a spoiler pushes is in each open round until it is refused, and its path looked trained."""
    scene = Scene()
    for peer in (HONEST, IDLE):
        scene.claim(peer)
    one, other = HERE.modules()
    standings = {HERE: Standing(progress=3, is_due=True)}
    both = tuple(Entry(path=HERE, peer=peer) for peer in (HONEST, IDLE))

    def told(*, refused_by: tuple[ModuleId, ...], counted: tuple[Entry, ...]) -> set[PeerId]:
        rounds = {
            module: OpenRound(
                version=3, entries=both, counted=(counted, ()), refused=both[1:] if module in refused_by else ()
            )
            for module in (one, other)
        }
        scene.sightings.told(rounds, standings, deadlines_s={HERE: DEADLINE_S}, now_s=scene.now_s)
        return scene.weighing()

    assert told(refused_by=(one,), counted=both) == {HONEST, IDLE}, "one leader that lies"
    assert told(refused_by=(one,), counted=both[:1]) == {HONEST}


def test_my_own_claim_weighs() -> None:
    scene = Scene()
    scene.claim(ME)
    scene.tell()
    scene.tell(after_s=9 * CHANCE_DEADLINES * DEADLINE_S)
    assert scene.weighing() == {ME}


def test_leaders_are_asked_when_a_chance_may_be_over_and_not_for_paths_without_claims() -> None:
    scene = Scene()
    assert scene.sightings.to_ask(now_s=scene.now_s) == []
    scene.claim(IDLE)
    scene.look()
    assert scene.sightings.to_ask(now_s=scene.now_s) == [HERE]
    assert scene.sightings.to_ask(now_s=scene.now_s + TTL_S - 0.1) == [], "the answer may be on its way"
    assert scene.sightings.to_ask(now_s=scene.now_s + TTL_S) == [HERE]
    scene.tell()
    for deadlines in (FIRST_CHANCE_DEADLINES, CHANCE_DEADLINES - FIRST_CHANCE_DEADLINES):
        scene.now_s += deadlines * DEADLINE_S
        assert scene.sightings.to_ask(now_s=scene.now_s - 0.1) == []
        assert scene.sightings.to_ask(now_s=scene.now_s) == [HERE]
        scene.tell()


def test_the_chance_of_newcomers_begins_when_a_module_of_their_path_moves_on() -> None:
    """Two idle claims once held their paths for a deadline and a half: nobody asked whether these could be trained."""
    scene = Scene()
    scene.claim(HONEST)
    scene.claim(IDLE, THERE)
    scene.works({HERE: [HONEST], THERE: [HONEST]})
    scene.tell()
    assert scene.sightings.to_ask(now_s=scene.now_s + 1) == [], "neither path is due"
    scene.publish()
    scene.sightings.moved([HERE, THERE])
    assert scene.sightings.to_ask(now_s=scene.now_s + 1) == [THERE], "whoever works has no such chance"
    scene.tell()
    scene.tell(after_s=FIRST_CHANCE_DEADLINES * DEADLINE_S)
    assert scene.weighing(THERE) == set()


@pytest.mark.parametrize("count", [10, 3 * GONE_MAX])
def test_what_is_remembered_of_a_crowd_is_bounded(count: int) -> None:
    scene = Scene()
    for number in range(count):
        scene.claim(PeerId(f"peer-{number}"))
        scene.look()
        scene.live[HERE].clear()
    assert len(scene.sightings._peers) == min(count, GONE_MAX + 1)


def test_no_crowd_is_so_large_that_its_chance_begins_again() -> None:
    scene, crowd = Scene(), [PeerId(f"peer-{number}") for number in range(3 * GONE_MAX)]
    for number, peer in enumerate(crowd):
        scene.claim(peer, (HERE, THERE)[number % 2])
    scene.tell()
    scene.tell(after_s=CHANCE_DEADLINES * DEADLINE_S)
    assert not scene.weighing(HERE) and not scene.weighing(THERE)


def test_a_claim_is_held_for_its_newest_path_only_and_from_when_it_was_seen() -> None:
    scene = Scene()
    scene.claim(IDLE, since_s=0.0)
    scene.look()
    assert scene.sightings.claimed_s(IDLE, HERE) == scene.now_s - TTL_S / 3, "nobody was there before it was seen"
    assert scene.sightings.claimed_s(IDLE, THERE) is None
    scene.now_s += DEADLINE_S
    scene.claim(IDLE, THERE)
    scene.look()
    came_s = scene.now_s - TTL_S / 3
    assert scene.sightings.claimed_s(IDLE, THERE) == came_s
    assert scene.sightings.claimed_s(IDLE, HERE) is None
    scene.live[THERE].clear()
    scene.now_s += DEADLINE_S
    scene.look()
    scene.claim(IDLE, THERE)
    scene.look()
    assert scene.sightings.claimed_s(IDLE, THERE) == came_s, "it lapsed for a while, but its author had come before"


def test_a_claim_that_was_there_before_us_was_always_there() -> None:
    sightings = Sightings(ME, ttl_s=TTL_S, deadline_max_s=DEADLINE_S, places=PLACES)
    sightings.weighing(HERE, {HONEST: Claim(path=HERE, since_s=990.0)}, now_s=1000.0)
    assert sightings.claimed_s(HONEST, HERE) == -math.inf
