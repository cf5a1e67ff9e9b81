"""How an error is planted: functions of the programs are replaced, and are themselves again at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from .speed import replace_everywhere


class Patches:
    """Replacements of functions of the programs, undone when the stack is closed."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def replace(self, home: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put `make(original)` in place of an attribute of a class or module."""
        self._stack.enter_context(mock.patch.object(home, name, make(getattr(home, name))))

    def wrap(self, home: Any, name: str) -> Callable[[Callable[..., Any]], None]:
        """As `replace`, with the decorated function, whose first argument is the original."""
        original = getattr(home, name)
        return lambda changed: self.replace(
            home, name, lambda _: lambda *parts, **named: changed(original, *parts, **named)
        )

    def replace_everywhere(self, name: str, original: object, changed: object) -> None:
        """As `replace`, in every module of the programs that imported `original` under this name."""
        replace_everywhere(self._stack, name, original, changed)


Plant = Callable[[Patches], None]
Change = tuple[Any, str, Callable[[Any], Any]]
"""Of what, which attribute, and `make(original)`, which gives what takes its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One error, and where to look for it."""

    plant: Plant
    faults: tuple[str, ...] = ()
    """The faults under which it shows soonest; empty for all."""


MUTANTS: dict[str, Mutant] = {}
"""By name."""


def mutant(name: str, *, faults: tuple[str, ...] = ()) -> Callable[[Plant], Plant]:
    """Register an error under its name."""

    def register(plant: Plant) -> Plant:
        MUTANTS[name] = Mutant(plant=plant, faults=faults)
        return plant

    return register


def replacing(name: str, *changes: Change, faults: tuple[str, ...]) -> None:
    """Register an error that only replaces attributes."""

    def plant(patches: Patches) -> None:
        for home, attribute, make in changes:
            patches.replace(home, attribute, make)

    mutant(name, faults=faults)(plant)


def nothing(original: Any) -> Callable[..., None]:
    """Takes the place of a function that then does nothing."""
    return lambda *parts, **named: None


def always(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """Takes the place of a function that then gives this."""
    return lambda original: lambda *parts, **named: value


async def done(*parts: Any, **named: Any) -> None:
    """Nothing, and at once."""
