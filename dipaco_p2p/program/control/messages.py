"""What a command and the running program say to each other: one line of JSON each way, bounded.

    {"schema": "dipaco.control/1", "ask": "pause", "for_s": 7200.0}
    {"schema": "dipaco.control/1", "answer": {...}}
    {"schema": "dipaco.control/1", "error": {"exit_code": 4, "message": "...", "hint": "..."}}

What can be asked, each program says itself: in a frozen dataclass with a `schema` and its `program`. Both ends are of
one machine and one user, but perhaps of two versions: what is not understood is refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from ... import errors, strict
from ...errors import ConfigError, DipacoError, IntegrityError, WrongRun

REQUEST_BYTES_MAX = 4096
ANSWER_BYTES_MAX = 8 * 1024 * 1024
"""A coordinator lists thousands of volunteers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One that can be asked, and the words for it."""

    noun: str
    """As in `no volunteer runs in ...`."""
    schema: str
    """Of its requests and answers."""
    start_hint: str
    upgrade_hint: str


class Asking(Protocol):
    """A request: a dataclass of what is asked, in fields that JSON can say."""

    program: ClassVar[Program]


R = TypeVar("R", bound=Asking)


def encode_request(request: Asking) -> bytes:
    return _line(strict.plain(request))


def read_request(line: bytes, kind: type[R]) -> R:
    """Raises WrongRun for another version of the schema, ConfigError for what is no request."""
    mapping = _mapping(line, REQUEST_BYTES_MAX)
    _check_schema(mapping, kind.program)
    return strict.load(kind, mapping, where="the request")


def encode_answer(answer: dict[str, Any], program: Program) -> bytes:
    return _line({"schema": program.schema, "answer": answer})


def encode_error(error: DipacoError, program: Program) -> bytes:
    found = {"exit_code": error.exit_code, "message": str(error)[:1000], "hint": error.hint[:1000]}
    return _line({"schema": program.schema, "error": found})


def read_answer(line: bytes, program: Program) -> dict[str, Any]:
    """What was answered; raises the error that was, and IntegrityError for what is no answer."""
    try:
        mapping = _mapping(line, ANSWER_BYTES_MAX)
    except ConfigError as error:
        message = f"the {program.noun}'s answer cannot be read: {error}"
        raise IntegrityError(message, hint=program.upgrade_hint) from None
    _check_schema(mapping, program)
    if isinstance(mapping.get("error"), dict):
        raise _error(mapping["error"])
    if not isinstance(mapping.get("answer"), dict):
        message = f"the {program.noun}'s answer has neither an answer nor an error"
        raise IntegrityError(message, hint=program.upgrade_hint)
    answer: dict[str, Any] = mapping["answer"]
    return answer


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _mapping(line: bytes, bytes_max: int) -> dict[str, Any]:
    if len(line) > bytes_max:
        raise ConfigError(f"a line of more than {bytes_max} bytes")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError("a line that is no JSON object")
    return value


def _check_schema(mapping: dict[str, Any], program: Program) -> None:
    if mapping.get("schema") != program.schema:
        found = str(mapping.get("schema"))[:64]
        message = f"control speaks `{found}` at one end and `{program.schema}` at the other"
        raise WrongRun(message, hint=program.upgrade_hint)


def _error(found: dict[str, Any]) -> DipacoError:
    """As it was raised at the other end, as far as its exit code says."""
    kinds = (
        errors.ConfigError,
        errors.NotRunning,
        errors.Unreachable,
        errors.EnvironmentUnfit,
        errors.WrongRun,
        errors.Refused,
        errors.IntegrityError,
    )
    kind = next((kind for kind in kinds if kind.exit_code == found.get("exit_code")), DipacoError)
    return kind(str(found.get("message", "")), hint=str(found.get("hint", "")))
