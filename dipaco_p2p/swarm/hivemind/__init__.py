"""The real network: everything that imports hivemind, subclasses it or patches it."""

import sys
from importlib.util import find_spec, module_from_spec


def _without_the_rest() -> None:
    """Let hivemind's DHT and daemon be imported alone: its `__init__` also imports averagers, experts and scipy, which
    cost each program 50 MB and most of a second. Nothing to do where the whole package is imported already, or where it
    is not installed."""
    if "hivemind" not in sys.modules and (spec := find_spec("hivemind")) is not None:
        sys.modules["hivemind"] = module_from_spec(spec)


_without_the_rest()
