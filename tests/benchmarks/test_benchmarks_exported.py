"""The benchmarks of exported paths: with another reader in the place of llama.cpp, and the task files of lm-eval."""

from __future__ import annotations

import asyncio
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
import yaml
from serving_harness import CONTEXT, TOKENIZER, make_served
from typer.testing import CliRunner

from benchmarks import llama, lm_eval
from dipaco_p2p.core.model.transformer import PathModel
from dipaco_p2p.topology import PathId
from dipaco_p2p.use.tokenizer import Tokenizer


def another_reader(model: PathModel, tokenizer: Tokenizer, *, shift: float) -> types.ModuleType:
    """What the benchmark asks of llama_cpp; its logits are `shift` off, and `z` is another token to it."""

    class Llama:
        def __init__(self, file: str, *, n_ctx: int, **options: Any) -> None:
            assert Path(file).read_bytes()[:4] == b"GGUF" and n_ctx == CONTEXT
            self.scores = np.zeros((CONTEXT, 260))

        def tokenize(self, text: bytes, **options: Any) -> list[int]:
            return tokenizer.encode(text.decode().replace("z", "y"))

        def reset(self) -> None:
            self.scores[:] = 0

        def eval(self, row: list[int]) -> None:
            self.scores[: len(row)] = model(torch.tensor([row]))[0].detach().numpy()
            self.scores[0, 0] += shift

        def generate(self, prompt: list[int], **options: Any) -> Any:
            text = list(prompt)
            while True:
                text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
                yield text[-1]

    found = types.ModuleType("llama_cpp")
    found.Llama, found.GGML_TYPE_F32 = Llama, 0  # type: ignore[attr-defined]
    return found


def test_tokens_logits_and_texts_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, figures = make_served(tmp_path / "run"), tmp_path / "figures.json"
    fake = another_reader(served.model(PathId((0, 1, 1))), Tokenizer(TOKENIZER), shift=0.5)
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    app = typer.Typer()
    app.command()(llama.main)
    wish = ["--path", "P0-1-1", "--texts", "50", "--sequences", "3", "--tokens", "8", "--json", str(figures)]
    result = CliRunner().invoke(app, [str(served.root), *wish], catch_exceptions=False)
    found = json.loads(figures.read_text())
    assert result.exit_code == 0 and "write the same" in result.output
    assert found["is_same_text"] and found["sequences"] == 3
    assert found["logit_difference"] == pytest.approx(0.5, abs=1e-5)
    assert found["perplexity"] == pytest.approx(found["perplexity_there"], rel=0.1)
    assert found["other_tokens"] and all("z" in text for text in found["other_tokens"])


def test_random_texts_are_text_of_all_planes() -> None:
    texts = list(llama.random_texts(50))
    assert texts == list(llama.random_texts(50)) and all(text.encode().decode() == text for text in texts)
    highest = {max(map(ord, text), default=0).bit_length() for text in texts}
    assert {7, 21} & highest and len(highest) > 3


def test_the_tasks_of_the_harness_are_over_local_text(tmp_path: Path) -> None:
    texts = [f"{number}" * 300 for number in range(7)]
    lm_eval.write_tasks(tmp_path / "tasks", texts)
    for name in ("text", "choice"):
        task = yaml.safe_load((tmp_path / "tasks" / f"{name}.yaml").read_text())
        assert task["task"] == f"dipaco_{name}" and task["dataset_path"] == "json"
        rows = [
            json.loads(line) for line in Path(task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
        ]
        assert len(rows) == 7
        assert {one["metric"] for one in task["metric_list"]} == set(lm_eval.FIGURES[task["task"]])
    for row, text in zip(rows, texts, strict=True):
        assert row["begun"] + row["ways"][row["right"]] == text[:260] and len(set(row["ways"])) == 4


def test_held_out_texts_and_the_path_are_prepared(tmp_path: Path) -> None:
    served = make_served(tmp_path / "run")
    context, texts = asyncio.run(lm_eval._prepared(tmp_path / "run", "P0-1-1", tmp_path / "out", count=2))
    assert context == CONTEXT == served.run.config.model.context and len(texts) <= 2
    assert (tmp_path / "out" / "model.safetensors").exists()
