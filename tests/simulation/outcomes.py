"""A run made by hand in which every promise holds, and ways to break it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulation.history import Counted, Event, Link, Look, Outcome

MODULE, PATH = "L0.M0", "P0"
ANNA, BERT = "volunteer-1", "volunteer-2"


def counted(name: str, **changes: Any) -> Counted:
    """A contribution of Anna's to version 0."""
    fields = {"id": name, "peer": "id-anna", "path": PATH, "base": 0, "base_digest": "genesis", "tokens": 10}
    return Counted(**(fields | changes))


def link(version: int, *counts: Counted, **changes: Any) -> Link:
    """A version that follows the one before."""
    parent = f"digest-{version - 1}" if version > 1 else "genesis"
    fields = {"version": version, "digest": f"digest-{version}", "parent": parent, "term": 1, "counts": counts}
    return Link(**(fields | changes))


def receipt(name: str, *, t_s: float = 5.0, base: int = 0, holders: tuple[str, ...] = ("id-anna", "id-bert")) -> Event:
    facts = {"id": name, "module": MODULE, "path": PATH, "base": base, "holders": list(holders)}
    return Event(t_s, ANNA, "receipt", facts)


def archived(version: int, digest: str | None = None, *, t_s: float = 8.0) -> Event:
    facts = {"module": MODULE, "version": version, "digest": digest or f"digest-{version}"}
    return Event(t_s, "seed", "archived", facts)


def look(t_s: float, **changes: Any) -> Look:
    fields: dict[str, Any] = {
        "alive": frozenset({ANNA, BERT}),
        "led": frozenset({MODULE}),
        "claimed": frozenset({PATH}),
        "versions": {MODULE: 1},
    }
    return Look(t_s=t_s, **(fields | changes))


def good(**changes: Any) -> Outcome:
    """Two versions, each of one contribution with a receipt that Anna and Bert hold."""
    chain = (link(1, counted("one")), link(2, counted("two", base=1, base_digest="digest-1")))
    outcome = Outcome(
        events=(receipt("one"), archived(1), receipt("two", t_s=9.0, base=1), archived(2, t_s=12.0)),
        genesis={MODULE: "genesis"},
        chains={MODULE: chain},
        looks=tuple(look(float(second)) for second in range(30)),
        paths={PATH: (MODULE,)},
        names={"id-anna": ANNA, "id-bert": BERT},
        rounds=2,
        staleness=1,
        tokens_max=10,
        ttl_s=1.0,
        deadline_s=1.0,
        calm_s=0.0,
        bound_s=60.0,
        end_s=30.0,
    )
    return replace(outcome, **changes)


def with_events(*events: Event) -> Outcome:
    outcome = good()
    return replace(outcome, events=(*outcome.events, *events))
