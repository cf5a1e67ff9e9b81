"""`check`: every judgement before a start, with a remedy for each problem; and the exit codes of the command."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_harness import write_run
from stages_harness import Home, run_file
from tiny_run import SEED_NUMBER, signer
from typer.testing import CliRunner

from bootstrap.cli import app
from bootstrap.genesis.prepare import prepare
from bootstrap.planning.examine import (
    CorpusFacts,
    FolderFacts,
    judge_clock,
    judge_corpus,
    judge_disk,
    judge_folder,
    judge_host,
    judge_port,
    judge_text,
    judge_tokenizer,
    planned_of,
    text_bytes_of,
)
from bootstrap.planning.pace import tokens_per_s
from bootstrap.planning.plan import Line, Plan, lines, plan
from bootstrap.runfile import ArchiveConfig, CorpusConfig, RunFile, load_run_file
from dipaco_p2p.config import MUON, SHARES_MAX, CompressionConfig, RunConfig
from dipaco_p2p.core.model.layout import hidden_values
from dipaco_p2p.core.outer.compress import HEADER_BYTES_MAX
from dipaco_p2p.errors import EnvironmentUnfit
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.owner.retention import Retention
from dipaco_p2p.program.examination import Finding, Level
from dipaco_p2p.program.files import folder_lock
from dipaco_p2p.use.folder import GRID, WARMUP, RunFolder

LINE = Line(up_mbit=10.0, down_mbit=50.0)
PLAN = plan(RunConfig(), text_bytes=12_000_000, line=LINE)
FOLDER = FolderFacts(path=Path("/runs/a"), free_bytes=2 * PLAN.disk.seed)
CORPUS = CorpusFacts(source="found", documents=100, text_bytes=10**7, long_documents=90)


def is_level(finding: Finding, level: Level, *words: str, code: int = 0) -> None:
    assert finding.level is level, finding
    assert bool(finding.remedy) is (level is not Level.OK), "a problem has a remedy, and only a problem"
    assert finding.exit_code == code
    for word in words:
        assert word in f"{finding.found} -> {finding.remedy}"


# -- the rules


def test_a_corpus_needs_documents_to_deal_out_and_long_ones_among_them() -> None:
    is_level(judge_corpus(CORPUS, paths=4), Level.OK, "100 documents")
    is_level(judge_corpus(replace(CORPUS, documents=15), paths=4), Level.FAIL, "at least 16", code=2)
    is_level(judge_corpus(CORPUS, paths=26), Level.FAIL, "at least 104", "smaller grid", code=2)
    is_level(judge_corpus(replace(CORPUS, long_documents=15), paths=4), Level.WARN, "only 15", "context")


def test_a_text_that_is_read_over_and_over_costs_something() -> None:
    is_level(judge_text(PLAN), Level.OK, "tokens")
    is_level(judge_text(replace(PLAN, passes=4.1)), Level.WARN, "4.1 times", "bytes_max")


def test_a_tokenizer_is_there_or_can_be_had_or_not() -> None:
    is_level(judge_tokenizer(300, None, is_there=True), Level.OK, "trained already")
    is_level(judge_tokenizer(300, None, is_there=False), Level.OK, "can be trained")
    is_level(judge_tokenizer(300, "too small", is_there=False), Level.FAIL, "vocab_size", code=2)


def test_a_port_is_free_or_ours_or_taken() -> None:
    is_level(judge_port("port", "h:1", None, is_ours=False), Level.OK, "free")
    is_level(judge_port("port", "h:1", "taken", is_ours=True), Level.OK, "this run")
    is_level(judge_port("port", "h:1", "taken", is_ours=False), Level.FAIL, "h:1: taken", "another port", code=5)


def test_who_listens_on_loopback_is_told_that_nobody_can_join() -> None:
    is_level(judge_host("127.0.0.1"), Level.WARN, "0.0.0.0")
    is_level(judge_host("0.0.0.0"), Level.OK)


def test_a_disk_must_hold_the_whole_run_but_for_what_is_there() -> None:
    is_level(judge_disk(FOLDER, PLAN), Level.OK, "free in /runs/a")
    full = replace(FOLDER, free_bytes=PLAN.disk.seed)
    is_level(judge_disk(full, PLAN), Level.FAIL, "free some space", code=5)
    is_level(judge_disk(replace(full, used_bytes=PLAN.disk.seed // 2), PLAN), Level.OK)
    is_level(judge_disk(replace(FOLDER, problem="Read-only"), PLAN), Level.FAIL, "Read-only", "--dir", code=5)


@pytest.mark.parametrize(
    ("changes", "level", "word", "code"),
    [
        ({}, Level.OK, "prepares it", 0),
        ({"stage": "warmup"}, Level.OK, "in its warmup: `start` resumes it", 0),
        ({"stage": "grid", "is_restored": True}, Level.OK, "catches up", 0),
        ({"stage": "grid", "is_running": True}, Level.WARN, "is running", 0),
        ({"stage": "grid", "is_other": True}, Level.FAIL, "another run file", 2),
        ({"damage": "manifest is damaged"}, Level.FAIL, "backup", 8),
    ],
)
def test_a_folder_is_new_ours_busy_restored_of_another_run_or_damaged(
    changes: dict[str, Any], level: Level, word: str, code: int
) -> None:
    is_level(judge_folder(replace(FOLDER, **changes)), level, word, code=code)


def test_a_clock_that_nobody_sets_is_a_warning() -> None:
    is_level(judge_clock(False), Level.WARN, "timedatectl")
    is_level(judge_clock(True), Level.OK)
    is_level(judge_clock(None), Level.OK)


# -- the command


@pytest.fixture
def file(tmp_path: Path, corpus: Path) -> Path:
    return write_run(tmp_path / "run.toml", corpus, rounds=4, min_paths=1)


def checked(file: Path, *more: str) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code, and the checks of the JSON document by name."""
    result = CliRunner().invoke(app, ["check", str(file), "--dir", str(file.parent / "run"), "--json", *more])
    document = json.loads(result.stdout)
    assert document["schema"] == "dipaco.check/1" and document["exit_code"] == result.exit_code
    assert set(document) == {"schema", "outcome", "exit_code", "checks"}
    assert all(set(check) == {"check", "level", "found", "remedy"} for check in document["checks"])
    return result.exit_code, {check["check"]: check for check in document["checks"]}


def test_a_run_that_can_start_is_told_so_and_nothing_is_made(file: Path) -> None:
    code, checks = checked(file)
    assert code == 0, checks
    names = {"run file", "folder", "corpus", "tokenizer", "text", "disk", "host", "port", "clock"}
    assert checks.keys() == names and not (file.parent / "run").exists()
    said = CliRunner().invoke(app, ["check", str(file), "--dir", str(file.parent / "run")]).stdout
    assert "-> host = " in said and "The run can start; the warnings say what it costs." in said


def test_a_wrong_key_is_2_and_the_rest_is_moot(file: Path) -> None:
    file.write_text(file.read_text().replace("width", "widht", 1))
    code, checks = checked(file)
    assert code == 2 and checks.keys() == {"run file"} and "widht" in checks["run file"]["found"]


def test_a_corpus_that_is_not_there_or_too_small_is_2(file: Path) -> None:
    corpus = file.parent / "corpus.jsonl"
    corpus.write_text("\n".join(corpus.read_text().splitlines()[:5]))
    code, checks = checked(file)
    assert code == 2 and "5 documents" in checks["corpus"]["found"]
    corpus.unlink()
    code, checks = checked(file)
    assert code == 2 and "does not exist" in checks["corpus"]["found"]


def test_a_vocabulary_beyond_the_text_is_2(file: Path) -> None:
    file.write_text(file.read_text().replace("vocab_size = 300", "vocab_size = 90000"))
    code, checks = checked(file)
    assert code == 2 and "too small for its vocabulary" in checks["tokenizer"]["found"]


def test_a_taken_port_is_5(file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file.write_text(file.read_text().replace("port = 0\n", f"port = {port}\n"))
        code, checks = checked(file)
    assert code == 5 and str(port) in checks["port"]["found"]


def test_a_prepared_folder_is_known_again_and_one_of_another_file_or_a_damaged_one_is_not(
    file: Path, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    prepare(run_file(tmp_path / "corpus.jsonl"), folder, signer(SEED_NUMBER))
    code, checks = checked(file)
    assert code == 2 and "another run file" in checks["folder"]["found"]
    manifest = tmp_path / "run" / "warmup" / "documents" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    code, checks = checked(file)
    assert code == 8 and "damaged" in checks["folder"]["found"]


def test_the_folder_of_a_coordinator_at_work_is_a_warning(file: Path, tmp_path: Path) -> None:
    with folder_lock(tmp_path / "run", hint="x"):
        code, checks = checked(file)
    assert code == 0 and checks["folder"]["level"] == "warn" and "is running" in checks["folder"]["found"]


EVERYTHING = ArchiveConfig(rounds=0, snapshots=0)


def planned(home: Home, archive: ArchiveConfig = EVERYTHING) -> Plan:
    return planned_of(replace(home.file, archive=archive), LINE, volunteers=2)


@pytest.mark.parametrize("stage", [WARMUP, GRID])
def test_what_was_sent_and_kept_is_what_was_planned(made: Home, stage: str) -> None:
    folder, expected = RunFolder(made.folder), planned(made)
    run, store = folder.open(stage), folder.store(stage)
    assert run is not None
    archive = SeedArchive(run, store)
    counted = 0
    for module, ledger in archive.ledgers.items():
        values = expected.levels[module.level].parameters
        for version in (sealed.document for sealed in ledger.versions):
            assert version.update is not None and version.state is not None
            assert 4 * values <= version.snapshot.size <= 4 * values + HEADER_BYTES_MAX
            assert 8 * values <= version.state.size <= 8 * values + HEADER_BYTES_MAX
            assert 0 <= expected.levels[module.level].down_bytes - version.update.size < HEADER_BYTES_MAX
            for share in version.shares:
                payload = archive.contribution(share.contribution).document.payload
                assert 0 <= expected.levels[module.level].up_bytes - payload.size < HEADER_BYTES_MAX
                counted += 1
    assert counted == 2 * run.config.rounds.rounds * len(run.topology.path(0).modules())
    assert expected.round.up_bytes == sum(level.up_bytes for level in expected.levels)


def test_the_coordinators_folder_does_not_outgrow_its_plan(made: Home) -> None:
    sizes = [path.stat().st_size for path in made.folder.glob("*/blobs/*/*")]
    sizes.append((made.folder / "sequences.safetensors").stat().st_size)
    assert sum(sizes) < planned(made).disk.seed < 3 * sum(sizes)


def test_a_thinned_folder_does_not_outgrow_its_plan_either(made: Home, tmp_path: Path) -> None:
    archive = ArchiveConfig(rounds=1, snapshots=2)
    folder = RunFolder(shutil.copytree(made.folder, tmp_path / "thinned"))
    for stage in (WARMUP, GRID):
        run, store = folder.open(stage), folder.store(stage)
        assert run is not None
        kept = SeedArchive(run, store)
        kept.thinning.retention = Retention(rounds=archive.rounds, snapshots=archive.snapshots)
        for ledger in kept.ledgers.values():
            for name in kept.thinning.thin(ledger):
                store.drop(name)
    sizes = [path.stat().st_size for path in folder.root.glob("*/blobs/*/*")]
    sizes.append((folder.root / "sequences.safetensors").stat().st_size)
    found, whole = planned(made, archive).disk, planned(made).disk
    assert sum(sizes) < found.seed < whole.seed == found.seed_whole
    assert found.seed_contributions < whole.seed_contributions and found.seed_text == whole.seed_text


def test_the_ready_run_for_homes_takes_less_than_20_gib_of_its_coordinator() -> None:
    file = load_run_file(Path("bootstrap/runs/home-4x4.toml"))
    found = planned_of(file, LINE)
    assert found.disk.seed < 20 * 2**30 < 200 * 2**30 < found.disk.seed_whole
    # What one more round costs is what two plans differ by, if text is sharded as often.
    file = replace(file, run=replace(file.run, routing=replace(file.run.routing, reshard_rounds=(30,))))
    rounds = replace(file.run.rounds, rounds=file.run.rounds.rounds + file.archive.snapshots)
    longer = planned_of(replace(file, run=replace(file.run, rounds=rounds)), LINE)
    grown = (longer.disk.seed - planned_of(file, LINE).disk.seed) / file.archive.snapshots
    assert grown == pytest.approx(found.disk.seed_round, rel=0.01)


def test_training_takes_as_long_as_volunteers_with_several_paths_need(tmp_path: Path) -> None:
    def timed(volunteers: int, tokens_per_s: float = 1000.0) -> Plan:
        return plan(RunConfig(), text_bytes=10**7, line=LINE, volunteers=volunteers, tokens_per_s=tokens_per_s)

    assert timed(4, 0.0).training is None
    found, fewer = timed(4).training, timed(2).training
    assert found is not None and fewer is not None
    assert found.round_s == pytest.approx(timed(4).round.tokens / 1000 + timed(4).round.line_s)
    assert fewer.round_s == pytest.approx(2 * found.round_s) and fewer.run_s > found.run_s
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "timed"\n')
    said = CliRunner().invoke(app, ["plan", str(path), "--tokens-per-s", "1000"]).output
    assert " a round, " in said and "at 1,000 tokens/s of each volunteer" in said
    assert " more; " in said and "if [archive] kept all rounds" in said


def test_how_fast_this_machine_trains_is_measured_after_the_first_step(tmp_path: Path) -> None:
    config = RunConfig(inner=replace(RunConfig().inner, batch=3))
    clock = iter([0.0, 0.5, 2.0, 6.0])  # the end of the first step, and of those that count
    assert tokens_per_s(config, now=lambda: next(clock)) == pytest.approx(3 * 3 * config.model.context / 6.0)
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "timed"\n')
    refused = CliRunner().invoke(app, ["plan", str(path), "--measure", "--tokens-per-s", "1000"])
    assert refused.exit_code == 2 and "give only one of the two" in refused.output


def test_larger_modules_are_planned_closely() -> None:
    """Where headers do not matter: one byte a value and a scale for 256, or half of that."""
    found = plan(RunConfig(), text_bytes=10**7, line=LINE)
    assert found.round.up_bytes_by_codec["int8"] == pytest.approx(found.path_parameters * (1 + 4 / 256), rel=0.05)
    eight = plan(RunConfig(compression=CompressionConfig(uplink="int8")), text_bytes=10**7, line=LINE)
    assert found.round.up_bytes == found.round.up_bytes_by_codec["int4"] < 0.6 * eight.round.up_bytes
    assert eight.round.down_bytes == found.round.down_bytes
    seconds = 8 * (found.round.up_bytes / 10e6 + found.round.down_bytes / 50e6)
    assert found.round.line_s == pytest.approx(seconds)


def test_replicas_cost_the_archive_contributions_and_nothing_else() -> None:
    few, many = (plan(RunConfig(), text_bytes=10**7, line=LINE, volunteers=count) for count in (4, 16))
    assert many.disk.seed_contributions == 4 * few.disk.seed_contributions
    assert (many.disk.seed_text, many.disk.seed_versions) == (few.disk.seed_text, few.disk.seed_versions)


def test_text_of_a_local_file_is_its_size_and_of_others_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 1000)

    def bytes_of(source: Path | str, bytes_max: int) -> int:
        return text_bytes_of(RunFile(corpus=CorpusConfig(source=str(source), bytes_max=bytes_max)))

    assert bytes_of(tmp_path / "a.txt", 5000) == 1000 == bytes_of(tmp_path, 5000)
    assert bytes_of(tmp_path / "a.txt", 700) == 700
    assert bytes_of("org/name", 5000) == 5000
    (tmp_path / "b.parquet").write_bytes(b"")
    assert bytes_of(tmp_path, 5000) == 5000


GOLDEN = Path(__file__).with_name("golden_plan.json")


def test_the_document_has_this_form(tmp_path: Path) -> None:
    """`golden_plan.json` is of the template; whoever reads such documents relies on its names."""
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "golden"\n')
    result = CliRunner().invoke(app, ["plan", str(path), "--json"])
    assert result.exit_code == 0, result.output
    found, golden = json.loads(result.output), json.loads(GOLDEN.read_text())
    for way in ("up_bytes_by_codec", "down_bytes_by_codec"):  # a further codec changes nothing for a reader
        found["round"][way] = {codec: found["round"][way][codec] for codec in golden["round"][way]}
    assert found == golden


def test_a_leader_takes_in_what_a_version_counts_and_no_more() -> None:
    def planned(volunteers: int, contributions_max: int = SHARES_MAX) -> Plan:
        config = replace(RunConfig(), rounds=replace(RunConfig().rounds, contributions_max=contributions_max))
        return plan(config, text_bytes=10**7, line=LINE, volunteers=volunteers)

    few, crowd, bounded = planned(4), planned(10_000), planned(10_000, 64)
    for made, contributions in ((few, 4), (crowd, 288), (bounded, 48)):
        assert made.leader.contributions == contributions and made.leader.module == "L0.M0"
        assert made.leader.down_bytes == contributions * made.levels[0].up_bytes
        assert made.coordinator_down_bytes == contributions * made.round.up_bytes
    assert crowd.leader.up_bytes == few.leader.up_bytes == 2 * few.levels[0].down_bytes
    assert few.disk.seed_contributions < bounded.disk.seed_contributions < crowd.disk.seed_contributions
    assert any("48 contributions to L0.M0" in line for line in lines(bounded))


def test_the_lines_say_path_codecs_memory_disk_and_line() -> None:
    text = "\n".join(lines(plan(RunConfig(), text_bytes=10**7, line=LINE)))
    for word in ("grid 1x2x2, 4 paths", "a path", "int8", "top128", "AdamW", "10 Mbit/s up", "coordinator", "bfloat16"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_run_file_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model]\nwidht = 3\n")
    result = CliRunner().invoke(app, ["plan", str(path)])
    assert result.exit_code == 2 and "widht" in result.stderr and "Traceback" not in result.stderr


def test_a_warm_up_costs_rounds_and_disk() -> None:
    config = RunConfig()
    without = replace(config, warmup=replace(config.warmup, rounds=0))
    cold, warm = (plan(each, text_bytes=10**7, line=LINE) for each in (without, config))
    assert warm.disk.seed_versions > cold.disk.seed_versions and warm.line_s > cold.line_s


def test_muon_needs_half_of_what_adamw_keeps_for_the_matrices_inside_the_blocks() -> None:
    config = RunConfig()
    muon = plan(replace(config, inner=replace(config.inner, optimizer=MUON)), text_bytes=10**7, line=LINE)
    adamw = plan(config, text_bytes=10**7, line=LINE)
    assert adamw.memory.optimizer - muon.memory.optimizer == 4 * hidden_values(config.model)
    said = "\n".join(lines(muon))
    assert "in 8 bits" in "\n".join(lines(adamw)) and "in 8 bits" not in said and "of which Muon and AdamW" in said


def test_a_torch_without_the_runs_optimizer_is_5(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(file.read_text().replace("[inner]", '[inner]\noptimizer = "muon"'))
    monkeypatch.delattr(torch.optim, "Muon")
    found = CliRunner().invoke(app, ["check", str(file), "--dir", str(file.parent / "new")], env={"COLUMNS": "160"})
    assert found.exit_code == 5 and "torch>=2.9" in found.output, found.output
    with pytest.raises(EnvironmentUnfit, match="Muon"):
        prepare(load_run_file(file), RunFolder(file.parent / "new"), signer(SEED_NUMBER))


def test_what_comes_to_the_coordinators_line_follows_from_its_archive() -> None:
    def down(volunteers: int, **archive: Any) -> int:
        retention = Retention(**{"rounds": 2, **archive})
        made = plan(RunConfig(), text_bytes=10**7, line=LINE, volunteers=volunteers, retention=retention)
        return made.coordinator_down_bytes

    assert down(40) == 10 * down(4), "all contributions"
    assert down(400) == down(10_000) == 72 * down(4), "as many of a path as are drawn for"
    light = down(4, remade=0.0)
    assert down(400, remade=0.0) == light < down(4)
    assert down(400, remade=0.5) == light + down(400) // 2
    none = down(400, remade=0.0, measured=0.0)
    assert none == 0 and down(400, remade=0.0, measured=0.0, snapshots=50) > 0
    half = down(400, remade=0.0, measured=0.5)
    assert half == pytest.approx(PLAN.paths * PLAN.path_parameters * 4 / 2, rel=0.01)
