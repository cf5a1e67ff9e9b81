"""`python -m benchmarks.serve FOLDER`: what `dipaco-peer serve` takes for a token, with a coordinator's own model.

Time to the first token of a routed prompt with warm paths; tokens/s of one stream beside `transformers.generate` and a
plain loop without a cache, all of the same path, in turns; and of many streams at once.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import openai
import torch
import typer

from benchmarks.processes import end_with_parent
from benchmarks.report import JsonFile, median_ratio, run_benchmark, seconds_of, show, spread, table, write_json
from bootstrap.processes import command_of
from bootstrap.use.export import Wish, export_run
from dipaco_p2p.core.model.transformer import PathModel, path_model
from dipaco_p2p.use.served import open_served
from dipaco_p2p.use.tokenizer import END_ID
from peers.serving.serve import SAID

PROMPT = (
    "It was a dark and stormy night, and the function returned nothing; then the list of values was sorted, twice. "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured; seconds, and tokens per second by turn."""

    first_token_s: list[float]
    served: list[float]
    transformers: list[float]
    plain: list[float]
    together: float
    """Of all streams at once."""
    together_first_s: list[float]
    errors: int


def main(
    folder: Annotated[Path, typer.Argument(help="A coordinator's folder, as given to `start --dir`.")],
    tokens: Annotated[int, typer.Option(min=2, help="Written in each text.")] = 128,
    turns: Annotated[int, typer.Option(min=1)] = 5,
    streams: Annotated[int, typer.Option(min=1)] = 16,
    json_file: JsonFile = None,
) -> None:
    """Measure the endpoint beside the same path in this process."""
    with tempfile.TemporaryDirectory(prefix="dipaco-serve-") as place:
        path, model = asyncio.run(_path_of(folder, Path(place) / "path"))
        with serving(folder, streams) as address:
            found = asyncio.run(measured(address, path, model, place, tokens=tokens, turns=turns, streams=streams))
    first, slowest = spread(found.first_token_s), max(found.together_first_s)
    rows = [
        [name, *(f"{value:,.0f}" for value in spread(values)), f"{median_ratio(found.served, values):.2f}"]
        for name, values in (("serve", found.served), ("transformers", found.transformers), ("no cache", found.plain))
    ]
    show(
        table("one stream, tokens/s", ("", "median", "least", "most", "serve to it"), rows),
        f"first token of a routed prompt: median {first[0] * 1e3:.0f} ms, at most {first[2] * 1e3:.0f} ms",
        f"{streams} streams: {found.together:,.0f} tokens/s in all, slowest first token {slowest:.2f} s,"
        f" {found.errors} errors",
    )
    write_json(json_file, asdict(found))


async def _path_of(folder: Path, to: Path) -> tuple[str, PathModel]:
    """The first path, as a model and as a checkpoint of transformers."""
    async with open_served(str(folder)) as served:
        path = served.run.topology.path(0)
        flats = await served.flats(await served.path_versions(path))
        await export_run(served, Wish(path=str(path)), to)
        return str(path), path_model(served.run.config.model, flats)


@contextmanager
def serving(folder: Path, streams: int) -> Iterator[str]:
    """The program, and the address of its API."""
    command = command_of("peers.cli", "serve", str(folder), "--port", "0", "--streams", str(streams))
    environment = os.environ | {"DIPACO_KEY": ""}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=end_with_parent
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().removeprefix(SAID).partition(",")[0].strip()
        finally:
            process.terminate()


async def measured(
    address: str, path: str, model: PathModel, checkpoint: str, *, tokens: int, turns: int, streams: int
) -> Figures:
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
        return await measure(client, path, model, checkpoint, tokens=tokens, turns=turns, streams=streams)


async def measure(
    client: openai.AsyncOpenAI,
    path: str,
    model: PathModel,
    checkpoint: str,
    *,
    tokens: int,
    turns: int,
    streams: int,
) -> Figures:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded: Any = AutoModelForCausalLM.from_pretrained(Path(checkpoint) / "path")
    peer = loaded.eval()
    prompt = AutoTokenizer.from_pretrained(Path(checkpoint) / "path").encode(PROMPT)[: model.config.context // 4]
    firsts, speeds = [], {"served": list[float](), "transformers": list[float](), "plain": list[float]()}
    for number in range(turns + 1):  # the first one warms up
        first = [(await stream(client, "auto", prompt, count=2, seed=seed))[0] for seed in range(4)]
        began_s, written = time.perf_counter(), await stream(client, path, prompt, count=tokens, seed=number)
        served = written[1] / (time.perf_counter() - began_s)
        others = tokens / seconds_of(lambda: generate(peer, prompt, tokens)), plain_speed(model, prompt, tokens)
        if number:
            firsts += first
            for name, speed in zip(speeds, (served, *others), strict=True):
                speeds[name].append(speed)
    began_s = time.perf_counter()
    wishes = (stream(client, "auto", prompt, count=tokens, seed=seed) for seed in range(streams))
    found = await asyncio.gather(*wishes, return_exceptions=True)
    took_s, good = time.perf_counter() - began_s, [one for one in found if not isinstance(one, BaseException)]
    return Figures(
        first_token_s=firsts,
        together=sum(count for _, count in good) / took_s,
        together_first_s=[first_s for first_s, _ in good],
        errors=len(found) - len(good),
        **speeds,
    )


async def stream(
    client: openai.AsyncOpenAI, model: str, prompt: Sequence[int], *, count: int, seed: int
) -> tuple[float, int]:
    """Seconds to the first token, and how many came; a text that ends early goes on from its prompt."""
    began_s, first_s, written = time.perf_counter(), 0.0, 0
    while written < count:
        wish = {"model": model, "prompt": list(prompt), "max_tokens": count - written, "seed": seed + written}
        options: Any = {**wish, "stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await client.completions.create(**options):
            first_s = first_s or time.perf_counter() - began_s
            written += chunk.usage.completion_tokens if chunk.usage else 0
        written += 1  # the end of the document, which is written and not shown
    return first_s, count


@torch.inference_mode()
def generate(peer: Any, prompt: Sequence[int], count: int) -> None:
    peer.generate(
        torch.tensor([list(prompt)]), do_sample=True, max_new_tokens=count, min_new_tokens=count, pad_token_id=END_ID
    )


@torch.inference_mode()
def plain_speed(model: PathModel, prompt: Sequence[int], count: int) -> float:
    """Tokens/s of a loop that reads the whole text for each token."""
    text, context = list(prompt), model.config.context

    def write() -> None:
        for _ in range(count):
            logits = model(torch.tensor([text[-context:]]))[0, -1]
            text.append(int(torch.multinomial(logits.softmax(dim=0), 1)))

    return count / seconds_of(write)


if __name__ == "__main__":
    run_benchmark(main)
