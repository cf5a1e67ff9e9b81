"""`python -m benchmarks.town run | pairs | moves | relay | update`: what a run costs among homes. Root, on Linux.

`run` starts the public programs in a town of network namespaces: a seed node with a public address, and homes. A leader
is killed, a router restarts, the relay is killed and comes back, and the run is checked afterwards. `pairs` dials from
home to home in fresh towns with four public peers, and counts who comes to a direct connection. `moves` carries a
laptop into another home. `relay` gives one relay many slots, and pushes bytes through it. `update` brings large modules
to their next version over lines of homes, beside hivemind's averager.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.processes import DAEMON, memory_bytes, spent
from benchmarks.report import MB, JsonFile, require_known, run_app, show, table, write_json
from benchmarks.town.network import Machine, Nat, Rate, Town, missing, town
from dipaco_p2p.core.outer.compress import CODECS
from peers.governor.machine import PROC, descendants

CODES = "Exit codes: 0 done; 1 a promise was broken; 2 a wrong flag; 5 this machine cannot."
LINE = Rate(up=20.0, down=100.0)
OBSERVERS = 3
"""Public peers besides the seed: libp2p punches holes once four have said which address they see."""
DIRECT_S = 6.0
"""How long a direct connection is waited for; libp2p tries three times within that."""
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, help=__doc__)


@app.command(epilog=CODES)
def run(
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of the grid.")] = 8,
    homes: Annotated[str, typer.Option(help="Their routers, with commas between.")] = "preserving,symmetric,double",
    public: Annotated[int, typer.Option(min=0, help="Volunteers with a public address besides.")] = 0,
    relaying: Annotated[bool, typer.Option("--relay/--no-relay", help="Whether the seed node relays.")] = True,
    faults: Annotated[bool, typer.Option("--faults/--no-faults", help="Whether anything is killed.")] = True,
    out: Annotated[Path, typer.Option(help="A new folder for homes, logs and histories.")] = Path("town"),
    figures: JsonFile = None,
) -> None:
    """A 2x2 run through the relay alone, if nobody else is public."""
    from .living import live

    if out.exists():
        raise typer.BadParameter(f"{out} is there already: give --out a new folder")
    with _ready():
        kinds = [Nat(kind) for kind in homes.split(",")]
    with town() as place:
        seed = place.public()
        machines = {f"{kind}-{number}": place.home(kind, rate=LINE) for number, kind in enumerate(kinds, 1)}
        machines |= {f"public-{number}": place.public() for number in range(1, public + 1)}
        found = live(seed, machines, out, rounds=rounds, is_relaying=relaying, has_faults=faults)
    show(
        table(
            f"{rounds} rounds, 2x2, a seed node {'that relays' if relaying else 'without a relay'}",
            ("volunteer", "joined, s", "dialled", "leads", "made", "receipts", "by relay, MB", "of all, MB"),
            [tuple(map(str, row)) for row in found["volunteers"]],
        ),
        *(f"{name}: {value}" for name, value in found["facts"].items()),
    )
    write_json(figures, found)
    raise typer.Exit(1 if found["facts"]["breaches"] else 0)


@app.command(epilog=CODES)
def pairs(
    towns: Annotated[int, typer.Option(min=1, help="Fresh towns, one after the other.")] = 5,
    homes: Annotated[
        str, typer.Option(help="Their routers.")
    ] = "preserving,preserving,preserving,symmetric,symmetric,double",
    figures: JsonFile = None,
) -> None:
    """Share of pairs that come to a direct connection, by what stands before them."""
    with _ready():
        kinds = [Nat(kind) for kind in homes.split(",")]
    tried: dict[tuple[str, str], list[float | None]] = defaultdict(list)
    slots_s, called_s = [], []
    for _ in range(towns):
        with tempfile.TemporaryDirectory() as folder, town() as place:
            for one in _dialled(Path(folder), place, kinds):
                slots_s += one["slots_s"]
                called_s += one["called_s"]
                for pair, direct_s in one["direct"]:
                    tried[pair].append(direct_s)
    rows = []
    for pair, found in sorted(tried.items()):
        direct = [value for value in found if value is not None]
        median_s = f"{statistics.median(direct):.2f}" if direct else "-"
        rows.append((" - ".join(pair), str(len(found)), str(len(direct)), f"{len(direct) / len(found):.0%}", median_s))
    show(
        table(f"Pairs of homes in {towns} towns", ("routers", "pairs", "direct", "share", "after, s"), rows),
        f"slot after opening the daemon: median {statistics.median(slots_s):.2f} s, at most {max(slots_s):.2f} s",
        f"first answer through the relay: median {statistics.median(called_s):.2f} s, at most {max(called_s):.2f} s",
    )
    write_json(figures, {"rows": rows, "slots_s": slots_s, "called_s": called_s})


@app.command(epilog=CODES)
def moves(
    times: Annotated[int, typer.Option(min=1, help="How often it is carried elsewhere.")] = 3,
    figures: JsonFile = None,
) -> None:
    """A laptop that is carried into another home: after how long another home reaches it again."""
    from dipaco_p2p.errors import DipacoError
    from dipaco_p2p.swarm.relay_slots import RelayLimits

    from .nodes import Node

    with _ready(), tempfile.TemporaryDirectory() as name, town() as place:
        folder = Path(name)
        seed = Node(folder, "seed", place.public(), relay=RelayLimits(), listen="/ip4/0.0.0.0/tcp/4001").started()
        nodes, taken_s = [seed], []
        try:
            inside: dict[str, Any] = {"listen": "/ip4/0.0.0.0/tcp/0", "behind_nat": True}
            inside["seeds"] = [_outside(seed.facts["addresses"], seed.machine)]
            for who in ("laptop", "other"):
                nodes.append(Node(folder, who, place.home(), **inside).started())
                nodes[-1].facts |= nodes[-1].ask("reserve")
            laptop, other = nodes[1:]
            to = {"peer": laptop.facts["peer"], "addresses": laptop.facts["addresses"], "within_s": 0.0}
            other.ask("dial", **to)
            for _ in range(times):
                assert laptop.machine is not None
                began_s, is_back = time.monotonic(), False
                place.move(laptop.machine)
                while not is_back:
                    seed.ask("note", peers=[node.facts["peer"] for node in nodes])
                    with suppress(DipacoError):
                        other.ask("dial", **to)
                        is_back = True
                taken_s.append(time.monotonic() - began_s)
        finally:
            for node in reversed(nodes):
                node.end()
    show("reached again after " + ", ".join(f"{seconds:.1f}" for seconds in taken_s) + " s")
    write_json(figures, {"taken_s": taken_s})


@app.command(epilog=CODES)
def relay(
    slots: Annotated[int, typer.Option(min=1, max=128, help="Peers that keep a slot, each with a daemon.")] = 100,
    megabytes: Annotated[int, typer.Option(min=4, help="To push through one circuit.")] = 200,
    idle_s: Annotated[float, typer.Option(help="How long the slots are only kept.")] = 30.0,
    figures: JsonFile = None,
) -> None:
    """A relay's memory and processor, on loopback."""
    from dipaco_p2p.swarm.relay_slots import RelayLimits

    from .nodes import Node

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        middle = Node(folder, "relay", None, relay=RelayLimits(slots=128, slots_per_host=128)).started()
        address = middle.facts["addresses"][0]
        before = _memory(middle.pid)
        crowd = Node(folder, "crowd", None, seeds=[address], behind_nat=True, count=slots)
        dialler = Node(folder, "dialler", None, seeds=[address], client_mode=True)
        try:
            crowd.started()
            dialler.started()
            middle.ask("note", peers=crowd.facts["peers"])
            crowd.facts |= crowd.ask("reserve")
            full, used = _memory(middle.pid), spent(middle.pid)
            time.sleep(idle_s)
            idle = spent(middle.pid).since(used)
            used, times = spent(middle.pid), megabytes // 4
            to = {"peer": crowd.facts["peer"], "addresses": crowd.facts["addresses"]}
            pushed = dialler.ask("push", bytes=int(4 * MB), times=times, **to)
            busy, found = spent(middle.pid).since(used), middle.ask("statistics")["statistics"]
        finally:
            for node in (dialler, crowd, middle):
                node.end()
    rows = [
        ("slots held", f"{found.relay_slots}"),
        ("program, MB: alone; with them", f"{before[0] / MB:.0f}; {full[0] / MB:.0f}"),
        ("daemon, MB: alone; with them", f"{before[1] / MB:.0f}; {full[1] / MB:.0f}"),
        ("processor while they are kept", f"{(idle.programs_s + idle.daemons_s) / idle_s:.1%} of a core"),
        ("MB passed on, MB/s", f"{found.relay_bytes / MB:.0f}, {times * 4 / pushed['seconds']:.0f}"),
        ("processor seconds for 100 MB: program", _each(busy.programs_s, times)),
        ("the same: daemon", _each(busy.daemons_s, times)),
    ]
    show(table("A relay", ("what", "figure"), rows))
    write_json(figures, rows)


@app.command(epilog=CODES)
def update(
    peers: Annotated[str, typer.Option(help="How many volunteers, with commas between.")] = "4,8",
    modules: Annotated[str, typer.Option(help="Into how many modules the path is cut, each with a leader.")] = "1,4",
    codecs: Annotated[str, typer.Option(help="Of the uplink.")] = "int4,ternary640",
    values: Annotated[int, typer.Option(min=100_000, help="Parameters of the path.")] = 25_000_000,
    runs: Annotated[int, typer.Option(min=1, help="Counted rounds of each.")] = 3,
    rival: Annotated[bool, typer.Option("--rival/--no-rival", help="Whether hivemind's averager runs, too.")] = True,
    figures: JsonFile = None,
) -> None:
    """Until all have the next version of a path of 100 MB, on lines of 20 and 100 Mbit/s."""
    from .update import RIVAL, Case, measure, tables

    names = [*([RIVAL] if rival else []), *codecs.split(",")]
    require_known("codec", codecs.split(","), CODECS)
    counts = [_whole(text, 3, "peers") for text in peers.split(",")]
    parts = [_whole(text, 1, "modules") for text in modules.split(",")]
    if max(parts) > min(counts):
        raise typer.BadParameter(f"{max(parts)} modules, {min(counts)} peers: each module has a leader of its own")
    cases = [Case(peers=count, modules=each, codec=name) for each in parts for count in counts for name in names]
    with _ready():
        found = list(measure(cases, values, LINE, runs=runs))
    show(*tables(found, LINE, values=values))
    write_json(figures, [asdict(one) for one in found])


def _whole(text: str, least: int, what: str) -> int:
    """Raises BadParameter."""
    if not text.isdecimal() or int(text) < least:
        raise typer.BadParameter(f"`{text}` {what}: a whole number from {least} on is needed")
    return int(text)


def _each(seconds: float, times: int) -> str:
    return f"{seconds / (times * 4) * 100:.2f}"


def _memory(pid: int) -> tuple[int, int]:
    """Of a program and of its daemon."""
    names = {one: (PROC / str(one) / "comm").read_text().strip() for one in descendants(pid)}
    daemons = [one for one, name in names.items() if name == DAEMON]
    return memory_bytes(pid, "VmRSS"), sum(memory_bytes(one, "VmRSS") for one in daemons)


def _dialled(folder: Path, place: Town, kinds: list[Nat]) -> Iterator[dict[str, Any]]:
    """Each home dials those after it, one after the other; different homes at the same time."""
    from dipaco_p2p.swarm.relay_slots import RelayLimits

    from .nodes import Node

    listen = {"listen": "/ip4/0.0.0.0/tcp/4001"}
    seed = Node(folder, "seed", place.public(), relay=RelayLimits(), **listen).started()
    nodes = [seed]
    try:
        seeds = [_outside(seed.facts["addresses"], seed.machine)]
        observers = [Node(folder, f"public{n}", place.public(), seeds=seeds, **listen) for n in range(OBSERVERS)]
        nodes += observers
        seeds += [_outside(one.started().facts["addresses"], one.machine) for one in observers]
        inside: dict[str, Any] = {"seeds": seeds, "listen": "/ip4/0.0.0.0/tcp/0", "behind_nat": True}
        homes = [Node(folder, f"home{n}", place.home(kind), **inside) for n, kind in enumerate(kinds)]
        nodes += homes
        slots_s = []
        for home in homes:
            home.started().facts |= home.ask("reserve")
            slots_s.append(home.facts["slot_s"])
        direct, called_s = [], []
        for step in range(1, len(homes)):
            asked = list(zip(range(len(homes) - step), range(step, len(homes)), strict=True))
            for here, there in asked:
                to = {"peer": homes[there].facts["peer"], "addresses": homes[there].facts["addresses"]}
                homes[here].send("dial", within_s=DIRECT_S, **to)
            for here, there in asked:
                found = homes[here].receive()
                pair = tuple(sorted((kinds[here].value, kinds[there].value)))
                direct.append((pair, found["direct_s"]))
                called_s.append(found["called_s"])
        yield {"direct": direct, "called_s": called_s, "slots_s": slots_s}
    finally:
        for node in reversed(nodes):
            node.end()


def _outside(addresses: list[str], machine: Machine | None) -> str:
    assert machine is not None
    return next(address for address in addresses if f"/{machine.address}/" in address)


@contextmanager
def _ready() -> Iterator[None]:
    """Ends with a line where there can be no town, or for a router of a kind that is not known."""
    if why := missing():
        typer.echo(f"error: {why}", err=True)
        raise typer.Exit(5)
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(f"{error}; there are {', '.join(Nat)}") from None


if __name__ == "__main__":
    run_app(app)
