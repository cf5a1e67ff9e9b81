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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dipaco_p2p import __version__
from dipaco_p2p.config import PREFIX_TOKENS, ModelConfig, count_buckets
from dipaco_p2p.core.codec import encode
from dipaco_p2p.core.layout import module_layout
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.program.files import unfit, write_atomically
from dipaco_p2p.protocol.documents import ModuleVersion
from dipaco_p2p.topology import PathId

from .card import Card, write_card
from .serving import Flat, ServedRun, check_choice, open_served
from .tokenizer import END, END_ID

ROUTER, TOKEN_ROUTER = "router.safetensors", "token_router.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    folder: Path
    path: PathId
    versions: tuple[ModuleVersion, ...]


async def export_from(
    source: str, *, path: str, to: Path, version: int | None, best: bool, expected: str | None
) -> Exported:
    """Write the checkpoint of `path` to the folder `to`, which must be empty or not there. Raises DipacoError."""
    require_empty(to)
    check_choice(version=version, best=best)
    async with open_served(source, expected=expected) as served:
        return await export_path(served, served.path(path), to, version=version, best=best)


async def export_path(
    served: ServedRun, path: PathId, to: Path, *, version: int | None = None, best: bool = False
) -> Exported:
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
    files = await _files(served, card, await _routers(served, version))
    _write_folder(to, files)
    return Exported(folder=to, path=path, versions=versions)


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
    """The path's tensors in one file; modules carry the names of a LlamaForCausalLM already (core/layout.py)."""
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
