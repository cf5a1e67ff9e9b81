"""`dipaco-bootstrap export`: transformers loads what is written, and it is the same model."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import load_file
from serving_harness import (
    CONTEXT,
    FLAT,
    PRIVATE,
    PROMPT,
    ROUNDS,
    TIED,
    TOKENIZER,
    UNTIED,
    Served,
    make_served,
    publish,
    random_router,
    run_cli,
    write,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from bootstrap.use import export
from bootstrap.use.card import Words
from bootstrap.use.export import Wish, export_run
from bootstrap.use.generate import Request
from dipaco_p2p.core.routing.router import decode_router
from dipaco_p2p.errors import ConfigError, EnvironmentUnfit
from dipaco_p2p.topology import ModuleId, PathId
from dipaco_p2p.use.tokenizer import Tokenizer

MODELS = {"tied": TIED, "untied": UNTIED, "private": PRIVATE, "flat": FLAT}
PATH = {"tied": PathId((0, 1, 1)), "untied": PathId((1, 0)), "private": PathId((1, 0, 2)), "flat": PathId((3,))}
WORDS = Words(licence="cc-by-4.0", languages=("en", "no"), data="org/corpus")
EVALUATION = {"version": ROUNDS, "loss": 3.25, "perplexity": 25.79, "paths": {"P0-1-1": {"loss": 3.1875}}}


@pytest.fixture(scope="module", params=list(MODELS))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Served, PathId, Path]:
    """A run, one of its paths, and the folder that it was exported to."""
    folder = tmp_path_factory.mktemp(request.param)
    served = make_served(folder / "run", model=MODELS[request.param])
    if request.param == "tied":
        (served.store.folder / "evaluations.jsonl").write_text(json.dumps(EVALUATION) + "\n")
    path = PATH[request.param]
    asyncio.run(export_run(served.open(), Wish(path=str(path), has_gguf=True, words=WORDS), folder / "out"))
    return served, path, folder / "out"


@torch.no_grad()
def test_transformers_loads_the_same_model(exported: tuple[Served, PathId, Path]) -> None:
    served, path, folder = exported
    model, notes = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(model, LlamaForCausalLM) and model.dtype == torch.float32
    assert not any(notes[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 260, (3, CONTEXT)))
    expected = served.model(path)(tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(model(tokens).logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "text", [PROMPT, "naïve \N{FIRE}  two  spaces\n\n\ttab", "<|end|> is text here", " leading", ""]
)
def test_its_tokenizer_is_the_run_s_own(exported: tuple[Served, PathId, Path], text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported[2])
    ids = tokenizer(text)["input_ids"]
    assert ids == Tokenizer(TOKENIZER).encode(text)
    assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token_id, len(tokenizer), tokenizer.model_max_length) == (0, 260, CONTEXT)


@torch.no_grad()
def test_transformers_generates_the_same_greedy_text(exported: tuple[Served, PathId, Path]) -> None:
    served, path, folder = exported
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    count = inputs["input_ids"].shape[1]
    output = model.generate(**inputs, max_new_tokens=CONTEXT - count, do_sample=False)[0, count:]
    request = Request(prompt=PROMPT, tokens_max=CONTEXT - count, temperature=0, path=str(path))
    assert tokenizer.decode(output, skip_special_tokens=True) == write(served, request).text != ""


def test_the_card_names_where_everything_comes_from(exported: tuple[Served, PathId, Path]) -> None:
    served, path, folder = exported
    card = (folder / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert (front["license"], front["language"], front["datasets"]) == ("cc-by-4.0", ["en", "no"], ["org/corpus"])
    assert front["library_name"] == "transformers" and "gguf" in front["tags"]
    for fact in (served.run.id, served.run.manifest.author, served.run.manifest.tokenizer.digest, f"path {path}"):
        assert fact in card
    for version in asyncio.run(served.open().path_versions(path)):
        assert f"| {version.module} | {ROUNDS} | `{version.digest}` | `{version.parent[:8]}` |" in card
    shard = served.run.shard(path)
    assert f"{shard.sequences} sequences of {CONTEXT} tokens" in card and shard.blob.digest in card
    assert ("3.2500 nats per token, perplexity 25.79" in card) == (str(path) == "P0-1-1")
    assert ("sequences that are routed to it: 3.1875 nats" in card) == (str(path) == "P0-1-1")


def test_the_routers_lie_beside_it(exported: tuple[Served, PathId, Path]) -> None:
    served, _, folder = exported
    features = np.random.default_rng(0).standard_normal((50, 16)).astype(np.float32)
    router = decode_router((folder / "router.safetensors").read_bytes(), path_count=4, width=16)
    np.testing.assert_array_equal(router.scores(features), served.router.scores(features))
    token_router = load_file(folder / "token_router.safetensors")
    np.testing.assert_array_equal(token_router["weights"], served.token_router.weights)
    about = json.loads((folder / "router.json").read_text())
    assert about["run"] == served.run.id
    assert about["paths"] == [str(served_path) for served_path in served.run.topology.paths()]
    assert set(about["feature_model"].values()) == {ref.blob.digest for ref in served.run.manifest.genesis}


def test_the_formula_beside_the_router_gives_its_scores(exported: tuple[Served, PathId, Path]) -> None:
    served, _, folder = exported
    features = np.random.default_rng(0).standard_normal((50, 16)).astype(np.float32)
    formula = json.loads((folder / "router.json").read_text())["scores"].split(";")[0]
    found = eval(formula, load_file(folder / "router.safetensors") | {"features": features})
    np.testing.assert_allclose(found, served.router.scores(features), rtol=1e-4, atol=1e-4)


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return make_served(tmp_path / "run", has_token_router=False)


def test_an_older_version_can_be_exported(served: Served, tmp_path: Path) -> None:
    asyncio.run(export_run(served.open(), Wish(path="P0-1-1", version=1), tmp_path / "out"))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in served.model(PATH["tied"], 1).state_dict().items():
        np.testing.assert_array_equal(tensors[name], value.numpy())
    assert not (tmp_path / "out" / "token_router.safetensors").exists()


def test_a_folder_with_something_in_it_is_refused_and_left_alone(served: Served, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("out", "file"):
        with pytest.raises(ConfigError, match="is there and not an empty folder"):
            asyncio.run(export_run(served.open(), Wish(path="P0-1-1"), tmp_path / name))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_an_empty_folder_is_filled(served: Served, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    asyncio.run(export_run(served.open(), Wish(path="P0-1-1"), tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_full_disk_leaves_nothing(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = export.write_atomically

    def fill(path: Path, data: bytes) -> None:
        if path.name == "tokenizer.json":
            raise EnvironmentUnfit("no space left on the disk")
        write(path, data)

    monkeypatch.setattr(export, "write_atomically", fill)
    before = set(tmp_path.iterdir())
    with pytest.raises(EnvironmentUnfit):
        asyncio.run(export_run(served.open(), Wish(path="P0-1-1"), tmp_path / "out"))
    assert set(tmp_path.iterdir()) == before


def test_a_router_of_another_run_is_not_exported(tmp_path: Path) -> None:
    served = make_served(tmp_path / "run", router=random_router(8, seed=0))
    code = run_cli("export", str(served.root), "--path", "P0-0-0", "--to", str(tmp_path / "out"))[0]
    assert code == 8 and not (tmp_path / "out").exists()


def test_the_command_exports_once(served: Served, tmp_path: Path) -> None:
    arguments = ("export", str(served.root), "--path", "P0-1-1", "--to", str(tmp_path / "new" / "out"))
    assert run_cli(*arguments) == (0, f"wrote P0-1-1 to {tmp_path / 'new' / 'out'}\n", "")
    code, _, errors = run_cli(*arguments)
    assert code == 2 and "is there and not an empty folder" in errors


@pytest.mark.parametrize(
    ("change", "words"),
    [(("--path", "P0-0"), "has no path P0-0"), (("--version", "9"), "has no version 9 yet")],
)
def test_what_cannot_be_exported_is_one_line(
    served: Served, tmp_path: Path, change: tuple[str, str], words: str
) -> None:
    arguments = ("export", str(served.root), "--path", "P0-1-1", "--to", str(tmp_path / "out"))
    code, _, errors = run_cli(*arguments, *change)
    assert code == 2 and errors.startswith("error: ") and words in errors.splitlines()[0]
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Served, Path]:
    """A run, and the folder of all its paths."""
    folder = tmp_path_factory.mktemp("whole")
    served = make_served(folder / "run")
    asyncio.run(export_run(served.open(), Wish(has_gguf=True), folder / "out"))
    return served, folder / "out"


@torch.no_grad()
def test_a_mixture_has_every_path_and_the_model_that_routers_look_at(whole: tuple[Served, Path]) -> None:
    served, folder = whole
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 260, (2, CONTEXT)))
    models = {str(path): served.model(path) for path in served.run.topology.paths()} | {"features": served.frozen()}
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set(models)
    for name, model in models.items():
        found = AutoModelForCausalLM.from_pretrained(folder / name)(tokens).logits
        torch.testing.assert_close(found, model(tokens), atol=1e-4, rtol=0)
        assert (folder / name / "model.gguf").exists() == (name != "features")


@pytest.mark.parametrize("prompt", [PROMPT, "the end", "a rest of the path of the text, a b c d e f g h i j k l m n"])
def test_the_program_in_the_card_routes_as_the_run_does(
    whole: tuple[Served, Path], monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    served, folder = whole
    [program] = re.findall("```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    found: dict[str, Any] = {}
    exec(program.replace("Once upon a time", prompt), found)
    said = write(served, Request(prompt=prompt, tokens_max=1)).said
    assert said[-1].startswith(f"{found['path']}:")


def test_a_mixture_has_only_the_paths_that_were_trained(tmp_path: Path) -> None:
    served = make_served(tmp_path / "run", model=PRIVATE, versions=0)
    publish(served, ModuleId(0, 1), 1)
    said = f"wrote P1-0-2, P1-1-3 to {tmp_path / 'out'}\n"
    assert run_cli("export", str(served.root), "--to", str(tmp_path / "out")) == (0, said, "")
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {"P1-0-2", "P1-1-3", "features"}
    assert json.loads((tmp_path / "out" / "router.json").read_text())["trained"] == ["P1-0-2", "P1-1-3"]


def test_a_mixture_s_card_has_a_line_for_each_path(tmp_path: Path) -> None:
    served = make_served(tmp_path / "run")
    served.write_evaluations({str(path): [3.0, 2.0, 2.5, 2.25] for path in served.run.topology.paths()})
    arguments = ("--licence", "mit", "--language", "en", "--data", "minutes of a club")
    assert run_cli("export", str(served.root), "--to", str(tmp_path / "out"), "--best", *arguments)[0] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    for path in served.run.topology.paths():
        assert f"- validation of {path}, on the sequences that are routed to it: 2.5000 nats" in card
        assert f"- round: 1 of 3, the best of {path} on held-out text" in card
    for fact in ("license: mit", "- licence of the weights: mit", "- language: en", "run: minutes of a club"):
        assert fact in card
    assert "datasets:" not in card and "router.json" in card


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--licence", "Do what you like"), ("--language", "English"), ("--data", "x" * 301), ("--data", "two\nlines")],
)
def test_words_that_the_hub_would_not_take_are_refused(served: Served, tmp_path: Path, flag: str, value: str) -> None:
    code, _, errors = run_cli("export", str(served.root), "--to", str(tmp_path / "out"), flag, value)
    assert code == 2 and errors.startswith(f"error: `{flag}") and not (tmp_path / "out").exists()
