"""A backup is a state that a crash could have left, whatever is written meanwhile; what comes out of it is checked."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stages_harness import Home
from tiny_run import signer
from view_harness import run

import bootstrap.recovery.backup as backup_module
from bootstrap.archives.verify import verify_stages
from bootstrap.folder import read_marker
from bootstrap.planning.examine import probe_folder
from bootstrap.recovery.backup import back_up, restore
from dipaco_p2p.errors import ConfigError, IntegrityError
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.swarm.identity import write as write_key
from dipaco_p2p.use.folder import GRID, WARMUP, RunFolder

NOW_S = 1_700_000_000.0


@pytest.fixture
def saved(made: Home, tmp_path: Path) -> Path:
    return back_up(made.folder, tmp_path / "run.tar", now_s=NOW_S).path


def files(root: Path) -> dict[str, bytes]:
    kept = (path for path in root.rglob("*") if path.is_file() and "partial" not in path.parts)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in kept}


def test_what_comes_out_is_what_went_in_and_a_mark_that_says_so(made: Home, saved: Path, tmp_path: Path) -> None:
    found = restore(saved, tmp_path / "again")
    again, before = files(tmp_path / "again"), files(made.folder)
    assert json.loads(again.pop("restored.json")) == {
        "schema": "dipaco.restored/1",
        "made_s": NOW_S,
        "is_caught_up": False,
    }
    assert again == {name: data for name, data in before.items() if name != "lock" and not name.endswith(".log")}
    assert found.files == len(again) and {stage for stage in (WARMUP, GRID) if made.heads(stage)} == {WARMUP, GRID}
    assert not [report for report in verify_stages(RunFolder(tmp_path / "again")) if report.problem]
    assert probe_folder(made.file, tmp_path / "again").is_restored


def test_only_the_owner_may_read_a_backup_or_the_key_that_comes_out_of_it(saved: Path, tmp_path: Path) -> None:
    restore(saved, tmp_path / "again")
    assert saved.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "again" / "identity.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("share", [0.12, 0.5])
@pytest.mark.parametrize("each", [1, 4])
def test_whatever_is_written_meanwhile_the_copy_is_a_state_that_a_crash_could_have_left(
    made: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, each: int
) -> None:
    live = tmp_path / "live"
    growing = grow(made.folder, live, share=share)
    read = backup_module._read

    def read_while_others_write(path: Path) -> bytes | None:
        for _ in range(each):
            next(growing, None)
        return read(path)

    monkeypatch.setattr(backup_module, "_read", read_while_others_write)
    restore(back_up(live, tmp_path / "run.tar", now_s=NOW_S).path, tmp_path / "again")
    folder = RunFolder(tmp_path / "again")
    assert not [report for report in verify_stages(folder) if report.problem and report.stage != "fork"]
    for name in (WARMUP, GRID):
        run = folder.open(name)
        for module in run.topology.modules() if run is not None else ():
            assert run is not None
            Ledger(run, folder.store(name), module, must_be_whole=True)


def grow(source: Path, target: Path, *, share: float) -> Iterator[None]:
    """Copy the files of a run in the order in which they were written: the first part at once, then one for each
    `next`."""
    paths = sorted((path for path in source.rglob("*") if path.is_file()), key=lambda path: path.stat().st_mtime_ns)
    paths = [path for path in paths if path.suffix not in {".jsonl", ".log"} and path.name not in {"lock"}]
    paths.sort(key=lambda path: path.name != "identity.key")
    begin = int(share * len(paths))
    assert "manifest.json" in {path.name for path in paths[:begin]}

    def put(path: Path) -> None:
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, place)

    for path in paths[:begin]:
        put(path)

    def rest() -> Iterator[None]:
        for path in paths[begin:]:
            put(path)
            yield

    return rest()


def test_a_line_that_is_half_written_is_left_out(made: Home, tmp_path: Path) -> None:
    shutil.copytree(made.folder, tmp_path / "live")
    with (tmp_path / "live" / GRID / "history.jsonl").open("ab") as file:
        file.write(b'{"ev": "arch')
    restore(back_up(tmp_path / "live", tmp_path / "run.tar", now_s=NOW_S).path, tmp_path / "again")
    again = (tmp_path / "again" / GRID / "history.jsonl").read_bytes()
    assert again == (made.folder / GRID / "history.jsonl").read_bytes()


def test_nothing_is_ever_replaced(made: Home, saved: Path, tmp_path: Path) -> None:
    before = saved.read_bytes()
    with pytest.raises(ConfigError, match="already exists"):
        back_up(made.folder, saved, now_s=NOW_S)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        restore(saved, tmp_path / "full")
    assert saved.read_bytes() == before and files(tmp_path / "full") == {"mine.txt": b"mine"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_folder_gets_a_file_with_name_and_time(made: Home, tmp_path: Path) -> None:
    assert back_up(made.folder, tmp_path, now_s=NOW_S).path.name == "tiny-20231114T221320Z.tar"


def test_a_damaged_blob_is_not_copied_as_if_it_were_whole(made: Home, tmp_path: Path) -> None:
    shutil.copytree(made.folder, tmp_path / "live")
    blob = next((tmp_path / "live" / GRID / "blobs").glob("*/*"))
    blob.write_bytes(b"x" + blob.read_bytes()[1:])
    with pytest.raises(IntegrityError, match="damaged on disk"):
        back_up(tmp_path / "live", tmp_path / "run.tar", now_s=NOW_S)
    assert not list(tmp_path.glob("*.tar")) and not list(tmp_path.glob(".*"))


# -- files that are no whole backup


def cut(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[: saved.stat().st_size // 2])


def flip(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    data[len(data) // 2] ^= 1
    saved.write_bytes(data)


def add(saved: Path, name: str, **values: object) -> None:
    info = tarfile.TarInfo(name)
    for key, value in values.items():
        setattr(info, key, value)
    with tarfile.open(saved, "a") as tar:
        tar.addfile(info)


HARM: dict[str, Callable[[Path], None]] = {
    "cut": cut,
    "flipped": flip,
    "outside": lambda saved: add(saved, "../outside"),
    "a link": lambda saved: add(saved, "link", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "unlisted": lambda saved: add(saved, "grid/blobs/aa/extra"),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_file_that_is_not_whole_or_not_ours_leaves_nothing(saved: Path, tmp_path: Path, harm: str) -> None:
    HARM[harm](saved)
    with pytest.raises(IntegrityError) as caught:
        restore(saved, tmp_path / "again")
    assert "\n" not in str(caught.value) and caught.value.hint
    assert not (tmp_path / "again").exists() and not list(tmp_path.glob(".*")) and not (tmp_path / "outside").exists()


def test_the_key_of_somebody_else_is_refused(made: Home, tmp_path: Path) -> None:
    shutil.copytree(made.folder, tmp_path / "live")
    (tmp_path / "live" / "identity.key").unlink()
    write_key(tmp_path / "live" / "identity.key", bytes([9]) * 32)
    saved = back_up(tmp_path / "live", tmp_path / "run.tar", now_s=NOW_S).path
    with pytest.raises(IntegrityError, match="not that of the run's coordinator"):
        restore(saved, tmp_path / "again")
    assert signer(9).peer != made.coordinator


# -- the commands


def test_the_commands_say_that_the_key_is_inside(made: Home, tmp_path: Path) -> None:
    assert "key is inside" in run("backup", made.folder, "--to", tmp_path / "a.tar")
    said = run("restore", tmp_path / "a.tar", "--dir", tmp_path / "new")
    assert "same key" in said and "--through" in said
    assert read_marker(tmp_path / "new") is not None
    assert "KEY IS INSIDE" in run("backup", "--help")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["backup", "nothing", "--to", "a.tar"], 2),
        (["restore", "nothing.tar", "--dir", "new"], 2),
        (["restore", "text.tar", "--dir", "new"], 8),
    ],
)
def test_what_cannot_be_done_is_one_line_and_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.tar").write_text("no backup")
    said = run(*words, code=code)
    assert said.startswith("error: ") and "hint: " in said
    assert not (tmp_path / "new").exists()
