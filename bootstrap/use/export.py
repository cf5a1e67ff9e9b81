"""`dipaco-bootstrap export`: one path as a Hugging Face checkpoint, or all paths with what routes among them.

    README.md                                                   the model card: what this is and where it comes from
    tokenizer.json  tokenizer_config.json                       the run's own tokenizer
    config.json  generation_config.json  model.safetensors      a LlamaForCausalLM: the path's modules put together
    model.gguf                                                  the same for llama.cpp, where it is wanted
    router.safetensors  token_router.safetensors  router.json   what chooses between this path and the others

All paths are a folder with card, tokenizer and routers, in which each path has a folder with the rest of this, and so
has the frozen model that the routers look at (`features/`). The folder appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dipaco_p2p import __version__
from dipaco_p2p.config import PREFIX_TOKENS, ModelConfig, count_buckets
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.core.tensor_file import encode
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.program.files import unfit, write_atomically
from dipaco_p2p.protocol.documents import ModuleVersion
from dipaco_p2p.topology import PathId
from dipaco_p2p.use.served import Flat, ServedRun, check_choice, open_served
from dipaco_p2p.use.tokenizer import END, END_ID

from .card import Card, Exported, Words, write_card
from .gguf_file import write_gguf

ROUTER, TOKEN_ROUTER = "router.safetensors", "token_router.safetensors"
FEATURES = "features"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to export. Raises ConfigError for versions that are named in two ways."""

    path: str | None = None
    """As P0-1-1; None: all paths that were trained."""
    version: int | None = None
    """Of every module; None: the newest of each."""
    best: bool = False
    """Each path at its best round."""
    has_gguf: bool = False
    words: Words = Words()
    """For the card."""

    def __post_init__(self) -> None:
        check_choice(version=self.version, best=self.best)


async def export_from(source: str, wish: Wish, to: Path, *, expected: str | None) -> list[PathId]:
    """Write what was wished for to the folder `to`, which must be empty or not there. Raises DipacoError."""
    require_empty(to)
    async with open_served(source, expected=expected) as served:
        return await export_run(served, wish, to)


async def export_run(served: ServedRun, wish: Wish, to: Path) -> list[PathId]:
    """As `export_from`, of an open run; the paths that were written."""
    require_empty(to)
    run, paths = served.run, await _paths(served, wish)
    # Routers are those of `version`, so with the best round, too, those of the newest sharding.
    routers = await _routers(served, wish.version)
    exported = [await _exported(served, wish, path) for path in paths]
    card = Card(
        run=run,
        paths=exported,
        is_whole=wish.path is None,
        evaluations=served.evaluations(),
        has_router=bool(routers),
        has_gguf=wish.has_gguf,
        words=wish.words,
    )
    tokenizer = {
        "tokenizer.json": await served.tokenizer_bytes(),
        "tokenizer_config.json": _json(tokenizer_config(run.config.model)),
    }
    with _new_folder(to) as folder:
        _write(folder, {"README.md": write_card(card).encode(), **tokenizer, **routers})
        for one in exported:
            place = folder / str(one.path) if card.is_whole else folder
            await _write_model(served, one.versions, place)
            if wish.has_gguf:
                name = f"{run.config.name} {one.path}"
                flats = await served.flats(one.versions)
                write_gguf(place / "model.gguf", run.config.model, flats, tokenizer["tokenizer.json"], name=name)
            if card.is_whole:
                _write(place, tokenizer)
        if card.is_whole and routers:
            await _write_model(served, served.feature_versions(), folder / FEATURES)
    return paths


def require_empty(folder: Path) -> None:
    """Raise ConfigError if there is something in the way."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"`{folder}` is there and not an empty folder", hint="give --to a folder that is new")


async def _paths(served: ServedRun, wish: Wish) -> list[PathId]:
    if wish.path is not None:
        return [served.path(wish.path)]
    if served.run.topology.path_count == 1:
        return [served.run.topology.path(0)]
    return [served.run.topology.path(number) for number in await served.usable(version=wish.version)]


async def _exported(served: ServedRun, wish: Wish, path: PathId) -> Exported:
    best = await served.best(path) if wish.best else None
    versions = await served.path_versions(path, version=best.version if best else wish.version)
    return Exported(path=path, versions=versions, best=best)


async def _write_model(served: ServedRun, versions: tuple[ModuleVersion, ...], folder: Path) -> None:
    model = served.run.config.model
    files = {
        "config.json": _json(llama_config(model)),
        "generation_config.json": _json({"eos_token_id": END_ID, "pad_token_id": END_ID}),
        "model.safetensors": checkpoint(model, await served.flats(versions)),
    }
    _write(folder, files)


def _write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        write_atomically(folder / name, data)


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
        "trained": [str(topology.path(number)) for number in await served.usable(version=version)],
        "digests": {name: ref.digest for name, ref in refs.items() if ref is not None},
        "prefix_tokens": PREFIX_TOKENS,
        "feature_width": served.run.config.feature_width,
        "feature_model": {str(version.module): version.digest for version in served.feature_versions()},
        "scores": "((features - mean) / scale) @ weights.T + bias; the greatest is the path: of `trained`, by `paths`",
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


@contextmanager
def _new_folder(to: Path) -> Iterator[Path]:
    """A folder to fill that takes its place when the block has ended well; raises EnvironmentUnfit."""
    to = to.resolve()
    temporary = to.with_name(f".{to.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(to)  # also over an empty folder
    except OSError as error:
        raise unfit(error, to) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
