"""`python -m benchmarks.lm_eval FOLDER`: does EleutherAI's harness find the same on `serve` and on the exported path?

Needs `lm-eval`, with what it calls its extras `api` and `hf`, which is no part of the development environment. The
tasks are files over local text, the run's own held-out sequences: no hub is asked. One measures perplexity, the other
picks how a text goes on from four ways.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.report import JsonFile, run_benchmark, show, table, write_json
from benchmarks.serve import serving
from bootstrap.use.export import Wish, export_run
from dipaco_p2p.core.model.shards import decode_held_out
from dipaco_p2p.use.served import open_served

TEXT = """task: dipaco_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
"""
CHOICE = """task: dipaco_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{begun}}}}"
doc_to_choice: "{{{{ways}}}}"
doc_to_target: right
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
FIGURES = {"dipaco_text": ("word_perplexity", "byte_perplexity", "bits_per_byte"), "dipaco_choice": ("acc", "acc_norm")}
WAYS = 4
BEGUN_CHARS, WAY_CHARS = 200, 60

Results = dict[str, float]


def main(
    folder: Annotated[Path, typer.Argument(help="A coordinator's folder, as given to `start --dir`.")],
    path: Annotated[str, typer.Option(help="The path to compare.")] = "P0-0-0",
    texts: Annotated[int, typer.Option(min=WAYS, help="Held-out sequences to take.")] = 40,
    json_file: JsonFile = None,
) -> None:
    """Run the harness on the path served, on the path exported, and on the endpoint that routes."""
    with tempfile.TemporaryDirectory(prefix="dipaco-lm-eval-") as place:
        exported, tasks = Path(place) / "path", Path(place) / "tasks"
        context, found = asyncio.run(_prepared(folder, path, exported, count=texts))
        write_tasks(tasks, found)
        with serving(folder, 16) as address:
            # Its client takes one token off a window, and one for the token that it has written behind each.
            client = f"base_url={address}/completions,tokenizer_backend=huggingface,tokenizer={exported}"
            client += f",max_length={context},num_concurrent=4,max_retries=1"
            here = f"pretrained={exported},dtype=float32,max_length={context - 2}"
            figures = {
                f"served {path}": harness("local-completions", f"model={path},{client}", tasks),
                f"exported {path}": harness("hf", here, tasks),
                "served auto": harness("local-completions", f"model=auto,{client}", tasks),
            }
    names = list(next(iter(figures.values())))
    rows = [[model, *(f"{results[name]:.4f}" for name in names)] for model, results in figures.items()]
    served, there = (list(results.values()) for results in list(figures.values())[:2])
    furthest = max(abs(one - other) / max(abs(other), 1e-9) for one, other in zip(served, there, strict=True))
    show(
        table(f"{texts} held-out texts of a context each", ("", *names), rows),
        f"served and exported differ by at most {furthest:.1e} of a figure",
    )
    write_json(json_file, figures)


async def _prepared(folder: Path, path: str, to: Path, *, count: int) -> tuple[int, list[str]]:
    """Export the path; the context, and held-out texts."""
    async with open_served(str(folder)) as served:
        config, tokenizer = served.run.config.model, await served.tokenizer()
        await export_run(served, Wish(path=path), to)
        blob = await served.blob(served.run.manifest.validation)
        held_out = decode_held_out(blob, vocab_size=config.vocab_size, context=config.context)
        # Halves of characters at the ends of a sequence are no text.
        texts = (tokenizer.decode(row).strip("\N{REPLACEMENT CHARACTER}") for row in held_out.tokens.tolist())
        return config.context, [text for text in texts if len(text) > BEGUN_CHARS + WAY_CHARS][:count]


def write_tasks(folder: Path, texts: Sequence[str]) -> None:
    """The task files and their data."""
    folder.mkdir()
    for name, task, rows in (("text", TEXT, ({"text": text} for text in texts)), ("choice", CHOICE, choices(texts))):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(task.format(file=data))


def choices(texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The beginning of each text, and how it and three others go on."""
    ways = [text[BEGUN_CHARS : BEGUN_CHARS + WAY_CHARS] for text in texts]
    for number, text in enumerate(texts):
        right = number % WAYS
        shown = [ways[(number + place - right) % len(ways)] for place in range(WAYS)]
        yield {"begun": text[:BEGUN_CHARS], "ways": shown, "right": right}


def harness(model: str, arguments: str, tasks: Path) -> Results:
    """What the harness finds of a model."""
    to = tasks.with_name(f"results-{len(list(tasks.parent.iterdir()))}")
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments, "--device", "cpu"]
    command += ["--tasks", "dipaco_text,dipaco_choice", "--include_path", str(tasks), "--output_path", str(to)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tasks.parent / "cache"), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"lm-eval failed on {model}:\n{done.stderr[-3000:]}")
    [file] = to.rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    return {name: results[task][f"{name},none"] for task, names in FIGURES.items() for name in names}


if __name__ == "__main__":
    run_benchmark(main)
