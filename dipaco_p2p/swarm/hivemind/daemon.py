"""What surrounds the libp2p daemon on this machine: its port and the sockets that dead ones leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import functools
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from ...errors import EnvironmentUnfit
from ..addresses import read_place

SOCKET_FOLDER = Path("/tmp")
SOCKET_PATTERN = "hivemind-*.sock"
_LIBC = ctypes.CDLL(None)  # looked up before any fork
_PR_SET_PDEATHSIG = 1
_BOUND_SOCKETS = Path("/proc/net/unix")
BACKLOG = 1024
"""Streams that may wait while we are busy: with asyncio's 100, two hundred of one stranger would have others' reset."""
TAKEN_AT_ONCE = 16
"""Of these."""
PORT_PATIENCE_S = 3.0
"""How long the daemon of a program that was killed may take to let its port go."""
PORT_LOOK_S = 0.1


async def wait_port_free(host: str, port: int) -> None:
    """Raises EnvironmentUnfit if `port` may not be used, or is taken and stays so: of a program that was killed the
    daemon ends a moment later.

    libp2p shares a taken port silently (SO_REUSEPORT) when it is of the same user, so that half of the connections
    would go to the other process.
    """
    until_s = time.monotonic() + PORT_PATIENCE_S
    while (problem := _problem_with(host, port)) is not None:
        if problem.errno != errno.EADDRINUSE or time.monotonic() >= until_s:
            raise _unfit(host, port, problem)
        await asyncio.sleep(PORT_LOOK_S)


def cannot_join(place: str, problem: str) -> EnvironmentUnfit:
    """A seed node at `place` answers but will not have us: our clock, or our firewall; `problem` is hivemind's text."""
    if "local time" in problem:
        message = f"the clock of this machine differs by more than 3 s from that of {place}"
        return EnvironmentUnfit(message, hint="set the clock, for instance with NTP")
    message = f"{place} cannot dial this machine back"
    return EnvironmentUnfit(message, hint="open the port of --listen, or join with --no-listen")


def sweep_stale_sockets(folder: Path = SOCKET_FOLDER) -> int:
    """Remove our user's daemon sockets that nobody holds any more; how many. A live process loses nothing."""
    removed = 0
    for path in stale_sockets(folder):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            path.unlink()
            removed += 1
    return removed


def stale_sockets(folder: Path = SOCKET_FOLDER) -> list[Path]:
    """Our user's daemon sockets that nobody holds any more."""
    found = []
    for path in folder.glob(SOCKET_PATTERN):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if _is_ours(path) and _is_dead(path):
                found.append(path)
    return found


@contextlib.contextmanager
def long_backlog() -> Iterator[None]:
    """Servers on Unix sockets that are started within let `BACKLOG` connections wait; hivemind lets nobody say so."""
    start = asyncio.start_unix_server
    asyncio.start_unix_server = functools.partial(_start_with_long_backlog, start)
    try:
        yield
    finally:
        asyncio.start_unix_server = start


async def _start_with_long_backlog(start: Callable[..., Awaitable[asyncio.Server]], *words: Any, **options: Any) -> Any:
    """asyncio takes as many connections at a time as may wait. Each is an open file before we know whose it is, and so
    here fewer are taken. `start` may be this very function, when two swarms of one process are opened at once."""
    server = await start(*words, **options | {"backlog": TAKEN_AT_ONCE})
    for listening in server.sockets:
        with socket.socket(fileno=os.dup(listening.fileno())) as same:
            same.listen(BACKLOG)
    return server


@contextlib.contextmanager
def daemons_apart() -> Iterator[None]:
    """Children started within are out of the terminal's reach, and end with us.

    Ctrl-C reaches the whole foreground group, but a program that wants to finish cleanly still needs its daemon; so
    that gets a session of its own. (To start it with SIGINT blocked does not help: Go unblocks what it handles.) And
    Linux sends it SIGTERM when we die, however we die. hivemind lets nobody say so, hence this detour.
    """
    start = asyncio.subprocess.create_subprocess_exec
    apart = functools.partial(start, start_new_session=True, preexec_fn=_end_with_parent)
    asyncio.subprocess.create_subprocess_exec = apart
    try:
        yield
    finally:
        asyncio.subprocess.create_subprocess_exec = start


def _end_with_parent() -> None:
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def places_to_listen(listen: str) -> list[str]:
    """`listen`, and where that means all addresses of this machine and one port, the same of IPv6 if it has that."""
    host, port = read_place(listen)
    has_both = host == "0.0.0.0" and port > 0 and _problem_with("::", port) is None
    return [listen, f"/ip6/::/tcp/{port}"] if has_both else [listen]


def _problem_with(host: str, port: int) -> OSError | None:
    try:
        probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:  # a system without IPv6
        return error
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if probe.family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as the daemon does
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error
    return None


def _unfit(host: str, port: int, error: OSError) -> EnvironmentUnfit:
    if error.errno == errno.EADDRINUSE:
        return EnvironmentUnfit(f"port {port} is taken", hint="choose another port, or 0 for any free one")
    if error.errno == errno.EACCES:
        return EnvironmentUnfit(f"port {port} needs more rights", hint="choose a port above 1023")
    return EnvironmentUnfit(f"cannot listen on {host}: {error.strerror}", hint="0.0.0.0 means all addresses")


def _is_ours(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.getuid()


def _is_dead(path: Path) -> bool:
    """Nobody accepts, and nobody has it bound (between bind and listen a live socket refuses too)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
            return False
        except ConnectionRefusedError:
            pass
        except OSError:
            return False
    try:
        return str(path) not in _BOUND_SOCKETS.read_text()
    except OSError:
        return True
