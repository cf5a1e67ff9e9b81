"""Who is at the other end of a Unix socket, as the kernel knows it (SO_PEERCRED of unix(7))."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple, Protocol

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
