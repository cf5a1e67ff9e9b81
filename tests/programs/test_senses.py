"""What the machine says of its owner: power supplies as the kernel shows them, sessions as logind and terminals do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peers.governor import senses
from peers.governor.senses import NEVER_MIN, idle_min, idle_of_sessions, idle_of_terminals, on_battery

NOW_S = 1_700_000_000.0


def supply(folder: Path, name: str, **values: str) -> None:
    (folder / name).mkdir(parents=True)
    for key, value in values.items():
        (folder / name / key).write_text(value + "\n")


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({}, False),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}, "AC": {"type": "Mains", "online": "0"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Charging"}, "AC": {"type": "Mains", "online": "1"}}, False),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}, "usb": {"type": "USB", "online": "1"}}, False),
        ({"BAT0": {"type": "Battery", "status": "Full"}, "AC": {"type": "Mains", "online": "0"}}, False),
        ({"mouse": {"type": "Battery", "scope": "Device", "status": "Discharging"}}, False),
    ],
    ids=["desktop", "unplugged", "no mains shown", "charging", "by USB", "full", "a mouse"],
)
def test_a_battery_counts_when_it_is_the_machines_and_nothing_else_gives_power(
    tmp_path: Path, supplies: dict[str, dict[str, str]], expected: bool
) -> None:
    for name, values in supplies.items():
        supply(tmp_path, name, **values)
    assert on_battery(tmp_path) == expected
    assert not on_battery(tmp_path / "none")


def session(minutes: float | None, *, kind: str = "user", state: str = "active") -> dict[str, str]:
    hint = {"IdleHint": "no"} if minutes is None else {"IdleHint": "yes"}
    since_us = 0 if minutes is None else int((NOW_S - minutes * 60) * 1e6)
    return {"Class": kind, "State": state, "IdleSinceHint": str(since_us), **hint}


def test_the_session_that_was_used_last_counts() -> None:
    assert idle_of_sessions([session(30), session(7)], NOW_S) == pytest.approx(7)
    assert idle_of_sessions([session(30), session(None)], NOW_S) == 0.0
    assert idle_of_sessions([session(30), session(None, kind="greeter")], NOW_S) == pytest.approx(30)
    assert idle_of_sessions([session(30), session(None, state="closing")], NOW_S) == pytest.approx(30)
    assert idle_of_sessions([], NOW_S) == NEVER_MIN


def test_without_logind_the_terminal_that_was_read_last_counts(tmp_path: Path) -> None:
    assert idle_of_terminals(tmp_path, NOW_S) is None
    (tmp_path / "pts").mkdir()
    for name, minutes in (("0", 12), ("1", 3), ("ptmx", 0)):
        path = tmp_path / "pts" / name
        path.touch()
        os.utime(path, (NOW_S - minutes * 60, NOW_S))
    assert idle_of_terminals(tmp_path, NOW_S) == pytest.approx(3)


def test_loginctl_is_read_as_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, since_us=int((NOW_S - 600) * 1e6))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert idle_min(now_s=NOW_S) == pytest.approx(10)


def test_where_loginctl_fails_terminals_are_asked_and_without_any_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(senses, "_sessions", lambda: None)
    assert idle_min(now_s=NOW_S, devices=tmp_path) is None


def fake(folder: Path, *, since_us: int) -> None:
    """A `loginctl` with a user's session and the greeter's."""
    script = folder / "loginctl"
    script.write_text(
        "#!/bin/sh\n"
        'case "$1 $2" in\n'
        """  "list-sessions "*) echo '[{"session":"2","uid":1000},{"session":"c1","uid":42}]';;\n"""
        f'  "show-session 2") printf "Class=user\\nState=active\\nIdleHint=yes\\nIdleSinceHint={since_us}\\n";;\n'
        '  "show-session c1") printf "Class=greeter\\nState=online\\nIdleHint=no\\nIdleSinceHint=0\\n";;\n'
        "esac\n"
    )
    script.chmod(0o755)
