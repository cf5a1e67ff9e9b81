"""A run, line by line, for whoever looks for the cause of a broken promise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dipaco_p2p.canonical import is_digest

from .history import Event, Outcome
from .plan import Plan

if TYPE_CHECKING:
    from .world import World

QUIET: set[str] = set()


def tell(plan: Plan, outcome: Outcome, world: World) -> None:
    """Print the plan, all events and the chains."""
    config = plan.config
    print(f"{plan.volunteers} volunteers, grid {config.topology}, {config.rounds}, {config.liveness}")
    print(f"delay {plan.delay_s}, loss {plan.loss}, faults until {plan.faulty_s:.1f} s")
    print("strokes:", ", ".join(f"{stroke.fault} at {stroke.at_s:.1f}" for stroke in plan.strokes))
    for event in outcome.events:
        if event.ev not in QUIET:
            print(f"{event.t_s:8.2f} {event.who:14} {event.ev:16} {_facts(event, outcome)}")
    for module, chain in outcome.chains.items():
        for link in chain:
            counts = " ".join(f"{each.id[:6]}({each.path}@{each.base})" for each in link.counts)
            print(f"{module} {link.version} {link.digest[:8]} term {link.term}: {counts}")
    for name, where in world.where.items():
        print(f"{name} waits in {where}")
    print(*world.tracebacks, sep="\n")


def _facts(event: Event, outcome: Outcome) -> str:
    return " ".join(f"{name}={_value(value, outcome)}" for name, value in event.facts.items())


def _value(value: object, outcome: Outcome) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + " ".join(_value(item, outcome) for item in value) + "]"
    if is_digest(value):
        return str(value)[:8]
    return outcome.names.get(str(value), str(value))
