"""A run among homes behind routers: no volunteer can be dialled, and each is reached through the seed node's relay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_harness import Program, Programs, breaches, eventually, free_port, programs_in, versions_of, write_run

from benchmarks.town.network import FORWARDED_PORT, Machine, Nat, Town, missing, town
from dipaco_p2p.ticket import read_ticket

pytestmark = [
    pytest.mark.libp2p,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "all is there"),
]
MODULES = ("L0.M0", "L0.M1", "L1.M0", "L1.M1")
TTL_S = 5.0
"""As in test_networks.py."""


@pytest.fixture
def place() -> Iterator[Town]:
    with town() as made:
        yield made


@pytest.fixture
def programs(tmp_path: Path, place: Town) -> Iterator[Programs]:
    """As everywhere, but ended before the network goes."""
    with programs_in(tmp_path / "programs") as started:
        yield started


class Run:
    """A 2x2 run without an end, whose seed node stays at its port; public, or behind a router that forwards it."""

    def __init__(self, programs: Programs, corpus: Path, seed: Machine) -> None:
        self._programs, self._seed, box = programs, seed, seed.box
        self._file = programs.folder / "town.toml"
        host, port = (seed.address, free_port()) if box is None else ("0.0.0.0", FORWARDED_PORT)
        write_run(self._file, corpus, rounds=100_000, min_paths=2, host=host, port=port, heartbeat_ttl_s=TTL_S)
        text = self._file.read_text().replace("modules = 1\n", "modules = 2\n")
        if box is not None:
            place = f"/ip4/{box.public}/tcp/{box.outside_port}"
            text = text.replace(f"port = {port}\n", f'port = {port}\nannounce = ["{place}"]\n')
        self._file.write_text(text)
        self.coordinator = self.start()
        self.ticket = self.coordinator.wait_address()["ticket"]

    def start(self) -> Program:
        """For the first time, or again."""
        folder = self._programs.folder / "coordinator"
        self.coordinator = self._programs.coordinator(self._file, folder, namespace=self._seed.namespace)
        return self.coordinator

    def join(self, name: str, home: Machine, *more: str) -> Program:
        return self._programs.volunteer(self.ticket, name, *more, namespace=home.namespace)

    def places(self) -> list[str]:
        """Where the coordinator's newest ticket says that the run is entered."""
        done = self._programs.run("dipaco-bootstrap", "ticket", self._programs.folder / "coordinator")
        assert done.wait() == 0, done.complaint
        return [seed.place for seed in read_ticket(done.said.strip()).seeds]

    def wait_versions(self, more: int, *volunteers: Program) -> None:
        """Until the archive has so many more of every module."""
        before = versions_of(self.coordinator)
        eventually(
            lambda: all(versions_of(self.coordinator).get(m, 0) >= before.get(m, 0) + more for m in MODULES),
            within_s=60,
            what=lambda: f"{before} {versions_of(self.coordinator)} {said(self.coordinator, *volunteers)}",
        )

    def wait_settled(self, *volunteers: Program) -> None:
        """Until each of these has receipts for its path that name another holder, and the archive then has two versions
        more of every module than any of them has made. By then it is decided what becomes of work in a branch that was
        left, as by two homes that did not see each other for a while."""
        seen = [len(one.events("receipt")) for one in volunteers]
        eventually(
            lambda: all(
                len({event["module"] for event in one.events("receipt")[begin:] if len(event["holders"]) > 1}) > 1
                for one, begin in zip(volunteers, seen, strict=True)
            ),
            within_s=60,
            what=lambda: said(self.coordinator, *volunteers),
        )
        made = [event for one in volunteers for event in one.events("version")]
        newest = {m: max((event["version"] for event in made if event["module"] == m), default=0) for m in MODULES}
        eventually(
            lambda: all(versions_of(self.coordinator).get(m, 0) >= newest[m] + 2 for m in MODULES),
            within_s=60,
            what=lambda: f"{newest} {versions_of(self.coordinator)} {said(self.coordinator, *volunteers)}",
        )


def leaders(**programs: Program) -> dict[str, str]:
    """Who was the last to begin to lead each module."""
    events = [(event["term"], event["module"], name) for name, one in programs.items() for event in one.events("leads")]
    return {module: name for _, module, name in sorted(events)}


def said(*programs: Program) -> str:
    return "\n".join(program.complaint[-600:] for program in programs)


def test_homes_behind_routers_lead_every_module_and_outlive_a_leader_a_router_and_the_relay(
    programs: Programs, corpus: Path, place: Town
) -> None:
    run = Run(programs, corpus, place.public())
    machines = {kind.value: place.home(kind) for kind in (Nat.PRESERVING, Nat.SYMMETRIC, Nat.DOUBLE)}
    homes = {name: run.join(name, machine) for name, machine in machines.items()}
    for home in homes.values():
        home.wait_event("receipt")
        assert "others dial it through a relay" in home.complaint, home.complaint
    everybody = {"seed": run.coordinator, **homes}
    eventually(
        lambda: len(led := leaders(**everybody)) == len(MODULES) and set(led.values()) <= set(homes),
        within_s=60,
        what=lambda: f"{leaders(**everybody)} {said(*everybody.values())}",
    )
    run.wait_versions(1, *homes.values())

    victim = leaders(**everybody)["L1.M0"]
    homes[victim].kill()
    left = {name: home for name, home in homes.items() if name != victim}
    run.wait_versions(1, *left.values())
    assert leaders(**everybody)["L1.M0"] in left, "no home took the module over"

    router, other = left
    box = machines[router].box
    assert box is not None
    box.restart()
    before = len(left[router].events("receipt"))
    eventually(lambda: len(left[router].events("receipt")) > before, within_s=60, what=lambda: said(*left.values()))
    run.wait_versions(1, *left.values())

    run.coordinator.kill()
    run.start().wait_address()
    run.wait_settled(*left.values())
    assert left[other].process.poll() is None and left[router].process.poll() is None
    for program in (*left.values(), run.coordinator):
        assert program.end() == 0, program.complaint
    assert breaches(run.coordinator.home, *homes.values()) == []


def test_who_is_behind_a_forwarded_port_is_dialled_where_its_router_is(
    programs: Programs, corpus: Path, place: Town
) -> None:
    """The coordinator's router has another port outside. The volunteer's has the same, and names nothing: whoever dials
    it back says where it is."""
    run = Run(programs, corpus, place.home(Nat.FORWARDED, outside_port=40_443))
    forwarded, other = ("--listen", f"/ip4/0.0.0.0/tcp/{FORWARDED_PORT}"), place.home(Nat.FORWARDED)
    other = place.home(Nat.FORWARDED)
    homes = {
        "forwarded": run.join("forwarded", other, *forwarded),
        "symmetric": run.join("symmetric", place.home(Nat.SYMMETRIC)),
    }
    for home in homes.values():
        home.wait_event("receipt")
    assert "nobody can reach this machine" not in homes["forwarded"].complaint
    everybody = {"seed": run.coordinator, **homes}
    # Who can be dialled directly leads first.
    eventually(
        lambda: set(leaders(**everybody).values()) == {"forwarded"} and len(leaders(**everybody)) == len(MODULES),
        within_s=60,
        what=lambda: f"{leaders(**everybody)} {said(*everybody.values())}",
    )
    before = len(homes["symmetric"].events("receipt"))
    eventually(
        lambda: len(homes["symmetric"].events("receipt")) >= before + len(MODULES),
        within_s=60,
        what=lambda: said(*everybody.values()),
    )
    run.wait_versions(1, *homes.values())
    # The ticket names volunteers whom newcomers can dial while the coordinator is away.
    router = other.box
    assert router is not None
    outside = f"/ip4/{router.public}/tcp/{FORWARDED_PORT}"
    eventually(lambda: outside in run.places(), within_s=60, what=lambda: str(run.places()))
    for program in (*homes.values(), run.coordinator):
        assert program.end() == 0, program.complaint
    assert breaches(run.coordinator.home, *homes.values()) == []
