"""The ticket of a run, made anew from its folder: with the addresses that its seed node had last, and further ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dipaco_p2p.errors import ConfigError, DipacoError
from dipaco_p2p.node.entry import read_entry
from dipaco_p2p.node.stages import DOORPLATE, make_ticket

from .folder import RunFolder

NO_SEED_HINT = "start the coordinator once, or name an address: --seed /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW..."


def ticket_of(folder: Path, *, seeds: Sequence[str]) -> str:
    """The ticket of the run in `folder`, with `seeds` first, since whoever names them knows. A coordinator may be at
    work there. Raises ConfigError for a folder without a run or an address that is none."""
    run, _ = RunFolder(folder).require()
    known = known_addresses(folder)
    if not seeds and not known:
        raise ConfigError(f"the run in `{folder}` has not been open yet: nobody to knock at", hint=NO_SEED_HINT)
    return make_ticket(run, [*seeds, *known])


def known_addresses(folder: Path) -> tuple[str, ...]:
    """Where the coordinator was reached last; nothing before its first start."""
    try:
        return read_entry(json.loads((folder / DOORPLATE).read_bytes())["ticket"]).addresses
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DipacoError):
        return ()
