"""What the commands and the running volunteer say to each other: one line of JSON each way, bounded.

    {"schema": "dipaco.control/1", "ask": "pause", "for_s": 7200.0}
    {"schema": "dipaco.control/1", "answer": {...}}
    {"schema": "dipaco.control/1", "error": {"exit_code": 4, "message": "...", "hint": "..."}}

Both ends are of one machine and one user, but perhaps of two versions: what is not understood is refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dipaco_p2p import errors, strict
from dipaco_p2p.errors import ConfigError, DipacoError, IntegrityError, WrongRun
from dipaco_p2p.strict import bounded

SCHEMA = "dipaco.control/1"
REQUEST_BYTES_MAX = 4096
ANSWER_BYTES_MAX = 256 * 1024
PAUSE_S_MAX = 366 * 86_400.0
UPGRADE_HINT = "the running volunteer is of another version than this command: stop it with Ctrl-C and join again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing that a running volunteer is asked for."""

    schema: str = SCHEMA
    ask: str = bounded(choices=("status", "config", "pause", "resume", "finish", "stop"))
    for_s: float | None = bounded(None, low=0.0, high=PAUSE_S_MAX)
    """Of `pause`: for how long; None is until `resume`."""
    now: bool = False
    """Of `stop`: without handing in what was trained."""


def encode_request(request: Request) -> bytes:
    return _line(strict.plain(request))


def read_request(line: bytes) -> Request:
    """Raises WrongRun for another version of the schema, ConfigError for what is no request."""
    mapping = _mapping(line, REQUEST_BYTES_MAX)
    _check_schema(mapping)
    return strict.load(Request, mapping, where="the request")


def encode_answer(answer: dict[str, Any]) -> bytes:
    return _line({"schema": SCHEMA, "answer": answer})


def encode_error(error: DipacoError) -> bytes:
    found = {"exit_code": error.exit_code, "message": str(error)[:1000], "hint": error.hint[:1000]}
    return _line({"schema": SCHEMA, "error": found})


def read_answer(line: bytes) -> dict[str, Any]:
    """What was answered; raises the error that was, and IntegrityError for what is no answer."""
    try:
        mapping = _mapping(line, ANSWER_BYTES_MAX)
    except ConfigError as error:
        raise IntegrityError(f"the volunteer's answer cannot be read: {error}", hint=UPGRADE_HINT) from None
    _check_schema(mapping)
    if isinstance(mapping.get("error"), dict):
        raise _error(mapping["error"])
    if not isinstance(mapping.get("answer"), dict):
        raise IntegrityError("the volunteer's answer has neither an answer nor an error", hint=UPGRADE_HINT)
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


def _check_schema(mapping: dict[str, Any]) -> None:
    if mapping.get("schema") != SCHEMA:
        found = str(mapping.get("schema"))[:64]
        raise WrongRun(f"control speaks `{found}` at one end and `{SCHEMA}` at the other", hint=UPGRADE_HINT)


def _error(found: dict[str, Any]) -> DipacoError:
    """As it was raised at the other end, as far as its exit code says."""
    kinds = (errors.ConfigError, errors.Unreachable, errors.EnvironmentUnfit, errors.WrongRun, errors.IntegrityError)
    kind = next((kind for kind in kinds if kind.exit_code == found.get("exit_code")), DipacoError)
    return kind(str(found.get("message", "")), hint=str(found.get("hint", "")))
