"""Ctrl-C and SIGTERM: once finishes cleanly, twice leaves at once."""

from __future__ import annotations

import math
import signal
import time

import pytest
from e2e_harness import Program, Programs, children_of, eventually, is_running, refused, stopped, write_run

pytestmark = pytest.mark.libp2p


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_one_signal_releases_the_path_and_hands_modules_over(
    programs: Programs, endless: Program, number: signal.Signals
) -> None:
    volunteer = programs.volunteer(endless.wait_address()["address"], "home", "--grace", "20")
    volunteer.wait_event("leads")
    volunteer.wait_event("round")
    eventually(lambda: last_led(volunteer), what=lambda: volunteer.complaint)
    began_s = time.monotonic()
    volunteer.send(number)
    assert volunteer.wait() == 0, volunteer.complaint
    assert time.monotonic() - began_s < 20
    # One alone goes from path to path: the signal may find it while a choice settles that is not a claim yet.
    moves = [event for event in volunteer.events() if event["ev"] in ("claimed", "released")]
    last = max(number for number, event in enumerate(moves) if event["ev"] == "claimed")
    assert moves[-1]["ev"] == "released" and moves[last]["path"] == moves[last + 1]["path"]
    handed = {event["module"]: event["to"] for event in volunteer.events("handed_over")}
    [leaving] = volunteer.events("doing")[-1:]
    led = last_led(volunteer, before_s=leaving["t"])
    assert leaving["doing"] == "leaving" and led
    [log] = [path.read_text() for path in volunteer.home.glob("runs/*/peer.log")]
    assert led <= set(handed) and set(handed.values()) == {endless.wait_address()["peer"]}, log
    leads = {(event["module"], event["term"]) for event in volunteer.events("leads")}
    ours = {module: max(term for name, term in leads if name == module) for module in handed}
    theirs = {event["module"]: event["term"] for event in endless.events("leads")}
    assert all(theirs[module] > term for module, term in ours.items()), "the seed node leads what was handed over"
    assert volunteer.events()[-1]["ev"] == "left"
    assert "Traceback" not in volunteer.complaint


def last_led(volunteer: Program, *, before_s: float = math.inf) -> set[str]:
    """The modules that `volunteer` led: on a busy machine it may take longer to take one over than a heartbeat lives,
    and then the coordinator has it again."""
    led: set[str] = set()
    for event in volunteer.events():
        if event["t"] < before_s and event["ev"] in ("leads", "deposed"):
            (led.add if event["ev"] == "leads" else led.discard)(event["module"])
    return led


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_while_a_run_is_prepared_ends_it_with_its_daemon(programs: Programs, number: signal.Signals) -> None:
    run_file = write_run(programs.folder / "long.toml", "found", rounds=4, min_paths=1)  # megabytes take a while
    coordinator = programs.coordinator(run_file, programs.folder / "run")
    eventually(lambda: "Reading the corpus" in coordinator.complaint, within_s=60, what=lambda: coordinator.complaint)
    daemons = children_of(coordinator.process.pid)
    assert daemons
    coordinator.send(number)
    began_s = time.monotonic()
    refused(coordinator, 130, "stopped before it was ready")
    assert time.monotonic() - began_s < 10
    eventually(lambda: not any(map(is_running, daemons)), within_s=10)


def test_a_second_ctrl_c_leaves_at_once(programs: Programs, endless: Program) -> None:
    volunteer = programs.volunteer(endless.wait_address()["address"], "home")
    volunteer.wait_event("leads")
    volunteer.wait_event("receipt")
    with stopped(endless):  # so that leaving in good order takes long
        volunteer.send(signal.SIGINT)
        volunteer.wait_event("doing", doing="finishing")
        began_s = time.monotonic()
        volunteer.send(signal.SIGINT)
        assert volunteer.wait() == 130
        assert time.monotonic() - began_s < 5
    assert not volunteer.events("left")
    assert "Traceback" not in volunteer.complaint
    eventually(lambda: endless.process.poll() is None)
