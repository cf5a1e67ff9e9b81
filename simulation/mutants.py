"""Errors that a programmer could make, planted at run time: each must be found, else the checkers see nothing.

A mutant replaces functions of the programs while the block of `planted` runs, and is undone afterwards.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

Plant = Callable[["Soil"], None]
PROGRAMS = ("dipaco_p2p.", "peers.", "bootstrap.")


class Soil:
    """What a mutant is planted in."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def replace(self, home: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put `make(original)` in place of an attribute of a class or module."""
        self._stack.enter_context(mock.patch.object(home, name, make(getattr(home, name))))

    def replace_everywhere(self, name: str, original: object, changed: object) -> None:
        """As `replace`, in every module of the programs that imported `original` under this name."""
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith(PROGRAMS) and vars(module).get(name) is original:
                self._stack.enter_context(mock.patch.object(module, name, changed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One error, and where to look for it first."""

    plant: Plant
    faults: tuple[str, ...] = ()
    """The faults under which it shows soonest; empty for all."""
    seeds: tuple[int, ...] = ()


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, *, faults: tuple[str, ...] = (), seeds: tuple[int, ...] = ()) -> Callable[[Plant], Plant]:
    """Register an error under its name."""

    def register(plant: Plant) -> Plant:
        MUTANTS[name] = Mutant(plant=plant, faults=faults, seeds=seeds)
        return plant

    return register


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Let the programs have this error while the block runs; None for none."""
    with contextlib.ExitStack() as stack:
        if name is not None:
            MUTANTS[name].plant(Soil(stack))
        yield
