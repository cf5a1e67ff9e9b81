"""Every judgement of the doctor: what is fine, what costs something, what keeps a machine out; each with a remedy."""

from __future__ import annotations

import json
import os
import platform
import socket
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dipaco_p2p.core.model.microbatch import Need
from dipaco_p2p.errors import EnvironmentUnfit, IntegrityError, Unreachable, WrongRun
from dipaco_p2p.node.sizes import PROGRAM_BYTES, Needs
from dipaco_p2p.program.examination import Finding, Level, document, exit_code, failure, fine, warning, worst
from dipaco_p2p.swarm.blobs.bandwidth import MBIT_BYTES
from dipaco_p2p.swarm.dialback import Reach
from peers.doctor.examine import SeedFacts, SpeedFacts, judge_clock, judge_reach, judge_seeds, judge_speed, show
from peers.doctor.machine import (
    PINS,
    GpuFacts,
    HomeFacts,
    Leftovers,
    _is_built_for,
    find_leftovers,
    judge_disk,
    judge_files,
    judge_gpu,
    judge_identity,
    judge_leftovers,
    judge_memory,
    judge_packages,
    judge_port,
    probe_home,
    remove,
)
from peers.joining.preview import Machine

GIB = 2**30
NEEDS = Needs(
    parameters=10**6,
    memory=Need(fixed=GIB, sequence=GIB, checkpointed=GIB // 2),
    first_down=GIB,
    round_up=10**6,
    round_down=10**6,
    disk=3 * GIB,
)
RUN = cast(Any, SimpleNamespace(name="run:abababab"))


def home(**changes: Any) -> HomeFacts:
    facts = {"path": Path("/somewhere"), "problem": None, "free_bytes": 10 * GIB, "key_mode": 0o600} | changes
    return HomeFacts(**facts)


def machine(free: int | None, *, is_cpu: bool = True) -> Machine:
    return Machine(device="cpu", is_cpu=is_cpu, memory_bytes=free, disk_bytes=GIB)


def seed(number: int = 1, **facts: Any) -> SeedFacts:
    return SeedFacts(address=f"/ip4/192.0.2.{number}/tcp/1/p2p/x", **facts)


def is_level(finding: Finding, level: Level, *words: str) -> None:
    assert finding.level is level, finding
    assert bool(finding.remedy) is (level is not Level.OK), "a problem has a remedy, and only a problem"
    for word in words:
        assert word in f"{finding.found} -> {finding.remedy}"


# -- the machine


def test_the_pins_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = {f"{name}>={low},<{high}" for name, (low, high) in PINS.items()}
    assert wanted <= {text.strip() for text in project["dependencies"]}


GOOD = {"hivemind": "1.1.12", "torch": "2.13.0+cpu", "numpy": "2.3.5", "bitsandbytes": "0.50.2", "safetensors": "0.8"}


def test_packages_within_their_pins_are_fine() -> None:
    is_level(judge_packages(GOOD), Level.OK, f"Python {platform.python_version()}, hivemind 1.1.12", "torch 2.13.0+cpu")


@pytest.mark.parametrize(
    ("name", "version", "word"),
    [
        ("numpy", "2.4.0", "'numpy>=1.26,<2.4'"),
        ("hivemind", "1.1.11", "hivemind 1.1.11"),
        ("hivemind", None, "hivemind is missing"),
        ("torch", "3.0.0a1", "torch>=2.4,<3"),
        ("torch", "odd", "torch odd"),
    ],
)
def test_a_package_outside_its_pin_is_named_with_the_command(name: str, version: str | None, word: str) -> None:
    is_level(judge_packages(GOOD | {name: version}), Level.FAIL, word, "pip install")


@pytest.mark.parametrize(
    ("facts", "level", "word"),
    [
        (GpuFacts(driver=None, torch_cuda=None), Level.OK, "uses the CPU"),
        (GpuFacts(driver="550.1", torch_cuda="12.4", devices=("H200",)), Level.OK, "H200"),
        (GpuFacts(driver="550.1", torch_cuda=None), Level.WARN, "CUDA build"),
        (GpuFacts(driver="470.1", torch_cuda="13.0"), Level.WARN, "update the driver"),
        (
            GpuFacts(driver="1", torch_cuda="13.0", devices=("GT 710",), unsupported=("GT 710 (sm_35)",)),
            Level.WARN,
            "sm_35",
        ),
    ],
)
def test_a_gpu_that_cannot_be_used_costs_something_unless_it_is_demanded(
    facts: GpuFacts, level: Level, word: str
) -> None:
    is_level(judge_gpu(facts), level, word)
    if level is Level.WARN:
        is_level(judge_gpu(facts, is_wanted=True), Level.FAIL, word)


def test_a_gpu_that_is_demanded_must_be_there() -> None:
    is_level(judge_gpu(GpuFacts(driver=None, torch_cuda="12.4"), is_wanted=True), Level.FAIL, "driver")


def test_code_for_a_gpu_is_that_of_its_major_version_or_made_for_all_later_ones() -> None:
    assert _is_built_for(["sm_80", "sm_90"], 8, 6) and _is_built_for(["sm_90a"], 9, 0)
    assert _is_built_for(["sm_50", "compute_70"], 12, 0)
    assert not _is_built_for(["sm_80", "sm_90"], 12, 0) and not _is_built_for(["sm_80"], 7, 5)


def test_memory_must_hold_one_sequence_with_all_that_is_fixed() -> None:
    least = GIB + GIB // 2
    is_level(judge_memory(machine(least, is_cpu=False), NEEDS), Level.OK)
    is_level(judge_memory(machine(least - 1, is_cpu=False), NEEDS), Level.FAIL, "1.5 GiB")
    is_level(judge_memory(machine(least + PROGRAM_BYTES - 1), NEEDS), Level.FAIL)
    is_level(judge_memory(machine(None), NEEDS), Level.OK)
    is_level(judge_memory(machine(GIB // 2), None), Level.WARN)


def test_the_disk_must_be_writable_and_hold_what_the_run_keeps() -> None:
    is_level(judge_disk(home(), NEEDS), Level.OK)
    is_level(judge_disk(home(free_bytes=2 * GIB), NEEDS), Level.FAIL, "3.0 GiB", "--home")
    is_level(judge_disk(home(free_bytes=GIB // 2), None), Level.WARN)
    is_level(judge_disk(home(problem="Permission denied"), None), Level.FAIL, "Permission denied", "--home")


def test_an_identity_is_for_its_owner_only(tmp_path: Path) -> None:
    from dipaco_p2p.swarm.identity import load_or_create

    is_level(judge_identity(home(key_mode=None)), Level.OK, "none yet")
    is_level(judge_identity(home(key_mode=0o640)), Level.FAIL, "640", "chmod 600")
    load_or_create(tmp_path / "identity.key")
    is_level(judge_identity(probe_home(tmp_path)), Level.OK)
    (tmp_path / "identity.key").write_bytes(b"nonsense")
    damaged = judge_identity(probe_home(tmp_path))
    is_level(damaged, Level.FAIL, "not an Ed25519 key file")
    assert damaged.exit_code == 8


def test_a_home_that_is_not_there_is_judged_by_the_folder_above_and_not_made(tmp_path: Path) -> None:
    facts = probe_home(tmp_path / "new" / "home")
    assert facts.problem is None and facts.free_bytes > 0 and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("hard", "level", "word"),
    [
        (2**30, Level.OK, "65536"),
        (4096, Level.OK, ""),
        (1024, Level.WARN, "LimitNOFILE"),
        (100, Level.FAIL, "limits.conf"),
    ],
)
def test_few_open_files_are_too_few(hard: int, level: Level, word: str) -> None:
    is_level(judge_files(hard), level, word)


def test_a_port_that_is_taken_is_told_with_its_hint() -> None:
    is_level(judge_port("/ip4/0.0.0.0/tcp/0", None), Level.OK)
    is_level(judge_port("/ip4/0.0.0.0/tcp/22", "port 22 is taken", "choose another port"), Level.FAIL, "another port")


def test_leftovers_are_counted_and_their_remedy_is_fix() -> None:
    is_level(judge_leftovers(Leftovers()), Level.OK)
    left = Leftovers(sockets=(Path("/a"), Path("/b")), daemons=(7,))
    is_level(judge_leftovers(left), Level.WARN, "2 sockets", "1 libp2p daemons", "--fix")
    is_level(judge_leftovers(left, is_fixed=True), Level.OK, "removed")


# -- the network


@pytest.mark.parametrize(
    ("ahead", "ntp", "level", "word"),
    [
        ([0.1], None, Level.OK, "1 of 1"),
        ([600.0, 0.5], None, Level.OK, "1 of 2"),  # one liar does not matter
        ([600.0], None, Level.FAIL, "600 s behind"),
        ([-600.0, -601.0], False, Level.FAIL, "600 s ahead of"),
        ([600.0], True, Level.FAIL, "its clock is wrong"),
        ([], True, Level.OK, "synchronised by NTP"),
        ([], False, Level.WARN, "set-ntp"),
        ([], None, Level.OK, "unknown"),
    ],
)
def test_the_clock_is_held_against_the_seeds(ahead: list[float], ntp: bool | None, level: Level, word: str) -> None:
    is_level(judge_clock([seed(ahead_s=value) for value in ahead], is_synchronised=ntp), level, word)


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (Unreachable("no answer"), 4),
        (EnvironmentUnfit("the clock"), 5),
        (WrongRun("another run", hint="ask"), 6),
        (IntegrityError("forged"), 8),
    ],
)
def test_a_bad_seed_decides_only_when_none_is_good(problem: Any, code: int) -> None:
    alone = judge_seeds([seed(problem=problem)])
    is_level(alone[0], Level.FAIL, str(problem))
    assert exit_code(alone) == code
    beside = judge_seeds([seed(problem=problem), seed(2, run=RUN, latency_s=0.01, ahead_s=0.0)])
    assert [each.level for each in beside] == [Level.WARN, Level.OK] and exit_code(beside) == 0


def test_a_seed_with_another_clock_opens_nothing() -> None:
    [found] = judge_seeds([seed(run=RUN, latency_s=0.01, ahead_s=-90.0)])
    is_level(found, Level.FAIL, "90 s behind")


def test_a_slow_seed_is_told() -> None:
    is_level(judge_seeds([seed(run=RUN, latency_s=2.5, ahead_s=0.0)])[0], Level.WARN, "2,500 ms")


def test_who_cannot_be_reached_is_told_what_that_costs_and_how_to_change_it() -> None:
    is_level(judge_reach(Reach.YES, port=1), Level.OK)
    is_level(judge_reach(Reach.UNKNOWN, port=1), Level.OK)
    is_level(judge_reach(Reach.NO, port=31337), Level.WARN, "31337", "client", "open a TCP port")
    is_level(judge_reach(Reach.RELAYED, port=31337), Level.OK, "31337", "a relay has a slot", "open a TCP port")
    is_level(judge_reach(Reach.NO, port=None), Level.OK, "leads no module")


def test_a_line_that_cannot_carry_a_round_in_time_is_told() -> None:
    quick = SpeedFacts(up=20 * MBIT_BYTES, down=80 * MBIT_BYTES)
    is_level(judge_speed(quick, NEEDS, deadline_s=60.0), Level.OK, "20.0 Mbit/s up", "80.0 Mbit/s down")
    is_level(judge_speed(SpeedFacts(up=1e4, down=1e6), NEEDS, deadline_s=60.0), Level.WARN, "101 s")
    is_level(judge_speed(SpeedFacts(up=None, down=1e6), NEEDS, deadline_s=60.0), Level.WARN)


# -- all together


def test_the_gravest_failure_decides_and_warnings_cost_nothing() -> None:
    assert exit_code([fine("a", "b"), warning("a", "b", "c")]) == 0
    assert exit_code([failure("a", "b", "c", code=4), failure("a", "b", "c", code=5)]) == 5
    assert exit_code([failure("a", "b", "c", code=5), failure("a", "b", "c", code=6)]) == 6
    assert worst([]) is Level.OK and worst([warning("a", "b", "c"), fine("a", "b")]) is Level.WARN


def test_the_document_has_this_form() -> None:
    assert document([failure("clock", "600 s behind", "set it")], schema="dipaco.doctor/1") == {
        "schema": "dipaco.doctor/1",
        "outcome": "fail",
        "exit_code": 5,
        "checks": [{"check": "clock", "level": "fail", "found": "600 s behind", "remedy": "set it"}],
    }


def test_off_a_terminal_each_finding_is_one_line_and_each_remedy_another(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 300
    assert show([fine("a", long), failure("seed [b]", "[red]dead", "ask")], is_json=False) == 5
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[0].endswith(long) and "\x1b" not in "".join(lines)
    assert lines[1].startswith("fail ") and "[red]dead" in lines[1] and lines[2].strip() == "-> ask"
    assert show([fine("a", "b")], is_json=True) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "ok"


P2PD = "/venv/site-packages/hivemind/hivemind_cli/p2pd"


class Remains:
    """Folders in place of /proc, /dev/shm and /tmp."""

    def __init__(self, root: Path) -> None:
        self.proc, self.shm, self.sockets = root / "proc", root / "shm", root / "tmp"
        for folder in (self.proc, self.shm, self.sockets):
            folder.mkdir()

    def process(self, pid: int, *command: str, parent: int = 1, maps: str = "", state: str = "S") -> None:
        folder = self.proc / str(pid)
        folder.mkdir()
        (folder / "cmdline").write_text("\0".join(command) + "\0")
        (folder / "stat").write_text(f"{pid} (a (b) c) {state} {parent} 0 0")
        (folder / "maps").write_text(maps)

    def segment(self, name: str) -> Path:
        (self.shm / name).write_bytes(b"x")
        return self.shm / name

    def found(self) -> Leftovers:
        return find_leftovers(proc=self.proc, shm=self.shm, sockets=self.sockets)


@pytest.fixture
def remains(tmp_path: Path) -> Remains:
    return Remains(tmp_path)


def test_a_segment_is_dead_when_its_maker_is_gone_and_nobody_maps_it(remains: Remains) -> None:
    remains.process(10, "/usr/bin/python3")
    remains.process(11, "/usr/bin/python3", maps="7f-80 rw-s 00000000 00:19 5 /dev/shm/torch_99_1_2\n")
    remains.segment("torch_10_1_0")  # its maker lives
    remains.segment("torch_99_1_2")  # another process still uses it
    remains.segment("sem.other")
    remains.segment("torch_99_notes")
    dead = remains.segment("torch_99_1_3")
    assert remains.found() == Leftovers(segments=(dead,))


def test_a_daemon_is_an_orphan_when_its_parent_is_no_python_program(remains: Remains) -> None:
    key = "-id=/data/identity.key"
    remains.process(1, "/sbin/init")
    remains.process(20, "/venv/bin/python", "/venv/bin/dipaco-peer")
    remains.process(21, P2PD, key, parent=20)
    remains.process(22, P2PD, key, parent=1)
    remains.process(23, P2PD, "-id=/data/of-another-program.pem", parent=1)
    remains.process(24, "/usr/bin/vim", "p2pd", key, parent=1)
    remains.process(25, P2PD, key, parent=1, state="Z")
    remains.process(26, P2PD, key, parent=4_000_000)  # gone in between: left alone
    assert remains.found().daemons == (22,)


def test_a_daemon_of_a_python_that_is_process_one_of_a_container_is_no_orphan(remains: Remains) -> None:
    remains.process(1, "/usr/bin/python3.11", "/usr/bin/dipaco-peer")
    remains.process(2, P2PD, "-id=/data/identity.key", parent=1)
    assert remains.found() == Leftovers()


def test_a_socket_that_somebody_listens_at_stays(remains: Remains) -> None:
    live, dead = remains.sockets / "hivemind-a.sock", remains.sockets / "hivemind-b.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as gone:
        listener.bind(str(live))
        listener.listen()
        gone.bind(str(dead))
        gone.close()
        assert remains.found() == Leftovers(sockets=(dead,))


def test_what_is_of_another_user_is_not_ours(remains: Remains, monkeypatch: pytest.MonkeyPatch) -> None:
    remains.segment("torch_99_1_3")
    remains.process(1, "/sbin/init")
    remains.process(22, P2PD, "-id=/data/identity.key")
    assert remains.found().count == 2
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert remains.found() == Leftovers()


def test_removing_takes_what_was_found_and_survives_what_is_gone(remains: Remains) -> None:
    dead = remains.segment("torch_99_1_3")
    found = remains.found()
    assert remove(found) == found and not dead.exists()
    assert remove(found) == Leftovers()
