from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dipaco_p2p.runtime import tasks

HERE = Path(__file__).parent
# serving_harness.py here, the tiny run of tiny_run.py and its peers of runtime_harness.py, the corpus of e2e_harness.py
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("runtime", "e2e"))]


@pytest.fixture(autouse=True, scope="module")  # runs that are played once for all tests of a file are meant, too
def rounds_take_time() -> Iterator[None]:
    """Tiny volunteers train in no time, and a run would be over before a test could do anything to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "SOON_S", 0.5)
        yield
