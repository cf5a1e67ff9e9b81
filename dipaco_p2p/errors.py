"""Every error that a user can meet, in one tree, each with the exit code of the programs.

    DipacoError                 exit code 1
    |-- Diverged                1   a loss that is not finite
    |-- ConfigError             2   a file, a flag or a value that cannot be used
    |-- CorpusError             2   text that is missing, unreadable or too little
    |-- NotRunning              3   the program that was to be asked does not run here
    |-- SwarmError              4   nobody answered
    |   |-- Unreachable             a peer did not answer, or not in time
    |   `-- BlobMissing             no holder could give the bytes
    |-- EnvironmentUnfit        5   this machine: a taken port, a full disk, a wrong clock
    |   `-- TooManyFiles            this process may open no more files now; it says nothing of the disk
    |-- WrongRun                6   the other side is of another run or protocol version
    |-- Refused                 7   a peer gave a reason why it will not take something
    |-- IntegrityError          8   bytes that are not what their digest or signature says
    `-- Interrupted           130   stopped by Ctrl-C or SIGTERM before there was a result

A message says what happened and with which value; `hint` says what to do about it. Both are one line: what needs more
lines adds each as a note (`add_note`), so that a line break in another peer's words begins no line of ours.
"""

from __future__ import annotations

import copy
from typing import Self

EXIT_OK = 0
EXIT_SECOND_INTERRUPT = 130


class DipacoError(Exception):
    """The root; a program prints `error: ...`, then `hint: ...`, and leaves with `exit_code`."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def notes(self) -> list[str]:
        """Further lines."""
        return list(getattr(self, "__notes__", ()))

    def reworded(self, message: str, *, hint: str) -> Self:
        """The same error in other words, with its notes."""
        again = copy.copy(self)
        again.args, again.hint = (message,), hint
        return again


class Diverged(DipacoError):
    """Training gave a loss or a gradient that is not finite."""


class ConfigError(DipacoError):
    """A run file, flag or value that cannot be used as it is."""

    exit_code = 2


class CorpusError(DipacoError):
    """The text to train on is missing, unreadable, or too little for the run."""

    exit_code = 2


class NotRunning(DipacoError):
    """The program that was to be asked does not run on this machine."""

    exit_code = 3


class SwarmError(DipacoError):
    """The network did not do what was asked."""

    exit_code = 4


class Unreachable(SwarmError):
    """A peer did not answer, or not in time."""


class BlobMissing(SwarmError):
    """None of the holders that were asked could give the blob."""


class EnvironmentUnfit(DipacoError):
    """A problem on this machine: a taken port, a full disk, a wrong clock."""

    exit_code = 5


class TooManyFiles(EnvironmentUnfit):
    """This process, or the machine, may open no more files now; a moment later it may."""


class WrongRun(DipacoError):
    """The other side belongs to another run, or speaks another version of the protocol."""

    exit_code = 6


class Refused(DipacoError):
    """Another peer refused a request and said why; `reason` is one short word of the protocol."""

    exit_code = 7

    def __init__(self, message: str, *, reason: str = "refused", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class IntegrityError(DipacoError):
    """Bytes that are not what their digest, signature or schema says."""

    exit_code = 8


class Interrupted(DipacoError):
    """Stopped by Ctrl-C or SIGTERM before there was a result."""

    exit_code = EXIT_SECOND_INTERRUPT
