"""The pace of whole runs in memory, for the folders of tests that play them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dipaco_p2p.program import tasks


@pytest.fixture(autouse=True, scope="module")  # runs that are played once for all tests of a file are meant, too
def rounds_take_time() -> Iterator[None]:
    """Tiny volunteers train in no time, and a run would be over before a test could do anything to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "SOON_S", 0.5)
        yield
