"""A run is named by the command, else by DIPACO_TICKET, else by what was joined last; each is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import signer
from typer.testing import CliRunner

from dipaco_p2p.errors import ConfigError, DipacoError, IntegrityError, Unreachable, WrongRun
from dipaco_p2p.program.files import LOCK_NAME
from dipaco_p2p.protocol.signing import public_key_of
from dipaco_p2p.ticket import SeedPlace, Ticket, write_ticket
from peers.cli import app
from peers.joining.choice import ANOTHER, FILE_NAME, LOST, VARIABLE, Choice, choose, find_choice, remember

COORDINATOR = signer(1).peer
ADDRESS = f"/ip4/127.0.0.1/tcp/1/p2p/{COORDINATOR}"


def ticket(run: str, name: str) -> str:
    seed = SeedPlace(place="/ip4/127.0.0.1/tcp/1", key=public_key_of(COORDINATOR))
    return write_ticket(Ticket(run=run, coordinator=public_key_of(COORDINATOR), seeds=(seed,), name=name))


FIRST, SECOND, THIRD = (ticket(pair * 32, name) for pair, name in (("ab", "first"), ("cd", "second"), ("ef", "third")))


def test_what_is_given_goes_before_the_environment_and_that_before_what_is_remembered(tmp_path: Path) -> None:
    remember(tmp_path, THIRD, run="ef" * 32)
    set_here = {VARIABLE: f" {SECOND}\n"}
    assert choose(FIRST, tmp_path, environment=set_here) == Choice(text=FIRST)
    from_there = choose(None, tmp_path, environment=set_here)
    assert (from_there.text, from_there.line) == (SECOND, f"using run:cdcdcdcd `second`, as {VARIABLE} says")
    remembered = choose(None, tmp_path, environment={VARIABLE: ""})
    assert remembered.entry().run == "ef" * 32
    assert remembered.line == f"using run:efefefef `third`, as remembered in {tmp_path / FILE_NAME}"
    assert choose(FIRST, tmp_path, environment={}).line == "", "whoever named the run need not be told"


def test_the_bare_ticket_is_remembered_and_an_address_with_the_run_that_was_there(tmp_path: Path) -> None:
    file = tmp_path / "mail.txt"
    file.write_text(f"Join us: dipaco-peer join {FIRST}\n")
    for text, kept in ((str(file), FIRST), (f"dipaco://{FIRST}", FIRST), (ADDRESS, ADDRESS)):
        remember(tmp_path, text, run="ab" * 32)
        assert json.loads((tmp_path / FILE_NAME).read_bytes()) == {"ticket": kept, "run": "ab" * 32}
    file.unlink()
    entry = choose(None, tmp_path, environment={}).entry()
    assert (entry.addresses, entry.run) == ((ADDRESS,), "ab" * 32), "another run at this address is refused"


@pytest.mark.parametrize("text", [FIRST, ADDRESS], ids=["ticket", "address"])
def test_a_run_that_is_demanded_must_be_the_remembered_one(tmp_path: Path, text: str) -> None:
    remember(tmp_path, text, run="ab" * 32)
    assert choose(None, tmp_path, run="run:abab", environment={}).run == "ab" * 32
    with pytest.raises(WrongRun, match="run:abababab.* is not run:12345678") as refused:
        choose(None, tmp_path, run="123456789", environment={})
    assert refused.value.hint == ANOTHER
    with pytest.raises(WrongRun, match=f"`second`, as {VARIABLE} says: the ticket is for run:cdcdcdcd, not run:abab"):
        choose(None, tmp_path, run="abab", environment={VARIABLE: SECOND})


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"ticket": 1, "run": "ab"}', b'{"ticket": "dipaco1", "run": ""}', b'{"run": "ab"}', b"\xff"],
)
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert find_choice(None, tmp_path, environment={}) is None
    with pytest.raises(ConfigError, match="no run is remembered"):
        choose(None, tmp_path, environment={})


def test_a_remembered_ticket_that_can_no_longer_be_read_is_named_with_a_way_out(tmp_path: Path) -> None:
    for text in (FIRST[:-1] + "qp"[FIRST.endswith("q")], SECOND):  # a flipped bit; a ticket of another run than noted
        (tmp_path / FILE_NAME).write_text(json.dumps({"ticket": text, "run": "ab" * 32}))
        with pytest.raises((ConfigError, WrongRun), match=FILE_NAME) as refused:
            choose(None, tmp_path, environment={})
        assert ANOTHER in refused.value.hint


@pytest.mark.parametrize("kind", [Unreachable, WrongRun])
def test_a_run_that_cannot_be_reached_is_named_unless_the_user_named_it(
    tmp_path: Path, kind: type[DipacoError]
) -> None:
    remember(tmp_path, FIRST, run="ab" * 32)
    remembered = choose(None, tmp_path, environment={})
    with pytest.raises(kind, match="run:abababab `first`.*: nobody there") as named, remembered.explained(*LOST):
        raise kind("nobody there", hint="ask")
    assert named.value.hint == f"ask; {ANOTHER}"
    with pytest.raises(kind, match="^nobody there$"), choose(FIRST, tmp_path).explained(*LOST):
        raise kind("nobody there")
    with pytest.raises(IntegrityError, match="^forged$"), remembered.explained(*LOST):
        raise IntegrityError("forged")
    assert remembered.closing == f"run:abababab `first` is complete; {ANOTHER}" and not choose(FIRST, tmp_path).closing


# -- the commands


def typed(home: Path, *words: str, **environment: str) -> Any:
    return CliRunner().invoke(app, words, env={"DIPACO_HOME": str(home), VARIABLE: None, **environment})


@pytest.mark.parametrize("words", [("join",), ("me",), ("evaluate",), ("service", "show"), ("service", "install")])
def test_without_any_run_there_is_one_line_that_says_what_to_do(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = typed(tmp_path, *words)
    assert done.exit_code == ConfigError.exit_code and done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert error == f"error: no ticket was given, and no run is remembered in `{tmp_path}`"
    assert "`dipaco-peer join dipaco1...`" in hint


@pytest.mark.parametrize("words", [("join",), ("me",), ("evaluate",), ("service", "show")])
def test_a_bad_variable_is_named_and_nothing_begins(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = typed(tmp_path, *words, DIPACO_TICKET="hello")
    assert done.exit_code == ConfigError.exit_code
    assert (
        f"`hello`, as {VARIABLE} says: `hello` is neither a ticket nor a peer's address" in done.stderr
        and ANOTHER in done.stderr
    )
    assert not (tmp_path / LOCK_NAME).exists()


def test_the_remembered_run_is_told_on_the_error_stream_and_another_one_refused(tmp_path: Path) -> None:
    remember(tmp_path, FIRST, run="ab" * 32)
    refused = typed(tmp_path, "join", "--run", "1234")
    assert refused.exit_code == WrongRun.exit_code and "`first`" in refused.stderr
    shown = typed(tmp_path, "service", "show")
    assert shown.exit_code == 0 and f" join {FIRST} --home {tmp_path} --run {'ab' * 32}" in shown.stdout
    assert shown.stderr == f"using run:abababab `first`, as remembered in {tmp_path / FILE_NAME}\n"
    nobody = typed(tmp_path, "me")
    assert nobody.exit_code == ConfigError.exit_code and "no identity in" in nobody.stderr
