"""`dipaco-bootstrap export`: one path as a Hugging Face checkpoint, with its lineage, and the routers beside it.

    config.json  generation_config.json  model.safetensors      a LlamaForCausalLM: the path's modules put together
    tokenizer.json  tokenizer_config.json                       the run's own tokenizer
    README.md                                                   the model card: what this is and where it comes from
    router.safetensors  token_router.safetensors  router.json   what chooses between this path and the others

The folder appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dipaco_p2p import __version__
from dipaco_p2p.config import PREFIX_TOKENS, ModelConfig, count_buckets
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.core.tensor_file import encode
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.node.run import Run
from dipaco_p2p.program.files import unfit, write_atomically
from dipaco_p2p.protocol.documents import ModuleVersion
from dipaco_p2p.protocol.signing import short
from dipaco_p2p.topology import PathId
from dipaco_p2p.use.best_rounds import Best
from dipaco_p2p.use.served import Flat, ServedRun, check_choice, open_served
from dipaco_p2p.use.tokenizer import END, END_ID

ROUTER, TOKEN_ROUTER = "router.safetensors", "token_router.safetensors"


async def export_from(
    source: str, *, path: str, to: Path, version: int | None, best: bool, expected: str | None
) -> PathId:
    """Write the checkpoint of `path` to the folder `to`, which must be empty or not there. Raises DipacoError."""
    require_empty(to)
    check_choice(version=version, best=best)
    async with open_served(source, expected=expected) as served:
        found = served.path(path)
        await export_path(served, found, to, version=version, best=best)
        return found


async def export_path(
    served: ServedRun, path: PathId, to: Path, *, version: int | None = None, best: bool = False
) -> None:
    """As `export_from`, of an open run."""
    require_empty(to)
    check_choice(version=version, best=best)
    found = await served.best(path) if best else None
    versions = await served.path_versions(path, version=found.version if found else version)
    # Routers are those of `version`, so with the best round, too, those of the newest sharding.
    card = Card(
        run=served.run,
        path=path,
        versions=versions,
        best=found,
        evaluations=served.evaluations(),
        has_router=served.router_ref(version=version) is not None,
    )
    _write_folder(to, await _files(served, card, await _routers(served, version)))


def require_empty(folder: Path) -> None:
    """Raise ConfigError if there is something in the way."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"`{folder}` is there and not an empty folder", hint="give --to a folder that is new")


async def _files(served: ServedRun, card: Card, routers: dict[str, bytes]) -> dict[str, bytes]:
    """Name to content of everything in the folder."""
    model = served.run.config.model
    return {
        "config.json": _json(llama_config(model)),
        "generation_config.json": _json({"eos_token_id": END_ID, "pad_token_id": END_ID}),
        "model.safetensors": checkpoint(model, await served.flats(card.versions)),
        "tokenizer.json": await served.tokenizer_bytes(),
        "tokenizer_config.json": _json(tokenizer_config(model)),
        "README.md": write_card(card).encode(),
        **routers,
    }


def checkpoint(model: ModelConfig, flats: Sequence[Flat]) -> bytes:
    """The path's tensors in one file; modules carry the names of a LlamaForCausalLM already (core/model/layout.py)."""
    tensors: dict[str, Flat] = {}
    for level, flat in enumerate(flats):
        tensors |= module_layout(model, level).split(flat)
    return encode(tensors, metadata={"format": "pt"})


def llama_config(model: ModelConfig) -> dict[str, Any]:
    """`config.json` of a path; `rope_theta` is written the way of transformers 4 and that of 5."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "intermediate_size": model.ffn_width,
        "num_hidden_layers": sum(level.blocks for level in model.levels),
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": END_ID,
        "torch_dtype": "float32",
    }


def tokenizer_config(model: ModelConfig) -> dict[str, Any]:
    """`tokenizer_config.json`: the characters of the end token in a text are text, as in training."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": model.context,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }


async def _routers(served: ServedRun, version: int | None) -> dict[str, bytes]:
    """The routers' files and what to know of them; nothing for a run of one path."""
    refs = {
        ROUTER: served.router_ref(version=version),
        TOKEN_ROUTER: served.token_router_ref(version=version),
    }
    if refs[ROUTER] is None:
        return {}
    await served.router(version=version)  # that it is one, and of this run
    topology, counts = served.run.topology, ""
    if served.run.config.routing.has_counts:
        buckets = count_buckets(served.run.config.model.vocab_size)
        counts = f"; then how often each token is among these 32, its number modulo {buckets}"
    about = {
        "run": served.run.origin,
        "paths": [str(path) for path in topology.paths()],
        "digests": {name: ref.digest for name, ref in refs.items() if ref is not None},
        "prefix_tokens": PREFIX_TOKENS,
        "feature_width": served.run.config.feature_width,
        "feature_model": {str(version.module): version.digest for version in served.feature_versions()},
        "scores": "((features - mean) / scale) @ weights.T + bias; the greatest score is the path, as listed here",
        "features": {
            ROUTER: "mean over the first 32 tokens of the last block's output, before the final norm" + counts,
            TOKEN_ROUTER: "the same mean over the last 32 tokens seen, then that over all tokens seen",
        },
        "dipaco_p2p": __version__,
    }
    blobs = {name: await served.blob(ref) for name, ref in refs.items() if ref is not None}
    return {**blobs, "router.json": _json(about)}


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _write_folder(to: Path, files: dict[str, bytes]) -> None:
    """All files, or no folder."""
    to = to.resolve()
    temporary = to.with_name(f".{to.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        for name, data in files.items():
            write_atomically(temporary / name, data)
        temporary.rename(to)  # also over an empty folder
    except OSError as error:
        raise unfit(error, to) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
