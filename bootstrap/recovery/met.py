"""Whom a seed node has met, in a file beside its run: a way back into the swarm for one that starts somewhere else.

<dir>/met.json     ["/ip4/203.0.113.7/tcp/4001/p2p/12D3...", ...]
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from dipaco_p2p.errors import ConfigError, EnvironmentUnfit
from dipaco_p2p.node.watch import Watch
from dipaco_p2p.program.files import write_atomically
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.swarm.addresses import best_address, read_address

log = logging.getLogger(__name__)

NAME = "met.json"
ADDRESSES_MAX = 16


class Met:
    """Of one folder; written when somebody new is there, and never emptied."""

    def __init__(self, root: Path, me: PeerId) -> None:
        self._path, self._me = root / NAME, me
        self._known: list[str] = read_met(root)

    def note(self, watch: Watch) -> None:
        """Seed nodes first: they stay."""
        others = sorted(watch.heartbeats.items(), key=lambda item: (item[1].role != "seed", item[0]))
        found = [best_address(b.addresses) for p, b in others if b.addresses and p != self._me][:ADDRESSES_MAX]
        if found and found != self._known:
            try:
                write_atomically(self._path, json.dumps(found).encode())
                self._known = found
            except EnvironmentUnfit as error:
                log.warning("who is in the run was not noted: %s", error)


def read_met(root: Path) -> list[str]:
    """Nobody, if the file is missing or damaged."""
    try:
        value = json.loads((root / NAME).read_bytes())
    except (OSError, ValueError):
        return []
    return [text for text in value if _is_address(text)][:ADDRESSES_MAX] if isinstance(value, list) else []


def _is_address(text: object) -> bool:
    try:
        read_address(str(text))
    except ConfigError:
        return False
    return True
