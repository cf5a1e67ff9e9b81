"""Two machines and a home line between them: network namespaces, a veth pair, and a token bucket at either end.

    far (owner, observer)  eth0 == veth == eth0  home (volunteer)        up: home to far, down: far to home

The namespaces are named after this process and deleted at the end, also after a failure; the machine's own network is
not touched. Needs root, and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dipaco_p2p.errors import EnvironmentUnfit

DEVICE = "eth0"
SUBNET = "10.78.0"
BURST, LATENCY = "32kb", "400ms"
"""The queue of a home router (tbf)."""
COUNTERS = Path("/proc/self/net/dev")
RECEIVED, SENT = 0, 8
"""Places of the byte counters in a device's line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One end; `inside` goes before a command that is to run there."""

    namespace: str
    address: str

    @property
    def inside(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The two ends; as fast as the machine until `limit`."""

    far: Host
    home: Host

    def limit(self, *, up_mbit: float, down_mbit: float) -> None:
        """From now on no faster than this; raises EnvironmentUnfit."""
        for host, mbit in ((self.home, up_mbit), (self.far, down_mbit)):
            shape = ("rate", f"{mbit}mbit", "burst", BURST, "latency", LATENCY)
            _run("tc", "-n", host.namespace, "qdisc", "add", "dev", DEVICE, "root", "tbf", *shape)


@contextlib.contextmanager
def home_line() -> Iterator[Line]:
    """The network while the block runs; programs in it must have ended by then. Raises EnvironmentUnfit."""
    require_root()
    far, home = (
        Host(namespace=f"dipaco-line-{os.getpid()}-{name}", address=f"{SUBNET}.{number}")
        for number, name in enumerate(("far", "home"), start=1)
    )
    try:
        for host in (far, home):
            _run("ip", "netns", "add", host.namespace)
        ends = (DEVICE, "type", "veth", "peer", DEVICE, "netns", home.namespace)
        _run("ip", "-n", far.namespace, "link", "add", *ends)
        for host in (far, home):
            _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _run("ip", "-n", host.namespace, "link", "set", device, "up")
        yield Line(far=far, home=home)
    finally:
        for host in (far, home):
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True)


def require_root() -> None:
    """Raise EnvironmentUnfit for anybody else."""
    if os.geteuid() != 0:
        raise EnvironmentUnfit("network namespaces need root", hint="run it as root, or in a container that is")


def line_bytes() -> tuple[int, int]:
    """Bytes that went up and down the line so far, with all headers: for a program at home. Zeros without a line."""
    for text in COUNTERS.read_text().splitlines():
        name, _, counters = text.partition(":")
        if name.strip() == DEVICE:
            words = counters.split()
            return int(words[SENT]), int(words[RECEIVED])
    return 0, 0


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise EnvironmentUnfit(f"there is no `{command[0]}` here", hint="install iproute2") from None
    if done.returncode:
        raise EnvironmentUnfit(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
