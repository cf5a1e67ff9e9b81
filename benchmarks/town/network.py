"""A public network with homes behind NAT boxes; every machine is a network namespace of its own.

    machine -- veth -- bridge of the backbone -- line (tbf) -- NAT box -- machine of a home
                                               \\- provider's NAT -- line -- NAT box -- machine   (double)

All addresses outside look public (45.0.0.0/16): libp2p punches holes between such only. Boxes translate with nftables:
`preserving` keeps a port where it can, as most home routers do; `symmetric` draws another for each connection;
`forwarded` is preserving with one port let in. New connections from outside are dropped, as routers do.

Everything is in namespaces that are named after this process, and is gone afterwards; the machine's own network is not
touched. Needs root, iproute2 and nftables (`missing` says what is not there).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

PUBLIC = "45.0"
"""The first half of all public addresses, and the network that machines believe to be on: /16."""
FORWARDED_PORT = 31337
WIRE = "wire"
"""A public machine's line, as the machine calls it."""
BURST = "256kbit"
QUEUE = "100ms"
_numbers = itertools.count(1)


class Nat(StrEnum):
    """What stands between a home and everybody else."""

    PRESERVING = "preserving"
    SYMMETRIC = "symmetric"
    DOUBLE = "double"
    FORWARDED = "forwarded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A home's line, in Mbit/s."""

    up: float
    down: float


def missing() -> str:
    """Why there can be no town here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = [tool for tool in ("ip", "tc", "nft") if shutil.which(tool) is None]
    return f"no {' and no '.join(tools)} here (Debian: iproute2, nftables)" if tools else ""


@dataclass(slots=True)
class Machine:
    """One machine: `inside` goes before a command that is to run there."""

    namespace: str
    address: str
    box: Box | None = None
    """The router before it; None for a public one."""

    @property
    def inside(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace)

    @property
    def carried(self) -> tuple[int, int]:
        """Bytes that a public machine's line has carried, up and down."""
        files = (f"/sys/class/net/{WIRE}/statistics/{way}_bytes" for way in ("tx", "rx"))
        up, down = in_namespace(self.namespace, "cat", *files).split()
        return int(up), int(down)


@dataclass(slots=True)
class Box:
    """A router: `wan` outside, `lan` inside, and what translates between them."""

    town: Town
    name: str
    public: str
    nat: Nat
    behind: str
    """The namespace whose bridge it is plugged into outside: the backbone, or the provider's box."""
    inner: str
    """The namespace inside, and the first three numbers of its addresses."""
    subnet: str
    rate: Rate | None
    outside_subnet: str = ""
    """Of a box behind a provider's: the first three numbers there."""
    outside_port: int = FORWARDED_PORT
    """Of a forwarded port, as others dial it."""

    def start(self) -> None:
        """Plug it in, and switch it on: it remembers no connection."""
        ip("netns", "add", self.name)
        for name, other, device in ((self.port, self.behind, "wan"), ("router", self.inner, "lan")):
            ip("-n", other, "link", "add", name, "type", "veth", "peer", device, "netns", self.name)
            ip("-n", other, "link", "set", name, "master", "switch", "up")
            ip("-n", self.name, "link", "set", device, "up")
        prefix = 24 if self.outside_subnet else 16
        ip("-n", self.name, "link", "set", "lo", "up")
        ip("-n", self.name, "address", "add", f"{self.public}/{prefix}", "dev", "wan")
        ip("-n", self.name, "address", "add", f"{self.subnet}.1/24", "dev", "lan")
        if self.outside_subnet:
            ip("-n", self.name, "route", "add", "default", "via", f"{self.outside_subnet}.1")
        in_namespace(self.name, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        in_namespace(self.name, "nft", "-f", "-", text=self._rules())
        if self.rate is not None:
            _limit(self.name, "wan", self.rate.up)
            _limit(self.behind, self.port, self.rate.down)

    def restart(self) -> None:
        """As when it is unplugged and plugged in again: all that it has translated is forgotten."""
        for other, name in ((self.behind, self.port), (self.inner, "router")):
            ip("-n", other, "link", "delete", name)  # at once: what goes with its namespace goes some time later
        ip("netns", "delete", self.name)
        self.start()

    @property
    def port(self) -> str:
        return f"p{self.name.rpartition('-')[2]}"

    def _rules(self) -> str:
        how = "masquerade random" if self.nat is Nat.SYMMETRIC else "masquerade"
        is_open = self.nat is Nat.FORWARDED
        inside = f"{self.subnet}.2:{FORWARDED_PORT}"
        dnat = f"iifname wan tcp dport {self.outside_port} dnat to {inside}" if is_open else ""
        return f"""
table ip nat {{
  chain before {{
    type nat hook prerouting priority -100; policy accept;
    {dnat}
  }}
  chain after {{
    type nat hook postrouting priority 100; policy accept;
    oifname wan {how}
  }}
}}
table ip gate {{
  chain through {{
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    ct status dnat accept
    iifname lan accept
  }}
  chain itself {{
    type filter hook input priority 0; policy accept;
    iifname wan ct state new drop
  }}
}}
"""


@dataclass(slots=True)
class Town:
    """Machines and homes; made by `town`."""

    backbone: str
    machines: list[Machine] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)

    def public(self, rate: Rate | None = None) -> Machine:
        """A machine that everybody can dial."""
        machine = self._machine(f"{PUBLIC}.0.{len(self.machines) + 1}", prefix=16)
        name = f"m{len(self.machines)}"
        ip("-n", self.backbone, "link", "add", name, "type", "veth", "peer", WIRE, "netns", machine.namespace)
        ip("-n", self.backbone, "link", "set", name, "master", "switch", "up")
        ip("-n", machine.namespace, "link", "set", WIRE, "master", "switch", "up")
        if rate is not None:
            _limit(machine.namespace, WIRE, rate.up)
            _limit(self.backbone, name, rate.down)
        return machine

    def home(
        self, nat: Nat = Nat.PRESERVING, *, rate: Rate | None = None, outside_port: int = FORWARDED_PORT
    ) -> Machine:
        """A machine behind a router of its own."""
        number = len(self.machines) + 1
        subnet, public = f"192.168.{number}", f"{PUBLIC}.1.{number}"
        machine = self._machine(f"{subnet}.2", prefix=24)
        behind, outside = self.backbone, ""
        if nat is Nat.DOUBLE:
            behind, outside = f"{self.backbone}-street{number}", f"10.{number}.0"
            _switch(behind)
            provider = Box(self, self._box(), public, Nat.PRESERVING, self.backbone, behind, outside, None)
            provider.start()
            self.boxes.append(provider)
            public = f"{outside}.2"
        place = (public, nat, behind, machine.namespace, subnet, rate, outside)
        machine.box = Box(self, self._box(), *place, outside_port=outside_port)
        machine.box.start()
        self.boxes.append(machine.box)
        ip("-n", machine.namespace, "route", "add", "default", "via", f"{subnet}.1")
        return machine

    def move(self, machine: Machine) -> None:
        """Carry a machine into another home, as one carries a laptop: another router, another address."""
        assert machine.box is not None
        ip("netns", "delete", machine.box.name)
        subnet, public = f"192.168.{100 + len(self.boxes)}", f"{PUBLIC}.2.{len(self.boxes) + 1}"
        ip("-n", machine.namespace, "address", "flush", "dev", "switch")
        machine.address = f"{subnet}.2"
        ip("-n", machine.namespace, "address", "add", f"{machine.address}/24", "dev", "switch")
        machine.box = Box(self, self._box(), public, Nat.PRESERVING, self.backbone, machine.namespace, subnet, None)
        machine.box.start()
        self.boxes.append(machine.box)
        ip("-n", machine.namespace, "route", "add", "default", "via", f"{subnet}.1")

    def namespaces(self) -> Iterator[str]:
        yield from (machine.namespace for machine in self.machines)
        yield from (box.name for box in self.boxes)
        yield from {box.behind for box in self.boxes} - {self.backbone}
        yield self.backbone

    def _machine(self, address: str, *, prefix: int) -> Machine:
        machine = Machine(f"{self.backbone}-m{len(self.machines) + 1}", address)
        _switch(machine.namespace)
        ip("-n", machine.namespace, "address", "add", f"{address}/{prefix}", "dev", "switch")
        self.machines.append(machine)
        return machine

    def _box(self) -> str:
        return f"{self.backbone}-b{len(self.boxes) + 1}"


@contextlib.contextmanager
def town() -> Iterator[Town]:
    """An empty town; all of it is gone afterwards. Programs in it must have ended."""
    made = Town(f"town-{os.getpid()}-{next(_numbers)}")
    try:
        _switch(made.backbone)
        yield made
    finally:
        for name in made.namespaces():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ip(*words: str) -> None:
    """Run iproute2's `ip`; fails with its own words."""
    _run("ip", *words)


def in_namespace(namespace: str, *command: str, text: str = "") -> str:
    """What `command` prints there."""
    return _run("ip", "netns", "exec", namespace, *command, text=text)


def _switch(namespace: str) -> None:
    """A namespace with a bridge: a machine keeps its address on it while a router is unplugged."""
    ip("netns", "add", namespace)
    ip("-n", namespace, "link", "add", "switch", "type", "bridge", "forward_delay", "0")
    for device in ("lo", "switch"):
        ip("-n", namespace, "link", "set", device, "up")


def _limit(namespace: str, device: str, mbit: float) -> None:
    shape = ("root", "tbf", "rate", f"{mbit:g}mbit", "burst", BURST, "latency", QUEUE)
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *shape)


def _run(*command: str, text: str = "") -> str:
    done = subprocess.run(command, capture_output=True, text=True, input=text)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
