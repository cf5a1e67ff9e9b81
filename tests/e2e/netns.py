"""A small network of its own for a test: hosts are network namespaces, joined by bridges that can be cut apart.

    host -- veth -- bridge `left`  == trunk ==  bridge `right` -- veth -- host

Everything is in namespaces that are named after this process and deleted at the end, with all links in them, also after
a failure; the machine's own network is not touched. Needs root (`NEEDS_ROOT` skips a test without), and iproute2.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces and mounts need root")
SUBNET = "10.77.0"
LEFT, RIGHT = "left", "right"
TRUNK = {LEFT: "trunk-l", RIGHT: "trunk-r"}
_numbers = itertools.count(1)


def ip(*words: str) -> None:
    """Run iproute2's `ip`; fails with its own words."""
    _run("ip", *words)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@dataclass(slots=True)
class Host:
    """One machine of the network: `inside` goes before a command that is to run there."""

    namespace: str
    address: str
    switch: str
    port: str
    """Its end of the cable at the switch."""

    @property
    def inside(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace)

    def limit(self, kbit: int) -> None:
        """A slow line, both ways, with the queue of a home router (tbf)."""
        shape = ("root", "tbf", "rate", f"{kbit}kbit", "burst", "16kbit", "latency", "400ms")
        _run("tc", "-n", self.namespace, "qdisc", "add", "dev", "eth0", *shape)
        _run("tc", "-n", self.switch, "qdisc", "add", "dev", self.port, *shape)


@dataclass(slots=True)
class Network:
    """Hosts on two bridges."""

    switch: str
    hosts: list[Host] = field(default_factory=list)

    def host(self, side: str = LEFT) -> Host:
        """One more host, on one side of the trunk."""
        number = len(self.hosts) + 1
        host = Host(f"{self.switch}-{number}", f"{SUBNET}.{number}", self.switch, f"port{number}")
        self.hosts.append(host)
        ip("netns", "add", host.namespace)
        ip("-n", self.switch, "link", "add", host.port, "type", "veth", "peer", "eth0", "netns", host.namespace)
        ip("-n", self.switch, "link", "set", host.port, "master", side, "up")
        ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", host.namespace, "link", "set", device, "up")
        return host

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """The two sides do not reach each other while the block runs."""
        ip("-n", self.switch, "link", "set", TRUNK[LEFT], "down")
        try:
            yield
        finally:
            ip("-n", self.switch, "link", "set", TRUNK[LEFT], "up")


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A network without hosts; all of it is gone afterwards. Programs in it must have ended."""
    made = Network(f"dipaco-{os.getpid()}-{next(_numbers)}")
    ip("netns", "add", made.switch)
    try:
        for side in (LEFT, RIGHT):
            ip("-n", made.switch, "link", "add", side, "type", "bridge")
            ip("-n", made.switch, "link", "set", side, "up")
        ip("-n", made.switch, "link", "add", TRUNK[LEFT], "type", "veth", "peer", TRUNK[RIGHT])
        for side, port in TRUNK.items():
            ip("-n", made.switch, "link", "set", port, "master", side, "up")
        yield made
    finally:
        for name in (*(host.namespace for host in made.hosts), made.switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
