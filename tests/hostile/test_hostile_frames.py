"""Bytes that are no frame, or no honest one, against the real programs."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from pathlib import Path

import pytest
from e2e_harness import stopped
from hostile_harness import (
    MIB,
    Attacker,
    Battlefield,
    Target,
    frame_of,
    prefix,
    reason_on,
    request,
)

from dipaco_p2p.swarm.api import BODY_BYTES_MAX, HEADER_BYTES_MAX, OPEN_CALLS_PER_PEER_MAX

pytestmark = pytest.mark.libp2p

DEEP = 100_000
FILES = 1024
"""What a program may have open where the system gives no more."""
GARBAGE = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
    "another magic": prefix(2, 0, magic=b"XXX") + b"{}",
    "another version": prefix(2, 0, version=2) + b"{}",
    "an unknown kind": prefix(2, 0, kind=9) + b"{}",
    "a reply": prefix(2, 0, kind=1) + b"{}",
    "a refusal": prefix(29, 0, kind=2) + b'{"message":"m","reason":"no"}',
    "no table": frame_of(b"[]"),
    "no method": frame_of(b"{}"),
    "no JSON": frame_of(b"{" * 64),
    "no UTF-8": frame_of(b'{"method":"\xff\xfe"}'),
    "half a surrogate": frame_of(b'{"header":{},"method":"\\ud800"}'),
    "not canonical": frame_of(b'{ "header": {}, "method": "run.manifest" }'),
    "doubled keys": frame_of(b'{"header":{},"header":{},"method":"run.manifest"}'),
    "not a number": frame_of(b'{"header":{"x":NaN},"method":"run.manifest"}'),
    "more than a float holds": frame_of(b'{"header":{"x":1e999},"method":"run.manifest"}'),
    "a number of 200000 digits": frame_of(b'{"header":{"x":' + b"9" * 200_000 + b'},"method":"run.manifest"}'),
    "lists too deep": frame_of(b'{"header":{"x":' + b"[" * DEEP + b"]" * DEEP + b'},"method":"run.manifest"}'),
    "tables too deep": frame_of(b'{"header":' + b'{"x":' * 30_000 + b"{}" + b"}" * 30_000 + b"}"),
}
BOMBS = {
    "a header of 2^32 - 1": prefix(2**32 - 1, 0),
    "a header of 2^31 - 1": prefix(2**31 - 1, 0),
    "a body of 2^32 - 1": prefix(2, 2**32 - 1) + b"{}",
    "a header over the limit": prefix(HEADER_BYTES_MAX + 1, 0),
    "a body over the limit": prefix(2, BODY_BYTES_MAX + 1) + b"{}",
}
METHODS = ["", "../run.manifest", "__class__", "run.manifest\0", "x" * 100_000, "\x1b[2J", "0" * 16 + "/run.manifest"]


def both(field: Battlefield) -> tuple[Target, Target]:
    return field.seed, field.leader


def test_garbage_is_called_malformed(field: Battlefield) -> None:
    async def attack(attacker: Attacker, target: Target) -> None:
        for name, data in GARBAGE.items():
            assert await attacker.say(target, data) == "malformed", name

    with field.attacked():
        for target in both(field):
            field.background.run(attack(field.attacker, target))


def test_lengths_beyond_the_limits_are_refused_before_anything_is_kept(field: Battlefield) -> None:
    async def attack(attacker: Attacker, target: Target) -> None:
        for name, data in BOMBS.items():
            assert await attacker.say(target, data) == "oversize", name

    with field.attacked():
        for target in both(field):
            field.background.run(attack(field.attacker, target))


def test_who_goes_on_writing_after_an_oversize_header_fills_nothing(field: Battlefield) -> None:
    async def pour(attacker: Attacker, target: Target) -> str:
        async with attacker.stream(target) as (reader, writer):
            with contextlib.suppress(ConnectionError):
                writer.write(prefix(2, 2**32 - 1))
                for _ in range(64):
                    writer.write(bytes(MIB))
                    async with asyncio.timeout(3):
                        await writer.drain()
            return await reason_on(reader)

    async def attack() -> list[str]:
        pours = (pour(field.attacker, field.leader) for _ in range(4))
        return [str(found) for found in await asyncio.gather(*pours, return_exceptions=True)]

    with field.attacked():
        field.background.run(attack())


def test_truncated_frames_end_with_the_stream(field: Battlefield) -> None:
    async def attack(target: Target) -> None:
        whole = request("run.manifest", {})
        cuts = (0, 1, 12, 13, len(whole) - 1)
        said = await asyncio.gather(
            *(field.attacker.say(target, whole[:cut], half_close=True) for cut in cuts), return_exceptions=True
        )
        assert said == [""] * len(cuts)

    with field.attacked():
        for target in both(field):
            field.background.run(attack(target))


def test_methods_that_nobody_serves_are_unknown(field: Battlefield) -> None:
    async def attack(target: Target) -> None:
        for method in METHODS:
            assert await field.attacker.say(target, request(method, {})) == "unknown-method", method[:20]

    with field.attacked():
        for target in both(field):
            field.background.run(attack(target))


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.parametrize("name", ["leader", "seed"])
def test_a_stranger_who_opens_streams_by_the_thousand_leaves_files_for_everything_else(
    name: str, field: Battlefield
) -> None:
    target, most = getattr(field, name), 0
    pid = target.program.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    before = open_files(pid)

    async def pour() -> None:
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(15), contextlib.AsyncExitStack() as streams:
                    for _ in range(1300):
                        await streams.enter_async_context(field.attacker.stream(target))

    async def attack() -> None:
        nonlocal most
        pouring = asyncio.ensure_future(pour())
        while not pouring.done():
            most = max(most, open_files(pid))
            await asyncio.sleep(0.05)
        await pouring

    with field.attacked(growth_max_bytes=96 * MIB):  # Go keeps what its daemon needed for so many streams at once
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (FILES, hard))
        try:
            field.background.run(attack())
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert most - before < FILES / 2, f"{most} files were open, {before} before"
    assert "Too many open files" not in target.program.complaint


def test_a_stranger_who_holds_two_hundred_streams_holds_nobody_else_up(field: Battlefield) -> None:
    async def attack(target: Target) -> None:
        async with contextlib.AsyncExitStack() as stack:
            with stopped(target.program):  # they all wait before any is answered, as when it has much to do
                streams = [await stack.enter_async_context(field.attacker.stream(target)) for _ in range(200)]
            waits = [asyncio.ensure_future(reason_on(reader)) for reader, _ in streams]
            # All but those that one caller may have open get their reason at once; these wait for their 30 seconds.
            done: list[str] = []
            while len(done) < len(streams) - OPEN_CALLS_PER_PEER_MAX:
                finished, waiting = await asyncio.wait(waits, timeout=20, return_when=asyncio.FIRST_COMPLETED)
                assert finished, f"{len(done)} of {len(streams)} were answered"
                done += [task.result() for task in finished]
                waits = list(waiting)
            assert set(done) <= {"busy", ""}, "a few are told why, and the others are closed at once"
            await asyncio.to_thread(field.assert_serves)
            await asyncio.to_thread(field.assert_goes_on)
            for task in waits:
                task.cancel()

    with field.attacked():
        for target in both(field):
            field.background.run(attack(target))
