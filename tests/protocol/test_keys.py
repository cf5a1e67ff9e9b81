"""DHT keys: as documented, different for different things, and accepted in records."""

from __future__ import annotations

from dipaco_p2p.canonical import digest
from dipaco_p2p.protocol.keys import PREFIX, claims_key, heads_key, peers_key
from dipaco_p2p.protocol.records import sign_record
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.topology import ModuleId, PathId, Topology

RUN, OTHER_RUN = digest(b"run"), digest(b"other run")


def keys(run: str, grid: Topology) -> list[str]:
    claims = [claims_key(run, path) for path in grid.paths()]
    return [peers_key(run), *claims, *(heads_key(run, module) for module in grid.modules())]


def test_keys_are_written_as_documented() -> None:
    assert peers_key(RUN) == f"dipaco/{RUN[:16]}/peers"
    assert claims_key(RUN, PathId((0, 1, 1))) == f"dipaco/{RUN[:16]}/claims/P0-1-1"
    assert heads_key(RUN, ModuleId(1, 0)) == f"dipaco/{RUN[:16]}/heads/L1.M0"


def test_no_two_things_share_a_key() -> None:
    grid = Topology((1, 12, 12))
    found = keys(RUN, grid) + keys(OTHER_RUN, grid)
    assert len(set(found)) == len(found) == 2 * (1 + 144 + 25)
    assert all(key.startswith(PREFIX) for key in found)


def test_the_longest_key_fits_a_record() -> None:
    deepest = PathId((999,) * 20)
    assert sign_record(Signer(bytes(32)), key=claims_key(RUN, deepest), counter=0, expires_s=1.0, body={})
