"""`dipaco-bootstrap export --push`, to a server on this machine that speaks as the hub does."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants
from serving_harness import Served, make_served, run_cli

# huggingface_hub 2.4 puts files by a way that httpx2 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

TOKEN = "hf_a_token_of_the_test"
LICENCES = ("mit", "unknown")
"""Some of those that the hub knows."""


class FakeHub(ThreadingHTTPServer):
    """Keeps what is pushed: https://huggingface.co/docs/hub/api, and Git LFS for what is large."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.refusal: tuple[int, str] | None = None
        self.asked: list[str] = []
        self.made: set[str] = set()
        self.large: dict[str, bytes] = {}
        self.commits: list[dict[str, bytes]] = []


class _Answers(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        self._answer(404, {"error": "not here"})  # no .gitignore

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        data = self._data()
        assert hashlib.sha256(data).hexdigest() == self.path.rpartition("/")[2]
        self.server.large[self.path.rpartition("/")[2]] = data
        self._answer(200, {})

    def do_POST(self) -> None:
        data, hub = self._data(), self.server
        hub.asked.append(self.path)
        if hub.refusal is not None:
            self._answer(hub.refusal[0], {"error": hub.refusal[1]})
        elif self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            body = json.loads(data)
            name = f"{body['organization']}/{body['name']}"
            url = f"{hub.address}/{name}"
            self._answer(409 if name in hub.made else 200, {"url": url, "name": name})
            hub.made.add(name)
        elif self.path == "/api/validate-yaml":
            front = yaml.safe_load(json.loads(data)["content"].split("---")[1])
            errors = [] if front["license"] in LICENCES else [{"message": '"license" must be one of those'}]
            self._answer(400 if errors else 200, {"errors": errors, "warnings": []})
        elif self.path == "/api/models/org/model/preupload/main":
            files = [self._mode(file) for file in json.loads(data)["files"]]
            self._answer(200, {"files": files})
        elif self.path == "/org/model.git/info/lfs/objects/batch":
            objects = [
                {**found, "actions": {"upload": {"href": f"{hub.address}/put/{found['oid']}", "header": {}}}}
                for found in json.loads(data)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif self.path == "/api/models/org/model/commit/main":
            hub.commits.append(dict(self._committed(data)))
            self._answer(200, {"commitUrl": f"{hub.address}/org/model/commit/1", "commitOid": "1" * 40})
        else:
            self._answer(404, {"error": f"no {self.path}"})

    def _mode(self, file: dict[str, Any]) -> dict[str, Any]:
        is_large = file["path"].endswith((".safetensors", ".gguf"))
        return {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}

    def _committed(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        for line in map(json.loads, data.splitlines()):
            if line["key"] == "file":
                yield line["value"]["path"], base64.b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                yield line["value"]["path"], self.server.large[line["value"]["oid"]]

    def _data(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture(autouse=True)
def _no_token_of_this_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    # Xet, which the real hub may prefer for large files, has no server that could be had here.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as found:
        thread = Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", found.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        try:
            yield found
        finally:
            found.shutdown()
            thread.join()
            huggingface_hub.close_session()


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return make_served(tmp_path / "run")


def export(served: Served, *arguments: str, name: str = "org/model") -> tuple[int, str, str]:
    return run_cli("export", str(served.root), "--to", str(served.root.parent / "out"), "--push", name, *arguments)


@pytest.mark.parametrize("path", ["P0-1-1", None])
def test_the_model_is_made_and_the_whole_folder_is_one_commit(hub: FakeHub, served: Served, path: str | None) -> None:
    chosen = ("--path", path) if path else ()
    code, said, errors = export(served, *chosen, "--gguf", "--licence", "mit")
    assert (code, errors) == (0, ""), errors
    assert said.splitlines()[-1] == f"pushed: {hub.address}/org/model/commit/1"
    folder = served.root.parent / "out"
    wanted = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert hub.commits == [wanted] and hub.made == {"org/model"}
    assert b"license: mit" in wanted["README.md"] and ("P0-0-0/model.gguf" in wanted) == (path is None)


def test_a_licence_that_the_hub_does_not_know_is_one_line(hub: FakeHub, served: Served) -> None:
    code, _, errors = export(served, "--path", "P0-1-1", "--licence", "beerware")
    assert code == 2 and '"license" must be one of those' in errors.splitlines()[0] and hub.commits == []


def test_a_model_that_is_there_gets_a_further_commit(hub: FakeHub, served: Served) -> None:
    hub.made.add("org/model")
    assert export(served, "--path", "P0-1-1")[0] == 0
    assert len(hub.commits) == 1


@pytest.mark.parametrize(
    ("refusal", "code", "words"),
    [
        ((403, "You have no right to org"), 2, "the hub refuses org/model: You have no right to org"),
        ((401, "Invalid username or password."), 2, "the hub refuses org/model: Invalid username or password."),
        ((500, "oh no"), 4, "cannot be pushed to"),
    ],
)
def test_a_hub_that_refuses_is_one_line_and_the_export_stays(
    hub: FakeHub, served: Served, refusal: tuple[int, str], code: int, words: str
) -> None:
    hub.refusal = refusal
    found, _, errors = export(served, "--path", "P0-1-1")
    error, hint = errors.splitlines()
    assert found == code and words in error and "hf upload org/model" in hint
    assert (served.root.parent / "out" / "model.safetensors").exists() and hub.commits == []


def test_a_hub_that_does_not_answer_is_one_line(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeHub() as gone:
        monkeypatch.setenv("HF_ENDPOINT", gone.address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, _, errors = export(served, "--path", "P0-1-1")
    assert code == 4 and f"org/model cannot be pushed to {os.environ['HF_ENDPOINT']}" in errors.splitlines()[0]


def test_without_a_token_nothing_is_written_or_asked(
    hub: FakeHub, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    code, said, errors = export(served, "--path", "P0-1-1")
    assert (code, said) == (2, "")
    assert errors.splitlines() == [
        "error: no token of the hub to push org/model with",
        "hint: set HF_TOKEN to one that may write, or run `hf auth login`",
    ]
    assert hub.asked == [] and not (served.root.parent / "out").exists()


@pytest.mark.parametrize("name", ["model", "a/b/c", "org/", "org/..", "org/a model"])
def test_a_wrong_name_is_refused_before_any_work(hub: FakeHub, served: Served, name: str) -> None:
    code, _, errors = export(served, name=name)
    assert code == 2 and errors.startswith(f"error: `--push {name}` is not the name of a model on the hub")
    assert hub.asked == [] and not (served.root.parent / "out").exists()
