"""The files of deploy/, as far as they can be checked where no container engine is: what they start exists, and what
docs/deploy.md says of rights, volumes, health and stopping holds."""

from __future__ import annotations

import configparser
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from peers.service import LEAVING_S

sys.path.insert(0, str(Path(__file__).parent))
commands = importlib.import_module("test_docs_commands")
ROOTS, problem_of = commands.ROOTS, commands.problem_of

REPO = Path(__file__).parents[2]
DEPLOY = REPO / "deploy"
UNITS = sorted(path.name for path in DEPLOY.iterdir() if path.suffix in {".service", ".timer"})
PROGRAM = "/opt/dipaco/bin/dipaco-bootstrap"


# -- the image


def instructions() -> list[tuple[str, str]]:
    """Of the Containerfile, lines that go on put together, without comments."""
    lines = [line for line in (DEPLOY / "Containerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1].strip()) for line in whole if line.strip()]


def last_stage() -> dict[str, str]:
    """The last value of each instruction that the image is left with."""
    found = instructions()
    begin = max(number for number, (name, _) in enumerate(found) if name == "FROM")
    return dict(found[begin:])


def test_the_image_is_built_in_two_stages_and_runs_as_nobody_special() -> None:
    assert [value.split()[0] for name, value in instructions() if name == "FROM"] == ["python:${PYTHON}"] * 2
    user, _, group = last_stage()["USER"].partition(":")
    assert user.isdigit() and group.isdigit() and int(user) >= 1000 and int(group) >= 1000
    assert last_stage()["VOLUME"] == "/data" and f"--owner {user}" in dict(instructions())["RUN"]


def test_nothing_floats_but_what_the_builder_chooses() -> None:
    arguments = dict(value.partition("=")[::2] for name, value in instructions() if name == "ARG")
    assert re.fullmatch(r"3\.\d+-slim-\w+", arguments["PYTHON"]) and arguments["TORCH_INDEX"] == '""'
    installs = [value for name, value in instructions() if name == "RUN" and "pip install" in value]
    assert "-c constraints.txt" in installs[-1] and "grep '^torch==' constraints.txt" in installs[0]
    assert len(re.findall(r"^torch==", (REPO / "constraints.txt").read_text(), flags=re.MULTILINE)) == 1


def test_what_is_copied_is_there_and_is_the_whole_package() -> None:
    copied = [value.split()[:-1] for name, value in instructions() if name == "COPY" and "--from" not in value]
    names = {name for words in copied for name in words}
    assert [name for name in names if not (REPO / name).exists()] == []
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    packages = {name.split(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    assert packages <= names and project["project"]["readme"] in names
    kept = {line[1:] for line in (REPO / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == names


def test_tini_is_the_first_process_and_the_program_is_told_to_stop_gently() -> None:
    stage = last_stage()
    assert json.loads(stage["ENTRYPOINT"]) == ["/usr/bin/tini", "--"] and stage["STOPSIGNAL"] == "SIGTERM"
    assert any(" tini" in value for name, value in instructions() if name == "RUN")
    assert problem_of(shlex.join(json.loads(stage["CMD"]))) == ""


def test_the_image_says_how_a_volunteer_is() -> None:
    options, _, command = last_stage()["HEALTHCHECK"].partition(" CMD ")
    assert problem_of(shlex.join(json.loads(command))) == "" and "status" in command
    assert {"--interval", "--timeout", "--start-period"} <= {word.split("=")[0] for word in options.split()}


# -- compose


def services() -> dict[str, dict[str, Any]]:
    yaml = importlib.import_module("yaml")  # `datasets` brings it
    document = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert document["volumes"].keys() == {"volunteer", "coordinator", "seed"}
    found: dict[str, dict[str, Any]] = document["services"]
    return found


NAMES = ("volunteer", "volunteer-gpu", "coordinator", "seed")


def test_there_is_a_service_for_each_part() -> None:
    assert services().keys() == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_service_has_no_rights_that_it_does_not_need(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"] and "privileged" not in service
    assert service["security_opt"] == ["no-new-privileges:true"] and "user" not in service
    assert any(mount.startswith("/tmp") for mount in service["tmpfs"])
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("name", NAMES)
def test_what_a_service_starts_and_asks_can_be_typed(name: str) -> None:
    service = services()[name]
    words = [re.sub(r"\$\{\w+:-\}", "TICKET", word) for word in service["command"]]
    assert words[0] in ROOTS and problem_of(shlex.join(words)) == ""
    kind, *test = service["healthcheck"]["test"]
    assert kind == "CMD"
    if test[0] in ROOTS:
        assert problem_of(shlex.join(test)) == ""
    else:
        compile(test[-1], "healthcheck", "exec")


@pytest.mark.parametrize("name", NAMES)
def test_a_service_keeps_its_files_and_has_time_to_say_good_bye(name: str) -> None:
    service = services()[name]
    assert any(re.fullmatch(r"[\w-]+:/data", volume) for volume in service["volumes"])
    folder = [word for word in service["command"] if word.startswith("/data")]
    assert len(folder) == 1
    assert int(service["stop_grace_period"].removesuffix("s")) >= LEAVING_S
    mounted = [volume for volume in service["volumes"] if not volume.endswith(":/data")]
    assert all(volume.endswith(":ro") for volume in mounted)


# -- systemd


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / name).read_text())
    return parser


@pytest.mark.parametrize("name", [name for name in UNITS if name.endswith(".service")])
def test_a_unit_starts_what_exists_with_few_rights(name: str) -> None:
    service = unit(name)["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program == PROGRAM and problem_of(shlex.join(["dipaco-bootstrap", *words])) == ""
    assert service["User"] == "dipaco" and service["UMask"] == "0077" and service["CapabilityBoundingSet"] == ""
    assert {"NoNewPrivileges", "PrivateTmp", "ProtectHome"} <= {key for key, value in service.items() if value == "yes"}
    assert service["ProtectSystem"] == "strict"


def test_the_coordinators_unit_starts_it_again_unless_that_is_of_no_use() -> None:
    service = unit("dipaco-coordinator.service")["Service"]
    assert service["Restart"] == "on-failure" and service["RestartPreventExitStatus"].split() == ["2", "6", "8"]
    assert service["KillMode"] == "mixed" and int(service["TimeoutStopSec"]) >= LEAVING_S
    assert "--dir /var/lib/dipaco/run" in service["ExecStart"] and service["StateDirectory"] == "dipaco"


def test_backups_go_where_the_unit_may_write_and_come_from_the_coordinators_folder() -> None:
    words = unit("dipaco-backup.service")["Service"]["ExecStart"].split()
    assert words[words.index("--to") + 1] == unit("dipaco-backup.service")["Service"]["ReadWritePaths"]
    started = unit("dipaco-coordinator.service")["Service"]["ExecStart"].split()
    assert words[2] == started[started.index("--dir") + 1]
    assert (DEPLOY / "dipaco-backup.timer").with_suffix(".service").exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    for name in UNITS:  # the program is not installed here
        (tmp_path / name).write_text((DEPLOY / name).read_text().replace(PROGRAM, "/bin/true"))
    command = ["systemd-analyze", "verify", *(str(tmp_path / name) for name in UNITS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if str(tmp_path) in line or line.startswith("dipaco-")]
    assert complaints == []
