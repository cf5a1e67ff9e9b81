"""The systemd unit: what it says, that systemd reads it, and what is told where there is no systemd."""

from __future__ import annotations

import configparser
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dipaco_p2p.errors import ConfigError, EnvironmentUnfit, Refused, WrongRun
from dipaco_p2p.program.files import OPEN_FILES
from dipaco_p2p.protocol.signing import Signer
from peers.cli import app
from peers.service import LEAVING_S, NOT_AGAIN, Service, quoted, unit

ADDRESS = f"/ip4/127.0.0.1/tcp/1/p2p/{Signer(bytes([9]) * 32).peer}"
NEW_IN_254 = ("RestartSteps", "RestartMaxDelaySec")


def service(tmp_path: Path, **changes: Any) -> Service:
    settings: dict[str, Any] = {
        "name": "dipaco-peer",
        "command": [shutil.which("true") or "/bin/true", "join", ADDRESS],
        "home": tmp_path / "home",
        "grace_s": 90.0,
    }
    return Service(**{**settings, **changes})


def parsed(text: str) -> dict[str, list[str]]:
    """The keys of a unit's [Service], each with all of its values."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line
        elif "=" in line and not line.startswith("#") and section == "[Service]":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_restarts_with_pauses_and_leaves_time_to_say_good_bye(tmp_path: Path) -> None:
    keys = parsed(unit(service(tmp_path, ram_gb=8.0)))
    assert keys["Restart"] == ["on-failure"] and int(keys["RestartSec"][0]) < int(keys["RestartMaxDelaySec"][0])
    assert int(keys["TimeoutStopSec"][0]) == 90 + LEAVING_S
    assert keys["KillMode"] == ["mixed"], "the libp2p daemon must live until the program has said good-bye"
    assert keys["MemoryMax"] == ["8800000000"]
    assert keys["LimitNOFILE"] == [str(OPEN_FILES)], "each call of a stranger is an open file"
    refusals = {str(error.exit_code) for error in (ConfigError, WrongRun, Refused)}
    assert set(keys["RestartPreventExitStatus"][0].split()) == refusals == set(map(str, NOT_AGAIN))
    assert str(EnvironmentUnfit.exit_code) not in refusals, "a disk may get room, a month ends"


def test_the_sandbox_leaves_the_gpu_and_the_home_and_can_be_left_out(tmp_path: Path) -> None:
    keys = parsed(unit(service(tmp_path)))
    assert keys["NoNewPrivileges"] == keys["PrivateTmp"] == keys["PrivateUsers"] == ["yes"]
    assert keys["ProtectSystem"] == ["strict"] and keys["ReadWritePaths"] == [str(tmp_path / "home")]
    assert not {"PrivateDevices", "MemoryDenyWriteExecute", "ProtectClock", "DeviceAllow"} & keys.keys()
    assert keys["Nice"] == ["10"] and keys["IOSchedulingClass"] == ["idle"] and "MemoryMax" not in keys
    plain = parsed(unit(service(tmp_path, is_sandboxed=False)))
    assert not {"PrivateUsers", "ProtectSystem", "PrivateTmp"} & plain.keys() and "Restart" in plain


def test_it_is_a_file_of_sections(tmp_path: Path) -> None:
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.read_string(unit(service(tmp_path)))
    assert parser.sections() == ["Unit", "Service", "Install"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [("plain/word-1", "plain/word-1"), ("two words", '"two words"'), ("100%", "100%%"), ('a"$b', '"a\\"$$b"')],
)
def test_words_of_a_command_arrive_as_they_are(word: str, expected: str) -> None:
    assert quoted(word) == expected


def test_what_no_unit_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line break|cannot hold"):
        service(tmp_path, command=["x", "a\nExecStartPost=/bin/false"])
    with pytest.raises(ConfigError, match="cannot be called"):
        service(tmp_path, name="../x")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
@pytest.mark.parametrize("is_sandboxed", [True, False])
def test_systemd_reads_the_unit(tmp_path: Path, is_sandboxed: bool) -> None:
    path = tmp_path / "dipaco-peer.service"
    path.write_text(unit(service(tmp_path, home=tmp_path / "a home of 100%", ram_gb=1.5, is_sandboxed=is_sandboxed)))
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    command = ["systemd-analyze", "verify", "--user", "--man=no", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    said = [line for line in done.stderr.splitlines() if not any(name in line for name in NEW_IN_254)]
    assert (done.returncode, said) == (0, []), done.stderr


# -- the commands


class Systemd:
    """A `systemctl` and a `loginctl` that note what they are told."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.home = folder / "bin", folder / "volunteer"
        self.config = folder / "config"
        self._log = folder / "told"
        self.bin.mkdir()
        answers = "ActiveState=active\\nUnitFileState=enabled\\nResult=success\\nExecMainStatus=0\\nNRestarts=2\\n"
        self.script("systemctl", f'case "$2" in show) printf "{answers}";; esac')
        self.script("loginctl", "echo no")

    def script(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {shlex.quote(str(self._log))}\n{body}\n')
        path.chmod(0o755)

    @property
    def told(self) -> list[str]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [line for line in lines if " show" not in line]

    def run(self, *arguments: str, **more: str) -> Any:
        path = f"{self.bin}:{os.environ['PATH']}"
        environment = {"PATH": path, "XDG_CONFIG_HOME": str(self.config), "DIPACO_CONFIG": None, **more}
        return CliRunner().invoke(app, ["service", *arguments], env=environment)

    @property
    def file(self) -> Path:
        return self.config / "systemd" / "user" / "dipaco-peer.service"


@pytest.fixture
def systemd(tmp_path: Path) -> Systemd:
    return Systemd(tmp_path)


def test_install_writes_and_starts_the_unit_and_explains_lingering(systemd: Systemd) -> None:
    done = systemd.run("install", ADDRESS, "--home", str(systemd.home), "--run", "3f9a21c4")
    assert done.exit_code == 0, done.output
    keys = parsed(systemd.file.read_text())
    assert keys["ExecStart"][0].endswith(f"join {ADDRESS} --home {systemd.home} --run 3f9a21c4")
    assert systemd.home.is_dir(), "a sandbox cannot open what is not there"
    assert systemd.told == [
        "systemctl --user daemon-reload",
        "systemctl --user enable dipaco-peer.service",
        "systemctl --user restart dipaco-peer.service",
    ]
    assert "loginctl enable-linger" in done.stdout and "journalctl --user -u dipaco-peer" in done.stdout


def test_uninstall_stops_and_removes_what_install_wrote_and_nothing_else(systemd: Systemd) -> None:
    assert systemd.run("uninstall").exit_code == 2
    systemd.run("install", ADDRESS, "--home", str(systemd.home), "--no-start")
    assert systemd.run("uninstall").exit_code == 0
    assert not systemd.file.exists() and systemd.home.exists()
    assert "systemctl --user disable --now dipaco-peer.service" in systemd.told
    systemd.file.write_text("[Service]\nExecStart=/bin/true\n")
    foreign = systemd.run("install", ADDRESS, "--home", str(systemd.home))
    assert foreign.exit_code == 2 and "was not written by this program" in foreign.stderr


def test_status_says_whether_it_runs_for_people_and_for_programs(systemd: Systemd) -> None:
    systemd.run("install", ADDRESS, "--home", str(systemd.home))
    shown = systemd.run("status")
    assert shown.exit_code == 0 and "dipaco-peer: active, enabled, restarted 2 times" in shown.stdout
    document = json.loads(systemd.run("status", "--json").stdout)
    assert document == {
        "schema": "dipaco.service/1",
        "name": "dipaco-peer",
        "is_installed": True,
        "active": "active",
        "enabled": "enabled",
        "result": "success",
        "exit_code": 0,
        "restarts": 2,
        "lingers": False,
    }
    failed = "ActiveState=failed\\nUnitFileState=enabled\\nResult=exit-code\\nExecMainStatus=226\\nNRestarts=9\\n"
    systemd.script("systemctl", f'case "$2" in show) printf "{failed}";; esac')
    ended = systemd.run("status")
    assert ended.exit_code == 3 and "--no-sandbox" in ended.stdout and "exit code 226" in ended.stdout


def test_without_a_manager_there_is_one_line_and_exit_code_5(systemd: Systemd) -> None:
    systemd.script("systemctl", 'echo "Failed to connect to bus: No medium found" >&2; exit 1')
    for command in (("install", ADDRESS), ("uninstall",), ("status",)):
        done = systemd.run(*command)
        assert done.exit_code == 5 and "Failed to connect to bus" in done.stderr and "hint: " in done.stderr
        assert "Traceback" not in done.stderr
    assert not systemd.file.exists()


def test_a_wrong_address_or_preference_is_refused_before_anything_is_written(systemd: Systemd) -> None:
    assert systemd.run("install", "hello").exit_code == 2
    missing = systemd.run("install", ADDRESS, "--config", str(systemd.home / "none.toml"))
    assert missing.exit_code == 2 and "there is no file of preferences" in missing.stderr
    assert systemd.told == []


def test_show_needs_no_systemd_and_reads_the_preferences(systemd: Systemd, tmp_path: Path) -> None:
    systemd.script("systemctl", "exit 1")
    wishes = tmp_path / "wishes.toml"
    wishes.write_text("[peer]\ngrace = 300\n[limits]\nram_gb = 2\n")
    done = systemd.run("show", ADDRESS, "--home", str(systemd.home), "--config", str(wishes))
    keys = parsed(done.stdout)
    assert keys["TimeoutStopSec"] == [str(300 + LEAVING_S)] and keys["MemoryMax"] == ["2200000000"]
    assert keys["ExecStart"][0].endswith(f"--config {wishes}") and systemd.told == []
    named = systemd.run("show", ADDRESS, "--home", str(systemd.home), DIPACO_CONFIG=str(wishes)).stdout
    assert f"--config {wishes}" in named, "the service does not see the variables of a shell"
