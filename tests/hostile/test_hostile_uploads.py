"""Uploads that never end, end wrong, or want to be elsewhere, against the real programs' disks."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from hostile_harness import HONEST, MIB, Attacker, Battlefield, Target

from dipaco_p2p.errors import Refused, Unreachable
from dipaco_p2p.swarm.blobs.blobs import RANGE_BYTES

pytestmark = pytest.mark.libp2p

DISK_MAX_BYTES = 8 * MIB
UPLOAD_BYTES = 1500  # what the tiny run's leader accepts as a payload


def disk_bytes(target: Target) -> int:
    """What is under the program's folder."""
    total = 0
    for folder, _, names in os.walk(target.program.home):
        for name in names:
            try:
                total += (Path(folder) / name).lstat().st_size
            except FileNotFoundError:
                continue
    return total


def partial_files(target: Target) -> list[Path]:
    return [path for path in target.program.home.rglob("partial/*")]


async def write(attacker: Attacker, target: Target, data: bytes, **changes: Any) -> str:
    header = {"digest": hashlib.sha256(data).hexdigest(), "size": len(data), "offset": 0} | changes
    return await attacker.ask(target, "blob.write", header, data)


def test_unfinished_uploads_by_the_hundred_are_bounded_and_oust_nobodys(field: Battlefield) -> None:
    data = bytes(UPLOAD_BYTES)

    async def attack(target: Target) -> None:
        theirs = hashlib.sha256(b"theirs").hexdigest()
        ours = {"digest": theirs, "size": UPLOAD_BYTES, "offset": 0}
        await field.second.call(target, "blob.write", ours, data[:100])
        for number in range(300):
            header = {"digest": f"{number:064x}", "size": UPLOAD_BYTES, "offset": 0}
            assert await field.attacker.ask(target, "blob.write", header, data[:-1]) in (HONEST, "busy")
        reply = await field.second.call(target, "blob.write", ours)
        assert reply.header["have"] == 100, "another's upload had to make room"

    for target in (field.seed, field.leader):
        before = disk_bytes(target)
        with field.attacked():
            field.background.run(attack(target))
        assert len(partial_files(target)) <= 64
        assert disk_bytes(target) < before + DISK_MAX_BYTES


def test_finished_uploads_that_nobody_names_are_bounded_whoever_sends_them(field: Battlefield) -> None:
    async def attack(target: Target) -> None:
        for number in range(40):
            data = number.to_bytes(4, "big") * (UPLOAD_BYTES // 4)
            assert await write(field.attacker, target, data) == HONEST

    for target in (field.seed, field.leader):
        before = sum(1 for _ in target.program.home.rglob("blobs/*/*"))
        with field.attacked():
            field.background.run(attack(target))
        after = sum(1 for _ in target.program.home.rglob("blobs/*/*"))
        assert after < before + 150, "honest work adds some"


LIES = {
    "another digest": ({"digest": "0" * 64}, "integrity"),
    "a digest with a path in it": ({"digest": "../" * 20 + "etc"}, "malformed"),
    "a digest of 64 characters with a path in it": ({"digest": ("../" * 22)[:64]}, "malformed"),
    "a digest in capitals": ({"digest": "A" * 64}, "malformed"),
    "a digest that is a number": ({"digest": 7}, "malformed"),
    "2^40 bytes": ({"size": 2**40}, "oversized"),
    "2^60 bytes": ({"size": 2**60}, "malformed"),
    "10^4000 bytes": ({"size": 10**4000}, "malformed"),
    "minus one byte": ({"size": -1}, "malformed"),
    "half a byte": ({"size": 0.5}, "malformed"),
    "a true size": ({"size": True}, "malformed"),
    "no bytes": ({"size": 0}, "malformed"),
    "an offset beyond the end": ({"offset": 2**40}, "malformed"),
    "a negative offset": ({"offset": -1}, "malformed"),
}


def test_lies_about_an_upload_are_refused_by_name(field: Battlefield) -> None:
    async def attack(target: Target) -> None:
        for number, (name, (change, reason)) in enumerate(LIES.items()):
            data = bytes([number]) * UPLOAD_BYTES
            assert await write(field.attacker, target, data, **change) == reason, name
        # A hole is not written: the answer says how much is there.
        data = bytes([99]) * UPLOAD_BYTES
        header = {"digest": hashlib.sha256(data).hexdigest(), "size": len(data), "offset": 700}
        assert (await field.attacker.call(target, "blob.write", header, data[700:])).header["have"] == 0

    with field.attacked():
        for target in (field.seed, field.leader):
            field.background.run(attack(target))
    secrets = [path for target in (field.seed, field.leader) for path in target.program.home.rglob("etc*")]
    assert not secrets


READS = {
    "the key": ({"digest": "../../identity.key"}, "malformed"),
    "a blob that is not here": ({"digest": "0" * 64}, "missing"),
    "from beyond the end": ({"digest": "", "offset": 2**52}, HONEST),
    "2^52 bytes": ({"digest": "", "length": 2**52}, HONEST),
    "a negative length": ({"digest": "", "length": -1}, "malformed"),
    "no length": ({"digest": "", "length": None}, "malformed"),
}


def test_reads_get_what_is_there_and_no_more(field: Battlefield) -> None:
    [ref] = [ref.blob for ref in field.run.manifest.genesis if str(ref.module) == "L1.M0"]

    async def attack() -> None:
        for name, (change, reason) in READS.items():
            header = {"digest": ref.digest, "offset": 0, "length": 0} | change
            header["digest"] = header["digest"] or ref.digest
            try:
                reply = await field.attacker.call(field.seed, "blob.read", header)
            except Refused as refused:
                assert refused.reason == reason, name
            else:
                assert reason == HONEST and len(reply.body) <= RANGE_BYTES, name

    with field.attacked():
        field.background.run(attack())


def test_hundreds_of_reads_at_once_are_served_refused_as_busy_or_cut(field: Battlefield) -> None:
    [ref] = [ref.blob for ref in field.run.manifest.genesis if str(ref.module) == "L0.M0"]

    async def attack() -> set[str]:
        header = {"digest": ref.digest, "offset": 0, "length": RANGE_BYTES}
        asked = (field.attacker.ask(field.seed, "blob.read", header) for _ in range(400))
        said = await asyncio.gather(*asked, return_exceptions=True)
        return {one if isinstance(one, str) else type(one).__name__ for one in said}

    with field.attacked():
        assert {HONEST, "busy"} <= field.background.run(attack()) <= {HONEST, "busy", Unreachable.__name__}
