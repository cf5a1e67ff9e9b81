"""Where things are in the DHT. Keys are sharded by path and module, so that none grows with the swarm.

    dipaco/<run>/peers              one heartbeat per live peer
    dipaco/<run>/claims/P0-1-1      one claim per volunteer that trains this path
    dipaco/<run>/heads/L1.M0        one head per leader of this module

`<run>` is the first 16 digits of the run's id.
"""

from __future__ import annotations

from ..topology import ModuleId, PathId

PREFIX = "dipaco/"


def peers_key(run: str) -> str:
    return f"{PREFIX}{run[:16]}/peers"


def claims_key(run: str, path: PathId) -> str:
    return f"{PREFIX}{run[:16]}/claims/{path}"


def heads_key(run: str, module: ModuleId) -> str:
    return f"{PREFIX}{run[:16]}/heads/{module}"
