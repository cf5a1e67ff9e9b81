from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, os.path.dirname(__file__))
from swarm_harness import HARNESSES, Libp2pHarness

Scenario = Callable[[Any], Awaitable[None]]


@pytest.fixture(params=list(HARNESSES))
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], None]:
    """Run a scenario on one of the swarms, and close all that it opened."""
    return _player(HARNESSES[request.param], tmp_path)


@pytest.fixture
def play_libp2p(tmp_path: Path) -> Callable[[Scenario], None]:
    """The same, for what only the real network has."""
    return _player(Libp2pHarness, tmp_path)


def _player(kind: type[Any], folder: Path) -> Callable[[Scenario], None]:
    async def run(scenario: Scenario) -> None:
        harness = kind(folder)
        try:
            async with asyncio.timeout(60):
                await scenario(harness)
        finally:
            await harness.close()

    return lambda scenario: asyncio.run(run(scenario))
