"""The model card of an exported path: what it is, how to use it, and every figure and digest of where it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dipaco_p2p import __version__
from dipaco_p2p.config import PREFIX_TOKENS
from dipaco_p2p.node.run import Run
from dipaco_p2p.protocol.documents import ModuleVersion
from dipaco_p2p.protocol.signing import short
from dipaco_p2p.topology import PathId

from .best import Best


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a card is written from."""

    run: Run
    path: PathId
    versions: tuple[ModuleVersion, ...]
    best: Best | None = None
    """Why it is these versions, if it is for early stopping."""
    evaluations: Sequence[dict[str, Any]]
    """Rows of the coordinator's evaluator, by version; empty where they are not known."""
    has_router: bool


def write_card(card: Card) -> str:
    """The card as Markdown, with the front matter that the Hugging Face hub reads."""
    parts = (_front(card), _about(card), _use(), _lineage(card), _losses(card), _text(card), _limits(card))
    return "\n".join(line for part in parts for line in part)


def _front(card: Card) -> Iterator[str]:
    yield from ("---", "library_name: transformers", "pipeline_tag: text-generation")
    yield from ("tags:", "- dipaco", "- dipaco-p2p", "---", "")
    yield from (f"# {card.run.config.name}, path {card.path}", "")


def _about(card: Card) -> Iterator[str]:
    topology, model = card.run.topology, card.run.config.model
    yield f"One path of a DiPaCo language model ({card.run.name}), trained by volunteers over a peer-to-peer network."
    yield f"The model is a grid of {topology} modules with {topology.path_count} paths; this checkpoint is path number"
    yield f"{topology.number(card.path)}, a Llama decoder with {sum(level.blocks for level in model.levels)} layers of"
    yield f"width {model.width}. Written by dipaco-p2p {__version__}."
    if not card.run.is_last_stage:
        yield "The run was still in its warm-up: all paths of its grid will begin as this one."
    yield ""


def _use() -> Iterator[str]:
    yield from ("## Use", "", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "")
    yield 'tokenizer = AutoTokenizer.from_pretrained(".")'
    yield 'model = AutoModelForCausalLM.from_pretrained(".")'
    yield 'inputs = tokenizer("Once upon a time", return_tensors="pt")'
    yield "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))"
    yield from ("```", "")


def _lineage(card: Card) -> Iterator[str]:
    run = card.run
    yield from ("## Lineage", "", f"- run: `{run.origin}`", f"- stage: {run.manifest.stage}, `{run.id}`")
    yield f"- coordinator: `{run.manifest.author}`"
    yield f"- tokenizer: `{run.manifest.tokenizer.digest}`"
    if card.best:
        yield f"- round: {card.best.version} of {run.config.rounds.rounds}, this path's best on held-out text since its"
        yield "  shard was last cut (early stopping, DiPaCo section 2.7)"
    yield ""
    yield "Each module is one link of a signed chain: its parent and contributions give its bytes, and anyone with the"
    yield "archive of the run can recompute them (`dipaco-bootstrap verify`)."
    yield ""
    yield "| module | version | SHA-256 of its parameters | parent | paths in its last step | made by |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for version in card.versions:
        paths = ", ".join(sorted({str(share.path) for share in version.shares})) or "-"
        made_by = f"...{short(version.author)}"
        parent = f"`{version.parent[:8]}`" if version.parent else "-"
        yield f"| {version.module} | {version.version} | `{version.digest}` | {parent} | {paths} | {made_by} |"
    yield ""


def _losses(card: Card) -> Iterator[str]:
    yield from ("## Losses", "")
    trained = [share.loss for version in card.versions for share in version.shares if share.path == card.path]
    if trained:
        yield f"- training loss of this path in its last round, as its trainer said: {trained[-1]:.4f} nats per token"
    newest = min(version.version for version in card.versions)
    rows = [row for row in card.evaluations if row.get("version", newest + 1) <= newest]
    if rows:
        row = rows[-1]
        yield f"- validation of the whole grid at version {row['version']}, every sequence under the path that it is"
        yield f"  routed to: {row['loss']:.4f} nats per token, perplexity {row['perplexity']:.2f}"
        yield f"  (the first {PREFIX_TOKENS} tokens of a sequence do not count)"
    own = card.best.loss if card.best else _own_loss(card, rows)
    if own is not None:
        yield f"- validation of this path, on the sequences that are routed to it: {own:.4f} nats per token"
    if not trained and not rows and own is None:
        yield "Not known here."
    yield ""


def _own_loss(card: Card, rows: Sequence[dict[str, Any]]) -> float | None:
    found: dict[str, Any] = rows[-1].get("paths", {}).get(str(card.path), {}) if rows else {}
    return found.get("loss")


def _text(card: Card) -> Iterator[str]:
    shard, context = card.run.shard(card.path, _sharding(card)), card.run.config.model.context
    yield from ("## Text", "")
    yield f"This path trained on its own shard of the run's text: {shard.sequences} sequences of {context} tokens"
    yield f"(`{shard.blob.digest}`)."
    yield ""


def _limits(card: Card) -> Iterator[str]:
    yield from (
        "## Limits",
        "",
        "The weights were trained by strangers and filtered by norm only; no text was checked.",
    )
    if card.has_router:
        yield "The path knows one kind of text. `router.safetensors` tells which; `router.json` says how to ask it, and"
        yield "names the frozen model that makes its features by digest."
    yield ""


def _sharding(card: Card) -> int:
    return card.run.sharding_at(max(min(version.version for version in card.versions) - 1, 0))
