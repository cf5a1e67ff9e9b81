"""Work that is spread over cores comes back in order, whole, and with its first error."""

from __future__ import annotations

import pytest

from dipaco_p2p.core import cores
from dipaco_p2p.core.cores import at_once, spans, spread


@pytest.mark.parametrize("most", [1, 2])
def test_what_is_spread_comes_back_in_order(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(cores, "CORES_MAX", most)
    assert spread(lambda number: number**2, range(100)) == [number**2 for number in range(100)]
    assert at_once(lambda: "one", lambda: "two", lambda: "three") == ["one", "two", "three"]
    assert spread(str, []) == []
    with pytest.raises(ZeroDivisionError):
        spread(lambda number: 1 // number, [2, 0, 1])


def test_spans_cover_every_place_once() -> None:
    assert [place for span in spans(11, 4) for place in range(11)[span]] == list(range(11))
    assert spans(0, 4) == []
