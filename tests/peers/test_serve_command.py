"""`dipaco-peer serve` as a program: it says where it listens, answers OpenAI's client, follows the run, and stops."""

from __future__ import annotations

import signal
from pathlib import Path

import openai
import pytest
from heavy_imports import probe
from serve_harness import serving
from serving_harness import PROMPT, Served, make_served
from typer.testing import CliRunner

from peers import cli


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(tmp_path_factory.mktemp("served"))


@pytest.mark.libp2p
def test_a_folder_is_served_until_a_signal_says_stop(served: Served) -> None:
    with serving(str(served.root), "--device", "cpu", key="a long word") as (process, address):
        assert address.startswith("http://127.0.0.1:") and address.endswith("/v1")
        with openai.OpenAI(base_url=address, api_key="a long word", max_retries=0) as client:
            answer = client.completions.create(model="auto", prompt=PROMPT, max_tokens=5, temperature=0)
            assert answer.choices[0].text and answer.model.startswith("P")
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="no").models.list()
            stream = client.completions.create(model="auto", prompt=[PROMPT] * 64, max_tokens=4096, stream=True)
            next(iter(stream))
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        assert process.stdout is not None and process.stderr is not None
        assert served.run.name in process.stdout.read() and process.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--host", "0.0.0.0"), 2, "error: `--host 0.0.0.0` lets other machines in, and there is no key"),
        (("--memory", "0.00001"), 2, "but one path and its text take"),
        (("--run", "abcdef01"), 6, "not run:abcdef01"),
        (("--device", "abacus"), 2, "`abacus` is not a device"),
        (("--device", "cuda:99"), 5, "`cuda:99`"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_an_exit_code(
    served: Served, arguments: tuple[str, ...], code: int, words: str
) -> None:
    result = CliRunner().invoke(cli.app, ["serve", str(served.root), "--port", "0", *arguments], env={"DIPACO_KEY": ""})
    assert result.exit_code == code and words in result.stderr.splitlines()[0]


def test_what_is_neither_a_folder_nor_a_ticket_is_said_before_heavy_imports(tmp_path: Path) -> None:
    for source, words in ((str(tmp_path / "gone"), "is neither a ticket"), ("dipaco1nonsense", "ticket")):
        result, heavy = probe("peers.cli", "serve", source, "--home", str(tmp_path))
        assert (result.returncode, heavy) == (2, []) and words in result.stderr
    result = CliRunner().invoke(cli.app, ["serve", str(tmp_path), "--port", "0"])
    assert result.exit_code == 2 and "holds no run" in result.stderr


def test_a_port_that_is_taken_is_one_line(served: Served) -> None:
    with serving(str(served.root)) as (_, address):
        port = address.split(":")[2].split("/")[0]
        result = CliRunner().invoke(cli.app, ["serve", str(served.root), "--port", port])
    assert result.exit_code == 5 and f"cannot listen on 127.0.0.1 port {port}" in result.stderr
