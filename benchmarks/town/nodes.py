"""Peers of a town that do nothing but call each other: each a process forked into its machine's namespace.

They are forked from a process that has imported hivemind and computed nothing, since that import takes seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.processes import end_with_parent
from benchmarks.town.network import Machine
from dipaco_p2p.clock import SystemClock
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.addresses import is_circuit, read_address
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.hivemind.libp2p import Libp2pSwarm, open_libp2p

ANSWER_S = 400.0
OPENED_AT_ONCE = 8
CALL_S = 10.0
NAMESPACES = Path("/run/netns")
_fork = multiprocessing.get_context("fork")


class Node:
    """One peer; `machine` None is this machine's own network."""

    def __init__(self, folder: Path, name: str, machine: Machine | None, *, seeds: Sequence[str] = (), **options: Any):
        self.machine = machine
        self._pipe, theirs = _fork.Pipe()
        arguments = (theirs, folder / f"{name}.key", machine, seeds, options)
        self._process = _fork.Process(target=_live, args=arguments, daemon=True)
        self._process.start()
        self.facts: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def started(self) -> Node:
        """Wait until it has joined; `facts` then says who and where it is."""
        self.facts = self._answer()
        return self

    def ask(self, do: str, **values: Any) -> Any:
        """What it answers; raises DipacoError if that fails."""
        self.send(do, **values)
        return self._answer()

    def send(self, do: str, **values: Any) -> None:
        self._pipe.send({"do": do, **values})

    def receive(self) -> Any:
        return self._answer()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send({"do": "end"})
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()

    def _answer(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise DipacoError(f"a peer did not answer within {ANSWER_S:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, dict) and "error" in answer:
            raise DipacoError(answer["error"])
        return answer


def _live(pipe: Connection, key: Path, machine: Machine | None, seeds: Sequence[str], options: dict[str, Any]) -> None:
    os.setsid()
    end_with_parent()
    if machine is not None:
        with (NAMESPACES / machine.namespace).open("rb") as place:
            assert ctypes.CDLL(None).setns(place.fileno(), 0) == 0, f"no way into {machine.namespace}"
    asyncio.run(_serve(pipe, key, seeds, options))


async def _serve(pipe: Connection, key: Path, seeds: Sequence[str], options: dict[str, Any]) -> None:
    count = options.pop("count", 1)
    gate = asyncio.Semaphore(OPENED_AT_ONCE)

    async def open_one(number: int) -> tuple[Libp2pSwarm, dict[str, Any]]:
        async with gate:
            return await _open(key.with_suffix(f".{number}"), seeds, dict(options))

    opened = await asyncio.gather(*map(open_one, range(count)))
    swarm, facts = opened[0]
    pipe.send({**facts, "peers": [one.peer for one, _ in opened]})
    loop = asyncio.get_running_loop()
    while (request := await loop.run_in_executor(None, pipe.recv))["do"] != "end":
        try:
            if request["do"] == "reserve":
                found = await asyncio.gather(*(_reserve(one, seeds[0]) for one, _ in opened))
                pipe.send(found[0] | {"slots": sum(each["has_slot"] for each in found)})
            else:
                pipe.send(await _do(swarm, request))
        except DipacoError as error:
            pipe.send({"error": str(error)})
    await asyncio.gather(*(one.close() for one, _ in opened))


async def _open(key: Path, seeds: Sequence[str], options: dict[str, Any]) -> tuple[Libp2pSwarm, dict[str, Any]]:
    began_s = time.monotonic()
    swarm = await open_libp2p(key, clock=SystemClock(), **options)

    async def echo(sender: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        return Reply({"bytes": len(body)}, body[: header.get("back", 0)])

    swarm.serve("echo", echo)
    facts: dict[str, Any] = {"peer": swarm.peer, "opened_s": time.monotonic() - began_s}
    if seeds:
        await swarm.join({address: read_address(address) for address in seeds})
    facts["addresses"] = list(swarm.addresses)
    return swarm, facts


async def _reserve(swarm: Libp2pSwarm, seed: str) -> dict[str, Any]:
    """Ask the relay at `seed` for a slot."""
    assert swarm.reservations is not None
    asked_s = time.monotonic()
    swarm.reservations.begin({read_address(seed).peer: [seed]})
    has_slot = await swarm.reservations.wait_reachable(60)
    return {"has_slot": has_slot, "slot_s": time.monotonic() - asked_s, "addresses": list(swarm.addresses)}


async def _do(swarm: Libp2pSwarm, request: dict[str, Any]) -> Any:
    peer = request.get("peer", "")
    if request["do"] == "dial":
        """Call, and say after how many seconds there was an answer, and after how many a direct connection."""
        began_s, direct_s = time.monotonic(), None
        await swarm.call(peer, "echo", {}, timeout_s=CALL_S, addresses=request["addresses"])
        called_s = time.monotonic() - began_s
        while direct_s is None and time.monotonic() - began_s < request["within_s"]:
            if any(not is_circuit(place) for place in await swarm.places(peer)):
                direct_s = time.monotonic() - began_s
            else:
                await asyncio.sleep(0.05)
        return {"called_s": called_s, "direct_s": direct_s}
    if request["do"] == "push":
        began_s, body = time.monotonic(), bytes(request["bytes"])
        for _ in range(request["times"]):
            await swarm.call(peer, "echo", {}, body, timeout_s=CALL_S, addresses=request["addresses"])
        return {"seconds": time.monotonic() - began_s}
    if request["do"] == "note":
        swarm.note_peers(members=request["peers"], known=(), banned=(), relays={})
    return {"statistics": swarm.statistics()}
