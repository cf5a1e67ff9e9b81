"""The end of the control socket that is in a command: one request, one answer."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ...errors import EnvironmentUnfit, IntegrityError, NotRunning, Unreachable
from .messages import ANSWER_BYTES_MAX, Asking, Program, encode_request, read_answer
from .place import find_socket

TIMEOUT_S = 5.0
"""The program answers between two turns of its event loop; one that does not is frozen."""
CHUNK_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What a running program said, and which process it is."""

    body: dict[str, Any]
    pid: int


def ask(home: Path, request: Asking, *, timeout_s: float = TIMEOUT_S) -> Answered:
    """Ask the program that runs in `home`.

    Raises NotRunning if none does, Unreachable if it does not answer in time, and what it refuses with.
    """
    program = request.program
    with _connected(home, program, timeout_s) as connection:
        who = credentials_of(connection)
        if not who.is_ours:
            raise EnvironmentUnfit(f"the control socket of `{home}` belongs to another user", hint="remove it")
        try:
            connection.sendall(encode_request(request))
            line = _read_line(connection)
        except TimeoutError:
            hint = f"it may be frozen, or its disk: look at process {who.pid}"
            raise Unreachable(
                f"the {program.noun} in `{home}` does not answer within {timeout_s:g} s", hint=hint
            ) from None
        except OSError as error:
            raise _ended(home, program, f" ({error.strerror})") from None
    if not line.endswith(b"\n"):
        raise _ended(home, program)
    return Answered(body=read_answer(line, program), pid=who.pid)


def wait_end(pid: int, *, timeout_s: float | None = None) -> bool:
    """Wait until this process has ended; whether it has. One that cannot be seen from here counts as ended."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


@contextlib.contextmanager
def _connected(home: Path, program: Program, timeout_s: float) -> Iterator[socket.socket]:
    path = find_socket(home)
    if path is None:
        raise not_running(home, program)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):  # of a process that was killed
            raise not_running(home, program) from None
        except PermissionError:
            message = f"the {program.noun} in `{home}` belongs to another user"
            raise EnvironmentUnfit(message, hint="ask as the user who started it") from None
        except OSError as error:
            raise Unreachable(f"the {program.noun} in `{home}` does not answer: {error}", hint="try again") from None
        yield connection


def _read_line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        chunk = connection.recv(CHUNK_BYTES)
        if not chunk:
            break
        data += chunk
        if len(data) > ANSWER_BYTES_MAX:
            raise IntegrityError(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
    return data


def not_running(home: Path, program: Program) -> NotRunning:
    """Nobody is there to be asked."""
    return NotRunning(f"no {program.noun} runs in `{home}`", hint=program.start_hint)


def _ended(home: Path, program: Program, why: str = "") -> NotRunning:
    return NotRunning(f"the {program.noun} in `{home}` has just ended{why}", hint=program.start_hint)


_FORMAT = struct.Struct("iII")


class Socket(Protocol):
    """A socket, or what asyncio shows of one."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


class Credentials(NamedTuple):
    """Of the process that connected or listens; `pid` is 0 for one of another container."""

    pid: int
    uid: int

    @property
    def is_ours(self) -> bool:
        """Whether it is of this very user; root needs no socket."""
        return self.uid == os.geteuid()


def credentials_of(connection: Socket) -> Credentials:
    pid, uid, _ = _FORMAT.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _FORMAT.size))
    return Credentials(pid, uid)
