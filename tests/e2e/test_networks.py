"""Swarms on networks that fail: cut into halves, slow lines, connections that are delayed and reset. Needs root."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_harness import Program, Programs, breaches, eventually, programs_in, versions_of, write_run
from netns import LEFT, NEEDS_ROOT, RIGHT, Host, Network, network

pytestmark = [pytest.mark.libp2p, pytest.mark.slow, NEEDS_ROOT]
MODULES = ("L0.M0", "L1.M0", "L1.M1")
SLOW_KBIT = 4000
TTL_S = 5.0
"""Long enough that five programs that start on two processors do not miss each other."""


@pytest.fixture
def net() -> Iterator[Network]:
    with network() as made:
        yield made


@pytest.fixture
def programs(tmp_path: Path, net: Network) -> Iterator[Programs]:
    """As everywhere, but ended before the network goes."""
    with programs_in(tmp_path / "programs") as started:
        yield started


def open_run(programs: Programs, corpus: Path, host: Host) -> Program:
    """A run without an end: however unlike the halves are in speed, none is through before it has healed."""
    file = programs.folder / "net.toml"
    run_file = write_run(file, corpus, rounds=100_000, min_paths=2, host=host.address, heartbeat_ttl_s=TTL_S)
    return programs.coordinator(run_file, programs.folder / "coordinator", namespace=host.namespace)


def made(*programs: Program) -> int:
    return sum(len(program.events("version")) for program in programs)


def test_a_partition_into_halves_heals_and_a_slow_line_is_no_reason_to_be_left_out(
    programs: Programs, corpus: Path, net: Network
) -> None:
    seed, slow = net.host(LEFT), net.host(LEFT)
    slow.limit(SLOW_KBIT)
    coordinator = open_run(programs, corpus, seed)
    address = coordinator.wait_address()["address"]
    hosts = {"slow": slow, "right-1": net.host(RIGHT), "right-2": net.host(RIGHT)}
    volunteers = {name: programs.volunteer(address, name, namespace=host.namespace) for name, host in hosts.items()}
    for volunteer in volunteers.values():
        volunteer.wait_event("receipt")
    # Three of four peers: some of each half, so that both can go on.
    eventually(lambda: set(groups(coordinator, *volunteers.values()).values()) == {3}, what=lambda: said(coordinator))
    # And the first version of each, which mirrors have made: what a run begins with is at the seed node only.
    eventually(lambda: min(versions_of(coordinator).get(module, 0) for module in MODULES) >= 1, within_s=90)
    halves = [(coordinator, volunteers["slow"]), (volunteers["right-1"], volunteers["right-2"])]
    with net.cut():
        before = [made(*half) for half in halves]
        for half, count in zip(halves, before, strict=True):  # both have leaders of their own, after an expiry
            eventually(lambda half=half, n=count: made(*half) >= n + 2, within_s=90, what=lambda half=half: said(*half))
    # Healed: one branch is left, and of each volunteer it counts a contribution that got its receipt since. Version
    # numbers would not show this: the branch that stays may be the slow line's, dozens of versions behind the other.
    before_healing = {name: receipts(volunteer) for name, volunteer in volunteers.items()}
    for name, volunteer in volunteers.items():
        eventually(
            lambda one=volunteer, before=before_healing[name]: (receipts(one) - before) & in_archive(coordinator),
            within_s=90,
            what=lambda one=volunteer: said(coordinator, one),
        )
    for program in (*volunteers.values(), coordinator):
        assert program.end() == 0, program.complaint
    assert breaches(coordinator.home, *volunteers.values()) == []
    assert volunteers["slow"].events("receipt")[0]["id"] in counted(coordinator)


def receipts(volunteer: Program) -> frozenset[str]:
    """The contributions that it has a receipt for."""
    return frozenset(event["id"] for event in volunteer.events("receipt"))


def in_archive(coordinator: Program) -> frozenset[str]:
    """What the versions count that the archive has so far; it is still being written, so that only files are read."""
    versions = (json.loads(path.read_text()) for path in coordinator.home.glob("grid/documents/version-*.json"))
    return frozenset(share["contribution"] for version in versions for share in version["document"]["shares"])


def groups(*programs: Program) -> dict[str, int]:
    """How many there are in the newest group of each module."""
    events = sorted((event for program in programs for event in program.events("mirrors")), key=lambda one: one["term"])
    return dict.fromkeys(MODULES, 0) | {event["module"]: 1 + len(event["mirrors"]) for event in events}


def said(*programs: Program) -> str:
    return "\n".join(program.complaint[-1000:] for program in programs)


def counted(coordinator: Program) -> frozenset[str]:
    from benchmarks.swarm_faults.evidence import gather

    return gather(coordinator.home, {}, done=(), ended_s=0.0).counted


def test_a_run_completes_over_a_connection_that_is_slow_and_reset_three_times(
    programs: Programs, corpus: Path, net: Network
) -> None:
    """The seed node listens on its own loopback only, so that the volunteer in the other machine needs the proxy."""
    seed, far = net.host(LEFT), net.host(RIGHT)
    run_file = write_run(programs.folder / "proxied.toml", corpus, rounds=4, min_paths=1)
    coordinator = programs.coordinator(run_file, programs.folder / "coordinator", namespace=seed.namespace)
    _, _, _, _, port, _, peer = coordinator.wait_address()["address"].split("/")
    report = programs.folder / "proxy.json"
    proxy = programs.script(
        Path(__file__).with_name("tcp_proxy.py"),
        *("--listen", f"{seed.address}:4001", "--to", f"127.0.0.1:{port}"),
        *("--delay-s", "0.05", "--resets", "3", "--every-s", "3", "--report", report),
        inside=seed.inside,
    )
    eventually(report.exists)
    address = f"/ip4/{seed.address}/tcp/4001/p2p/{peer}"
    volunteer = programs.volunteer(address, "far", "--no-listen", namespace=far.namespace)
    assert volunteer.wait(90) == 0, volunteer.complaint
    assert volunteer.events()[-1]["complete"]
    assert coordinator.end() == 0, coordinator.complaint
    assert proxy.end() == 0
    relayed = json.loads(report.read_text())
    assert relayed["resets"] == 3 and relayed["bytes"] > 10_000, relayed
    assert breaches(coordinator.home, volunteer) == []


def test_a_volunteer_that_nobody_can_dial_is_told_so_and_goes_on_as_a_client_without_a_relay(
    programs: Programs, corpus: Path, net: Network
) -> None:
    """It listens where only its own machine can dial it, as behind a router that forwards nothing."""
    seed, inside = net.host(LEFT), net.host(RIGHT)
    run_file = write_run(programs.folder / "nat.toml", corpus, rounds=100_000, min_paths=1, host=seed.address)
    run_file.write_text(run_file.read_text().replace("[node]", "[node]\nrelay = false"))
    coordinator = programs.coordinator(run_file, programs.folder / "coordinator", namespace=seed.namespace)
    ticket = coordinator.wait_address()["ticket"]
    listen = ("--listen", "/ip4/127.0.0.1/tcp/0")
    volunteer = programs.volunteer(ticket, "inside", *listen, namespace=inside.namespace)
    volunteer.wait_event("receipt")
    said = volunteer.complaint
    assert "nobody can reach this machine" in said and "trains without leading a module" in said, said
    assert volunteer.end() == 0, said
    assert not volunteer.events("leads") and not (volunteer.home / "address.json").exists()
    home = ("--home", programs.folder / "inside")
    words = ("doctor", ticket, *listen, *home)
    doctor = programs.start("dipaco-peer", *words, home=programs.folder, namespace=inside.namespace)
    assert doctor.wait(90) == 0, doctor.complaint
    assert "goes on as a client" in doctor.said, doctor.said
    assert coordinator.end() == 0, coordinator.complaint
