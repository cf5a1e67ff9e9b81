"""Outer gradients that are none, claims about them that are lies, and old ones again, against a module's leader."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hostile_harness import HONEST, Battlefield
from safetensors.numpy import save

from dipaco_p2p.protocol.documents import BlobRef, seal
from dipaco_p2p.strict import plain
from dipaco_p2p.topology import ModuleId, PathId

pytestmark = pytest.mark.libp2p

MODULE, PATH = ModuleId(1, 0), PathId((0, 0))
BLOCK = 256
INT4 = {"block": "256", "codec": "int4"}
NOT_FINITE = (float("nan"), float("inf"), -float("inf"))


def payload(size: int, *, scale: float = 1e-5, code: int = 1, **changes: Any) -> bytes:
    """A payload as an honest trainer would write it, but for what is said."""
    tensors = {"codes": packed(size, code), "scales": np.full(-(-size // BLOCK), scale, np.float32)}
    return save(tensors | changes, metadata=INT4)


def packed(size: int, code: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """As many codes of 4 bits, two to a byte; one that is missing at the end is 0."""
    codes = np.full(-(-size // 2), (code + 8) * 17, np.uint8)
    if size % 2:
        codes[-1] = (code + 8) | 8 << 4
    return codes


def bad_payloads(size: int) -> dict[str, tuple[bytes, str]]:
    """By name: the payload, and the reason why it is refused."""
    scales = np.full(-(-size // BLOCK), 1e-6, np.float32)
    lies = {
        **{f"a scale of {value}": payload(size, scale=value) for value in (*NOT_FINITE, -1.0, 3e38, 1e-45)},
        "the code -8": payload(size, code=-8),
        "one value, to be broadcast": payload(1),
        "one scale, to be broadcast": payload(size, scales=scales[:1]),
        "two values too many": payload(size + 2),
        "another shape": payload(size, codes=packed(size, 1)[None]),
        "half floats for codes": payload(size // 4, codes=np.ones(size // 4, np.float16)),
        "complex scales": payload(size, scales=scales.astype(np.complex64)),
        "scales of 64 bits": payload(size, scales=scales.astype(np.float64)),
        "a tensor too many": payload(size, more=scales),
        "no scales": save({"codes": packed(size, 1)}, metadata=INT4),
        "another codec": save({"codes": packed(size, 1), "scales": scales}, metadata={"codec": "raw"}),
        "no tensors": b"\x02\0\0\0\0\0\0\0{}",
        "no safetensors": b"PK\x03\x04" + bytes(100),
        "a header of 2^60 bytes": (2**60).to_bytes(8, "little") + b"{}",
        "a header of 2^63 bytes": (2**63).to_bytes(8, "little") + b"{}",
        "a header of lists": (500).to_bytes(8, "little") + b"[" * 500,
        "offsets beyond the end": b"\x40\0\0\0\0\0\0\0"
        + b'{"codes":{"dtype":"I8","shape":[9],"data_offsets":[0,999999999]}}'.ljust(64),
    }
    norms = {
        "zeros": payload(size, code=0),
        "1e30": payload(size, scale=1e30),
        "thousands": payload(size, scale=9.0),
    }
    return (
        {name: (data, "malformed") for name, data in lies.items()}
        | {name: (data, "norm") for name, data in norms.items()}
        | {"floats for codes": (payload(size, codes=np.ones(size, np.float32)), "oversized")}
    )


def test_payloads_that_are_no_outer_gradients_are_refused_by_name(field: Battlefield) -> None:
    async def attack() -> None:
        for name, (data, reason) in bad_payloads(field.run.layout(MODULE).size).items():
            contribution = await field.attacker.contribution(field.leader, PATH, MODULE, data)
            assert await field.attacker.push(field.leader, contribution, data) == reason, name

    with field.attacked():
        field.background.run(attack())


LIES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "no tokens": (lambda d: {"tokens": 0}, "malformed"),
    "negative tokens": (lambda d: {"tokens": -1}, "malformed"),
    "half a token": (lambda d: {"tokens": 1.5}, "malformed"),
    "tokens as text": (lambda d: {"tokens": "1"}, "malformed"),
    "true tokens": (lambda d: {"tokens": True}, "malformed"),
    "more tokens than a round has": (lambda d: {"tokens": 10**9}, "malformed"),
    "2^41 tokens": (lambda d: {"tokens": 2**41}, "malformed"),
    "10^4000 tokens": (lambda d: {"tokens": 10**4000}, "malformed"),
    "no steps": (lambda d: {"steps": 0}, "malformed"),
    "a loss of 10^4000": (lambda d: {"loss": 10**4000}, "malformed"),
    "a loss in lists": (lambda d: {"loss": deep(400)}, "malformed"),
    "a payload of 2^60 bytes": (lambda d: {"payload": d["payload"] | {"size": 2**60}}, "malformed"),
    "a payload of 2^40 bytes": (lambda d: {"payload": d["payload"] | {"size": 2**40}}, "oversized"),
    "a digest with a path in it": (lambda d: {"payload": d["payload"] | {"digest": "../../identity.key"}}, "malformed"),
    "a shard that is to come": (lambda d: {"sharding": 2}, "unknown-sharding"),
    "a shard that never was": (lambda d: {"sharding": 2**40}, "unknown-sharding"),
    "another run": (lambda d: {"run": "0" * 64}, "wrong-run"),
    "another path": (lambda d: {"path": "P0-1"}, "wrong-path"),
    "a path that is none": (lambda d: {"path": "P0-999999"}, "wrong-path"),
    "a module that is none": (lambda d: {"module": "L9.M9"}, "not-leader"),
    "a module with a path in it": (lambda d: {"module": "../L1.M0"}, "malformed"),
    "a base that is to come": (lambda d: {"base_version": d["base_version"] + 1000}, "unknown-base"),
    "an old base": (lambda d: {"base_version": 0}, "stale-base"),
    "another digest of the base": (lambda d: {"base_digest": "f" * 64}, "unknown-base"),
    "another author": (
        lambda d: {"author": d["author"][:-1] + ("2" if d["author"].endswith("1") else "1")},
        "malformed",
    ),
    "a field too many": (lambda d: {"weight": 1e9}, "malformed"),
}


def deep(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def test_lies_about_a_contribution_are_refused_by_name(field: Battlefield) -> None:
    data = payload(field.run.layout(MODULE).size)

    async def attack() -> None:
        await field.attacker.upload(field.leader, data)
        for name, (change, reason) in LIES.items():
            honest = await field.attacker.contribution(field.leader, PATH, MODULE, data)
            document = plain(honest) | change(plain(honest))
            header = {"contribution": field.attacker.sealed("contribution", document)}
            assert await field.attacker.ask(field.leader, "module.contribute", header) == reason, name

    eventually_old = field.leader.program
    eventually_old.wait_event("version", count=3)  # so that version 0 is too old
    with field.attacked():
        field.background.run(attack())


def test_the_same_again_and_another_in_its_place_count_once(field: Battlefield) -> None:
    """Replays by the author get the same receipt, by others none; a second one for the same base is refused."""
    size = field.run.layout(MODULE).size
    first, second = payload(size), payload(size, code=2)

    async def attack() -> list[str]:
        attacker, other = field.attacker, field.second
        await attacker.claim(PATH)
        # The base may be gone by the time the contribution comes; and the volunteer trains the path, so that a newcomer
        # begins with the next round.
        for _ in range(20):
            contribution = await attacker.contribution(field.leader, PATH, MODULE, first)
            twin = dataclasses.replace(contribution, payload=BlobRef.of(second), tokens=2)
            await attacker.upload(field.leader, first)
            await attacker.upload(field.leader, second)
            answers = await asyncio.gather(
                *(attacker.push(field.leader, contribution) for _ in range(8)), attacker.push(field.leader, twin)
            )
            if HONEST in answers:
                break
            await asyncio.sleep(1.0)
        # Which of the two came first is chance; the other is refused, every time that it comes.
        assert set(answers) <= {HONEST, "already-contributed", "busy", "no-mirror"}
        assert {HONEST in answers[:8], HONEST in answers[8:]} == {True, False}
        sealed = seal(attacker.swarm.signer, contribution).to_dict()
        stolen = {"contribution": sealed}
        replay = await other.ask(field.leader, "module.contribute", stolen)
        assert replay in ("not-author", HONEST), replay
        return answers

    with field.attacked():
        field.background.run(attack())
    counted = [one for event in field.leader.program.events("version") for one in event.get("contributions", [])]
    assert len(counted) == len(set(counted))
