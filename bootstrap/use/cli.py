"""The commands of `dipaco-bootstrap` that use what was trained: `generate` and `export`. Heavy imports stay inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dipaco_p2p.program.control.options import end_program

Source = Annotated[str, typer.Argument(help="The run's folder or ticket, or a peer's address.")]
OfVersion = Annotated[int | None, typer.Option(min=0, help="The version of every module. Default: the newest of each.")]
RunId = Annotated[str | None, typer.Option(help="The run's id, or the start of it; any other run is refused.")]


def add_commands(app: typer.Typer, *, epilog: str) -> None:
    """Put them among the program's own."""
    for command in (generate, export):
        app.command(epilog=epilog)(command)


def generate(
    source: Source,
    prompt: Annotated[str | None, typer.Argument(help="The text to continue. Default: the standard input.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to write.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, help="Of sampling; 0 takes the likeliest token every time.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(min=0, help="Choose among this many of the likeliest tokens; 0: among all.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed writes the same text.")] = 0,
    path: Annotated[str, typer.Option(help="Take this path, such as P0-1-1, instead of routing.")] = "",
    every: Annotated[int, typer.Option(help="Route again after so many tokens, a multiple of 16; 0: once.")] = 0,
    version: OfVersion = None,
    best: Annotated[bool, typer.Option("--best", help="Each path at its best round on held-out text.")] = False,
    run: RunId = None,
) -> None:
    """Route a prompt to a path, and let it continue the text. Only that path is read, never the whole model.

    A prompt of fewer than 32 tokens is routed by those it has. The path that writes is named on the error stream.

    Example: dipaco-bootstrap generate my-run 'It was a dark and stormy night' --every 64
    """

    async def main() -> None:
        from .generate import Request, generate_from, read_prompt

        request = Request(
            prompt=read_prompt(prompt),
            tokens_max=max_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            path=path,
            version=version,
            best=best,
            every=every,
        )
        await generate_from(source, request, expected=run)

    end_program(main)


def export(
    source: Source,
    to: Annotated[Path, typer.Option(help="A folder that is new or empty.")],
    path: Annotated[
        str | None, typer.Option(help="The path to write, such as P0-1-1. Default: all trained ones, each in a folder.")
    ] = None,
    version: OfVersion = None,
    best: Annotated[bool, typer.Option("--best", help="Each path at its best round on held-out text.")] = False,
    gguf: Annotated[bool, typer.Option("--gguf", help="Also write each path for llama.cpp, as model.gguf.")] = False,
    licence: Annotated[str, typer.Option(help="The weights' licence, for the card: apache-2.0, other, ...")] = "",
    language: Annotated[
        list[str] | None, typer.Option(help="The text's language, for the card: a code such as en. Repeatable.")
    ] = None,
    data: Annotated[str, typer.Option(help="What the text was, for the card: a dataset on the hub, or a line.")] = "",
    push: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="Publish it as this model on the Hugging Face hub.")
    ] = None,
    run: RunId = None,
) -> None:
    """Write one path, or all, as Hugging Face checkpoints, with tokenizer, routers and a model card with the lineage.

    --push takes the token from HF_TOKEN or `hf auth login`. It creates the model on the hub if need be: public, unless
    you made it private before.

    Example: dipaco-bootstrap export my-run --path P0-1-0 --to my-path
    """

    async def main() -> None:
        from .card import Words  # before the imports that take seconds

        words = Words(licence=licence, languages=tuple(language or ()), data=data)
        hub = None
        if push is not None:
            from .hub import Hub

            hub = Hub(push)
        from .export import Wish, export_from

        wish = Wish(path=path, version=version, best=best, has_gguf=gguf, words=words)
        exported = await export_from(source, wish, to, expected=run)
        print(f"wrote {', '.join(map(str, exported))} to {to}")
        if hub is not None:
            print(f"pushed: {hub.push(to)}")

    end_program(main)
