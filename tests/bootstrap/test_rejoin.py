"""Whom a coordinator remembers, to find its swarm again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bootstrap.recovery.rejoin import Met, read_met
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.signing import PeerId, Signer


def peer_of(number: int) -> PeerId:
    return Signer(bytes([number]) * 32).peer


def test_keys_that_call_themselves_seeds_do_not_take_the_places_of_those_who_have_worked(tmp_path: Path) -> None:
    workers, crowd, me = [peer_of(n) for n in range(1, 9)], [peer_of(n) for n in range(20, 60)], peer_of(99)
    beats = {peer: Heartbeat(addresses=(f"/ip4/203.0.113.7/tcp/1/p2p/{peer}",)) for peer in [*workers, me]}
    beats |= {peer: Heartbeat(role="seed", addresses=(f"/dns/a/tcp/1/p2p/{peer}",)) for peer in crowd}
    watch: Any = SimpleNamespace(heartbeats=beats, seeds=lambda: [])
    Met(tmp_path, me).note(watch, workers=workers)
    found = read_met(tmp_path)
    assert len(found) == 16 and {address.rpartition("/")[2] for address in found[:8]} == set(workers)
    watch.heartbeats = {me: beats[me]}
    Met(tmp_path, me).note(watch, workers=workers)
    assert read_met(tmp_path) == found, "a list of those met is never emptied"
