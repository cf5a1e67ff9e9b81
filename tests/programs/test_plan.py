"""`plan`: its figures hold for a run that was really made, and its JSON keeps its form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_harness import write_corpus
from stages_harness import Home, play_whole, run_file
from typer.testing import CliRunner

from bootstrap.cli import app
from bootstrap.folder import GRID, WARMUP, RunFolder
from bootstrap.planning.examine import planned_of, text_bytes_of
from bootstrap.planning.plan import Line, Plan, plan
from bootstrap.planning.show import lines
from bootstrap.runfile import CorpusConfig, RunFile
from dipaco_p2p.config import CompressionConfig, RunConfig
from dipaco_p2p.core.compress import HEADER_BYTES_MAX
from dipaco_p2p.owner.archive import SeedArchive

LINE = Line(up_mbit=10.0, down_mbit=50.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A run of two volunteers, from its corpus to its end."""
    folder = tmp_path_factory.mktemp("made")
    home = Home(folder, run_file(write_corpus(folder / "corpus.jsonl")))
    play_whole(home)
    return home


def planned(home: Home) -> Plan:
    return planned_of(home.file, LINE, volunteers=2)


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
    assert json.loads(result.output) == json.loads(GOLDEN.read_text())


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
