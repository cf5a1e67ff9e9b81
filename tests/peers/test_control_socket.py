"""The control socket: who may speak over it, what it takes, where it is, and what becomes of a dead one."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from control_harness import answered

from dipaco_p2p.errors import ConfigError, DipacoError, EnvironmentUnfit, NotRunning, Unreachable, WrongRun
from dipaco_p2p.program.control import client, place
from dipaco_p2p.program.control.client import Credentials, ask, wait_end
from dipaco_p2p.program.control.messages import (
    ANSWER_BYTES_MAX,
    REQUEST_BYTES_MAX,
    encode_answer,
    encode_error,
    encode_request,
    read_answer,
    read_request,
)
from dipaco_p2p.program.control.server import CLIENTS_MAX, ControlServer
from peers.control.commands import read_duration
from peers.control.control import SCHEMA, VOLUNTEER, Request

GIVEN: list[Request] = []


def answer(request: Request) -> dict[str, Any]:
    """A volunteer that says what it was asked, and does not like to pause."""
    GIVEN.append(request)
    if request.ask == "pause":
        raise Unreachable("not now", hint="later")
    if request.ask == "resume":
        raise ZeroDivisionError("a mistake of ours")
    return {"asked": request.ask}


@contextmanager
def running(home: Path) -> Iterator[None]:
    """A volunteer that answers, in a thread."""
    with answered(home, Request, answer):
        yield


def exchange(home: Path, data: bytes) -> list[dict[str, Any]]:
    """What comes back until it hangs up."""
    path = place.find_socket(home)
    assert path is not None
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(path))
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        found = b"".join(iter(lambda: connection.recv(65_536), b""))
    return [json.loads(line) for line in found.splitlines()]


# -- over it


def test_a_request_is_answered_and_an_error_keeps_its_words_and_code(tmp_path: Path) -> None:
    with running(tmp_path):
        assert ask(tmp_path, Request(ask="status")).body == {"asked": "status"}
        assert ask(tmp_path, Request(ask="status")).pid == os.getpid()
        with pytest.raises(Unreachable, match="not now") as refused:
            ask(tmp_path, Request(ask="pause", for_s=5.0))
        assert (refused.value.hint, GIVEN[-1].for_s) == ("later", 5.0)
        with pytest.raises(DipacoError, match="a mistake of ours"):
            ask(tmp_path, Request(ask="resume"))


def test_junk_is_refused_by_name_and_the_next_request_is_answered(tmp_path: Path) -> None:
    good = encode_request(Request(ask="status"))
    with running(tmp_path):
        for junk in (
            b"hello\n",
            b"[]\n",
            b'{"schema":"dipaco.control/1","ask":"dance"}\n',
            b"\xff\xfe\n",
            b"[" * 3000 + b"\n",
        ):
            first, second = exchange(tmp_path, junk + good)
            assert first["error"]["exit_code"] == 2 and second["answer"] == {"asked": "status"}, junk
        [old] = exchange(tmp_path, b'{"schema":"dipaco.control/0","ask":"status"}\n')
        assert old["error"]["exit_code"] == 6 and "dipaco.control/0" in old["error"]["message"]


def test_a_request_without_an_end_is_given_up_at_its_bound(tmp_path: Path) -> None:
    with running(tmp_path):
        [found] = exchange(tmp_path, b"x" * (REQUEST_BYTES_MAX + 10))
        assert str(REQUEST_BYTES_MAX) in found["error"]["message"]
        assert ask(tmp_path, Request(ask="status")).body == {"asked": "status"}


def test_several_clients_at_once_are_answered_and_no_more_than_the_limit(tmp_path: Path) -> None:
    with running(tmp_path):
        path = place.find_socket(tmp_path)
        assert path is not None
        silent = [socket.socket(socket.AF_UNIX) for _ in range(CLIENTS_MAX - 1)]
        try:
            for each in silent:
                each.connect(str(path))
            assert ask(tmp_path, Request(ask="status"), timeout_s=20).body == {"asked": "status"}
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(str(path))
                with pytest.raises(Unreachable, match=str(CLIENTS_MAX)):
                    ask(tmp_path, Request(ask="status"), timeout_s=20)
        finally:
            for each in silent:
                each.close()


def test_a_silent_client_is_hung_up_on() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        reader, writer = await asyncio.open_connection(sock=ours)
        server_reader, server_writer = await asyncio.open_connection(sock=theirs)
        await ControlServer(Request, answer, idle_s=0.01)._on_client(server_reader, server_writer)
        assert await reader.read() == b""
        writer.close()

    asyncio.run(scenario())


def test_another_user_is_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Credentials, "is_ours", property(lambda self: False))
    with running(tmp_path):
        before = len(GIVEN)
        [found] = exchange(tmp_path, encode_request(Request(ask="stop")))
        assert "another user" in found["error"]["message"] and len(GIVEN) == before
        with pytest.raises(EnvironmentUnfit, match="another user"):
            ask(tmp_path, Request(ask="status"))


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        found = client.credentials_of(ours)
    assert (found.pid, found.uid, found.is_ours) == (os.getpid(), os.geteuid(), True)
    assert not Credentials(1, os.geteuid() + 1).is_ours


# -- where it is


def test_only_its_owner_may_open_the_socket_from_its_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    bind = socket.socket.bind

    class Bound(socket.socket):
        def bind(self, address: Any) -> None:
            bind(self, address)
            modes.append(stat.S_IMODE(os.stat(address).st_mode))

    monkeypatch.setattr(socket, "socket", Bound)
    before = os.umask(0)
    try:
        made, path = place.open_socket(tmp_path)
    finally:
        os.umask(before)
    made.close()
    assert path == tmp_path / "control.sock" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert modes == [0o600]


def test_a_home_with_a_long_name_has_its_socket_in_the_runtime_folder(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path_factory.mktemp("r")  # short: it has to fit into a socket's path
    monkeypatch.setenv("XDG_RUNTIME_DIR", os.path.relpath(base))  # no absolute path: not used
    monkeypatch.setattr("tempfile.tempdir", str(base))
    home = tmp_path / ("long" * 30)
    home.mkdir()
    with running(home):
        path = place.find_socket(home)
        assert path is not None and path.parent == base / f"dipaco-p2p-{os.geteuid()}"
        assert json.loads((home / "control.json").read_text()) == {"socket": str(path)}
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert ask(home, Request(ask="status")).body == {"asked": "status"}
    assert place.find_socket(home) is None and not (home / "control.json").exists()


def test_a_runtime_folder_that_others_may_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / f"dipaco-p2p-{os.geteuid()}").mkdir(mode=0o777)
    os.chmod(tmp_path / f"dipaco-p2p-{os.geteuid()}", 0o777)
    with pytest.raises(EnvironmentUnfit, match="not a folder of this user alone"):
        place.runtime_folder()


def test_a_dead_socket_is_nobody_and_gives_way(tmp_path: Path) -> None:
    made, path = place.open_socket(tmp_path)
    made.close()  # as after SIGKILL: the file is there, and nobody listens
    assert path.exists()
    with pytest.raises(NotRunning, match="no volunteer runs"):
        ask(tmp_path, Request(ask="status"))
    with running(tmp_path):
        assert ask(tmp_path, Request(ask="status")).body == {"asked": "status"}
    assert not path.exists()


def test_without_a_socket_or_a_home_nobody_runs(tmp_path: Path) -> None:
    for home in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NotRunning) as missing:
            ask(home, Request(ask="status"))
        assert missing.value.exit_code == 3 and "dipaco-peer join" in missing.value.hint


def test_a_volunteer_that_does_not_answer_is_given_up_and_its_process_named(tmp_path: Path) -> None:
    made, _ = place.open_socket(tmp_path)
    with made, pytest.raises(Unreachable, match="does not answer") as frozen:
        ask(tmp_path, Request(ask="status"), timeout_s=0.05)
    assert str(os.getpid()) in frozen.value.hint


def test_a_volunteer_runs_on_where_there_can_be_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(home: Path) -> Any:
        raise EnvironmentUnfit("no sockets here")

    monkeypatch.setattr("dipaco_p2p.program.control.server.open_socket", refuse)
    with running(tmp_path):
        assert place.find_socket(tmp_path) is None


def test_the_end_of_a_process_is_noticed() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert wait_end(child, timeout_s=20) and wait_end(2**22 - 1)
    os.waitpid(child, 0)
    assert not wait_end(os.getpid(), timeout_s=0.0)


# -- its messages


@pytest.mark.parametrize("request_", [Request(ask="pause", for_s=7200.0), Request(ask="stop", now=True)], ids=str)
def test_a_request_is_read_as_it_was_written(request_: Request) -> None:
    line = encode_request(request_)
    assert line.endswith(b"\n") and line.count(b"\n") == 1 and read_request(line, Request) == request_
    assert json.loads(line)["schema"] == SCHEMA == "dipaco.control/1"


@pytest.mark.parametrize(
    "changes",
    [{"ask": "dance"}, {"for_s": -1.0}, {"for_s": 1e12}, {"for": 3}, {"now": "yes"}, {"for_s": float("nan")}],
    ids=str,
)
def test_a_request_that_is_none_is_refused(changes: dict[str, Any]) -> None:
    line = json.dumps({"schema": SCHEMA, "ask": "pause"} | changes).encode()
    with pytest.raises(ConfigError):
        read_request(line, Request)


def test_an_answer_and_an_error_are_read_as_they_were_written() -> None:
    assert read_answer(encode_answer({"a": [1, None]}, VOLUNTEER), VOLUNTEER) == {"a": [1, None]}
    for error in (WrongRun("another", hint="do this"), ConfigError("wrong"), EnvironmentUnfit("full")):
        with pytest.raises(type(error)) as found:
            read_answer(encode_error(error, VOLUNTEER), VOLUNTEER)
        assert (str(found.value), found.value.hint) == (str(error), error.hint)


@pytest.mark.parametrize("line", [b"", b"{}", b'{"schema":"dipaco.control/1"}', b"x" * (ANSWER_BYTES_MAX + 1)], ids=len)
def test_an_answer_that_is_none_is_an_error(line: bytes) -> None:
    with pytest.raises(DipacoError):
        read_answer(line, VOLUNTEER)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1d", 86_400), (" 1.5h", 5400)]
)
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert read_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "2 h", "-2h", "2x", "0s", "1h30m", "999999d", "nan", "1e3s", "٣h"])
def test_what_is_no_length_of_time_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_duration(text)
    assert "90s" in refused.value.hint and "\n" not in str(refused.value)
