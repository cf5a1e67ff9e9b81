"""`python -m benchmarks.llama FOLDER`: an exported path in llama.cpp itself, beside the path in this project.

Needs `llama-cpp-python`, which is built from source and is no part of the development environment. Token ids of many
texts, in many scripts and of random characters; logits and perplexity of held-out sequences; tokens per second.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from benchmarks.report import JsonFile, run_benchmark, show, write_json
from bootstrap.use.export import Wish, export_run
from dipaco_p2p.core.model.generate import Sampler, generate
from dipaco_p2p.core.model.shards import decode_held_out
from dipaco_p2p.core.model.transformer import PathModel, path_model
from dipaco_p2p.use.served import open_served
from dipaco_p2p.use.tokenizer import Tokenizer

PLANES = (0x80, 0x800, 0x3000, 0x10000, 0x110000)
"""Characters of a random text are below one of these."""
SENTENCES = (
    "Grüße aus Zürich, naïve cafés, cafe\u0301 and I'll, they've, WE'RE, it's 12,345.67 ½ ² Ⅷ ٣٤",
    "Το γρήγορο αλεπού, быстрая лисица, שועל זריז, الثعلب السريع, तेज़ लोमड़ी, ไวสุนัขจิ้งจอก",
    "素早い茶色の狐が怠惰な犬を飛び越える。敏捷的棕色狐狸。빠른 갈색 여우",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇨🇭 ☕️ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u200b\u200d\ufeff\u00ad\u2028\u2029\u0085\u00a0\u3000",
    "  \t\n\r\n \x0b\x0c\x1c\x00 <|end|> </s> <s> [INST] \\n 'S 'T ''ve",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(3)]}  # ——— ≤ ≥ ∑ ∫\n\n\n",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was compared."""

    texts: int
    characters: int
    other_tokens: list[str]
    """Texts whose tokens differ."""
    sequences: int
    logit_difference: float
    """The greatest."""
    perplexity: float
    perplexity_there: float
    is_same_text: bool
    """Whether both write the same greedily."""
    speed: float
    """Tokens per second."""
    speed_there: float


def main(
    folder: Annotated[Path, typer.Argument(help="A coordinator's folder, as given to `start --dir`.")],
    path: Annotated[str, typer.Option(help="The path to compare.")] = "P0-0-0",
    texts: Annotated[int, typer.Option(min=1, help="Random texts.")] = 2000,
    sequences: Annotated[int, typer.Option(min=1, help="Held-out sequences.")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="To write, for the speed.")] = 128,
    json_file: JsonFile = None,
) -> None:
    """Compare the path with itself in llama.cpp."""
    with tempfile.TemporaryDirectory(prefix="dipaco-llama-") as place:
        model, tokenizer, held_out = asyncio.run(_exported(folder, path, Path(place) / "path"))
        found = compare(
            Path(place) / "path" / "model.gguf", model, tokenizer, held_out[:sequences], texts=texts, tokens=tokens
        )
    show(
        f"{found.texts:,} texts of {found.characters:,} characters: {len(found.other_tokens)} with other token ids",
        *map(repr, found.other_tokens[:10]),
        f"{found.sequences} held-out sequences: logits differ by at most {found.logit_difference:.1e}, perplexity"
        f" {found.perplexity:.4f} here, {found.perplexity_there:.4f} there",
        f"greedily they write {'the same' if found.is_same_text else 'different'} {tokens} tokens,"
        f" {found.speed:,.0f} a second here, {found.speed_there:,.0f} there",
    )
    write_json(json_file, asdict(found))


async def _exported(folder: Path, path: str, to: Path) -> tuple[PathModel, Tokenizer, NDArray[np.int32]]:
    async with open_served(str(folder)) as served:
        config = served.run.config.model
        await export_run(served, Wish(path=path, has_gguf=True), to)
        model = path_model(config, await served.flats(await served.path_versions(served.path(path))))
        blob = await served.blob(served.run.manifest.validation)
        held_out = decode_held_out(blob, vocab_size=config.vocab_size, context=config.context)
        return model, await served.tokenizer(), held_out.tokens


@torch.inference_mode()
def compare(
    file: Path, model: PathModel, tokenizer: Tokenizer, held_out: NDArray[np.int32], *, texts: int, tokens: int
) -> Figures:
    import llama_cpp

    context = model.config.context
    exact = llama_cpp.GGML_TYPE_F32  # what it has read it keeps in float16 otherwise
    options: Any = {"n_ctx": context, "n_threads": 1, "logits_all": True, "type_k": exact, "type_v": exact}
    there: Any = llama_cpp.Llama(str(file), verbose=False, **options)
    tried = [*SENTENCES, *(tokenizer.decode(row) for row in held_out.tolist()), *random_texts(texts)]
    other = [
        text for text in tried if there.tokenize(text.encode(), add_bos=False, special=False) != tokenizer.encode(text)
    ]
    difference, nats, nats_there = 0.0, [], []
    for row in held_out.tolist():
        there.reset()
        there.eval(row)
        logits_there = np.array(there.scores[: len(row)], dtype=np.float64)
        logits = model(torch.tensor([row]))[0].numpy().astype(np.float64)
        difference = max(difference, float(np.abs(logits - logits_there).max()))
        nats.append(nats_of(logits, row))
        nats_there.append(nats_of(logits_there, row))
    prompt, count = held_out[0, : context // 4].tolist(), min(tokens, context // 2)
    began_s = time.perf_counter()
    written = list(generate(model, prompt, count=count, sampler=Sampler(temperature=0)))
    middle_s = time.perf_counter()
    there.reset()
    steps = there.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)
    written_there = [token for token, _ in zip(steps, range(count), strict=False)]
    return Figures(
        texts=len(tried),
        characters=sum(map(len, tried)),
        other_tokens=other,
        sequences=len(held_out),
        logit_difference=difference,
        perplexity=math.exp(float(np.mean(nats))),
        perplexity_there=math.exp(float(np.mean(nats_there))),
        is_same_text=written == written_there,
        speed=count / (middle_s - began_s),
        speed_there=count / (time.perf_counter() - middle_s),
    )


def random_texts(count: int) -> Iterator[str]:
    """Letters, digits, white space and what else there is, but halves of surrogate pairs, which no text has."""
    generator = np.random.default_rng(0)
    for number in range(count):
        below = PLANES[number % len(PLANES)]
        points = generator.integers(0, below, int(generator.integers(1, 60)))
        plain = generator.choice([32, 32, 10, 39, 49, 97, 115], len(points))
        mixed = np.where(generator.random(len(points)) < 0.4, plain, points)
        yield "".join(chr(point) for point in mixed if unicodedata.category(chr(point)) != "Cs")


def nats_of(logits: NDArray[np.float64], row: Sequence[int]) -> float:
    """Cross-entropy per token of a sequence."""
    rows, targets = logits[:-1], np.array(row[1:])
    greatest = rows.max(axis=1)
    sums = greatest + np.log(np.exp(rows - greatest[:, None]).sum(axis=1))
    return float((sums - rows[np.arange(len(rows)), targets]).mean())


if __name__ == "__main__":
    run_benchmark(main)
