"""What a volunteer is doing right now, in words and figures; the display and the heartbeat read it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dipaco_p2p.topology import ModuleId, PathId


@dataclass(slots=True, kw_only=True)
class Status:
    """Changed by the volunteer, one plain assignment at a time, so any thread may read it."""

    run: str = ""
    peer: str = ""
    doing: str = "starting"
    waits_for: str = ""
    """Whom or what it waits for; empty while it works."""
    path: PathId | None = None
    round: int = 0
    rounds: int = 0
    step: int = 0
    """Inner steps of this round."""
    steps: int = 0
    is_cut: bool = False
    """Whether the inner steps end early, for the push to be in time."""
    limited: str = ""
    """What was done last to stay within the owner's limits."""
    loss: float | None = None
    tokens_per_s: float = 0.0
    last_receipt: str = ""
    receipts: int = 0
    leads: list[ModuleId] = field(default_factory=list)
    peers_alive: int = 0
    """Peers whose heartbeat is heard."""
    peers_training: int = 0
    """Those of them that take part: that claim a path, and get on with it."""
    paths_covered: int = 0
    paths: int = 0
    is_complete: bool = False
    """Whether the whole run has ended."""
    eta_s: float | None = None
    """Seconds until the run ends at the present pace."""
