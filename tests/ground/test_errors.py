"""The error tree: one root, the documented exit codes, a hint that is always there."""

from __future__ import annotations

import re

import pytest

from dipaco_p2p import errors
from dipaco_p2p.errors import DipacoError, Interrupted, Refused

KINDS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, DipacoError)]


def documented() -> dict[str, int]:
    """Exit codes by name, from the module's docstring; a branch without a number has its parent's."""
    codes: dict[str, int] = {}
    code = 0
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"    [| `-]*([A-Z]\w+)\s+(?:exit code )?(\d+)?", line):
            code = int(found[2] or code)
            codes[found[1]] = code
    return codes


def test_the_docstring_lists_every_error_with_its_exit_code() -> None:
    assert documented() == {kind.__name__: kind.exit_code for kind in KINDS}


def test_exit_codes_are_errors_and_not_those_of_the_shell() -> None:
    assert Interrupted.exit_code == errors.EXIT_SECOND_INTERRUPT, "what a shell says of a program that Ctrl-C ended"
    assert all(0 < kind.exit_code < 126 for kind in KINDS if kind is not Interrupted)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_has_a_message_and_a_hint(kind: type[DipacoError]) -> None:
    assert (str(kind("what")), kind("what").hint) == ("what", "")
    assert kind("what", hint="do this").hint == "do this"


def test_a_refusal_has_a_reason() -> None:
    assert Refused("no").reason == "refused"
    assert Refused("no", reason="norm", hint="h").reason == "norm"
    assert str(Refused("no", reason="norm")) == "no"
