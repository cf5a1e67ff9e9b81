"""The doctor as users call it: a machine that is well, and machines with one thing wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from e2e_harness import Program, Programs
from liars import clock_liar

from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.swarm.identity import load_or_create
from dipaco_p2p.ticket import SeedPlace, read_ticket, write_ticket

pytestmark = pytest.mark.libp2p
DEAD = SeedPlace(place="/ip4/127.0.0.1/tcp/1", key=Signer(bytes([9]) * 32).public_key)


def visit(programs: Programs, *words: str, code: int, name: str = "patient") -> dict[str, dict[str, Any]]:
    """The checks of one visit, by name."""
    done = programs.run("dipaco-peer", "doctor", *words, "--json", "--home", programs.folder / name, timeout_s=90)
    assert done.wait() == code, done.said + done.complaint
    found = json.loads(done.said)
    assert (found["schema"], found["exit_code"]) == ("dipaco.doctor/1", code)
    return {check["check"]: check for check in found["checks"]}


def test_a_machine_that_is_well_has_a_remark_on_everything_and_leaves_nothing(
    programs: Programs, endless: Program
) -> None:
    plate = endless.wait_address()
    checks = visit(programs, plate["ticket"], code=0)
    wanted = {"packages", "gpu", "identity", "files", "leftovers", "port", "memory", "disk", "clock"}
    assert wanted | {"reach", "line", f"seed {plate['address']}"} <= checks.keys()
    for name in ("clock", "memory", "disk", "reach", f"seed {plate['address']}"):
        assert checks[name]["level"] == "ok", checks[name]
    assert "Mbit/s" in checks["line"]["found"] and "1 of 1 seeds" in checks["clock"]["found"]
    assert not (programs.folder / "patient").exists(), "it looked, and did not move in"


def test_without_a_ticket_the_machine_is_looked_at(programs: Programs) -> None:
    checks = visit(programs, code=0)
    assert "line" not in checks and checks["port"]["level"] == "ok"


def test_a_dead_seed_costs_nothing_beside_a_good_one_and_alone_it_is_exit_4(
    programs: Programs, endless: Program
) -> None:
    ticket = read_ticket(endless.wait_address()["ticket"])
    checks = visit(programs, write_ticket(replace(ticket, seeds=(DEAD, ticket.seeds[0]))), code=0)
    assert sorted(check["level"] for name, check in checks.items() if name.startswith("seed ")) == ["ok", "warn"]
    checks = visit(programs, write_ticket(replace(ticket, seeds=(DEAD,))), code=4)
    [dead] = [check for name, check in checks.items() if name.startswith("seed ")]
    assert dead["level"] == "fail" and "its port is open" in dead["remedy"]


def test_a_clock_that_no_seed_agrees_with_is_exit_5_and_one_lying_seed_is_not(
    programs: Programs, endless: Program
) -> None:
    plate = endless.wait_address()
    ticket = read_ticket(plate["ticket"])
    with clock_liar(programs.folder, plate["address"], ahead_s=600.0) as liar:
        place, _, _ = liar.rpartition("/p2p/")
        key = load_or_create(programs.folder / "liar.key").public_key
        lying = SeedPlace(place=place, key=key)
        checks = visit(programs, write_ticket(replace(ticket, seeds=(lying,))), code=5)
        assert checks["clock"]["level"] == "fail" and "600 s behind" in checks["clock"]["found"]
        checks = visit(programs, write_ticket(replace(ticket, seeds=(lying, *ticket.seeds))), code=0)
        assert checks["clock"]["level"] == "ok" and checks[f"seed {liar}"]["level"] == "warn"


def test_an_open_identity_is_exit_5_and_another_version_exit_6(programs: Programs, endless: Program) -> None:
    key = programs.folder / "careless" / "identity.key"
    load_or_create(key)
    key.chmod(0o644)
    checks = visit(programs, code=5, name="careless")
    assert checks["identity"]["remedy"] == f"chmod 600 {key}"
    newer = write_ticket(replace(read_ticket(endless.wait_address()["ticket"]), protocol=99))
    checks = visit(programs, newer, code=6)
    assert "protocol 99" in checks["ticket"]["found"] and "upgrade" in checks["ticket"]["remedy"]
