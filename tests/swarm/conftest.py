from __future__ import annotations

import asyncio
import inspect
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, os.path.dirname(__file__))
from swarm_harness import HARNESSES

LIMIT_S = 60.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An `async def` test runs in a loop of its own (of virtual time, if its file imports `play`), at the end of which
    all swarms of `net` are closed."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    scenario, play = partial(pyfuncitem.obj, **arguments), getattr(pyfuncitem.module, "play", None)

    async def run() -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                await scenario()
        finally:
            if "net" in arguments:
                await arguments["net"].close()

    play(scenario) if play is not None else asyncio.run(run())
    return True


@pytest.fixture(params=list(HARNESSES))
def net(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """One of the swarms."""
    return HARNESSES[request.param](tmp_path)
