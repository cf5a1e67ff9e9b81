"""The model card of an export: what it is, how to use it, what it was trained on, under which licence, and its lineage.

Markdown, with the front matter that the Hugging Face hub reads: https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dipaco_p2p import __version__
from dipaco_p2p.config import PREFIX_TOKENS, count_buckets
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.node.run import Run
from dipaco_p2p.protocol.documents import ModuleVersion
from dipaco_p2p.protocol.signing import short
from dipaco_p2p.topology import PathId
from dipaco_p2p.use.best_rounds import Best

DATA_CHARS_MAX = 300
LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,40}")
LANGUAGE = re.compile(r"[a-z]{2,3}")
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
UNSAID = "not stated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What no document of a run says. Raises ConfigError for what the hub would not take."""

    licence: str = ""
    """Of the weights, as the hub writes it: apache-2.0, cc-by-sa-4.0, other."""
    languages: tuple[str, ...] = ()
    """ISO 639 codes."""
    data: str = ""
    """What the text was: a data set's name on the hub, or a line about it."""

    def __post_init__(self) -> None:
        if self.licence and not LICENCE.fullmatch(self.licence):
            hint = "write it as the hub does: apache-2.0, mit, cc-by-sa-4.0, other"
            raise ConfigError(f"`--licence {self.licence}` is not the name of a licence", hint=hint)
        for language in self.languages:
            if not LANGUAGE.fullmatch(language):
                raise ConfigError(
                    f"`--language {language}` is not a language's code", hint="write it like en, de or ast"
                )
        if len(self.data) > DATA_CHARS_MAX or not self.data.isprintable():
            raise ConfigError(f"`--data` is not one line of up to {DATA_CHARS_MAX} characters", hint="shorten it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A path, and what it is made of."""

    path: PathId
    versions: tuple[ModuleVersion, ...]
    best: Best | None = None
    """Why it is these versions, if it is for early stopping."""

    @property
    def version(self) -> int:
        """That of its oldest module."""
        return min(version.version for version in self.versions)

    @property
    def trained_loss(self) -> float | None:
        """In its last round, as its trainer said (nats per token)."""
        found = [share.loss for version in self.versions for share in version.shares if share.path == self.path]
        return found[-1] if found else None

    def held_out_loss(self, rows: Sequence[dict[str, Any]]) -> float | None:
        """On the validation sequences that are routed to it, by the evaluator's rows up to its version."""
        if self.best:
            return self.best.loss
        found: dict[str, Any] = rows[-1].get("paths", {}).get(str(self.path), {}) if rows else {}
        return found.get("loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a card is written from."""

    run: Run
    paths: Sequence[Exported]
    is_whole: bool
    """Whether these are all paths, each in a folder of its own."""
    evaluations: Sequence[dict[str, Any]]
    """Rows of the coordinator's evaluator, by version; empty where they are not known."""
    has_router: bool
    has_gguf: bool = False
    words: Words

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The evaluations up to what is exported."""
        newest = min(exported.version for exported in self.paths)
        return [row for row in self.evaluations if row.get("version", newest + 1) <= newest]


def write_card(card: Card) -> str:
    """The card as Markdown."""
    parts = (_front(card), _about(card), _use(card), _text(card), _losses(card), _lineage(card), _limits(card))
    return "\n".join(line for part in parts for line in part)


def _front(card: Card) -> Iterator[str]:
    words = card.words
    yield from ("---", "library_name: transformers", "pipeline_tag: text-generation")
    yield f"license: {words.licence or 'unknown'}"
    if words.languages:
        yield from ("language:", *(f'- "{language}"' for language in words.languages))  # `no` is a truth value in YAML
    if HUB_NAME.fullmatch(words.data):
        yield from ("datasets:", f"- {words.data}")
    yield from ("tags:", "- dipaco", "- dipaco-p2p", *(["- gguf"] if card.has_gguf else []), "---", "")
    what = f"{len(card.paths)} paths" if card.is_whole else f"path {card.paths[0].path}"
    yield from (f"# {card.run.config.name}, {what}", "")


def _about(card: Card) -> Iterator[str]:
    topology, model = card.run.topology, card.run.config.model
    what = "A" if card.is_whole else "One path of a"
    yield f"{what} DiPaCo language model ({card.run.name}), trained by volunteers over a peer-to-peer network."
    yield f"The model is a grid of {topology} modules with {topology.path_count} paths;"
    if card.is_whole:
        yield f"each of the {len(card.paths)} that were trained is here as a checkpoint of its own,"
    else:
        yield f"this checkpoint is path number {topology.number(card.paths[0].path)},"
    yield f"a Llama decoder with {sum(level.blocks for level in model.levels)} layers of width {model.width} that sees"
    yield f"{model.context} tokens. Written by dipaco-p2p {__version__}."
    if card.run.manifest.router is None:
        yield "The run was still in its warm-up: all paths of its grid will begin as this one."
    yield ""


def _use(card: Card) -> Iterator[str]:
    yield from ("## Use", "")
    if card.is_whole and card.has_router:
        yield from ("The router chooses the path by the first tokens of a prompt:", "", "```python", *_routed(card))
    else:
        place = f"./{card.paths[0].path}" if card.is_whole else "."
        yield from ("```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "")
        yield f'tokenizer = AutoTokenizer.from_pretrained("{place}")'
        yield f'model = AutoModelForCausalLM.from_pretrained("{place}")'
        yield 'inputs = tokenizer("Once upon a time", return_tensors="pt")'
    yield "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))"
    yield from ("```", "")
    if card.has_gguf:
        yield "`model.gguf` is the same path for llama.cpp and what is built on it, in float32, with the same tokens."
        yield from ("It knows no format of chats, and no token stands before a text.", "")


def _routed(card: Card) -> Iterator[str]:
    """A program that routes as the run does, with nothing of it."""
    yield from ("import json", "import torch", "from safetensors.torch import load_file")
    yield from ("from transformers import AutoModelForCausalLM, AutoTokenizer", "")
    yield from ('with open("router.json") as file:', "    about = json.load(file)")
    yield 'router = load_file("router.safetensors")'
    yield 'tokenizer = AutoTokenizer.from_pretrained(".")'
    yield 'inputs = tokenizer("Once upon a time", return_tensors="pt")'
    yield f'first = inputs["input_ids"][:, :{PREFIX_TOKENS}]'
    yield 'frozen = AutoModelForCausalLM.from_pretrained("features").model'
    yield "frozen.norm = torch.nn.Identity()  # the router looks at what comes before the last norm"
    yield "features = frozen(first).last_hidden_state.mean(dim=1)"
    if card.run.config.routing.has_counts:
        buckets = count_buckets(card.run.config.model.vocab_size)
        yield f"counts = torch.bincount(first[0] % {buckets}, minlength={buckets})"
        yield f"features = torch.cat([features, counts[None] * {PREFIX_TOKENS} / first.shape[1]], dim=1)"
    yield 'scores = ((features - router["mean"]) / router["scale"]) @ router["weights"].T + router["bias"]'
    yield 'path = max(about["trained"], key=lambda name: scores[0, about["paths"].index(name)])'
    yield 'model = AutoModelForCausalLM.from_pretrained(f"./{path}")'


def _text(card: Card) -> Iterator[str]:
    words, context = card.words, card.run.config.model.context
    yield from ("## Text and licence", "", f"- licence of the weights: {words.licence or UNSAID}")
    yield f"- language: {', '.join(words.languages) or UNSAID}"
    yield f"- text of the run: {words.data or UNSAID}"
    for exported in card.paths:
        shard = card.run.shard(exported.path, card.run.sharding_at(max(exported.version - 1, 0)))
        yield f"- {exported.path} trained on its own shard: {shard.sequences} sequences of {context} tokens"
        yield f"  (`{shard.blob.digest}`)"
    yield ""


def _losses(card: Card) -> Iterator[str]:
    yield from ("## Losses", "")
    if rows := card.rows:
        row = rows[-1]
        yield f"- validation of the whole grid at version {row['version']}, every sequence under the path that it is"
        yield f"  routed to: {row['loss']:.4f} nats per token, perplexity {row['perplexity']:.2f}"
        yield f"  (the first {PREFIX_TOKENS} tokens of a sequence do not count)"
    known = [(exported.path, exported.held_out_loss(rows), exported.trained_loss) for exported in card.paths]
    for path, held_out, trained in known:
        if held_out is not None:
            yield f"- validation of {path}, on the sequences that are routed to it: {held_out:.4f} nats per token"
        if trained is not None:
            yield f"- training loss of {path} in its last round, as its trainer said: {trained:.4f} nats per token"
    if not rows and not any(held_out or trained for _, held_out, trained in known):
        yield "Not known here."
    yield ""


def _lineage(card: Card) -> Iterator[str]:
    run = card.run
    yield from ("## Lineage", "", f"- run: `{run.origin}`", f"- stage: {run.manifest.stage}, `{run.id}`")
    yield f"- coordinator: `{run.manifest.author}`"
    yield f"- tokenizer: `{run.manifest.tokenizer.digest}`"
    for one in card.paths:
        if one.best:
            yield f"- round: {one.best.version} of {run.config.rounds.rounds}, the best of {one.path} on held-out text"
            yield "  since its shard was last cut (early stopping, DiPaCo section 2.7)"
    yield ""
    yield "Each module is one link of a signed chain: its parent and contributions give its bytes, and anyone with the"
    yield "archive of the run can recompute them (`dipaco-bootstrap verify`)."
    yield ""
    yield "| module | version | SHA-256 of its parameters | parent | paths in its last step | made by |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for version in dict.fromkeys(version for exported in card.paths for version in exported.versions):
        paths = ", ".join(sorted({str(share.path) for share in version.shares})) or "-"
        made_by = f"...{short(version.author)}"
        parent = f"`{version.parent[:8]}`" if version.parent else "-"
        yield f"| {version.module} | {version.version} | `{version.digest}` | {parent} | {paths} | {made_by} |"
    yield ""


def _limits(card: Card) -> Iterator[str]:
    yield from ("## Limits", "")
    yield "The weights were trained by strangers and filtered by norm only; no text was checked."
    if card.has_router and not card.is_whole:
        yield "The path knows one kind of text. `router.safetensors` tells which; `router.json` says how to ask it, and"
        yield "names the frozen model that makes its features by digest."
    yield ""
