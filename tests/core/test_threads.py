"""Work that is spread over cores comes back in order, whole, and with its first error."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from dipaco_p2p.core import arrays
from dipaco_p2p.core.arrays import NICENESS, TRAINER_NICENESS, at_once, spans, spread, trainer_thread


@pytest.mark.parametrize("most", [1, 2])
def test_what_is_spread_comes_back_in_order(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(arrays, "CORES_MAX", most)
    assert spread(lambda number: number**2, range(100)) == [number**2 for number in range(100)]
    assert at_once(lambda: "one", lambda: "two", lambda: "three") == ["one", "two", "three"]
    assert spread(str, []) == []
    with pytest.raises(ZeroDivisionError):
        spread(lambda number: 1 // number, [2, 0, 1])


def test_spans_cover_every_place_once() -> None:
    assert [place for span in spans(0, 11, 4) for place in range(11)[span]] == list(range(11))
    assert spans(0, 0, 4) == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no niceness of its own")
def test_threads_give_way_to_a_trainer_and_who_calls_does_not() -> None:
    def niceness(_: int = 0) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    expected = [max(before, NICENESS)] * 3 if len(os.sched_getaffinity(0)) > 1 else [before] * 3
    assert spread(niceness, [0, 1, 2]) == expected
    assert niceness() == before


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no niceness of its own")
def test_a_trainer_gives_way_to_all_that_does_not_train() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    with trainer_thread() as thread:
        assert thread.submit(niceness).result() == max(before, TRAINER_NICENESS)
    assert niceness() == before and TRAINER_NICENESS < NICENESS
