"""The run file: strict, and its template says the truth about the defaults."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import bootstrap
from bootstrap.runfile import RunFile, load_run_file, template
from dipaco_p2p.config import AdmissionConfig, JudgingConfig, RunConfig
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.strict import load, plain

RUNS = sorted((Path(bootstrap.__file__).parent / "runs").glob("*.toml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "my-run.toml"
    path.write_text(text)
    return path


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_run_file(write(tmp_path, "")) == RunFile()


def test_the_template_is_exactly_the_defaults(tmp_path: Path) -> None:
    assert load_run_file(write(tmp_path, template("mine"))) == RunFile(
        run=RunConfig(name="mine", judging=JudgingConfig())
    )


def test_the_template_names_every_key_of_every_table() -> None:
    tables = tomllib.loads(template("run"))
    run = plain(RunFile().run)
    expected = {name: set(table) for name, table in run.items() if isinstance(table, dict)}
    expected["run"] = {name for name, value in run.items() if not isinstance(value, dict)}
    expected |= {name: set(plain(getattr(RunFile(), name))) for name in ("corpus", "node", "archive", "leaderboard")}
    expected["admission"] = set(plain(RunFile().run.admission))  # left out of documents where it is the default
    expected["inner"].add("optimizer")  # so are these two
    expected["rounds"].add("contributions_max")
    expected["warmup"].add("from")  # and this is only this machine's business
    assert "judging" in expected  # a run file that says nothing of it has its work judged
    assert {name: set(table) for name, table in tables.items()} == expected
    assert set(tables["model"]["levels"][0]) == set(run["model"]["levels"][0])


def test_an_archive_keeps_what_its_table_says_and_impossible_figures_are_refused(tmp_path: Path) -> None:
    file = load_run_file(write(tmp_path, "[archive]\nrounds = 0\nsnapshots = 7\n"))
    assert (file.archive.rounds, file.archive.snapshots) == (0, 7) and file.run == RunFile().run, "not part of the run"
    for text in ("rounds = -1", "snapshots = 1.5", 'keep = "all"'):
        with pytest.raises(ConfigError, match=text.split()[0]):
            load_run_file(write(tmp_path, f"[archive]\n{text}\n"))


def test_a_template_for_an_impossible_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be called"):
        template('a"b')


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_shipped_run_loads_and_is_called_like_its_file(path: Path) -> None:
    assert load_run_file(path).run.name == path.stem


def test_runs_are_shipped() -> None:
    assert {path.stem: str(load_run_file(path).run.topology) for path in RUNS} == {
        "demo-2x2": "1x2x2",
        "home-4x4": "1x4x4",
        "trunk-1x4": "1x4",
        "private-2x2": "1x4px2x2x4p",
        "flat-4": "4p",
        "diloco": "1",
        "ends-2x2": "2x2",
    }


def test_a_policy_and_its_list_come_from_the_file(tmp_path: Path) -> None:
    peers = [Signer(bytes([number]) * 32).peer for number in (1, 2)]
    invited = load_run_file(write(tmp_path, '[admission]\npolicy = "invite"')).run
    listed = load_run_file(write(tmp_path, f'[admission]\npolicy = "list"\npeers = {peers}')).run
    assert invited.admission == AdmissionConfig(policy="invite")
    assert listed.admission == AdmissionConfig(policy="list", peers=tuple(peers))
    for run in (invited, listed):
        assert load(RunConfig, plain(run), where="a manifest") == run
        assert run.for_warmup().admission == run.admission


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("[model]\nwidht = 64\n", "`widht` in model", "did you mean `width`?"),
        ("[modle]\n", "`modle`", "did you mean `model`?"),
        ("[run]\nmodel = {}\n", "unknown key `model`", None),
        ("[run]\nseed = -1\n", "is -1, but must be", None),
        ("[node]\nport = 70000\n", "is 70000, but must be", None),
        ("[node]\nup_mbit = 0.01\n", "0.01 Mbit/s up", None),
        ("[rounds]\nrounds = 2.5\n", "must be a whole number, not `2.5`", None),
        ("[model]\nwidth = 65\n", "width of 65", None),
        ("[corpus]\nvalidation_share = 0.4\nrouter_share = 0.3\n", "less than half", None),
        ("[run]\nname = demo\n", "line 2", None),
        ('[admission]\npolicy = "closed"', "`policy` in admission", None),
        ('[admission]\npolicy = "list"', "no peers", None),
        ('[admission]\npeers = ["x"]', "1 peers on the list", None),
        ('[admission]\npolicy = "list"\npeers = ["x"]', "not an Ed25519 peer id: 'x'", None),
    ],
)
def test_a_mistake_is_refused_in_one_line_that_names_it(
    tmp_path: Path, text: str, words: str, hint: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_file(write(tmp_path, text))
    said = str(caught.value)
    assert words in said and "my-run.toml" in said and "\n" not in said
    assert hint in (None, caught.value.hint)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "my-run.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_run_file(path)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file") as caught:
        load_run_file(tmp_path / "none.toml")
    assert "dipaco-bootstrap init" in caught.value.hint


def test_a_relative_corpus_counts_from_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    file = load_run_file(write(tmp_path, '[corpus]\nsource = "texts"\n'))
    assert file.corpus.source == str(tmp_path / "texts")
    hub = load_run_file(write(tmp_path, '[corpus]\nsource = "org/name"\n'))
    assert hub.corpus.source == "org/name"


def test_found_is_never_a_file(tmp_path: Path) -> None:
    (tmp_path / "found").mkdir()
    file = load_run_file(write(tmp_path, '[corpus]\nsource = "found"\n'))
    assert file == RunFile()
