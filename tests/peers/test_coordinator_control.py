"""The verbs of a running coordinator, and answers that take time: over the socket that both programs use."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from control_harness import answered

from bootstrap.control.requests import Control, Request
from dipaco_p2p.errors import ConfigError, IntegrityError, Refused, WrongRun
from dipaco_p2p.program.control import server
from dipaco_p2p.program.control.client import ask
from peers.control.control import Request as OfAVolunteer


@contextmanager
def running(folder: Path, control: Control) -> Iterator[None]:
    """A coordinator that answers, in a thread."""
    with answered(folder, Request, control.answer):
        yield


def test_a_verb_may_take_time_and_others_are_answered_meanwhile(tmp_path: Path) -> None:
    control, may_end, found = Control(), asyncio.Event(), []

    async def slow(request: Request) -> dict[str, Any]:
        await may_end.wait()
        return {"done": request.ask}

    def free(request: Request) -> dict[str, Any]:
        may_end.set()
        return {}

    control.on("freeze", slow)
    control.on("free", free)
    with running(tmp_path, control):
        waiting = threading.Thread(target=lambda: found.append(ask(tmp_path, Request(ask="freeze"), timeout_s=20)))
        waiting.start()
        assert ask(tmp_path, Request(ask="free"), timeout_s=20).body == {}
        waiting.join()
    assert [each.body for each in found] == [{"done": "freeze"}]


def test_an_error_of_a_slow_verb_keeps_its_words_and_code(tmp_path: Path) -> None:
    async def refuse(request: Request) -> dict[str, Any]:
        raise Refused("that peer is banned already", hint="admit it first")

    control = Control()
    control.on("ban", refuse)
    with running(tmp_path, control), pytest.raises(Refused, match="banned already") as refused:
        ask(tmp_path, Request(ask="ban"))
    assert (refused.value.hint, refused.value.exit_code) == ("admit it first", 7)


def test_a_verb_that_nobody_answers_is_refused_by_name(tmp_path: Path) -> None:
    control = Control()
    control.on("status", lambda request: {})
    with running(tmp_path, control):
        with pytest.raises(ConfigError, match="cannot `statis`") as refused:
            ask(tmp_path, Request(ask="statis"))
        with pytest.raises(ConfigError, match="cannot") as long:
            ask(tmp_path, Request(ask="x" * 3000))
    assert refused.value.hint == "did you mean `status`?" and len(str(long.value)) < 100


def test_a_coordinator_and_a_volunteer_are_not_taken_for_each_other(tmp_path: Path) -> None:
    with running(tmp_path, Control()), pytest.raises(WrongRun, match="dipaco.coordinator/1"):
        ask(tmp_path, OfAVolunteer(ask="status"))


def test_an_answer_beyond_its_bound_is_an_error_and_no_half_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ANSWER_BYTES_MAX", 100)
    control = Control()
    control.on("status", lambda request: {"long": "x" * 100})
    with running(tmp_path, control), pytest.raises(IntegrityError, match="of 100 at most"):
        ask(tmp_path, Request(ask="status"))
