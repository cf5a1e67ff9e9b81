"""What an examination gives: one finding for each thing that was looked at, and what they come to together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from ..errors import EXIT_OK, ConfigError, EnvironmentUnfit, IntegrityError, Unreachable, WrongRun
from ..words import printable_line

UNFIT = EnvironmentUnfit.exit_code
SILENT = Unreachable.exit_code
MISMATCH = WrongRun.exit_code
DAMAGED = IntegrityError.exit_code
WRONG = ConfigError.exit_code
GRAVEST_FIRST = (MISMATCH, WRONG, DAMAGED, UNFIT, SILENT)
"""Of several exit codes: a wrong version or file makes the rest moot, and a silent seed is not for this machine to
mend."""
CHECK_CHARS = 10
CLOCK_REMEDY = "set the clock: timedatectl set-ntp true, or an NTP service of your system"


class Level(StrEnum):
    """How bad it is: a warning costs something, a failure keeps the machine from taking part."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    check: str
    level: Level
    found: str
    """What is so, with its value."""
    remedy: str = ""
    """What to do about it; empty only when all is well."""
    exit_code: int = EXIT_OK
    """How the program ends for a failure."""


def fine(check: str, found: str) -> Finding:
    return Finding(check=check, level=Level.OK, found=found)


def warning(check: str, found: str, remedy: str) -> Finding:
    return Finding(check=check, level=Level.WARN, found=found, remedy=remedy)


def failure(check: str, found: str, remedy: str, *, code: int = UNFIT) -> Finding:
    return Finding(check=check, level=Level.FAIL, found=found, remedy=remedy, exit_code=code)


def milder(finding: Finding) -> Finding:
    """The same as a warning."""
    return replace(finding, level=Level.WARN, exit_code=EXIT_OK) if finding.level is Level.FAIL else finding


def worst(findings: Sequence[Finding]) -> Level:
    """The level of the whole examination."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)


def exit_code(findings: Sequence[Finding]) -> int:
    """0 for fine and for warnings, else that of the gravest failure."""
    codes = {finding.exit_code for finding in findings if finding.level is Level.FAIL}
    return next((code for code in GRAVEST_FIRST if code in codes), EXIT_OK)


def told(findings: Sequence[Finding]) -> Iterator[tuple[Level | None, str]]:
    """For people: each finding behind its level, its remedy on a line of its own that has none. Some words are other
    peers'."""
    for each in findings:
        yield each.level, f"{each.check:<{CHECK_CHARS}} {printable_line(each.found)}"
        if each.remedy:
            yield None, f"{'':{CHECK_CHARS}} -> {printable_line(each.remedy)}"


def document(findings: Sequence[Finding], *, schema: str) -> dict[str, Any]:
    """The JSON document."""
    checks = [{key: value for key, value in asdict(each).items() if key != "exit_code"} for each in findings]
    return {"schema": schema, "outcome": worst(findings), "exit_code": exit_code(findings), "checks": checks}
