"""Leaving the GPU to others: who counts and who does not, when it is free again, and what NVML may leave unsaid."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from fake_nvml import GIB, LOST, OURS, FakeNvml, FakePrograms

from dipaco_p2p.clock import ManualClock
from dipaco_p2p.errors import EnvironmentUnfit
from peers.governor import nvml
from peers.governor.governor import FAILURES_MAX, CardWatch
from peers.governor.nvml import Card, open_card
from peers.governor.yielding import ANOTHER, COOLER_C, GROWTH_S, QUIET_S, REST_S
from peers.preferences.keys import When

GAME, DESKTOP, BROWSER, MODEL, VOLUNTEER = 201, 203, 205, 206, 208
NAMES = {GAME: "eldenring.exe", DESKTOP: "kwin_wayland", BROWSER: "firefox", MODEL: "ollama", VOLUNTEER: "python3"}
PLAYING = ("yielding the GPU to eldenring.exe",)
SOMEBODY = (f"yielding the GPU to {ANOTHER}",)


class Scene:
    """A card that is looked at every second, beside a desktop that sits on it."""

    def __init__(self, when: When | None = None, *, card: FakeNvml | None = None) -> None:
        self.clock = ManualClock()
        self.nvml = card or FakeNvml(own_bytes=4 * GIB)
        self.who = FakePrograms(names=NAMES)
        self.is_resting = False
        self.said: list[str] = []
        if card is None:
            self.nvml.put(OURS, memory=5 * GIB, use=90)
            self.nvml.put(DESKTOP, memory=GIB // 4, use=4)
        self.watch = CardWatch(
            self.nvml.card(),
            when or When(),
            clock=self.clock,
            is_resting=lambda: self.is_resting,
            say=self.said.append,
            who=self.who,
        )

    def look(self) -> tuple[str, ...]:
        self.clock._now_s += 1.0
        self.nvml.now_s = self.clock.now_s()
        found = self.watch.look()
        if found and OURS in self.nvml.use:
            self.nvml.use[OURS] = 0
        return found

    def looks(self, seconds: float) -> set[tuple[str, ...]]:
        return {self.look() for _ in range(round(seconds))}

    def free_after(self) -> int:
        """Looks until nothing is said any more."""
        return next(count for count in range(1, 200) if not self.look())


def test_a_game_is_noticed_at_the_next_look_and_forgotten_when_it_was_gone_for_half_a_minute() -> None:
    scene = Scene()
    assert scene.looks(20) == {()}
    scene.nvml.put(GAME, memory=GIB // 8, use=35)
    assert scene.look() == PLAYING
    assert scene.looks(600) == {PLAYING}
    scene.nvml.take(GAME)
    assert scene.free_after() == QUIET_S
    assert scene.looks(100) == {()}


def test_a_game_that_loads_or_stands_still_for_a_moment_is_not_over() -> None:
    scene = Scene()
    scene.look()
    scene.nvml.put(GAME, memory=GIB // 8, use=35)
    for _ in range(5):
        scene.nvml.use[GAME] = 40
        assert scene.look() == PLAYING
        scene.nvml.use[GAME] = 0
        assert scene.looks(QUIET_S - 1) == {PLAYING}
    assert scene.look() == ()


def test_a_game_is_noticed_by_what_it_loads_before_it_draws_anything() -> None:
    scene = Scene()
    scene.look()
    scene.nvml.put(GAME, memory=2 * GIB)
    assert scene.look() == PLAYING


def test_who_sits_on_the_card_without_doing_much_there_never_stops_us() -> None:
    scene = Scene()
    scene.nvml.put(MODEL, memory=16 * GIB)
    scene.nvml.put(BROWSER, memory=2 * GIB, use=7)
    assert scene.looks(30) == {()}
    for _ in range(60):  # a browser that takes more and more, slowly
        scene.nvml.memory[BROWSER] = (scene.nvml.memory[BROWSER] or 0) + GIB // 16
        assert scene.look() == ()
    scene.nvml.memory[MODEL] = 24 * GIB
    assert scene.look() == ("yielding the GPU to ollama",), "it has loaded another one"
    assert scene.free_after() == GROWTH_S - 1 + QUIET_S, "what it held before is a second older than what it loaded"


def test_the_name_stays_while_its_program_is_there_and_is_the_next_ones_afterwards() -> None:
    scene = Scene()
    scene.look()
    scene.nvml.put(GAME, memory=GIB // 8, use=20)
    assert scene.look() == PLAYING
    scene.nvml.put(MODEL, memory=GIB // 8, use=70)
    assert scene.look() == PLAYING
    scene.nvml.take(GAME)
    assert scene.look() == ("yielding the GPU to ollama",)


def test_another_volunteer_on_the_card_does_not_count() -> None:
    scene = Scene()
    scene.look()
    scene.who.volunteers.add(VOLUNTEER)
    scene.nvml.put(VOLUNTEER, memory=6 * GIB, use=50)
    assert scene.looks(60) == {()}
    scene.who.volunteers.clear()
    assert scene.look() == ("yielding the GPU to python3",), "one that only looks like it does"


def test_with_a_list_whoever_is_on_it_counts_by_being_there_and_nobody_else() -> None:
    scene = Scene(When(gpu_yield="listed", gpu_programs=("EldenRing.exe",)))
    scene.nvml.put(MODEL, memory=GIB, use=80)
    assert scene.looks(10) == {()}
    scene.nvml.put(GAME, memory=1)
    assert scene.looks(60) == {PLAYING}
    scene.nvml.take(GAME)
    assert scene.free_after() == QUIET_S


def test_a_listed_program_counts_by_being_there_beside_any_that_uses_the_card() -> None:
    scene = Scene(When(gpu_programs=("eldenring.exe",)))
    scene.nvml.put(GAME, memory=1)
    assert scene.look() == PLAYING


def test_heat_pauses_until_it_was_cooler_for_a_while_whoever_uses_the_card() -> None:
    scene = Scene(When(gpu_yield="off", gpu_temperature_c=80.0))
    scene.nvml.put(GAME, memory=8 * GIB, use=90)
    scene.nvml.celsius = 79
    assert scene.looks(10) == {()}
    scene.nvml.celsius = 80
    assert scene.look() == ("cooling the GPU, above 80 °C",)
    scene.nvml.celsius = 80 - int(COOLER_C) + 1
    assert scene.looks(100) == {("cooling the GPU, above 80 °C",)}, "hardly cooler"
    scene.nvml.celsius -= 1
    assert scene.free_after() == QUIET_S


# -- where it is not said who uses what


def container(**settings: Any) -> Scene:
    """Processes have other numbers here than we know, or none: we are not in the list."""
    card = FakeNvml(own_bytes=4 * GIB, hidden_bytes=5 * GIB, hidden_use=90, **settings)
    card.put(3, memory=GIB, use=60)  # whoever has this number outside
    scene = Scene(card=card)
    scene.who.names = {3: "nobody we know"}
    return scene


def test_without_processes_growth_of_what_is_not_ours_counts_and_in_a_rest_all_use() -> None:
    scene = container()
    assert scene.looks(20) == {()}, "what was there before us, and our own use"
    scene.nvml.own_bytes += 3 * GIB
    scene.nvml.hidden_bytes += 3 * GIB
    assert scene.looks(20) == {()}, "our own growth"
    scene.nvml.hidden_bytes += 2 * GIB
    assert scene.look() == SOMEBODY
    assert scene.looks(100) == {SOMEBODY}, "before the rest has begun, nobody can say that it is free"
    scene.is_resting, scene.nvml.own_bytes = True, 0
    scene.nvml.hidden_bytes -= 7 * GIB
    scene.nvml.hidden_use = 0
    scene.nvml.use[3] = 40
    assert scene.looks(200) == {SOMEBODY}
    scene.nvml.use[3] = 2
    assert scene.free_after() == QUIET_S


def test_our_last_step_is_not_taken_for_somebody_elses_use() -> None:
    scene = container()
    scene.look()
    scene.is_resting = True
    assert scene.looks(REST_S) == {()}
    scene.nvml.hidden_use, scene.nvml.use[3] = 0, 1
    assert scene.looks(20) == {()}


def test_a_card_that_is_busy_with_nobody_on_it_is_used_from_where_we_cannot_look() -> None:
    card = FakeNvml(hidden_bytes=GIB, hidden_use=55)
    scene = Scene(card=card)
    scene.is_resting = True
    assert scene.looks(REST_S) == {()}
    assert scene.look() == SOMEBODY
    card.hidden_use = 0
    assert scene.free_after() == QUIET_S


@pytest.mark.parametrize("question", ["processes", "use", "rates", "memory", "temperature"])
def test_a_question_that_the_card_does_not_answer_is_no_failure(question: str) -> None:
    scene = Scene(When(gpu_temperature_c=80.0))
    scene.nvml.unanswered = {question}
    assert scene.looks(20) == {()}
    scene.nvml.put(GAME, memory=3 * GIB, use=60)
    assert scene.looks(3) != {()}, "there is always another way to notice a game"
    assert not scene.said


def test_without_the_use_by_process_a_rest_goes_on_while_the_card_is_busy() -> None:
    scene = Scene()
    scene.nvml.unanswered = {"use"}
    scene.look()
    scene.nvml.put(GAME, memory=3 * GIB, use=60)
    assert scene.look() == PLAYING
    scene.is_resting = True
    assert len(scene.looks(200)) == 2, "first by its name, then by the use of the card"
    scene.nvml.take(GAME)
    assert scene.free_after() == QUIET_S


# -- where NVML fails


def test_a_short_failure_changes_nothing_and_a_lasting_one_ends_the_asking_with_one_line() -> None:
    scene = Scene()
    scene.look()
    scene.nvml.put(GAME, memory=GIB // 8, use=50)
    assert scene.look() == PLAYING
    scene.nvml.failure = LOST
    assert scene.looks(FAILURES_MAX - 1) == {PLAYING}
    scene.nvml.failure = None
    assert scene.look() == PLAYING
    scene.nvml.failure = LOST
    assert scene.looks(FAILURES_MAX - 1) == {PLAYING} and not scene.said
    assert scene.looks(50) == {()}
    assert scene.said == ["the GPU is not yielded until the next start: NVML fails: NVML error 15"]
    scene.nvml.failure = None
    assert scene.looks(5) == {()}, "as was said"


def test_a_reading_of_use_begins_when_we_begin_and_leaves_out_what_cannot_be() -> None:
    fake = FakeNvml()
    fake.put(GAME, memory=GIB, use=99)
    card = fake.card()
    assert card.read().use == {}, "that was before"
    assert card.read().use == {}, "nothing new"
    fake.now_s += 1.0
    assert card.read().use == {GAME: 99.0}
    fake.use[GAME], fake.now_s = 4_294_967_295, fake.now_s + 1.0
    assert card.read().use == {}


def test_what_goes_wrong_in_the_binding_is_one_line() -> None:
    fake = FakeNvml()
    card = fake.card()

    def broken(handle: str) -> None:
        raise ValueError("a structure of another version")

    fake.nvmlDeviceGetMemoryInfo = broken  # type: ignore[method-assign,assignment]
    with pytest.raises(EnvironmentUnfit, match="NVML fails: a structure of another version"):
        card.read()


def test_a_card_that_is_not_there_is_said() -> None:
    with pytest.raises(EnvironmentUnfit, match="NVML knows no card GPU-7"):
        Card(FakeNvml(), ("GPU-7", "MIG-7"), own_bytes=lambda: 0)
    with pytest.raises(EnvironmentUnfit, match="NVML fails: NVML error 15"):
        Card(FakeNvml(failure=LOST), ("GPU-1",), own_bytes=lambda: 0)
    with pytest.raises(EnvironmentUnfit, match="which card"):
        Card(FakeNvml(), (), own_bytes=lambda: 0)


def test_without_the_binding_the_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(EnvironmentUnfit, match="nvidia-ml-py is not installed") as caught:
        open_card("cuda")
    assert caught.value.hint == "pip install nvidia-ml-py"


def test_the_binding_has_what_is_asked_of_it() -> None:
    pynvml = pytest.importorskip("pynvml")
    for name in dir(FakeNvml):
        assert not name.startswith("nvml") or callable(getattr(pynvml, name))
    for name in ("INVALID_ARGUMENT", "NOT_SUPPORTED", "NO_PERMISSION", "NOT_FOUND", "FUNCTION_NOT_FOUND", "NO_DATA"):
        assert getattr(pynvml, f"NVML_ERROR_{name}") in nvml.UNANSWERED
    assert nvml.NOTHING_NEW == pynvml.NVML_ERROR_NOT_FOUND and nvml.SENSOR == pynvml.NVML_TEMPERATURE_GPU
