"""What tests of the leaderboard share: rounds that take time, as those of volunteers do, a swarm, and a site."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from collector_harness import Swarm
from pace import rounds_take_time
from starlette.testclient import TestClient
from web_harness import site

from leaderboard.database import Database

__all__ = ["rounds_take_time"]


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    made = Swarm(tmp_path)
    with closing(made.database):
        yield made


@pytest.fixture
def database() -> Iterator[Database]:
    """An empty one."""
    with closing(Database.open(None)) as found:
        yield found


@pytest.fixture
def client() -> Iterator[TestClient]:
    """Of a site with a small Snapshot."""
    with site() as (found, _):
        yield found
