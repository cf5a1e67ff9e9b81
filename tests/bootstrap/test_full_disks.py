"""A disk that fills up ends the program, also when it was another peer's bytes that found no room."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest
from runtime_harness import World
from stages_harness import Home, run_file
from tiny_run import tiny_config
from virtual_time import eventually

from dipaco_p2p.errors import EnvironmentUnfit, Refused
from dipaco_p2p.node.node import send
from dipaco_p2p.program import files
from dipaco_p2p.program.files import Disk
from dipaco_p2p.use.folder import WARMUP


class FullBelow(Disk):
    """No room in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        if self._folder in Path(file.name).parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(file, data)


async def test_a_volunteer_that_has_no_room_for_what_others_upload_leaves_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(tmp_path, config=tiny_config(min_paths=2)) as world:
        volunteer, caller = world.join(1), world.peer(2)
        await eventually(lambda: bool(volunteer.said("claimed")))  # from here on it waits for a second path
        monkeypatch.setattr(files, "disk", FullBelow(volunteer.folder))
        with pytest.raises(Refused, match="failed at the other side"):
            await send(caller, volunteer.peer, b"bytes of a contribution")
        with pytest.raises(EnvironmentUnfit, match="no space left") as caught:
            await asyncio.wait_for(volunteer.done(), 30.0)
        assert "free some space" in caught.value.hint and volunteer.said("left")
        await world.seed.node.watch.refresh()
        assert not any(world.seed.node.watch.claims.values())


async def test_a_seed_node_that_cannot_archive_ends_and_says_so(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path, run_file(corpus))
    home.start()
    await home.join(1)
    await eventually(lambda: any(home.heads(WARMUP).values()))
    monkeypatch.setattr(files, "disk", FullBelow(home.folder))
    with pytest.raises(EnvironmentUnfit, match="no space left"):
        await asyncio.wait_for(home.seed_done(), 120.0)
    await home.close()
