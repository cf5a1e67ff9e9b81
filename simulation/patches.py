"""How an error is planted: functions of the programs are replaced, and are themselves again at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
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
