"""Starts the programs from a process that has imported what they import: that takes three seconds of a processor each.

A program is a fork of the forge, in a session of its own, with streams, arguments and end of its own, and runs the same
`main` as the installed script. The forge has one thread and has computed nothing, so a fork of it is as good as new.
A fork may enter a network namespace first, as `ip netns exec` would. What is not so simple (another environment, a
terminal) is started from scratch, see e2e_harness.

As a script: the forge itself, which serves the socket that it is given until that closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

MESSAGE_BYTES_MAX = 65536
NAMESPACES = Path("/run/netns")
"""Where iproute2 keeps those that have a name."""
IMPORTS = (
    *(
        "bootstrap.cli",
        "bootstrap.coordinator.seed",
        "bootstrap.coordinator.stage",
        "bootstrap.genesis.prepare",
        "peers.cli",
        "peers.joining.join",
    ),
    "torch._dynamo",  # which the first optimizer of a process imports, and sympy with it: a second of a processor
)


class Forged:
    """A program that was forked; of `subprocess.Popen` what tests use."""

    def __init__(self, forge: Forge, pid: int) -> None:
        self._forge = forge
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        self._forge.listen(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As `poll`, in the end; raises TimeoutExpired after `timeout` seconds."""
        deadline_s = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while self.returncode is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise subprocess.TimeoutExpired(f"forked as {self.pid}", timeout or 0.0)
            self._forge.listen(min(left_s, 1.0))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forge:
    """The process that forks programs, from the first one on until `close`."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True)
        theirs.close()
        self._forged: dict[int, Forged] = {}
        self._born: int | None = None

    def start(
        self, program: str, entry: str, arguments: Sequence[str], *, out: IO[bytes], err: IO[bytes], namespace: str = ""
    ) -> Forged:
        """A program whose streams are these files, in the network namespace of this name if there is one."""
        order = json.dumps([namespace, program, entry, *arguments]).encode()
        assert len(order) <= MESSAGE_BYTES_MAX, "too long a command line"
        socket.send_fds(self._ours, [order], [out.fileno(), err.fileno()])
        self._born = None
        while self._born is None:
            assert self._process.poll() is None, "the forge has ended"
            self.listen(1.0)
        return self._forged[self._born]

    def listen(self, within_s: float) -> None:
        """Take what the forge says of births and deaths, waiting so long for the first of it."""
        while select.select([self._ours], [], [], within_s)[0]:
            message = self._ours.recv(MESSAGE_BYTES_MAX)
            assert message, "the forge has ended"
            within_s = 0.0
            pid, code = json.loads(message)
            if code is None:
                self._forged[pid], self._born = Forged(self, pid), pid
            else:
                self._forged.pop(pid).returncode = code

    def close(self) -> None:
        self._ours.close()
        self._process.wait(20)


def serve(orders: socket.socket) -> tuple[list[str], list[int]]:
    """Fork a program for every order, until there are no more. In each fork: its command line and its streams."""
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker)
    while True:
        sources: list[socket.socket | int] = [orders, woken]
        ready = select.select(sources, [], [])[0]
        if woken in ready:
            os.read(woken, 1024)
            _tell_ended(orders)
        if orders in ready:
            order, streams, _, _ = socket.recv_fds(orders, MESSAGE_BYTES_MAX, 2)
            if not order:
                raise SystemExit
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (woken, waker, orders.detach()):
                    os.close(end)
                return json.loads(order), streams
            for stream in streams:
                os.close(stream)
            orders.send(json.dumps([pid, None]).encode())


def _tell_ended(orders: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with contextlib.suppress(BrokenPipeError):
                orders.send(json.dumps([ended[0], os.waitstatus_to_exitcode(ended[1])]).encode())


def become(command: list[str], streams: list[int]) -> str:
    """Make this fork a process of its own; the module whose `main` it is to run."""
    import random

    import numpy as np

    os.setsid()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for target, stream in enumerate(streams, start=1):
        os.dup2(stream, target)
        os.close(stream)
    namespace, program, entry, *arguments = command
    if namespace:
        enter(namespace)
    for chance in (random.seed, np.random.seed):  # else all forks would make the same choices
        chance()
    sys.argv[:] = [program, *arguments]
    return entry


def enter(namespace: str) -> None:
    """Have its network instead of the machine's, for all that this process starts as well; as root."""
    with (NAMESPACES / namespace).open("rb") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), 0):  # os.setns comes with Python 3.12
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(NAMESPACES / namespace))


def main() -> None:
    """Be the forge; in a fork: the program."""
    import importlib

    sys.path[0] = str(Path(__file__).parents[2])  # as `python -c` would have it, not this folder
    for name in IMPORTS:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"something that was imported runs {len(threads)} threads: a fork would lack them"
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        entry = become(*serve(orders))
    importlib.import_module(entry).main()


if __name__ == "__main__":
    main()
