"""Preferences: which layer wins, what is refused and how, and that every key is everywhere it should be."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from dipaco_p2p.core.model import engine
from dipaco_p2p.errors import ConfigError
from peers.cli import app
from peers.config import PeerConfig
from peers.preferences.keys import ENGINES, SETTINGS, Preferences
from peers.preferences.layers import Origin, config_path, resolve, template, unknown_variables


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def refused(flags: dict[str, Any], *words: str, config: Path | None = None, **environment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(flags, config=config, environment=environment)
    said = f"{caught.value}\n{caught.value.hint}"
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in said, said


def test_a_flag_goes_before_the_environment_before_the_file_before_the_default(tmp_path: Path) -> None:
    path = write(tmp_path, "[limits]\nup_mbit = 1\ndown_mbit = 1\ncpu = 0.1\n")
    environment = {"DIPACO_DOWN_MBIT": "2", "DIPACO_CPU": "0.2", "DIPACO_RAM_GB": ""}
    found = resolve({"cpu": 0.3, "disk_gb": None}, config=path, environment=environment)
    limits, origin = found.preferences.limits, {name: source.origin for name, source in found.sources.items()}
    assert (limits.up_mbit, limits.down_mbit, limits.cpu, limits.ram_gb) == (1.0, 2.0, 0.3, None)
    assert (origin["up_mbit"], origin["down_mbit"]) == (Origin.FILE, Origin.ENVIRONMENT)
    assert (origin["cpu"], origin["ram_gb"]) == (Origin.FLAG, Origin.DEFAULT)
    assert (found.sources["cpu"].where, found.sources["down_mbit"].where) == ("--cpu", "DIPACO_DOWN_MBIT")


def test_what_nobody_says_is_what_the_program_did_before(tmp_path: Path) -> None:
    found = resolve({"home": tmp_path}, environment={}).preferences
    assert PeerConfig.of(found) == PeerConfig(home=tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("on_battery", "yes", True),
        ("listening", "0", False),
        ("checkpoint", "auto", None),
        ("eight_bit", "off", False),
        ("threads", "3", 3),
        ("only_idle", "2.5", 2.5),
        ("gpu_memory", "none", None),
        ("gpu", "none", "none"),
        ("gpu_yield", "off", "off"),
        ("gpu_programs", "eldenring.exe, Blender", ("eldenring.exe", "Blender")),
        ("gpu_temperature_c", "80", 80.0),
        ("log", "csv:curves.csv, wandb", ("csv:curves.csv", "wandb")),
        ("device", "cuda:1", "cuda:1"),
    ],
)
def test_the_environment_says_values_of_every_type(name: str, text: str, value: object) -> None:
    assert resolve({}, environment={SETTINGS[name].variable: text}).value(name) == value


def test_a_schedule_is_a_list_in_the_file_and_a_text_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path, '[when]\nschedule = ["mon-fri 19:00-8:00", "sat-sun"]\n')
    spans = [str(span) for span in resolve({}, config=path, environment={}).preferences.when.schedule]
    assert spans == ["mon-fri 19:00-08:00", "sat-sun"]
    given = resolve({"schedule": "Mon-Fri 19:00 - 08:00, sat-sun"}, environment={"DIPACO_SCHEDULE": "always"})
    assert [str(span) for span in given.preferences.when.schedule] == spans


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[limits]\nup_mbits = 3", ("unknown key `up_mbits`", "did you mean `up_mbit`?")),
        ("[limit]\nup_mbit = 3", ("unknown key `limit`", "`limits`")),
        ("[training]\ncpu = 0.5", ("`cpu` stands in [training]", "move it to [limits]")),
        ('device = "cpu"', ("`device` stands outside", "[training]")),
        ("[limits]\ncpu = 2", ("`cpu`", "is 2", "from 0.01 to 1")),
        ("[limits]\nup_mbit = 0", ("0 Mbit/s", "leave it out")),
        ("[limits]\nram_gb = nan", ("must be finite",)),
        ("[limits]\ndisk_gb = true", ("must be a number",)),
        ('[limits]\ngpu = "first"', ("`first` is not a valid GPU", "nvidia-smi -L")),
        ('[when]\nschedule = "sat"', ("must be a list",)),
        ('[when]\nschedule = ["sun 25:00-26:00"]', ("`25:00`", "a span looks like")),
        ('[when]\nschedule = ["someday"]', ("`someday`", "mon, tue")),
        ('[training]\nengine = "fats"', ("`fats`", "did you mean `fast`?")),
        ('[when]\ngpu_yield = "all"', ("`all`", "any, listed")),
        ('[when]\ngpu_yield = "listed"', ('`gpu_yield = "listed"`', "`gpu_programs` lists none")),
        ('[when]\ngpu_programs = ["/usr/bin/blender"]', ("`/usr/bin/blender`", "without the folder")),
        ('[when]\ngpu_programs = [" "]', ("not a program's name",)),
        ("[when]\ngpu_temperature_c = 300", ("`gpu_temperature_c`", "from 30.0 to 110.0")),
        ("[limits]\ngpu_power_w = 220", ("`gpu_power_w` in", "config.toml is gone", "never set here", "take it out")),
        ('[training]\ndevice = "abacus"', ("`abacus`", "cuda:1")),
        ('[peer]\nlog = ["mlflow:x"]', ("`log` in [peer]", "`mlflow:x`", "tensorboard:DIR")),
        ('[peer]\nlog = "wandb"', ("must be a list",)),
        ('[training]\ndevice = "cuda"\n[limits]\ngpu = "none"', ('`gpu = "none"`', "leave one of them out")),
        ('[training]\ndevice = "cuda:1"\n[limits]\ngpu = "0"', ("the only GPU", "leave one of them out")),
        ('[public]\nname = "   "', ("`name` in [public]", "a name is more than spaces", "up to 32 letters")),
        ('[public]\nname = "a\\nb"', ("is one line", "without U+000A")),
        ('[public]\nteam = "\\u202Egnp"', ("`team` in [public]", "a team is one line", "without U+202E")),
        ('[public]\nname = "12D3KooWabc"', ("does not look like a peer id",)),
        ("[public]\nname = 7", ("`name`", "must be a text")),
        ('[peer]\nname = "Ada"', ("`name` stands in [peer]", "move it to [public]")),
        ("[limits", ("is not valid TOML", "config init")),
        ("limits = 3", ("must be a table",)),
        ("x = " + "[" * 5000, ("config.toml",)),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_it(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    refused({}, *words, config=write(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("DIPACO_CPU", "half", ("`half` in DIPACO_CPU is not a number",)),
        ("DIPACO_THREADS", "1.5", ("not a whole number",)),
        ("DIPACO_THREADS", "-1", ("`DIPACO_THREADS` is -1, but must be from 0 to",)),
        ("DIPACO_ON_BATTERY", "perhaps", ("neither yes nor no", "use true or false")),
        ("DIPACO_SCHEDULE", "mon 8-9", ("DIPACO_SCHEDULE", "`mon 8-9`")),
        ("DIPACO_DOWN_MBIT", "inf", ("DIPACO_DOWN_MBIT", "inf Mbit/s")),
        ("DIPACO_LOG", "csv:a, csv", ("DIPACO_LOG", "`csv` is not a place for curves")),
        ("DIPACO_GPU_POWER_W", "220", ("DIPACO_GPU_POWER_W is gone", "`gpu_temperature_c`")),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(name: str, text: str, words: tuple[str, ...]) -> None:
    refused({}, *words, **{name: text})


def test_a_mistake_in_a_flag_names_the_flag() -> None:
    refused({"up_mbit": -3.0}, "--up-mbit", "-3 Mbit/s")
    refused({"gpu_memory": 1.5}, "`--gpu-memory` is 1.5, but must be from 0.05 to 1")
    refused({"gpu_power_w": "220"}, "--gpu-power-w is gone", "nvidia-smi -pl")
    refused({"name": "x" * 33}, "--name: a name has at most 32 characters, not 33")
    refused({"team": "x" * 10_240}, "--team: a team has at most 32 characters, not 10240")
    refused({"name": "\x1b[31mred"}, "--name: a name is one line", "without U+001B")


def test_a_name_is_composed_and_trimmed_where_it_is_used_and_an_empty_one_takes_it_back(tmp_path: Path) -> None:
    path = write(tmp_path, '[public]\nname = "Ada"\nteam = "The Analysts"\n')
    flags = {"home": tmp_path, "name": "  Zoe\u0308   Smith "}
    config = PeerConfig.of(resolve(flags, config=path, environment={}).preferences)
    assert (config.name, config.team) == ("Zo\u00eb Smith", "The Analysts")
    config = PeerConfig.of(
        resolve({**flags, "name": ""}, config=path, environment={"DIPACO_TEAM": "Others"}).preferences
    )
    assert (config.name, config.team) == ("", "Others")


def test_a_file_that_was_named_must_be_there_and_the_usual_one_need_not(tmp_path: Path) -> None:
    refused({}, "there is no file of preferences", "config init", config=tmp_path / "none.toml")
    refused({}, "there is no file of preferences", DIPACO_CONFIG=str(tmp_path / "none.toml"))
    assert not resolve({}, environment={"DIPACO_HOME": str(tmp_path)}).is_there
    refused({}, "cannot be read", config=tmp_path)


def test_the_file_is_where_xdg_or_the_home_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert config_path(None, {}) == tmp_path / "dipaco-p2p" / "config.toml"
    assert config_path(None, {"DIPACO_HOME": str(tmp_path)}) == tmp_path / "config.toml"
    assert config_path(None, {"DIPACO_HOME": "x", "DIPACO_CONFIG": "/y.toml"}) == Path("/y.toml")


def test_a_variable_that_is_nearly_ours_is_noticed() -> None:
    assert unknown_variables({"DIPACO_UP_MBITS": "3", "DIPACO_CPU": "1", "HOME": "x"}) == {
        "DIPACO_UP_MBITS": "DIPACO_UP_MBIT"
    }


def test_no_variable_that_a_command_reads_is_called_unknown() -> None:
    commands: Any = get_command(app)
    read = {one.envvar for node in commands.commands.values() for one in node.params if one.envvar}
    assert "DIPACO_KEY" in read and unknown_variables(dict.fromkeys(read, "x")) == {}


def test_the_template_changes_nothing_and_with_its_comments_away_says_every_key(tmp_path: Path) -> None:
    text = template()
    assert resolve({}, config=write(tmp_path, text), environment={}).preferences == Preferences()
    heads = [line for line in text.splitlines() if line.startswith("# ") and " = " in line.split("  #")[0]]
    bare = "\n".join(line.removeprefix("# ") if line in heads else line for line in text.splitlines())
    said = {name for table in tomllib.loads(bare).values() for name in table}
    assert said == set(SETTINGS)
    resolve({}, config=write(tmp_path, bare), environment={})


def test_every_key_is_a_flag_of_join_and_has_words_and_its_default() -> None:
    told = CliRunner().invoke(app, ["join", "--help"], env={"COLUMNS": "400", "NO_COLOR": "1"}).stdout
    for setting in SETTINGS.values():
        assert setting.text.endswith("."), setting.name
        [row] = [line for line in told.splitlines() if line.startswith(f"│ {setting.flag} ")]
        has_default = setting.default not in (None, "", ()) and not setting.is_switch
        assert (f"[default: {setting.default}]" in row) is has_default, setting.name
    assert ENGINES == engine.ENGINES


def run(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(app, ["config", *arguments], env={"DIPACO_CONFIG": None, **environment})


def test_config_show_says_where_each_value_comes_from(tmp_path: Path) -> None:
    path = write(tmp_path, '[when]\nschedule = ["sat-sun"]\n')
    done = run("show", "--json", "--config", str(path), "--cpu", "0.5", DIPACO_UP_MBIT="12")
    document = json.loads(done.stdout)
    assert (document["schema"], document["file"], document["file_exists"]) == ("dipaco.config/1", str(path), True)
    keys = {entry.pop("key"): entry for entry in document["keys"]}
    assert keys["when.schedule"] == {"value": ["sat-sun"], "origin": "file", "where": str(path)}
    assert keys["limits.cpu"] == {"value": 0.5, "origin": "flag", "where": "--cpu"}
    assert keys["limits.up_mbit"] == {"value": 12.0, "origin": "env", "where": "DIPACO_UP_MBIT"}
    assert keys["limits.month_gb"] == {"value": None, "origin": "default", "where": ""}
    assert set(keys) == {setting.path for setting in SETTINGS.values()}
    shown = run("show", "--config", str(path), "--no-listen").stdout
    assert f"# file: {path}" in shown and "listening = false" in shown and "# flag --listening" in shown


def test_config_init_writes_once_and_check_reads_it(tmp_path: Path) -> None:
    home = {"DIPACO_HOME": str(tmp_path / "new")}
    assert run("path", **home).stdout.strip() == str(tmp_path / "new" / "config.toml")
    assert run("init", **home).exit_code == 0
    again = run("init", **home)
    assert again.exit_code == 2 and "already exists" in again.stderr and "hint: " in again.stderr
    checked = run("check", DIPACO_UP_MBITS="1", **home)
    assert checked.exit_code == 0 and "configuration is valid: 0 from" in checked.stdout
    assert "DIPACO_UP_MBITS is not a preference; did you mean DIPACO_UP_MBIT?" in checked.stderr
    wrong = run("check", str(write(tmp_path, "[limits]\ncpus = 1")))
    assert wrong.exit_code == 2 and "did you mean `cpu`?" in wrong.stderr and "Traceback" not in wrong.stderr


def test_the_flag_for_curves_may_be_given_several_times(tmp_path: Path) -> None:
    path = write(tmp_path, '[peer]\nlog = ["wandb"]\n')
    shown = run("show", "--json", "--config", str(path), "--log", "csv:a,b.csv", "--log", "tensorboard:c")
    keys = {entry["key"]: entry for entry in json.loads(shown.stdout)["keys"]}
    assert keys["peer.log"] == {
        "key": "peer.log",
        "value": ["csv:a,b.csv", "tensorboard:c"],
        "origin": "flag",
        "where": "--log",
    }
    kept = run("show", "--json", "--config", str(path))
    assert {entry["key"]: entry for entry in json.loads(kept.stdout)["keys"]}["peer.log"]["origin"] == "file"
    assert PeerConfig.of(resolve({}, config=path, environment={}).preferences).log == ("wandb",)


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [("mlflow:x", 2, ("--log", "`mlflow:x`", "csv:FILE")), ("wandb", 5, ("`wandb`", "dipaco-p2p[wandb]"))],
)
def test_join_refuses_a_place_for_curves_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int, words: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]  # what Python itself takes for missing
    command = ["join", "no ticket", "--home", str(tmp_path / "home"), "--log", text]
    done = CliRunner().invoke(app, command, env={"DIPACO_CONFIG": None})
    [error, hint] = done.stderr.splitlines()
    assert done.exit_code == code and error.startswith("error: ") and hint.startswith("hint: ")
    assert all(word in error + hint for word in words), done.stderr
    assert not (tmp_path / "home").exists()
