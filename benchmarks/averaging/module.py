"""A module of a run and contributions to it on a disk, as its leader has them when the round closes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.manifests import sealed_manifest
from dipaco_p2p.config import CompressionConfig, LevelConfig, ModelConfig, RunConfig
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.compress import compress, encode_compressed, norm
from dipaco_p2p.core.outer import OuterState
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.version import Admitted, stored
from dipaco_p2p.protocol.documents import BlobRef, Contribution, seal
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.protocol.versions import genesis_version
from dipaco_p2p.topology import ModuleId

MODULE = ModuleId(0, 0)
PATHS = 16
LEADER = Signer(b"\x01" * 32)
LIST = "payloads"


def run_of(codec: str, *, width: int) -> Run:
    """A trunk that 16 paths share: of 25 million values with the width 512, of 2 million with 128."""
    model = ModelConfig(
        vocab_size=5000,
        width=width,
        heads=8,
        ffn_width=11 * width // 4,
        levels=(LevelConfig(blocks=7, embedding=True, head=True), LevelConfig(modules=PATHS, blocks=1)),
    )
    config = RunConfig(name="averaging", model=model, compression=CompressionConfig(uplink=codec))
    return Run(sealed_manifest(LEADER, config, sequences=1000))


def fill(folder: Path, run: Run) -> None:
    """Put a payload of each path into the store in `folder`, and a list of them with their norms."""
    store, size, found = Store(folder), run.layout(MODULE).size, []
    values = np.random.default_rng(0).standard_normal(size, dtype=np.float32) * np.float32(1e-3)
    for number in range(PATHS):
        compressed, _ = compress(np.roll(values, 1009 * number), codec=run.config.compression.uplink)
        ref = store.put(encode_compressed(compressed))
        found.append({"digest": ref.digest, "size": ref.size, "norm": norm(compressed)})
    store.write_document(LIST, json.dumps(found).encode())


def admitted(folder: Path, run: Run, count: int) -> list[Admitted]:
    """The first `count` contributions of what `fill` has put there, as the leader holds them."""
    store = Store(folder)
    listed = json.loads(store.read_document(LIST) or b"[]")[:count]
    items = []
    for path, entry in zip(run.topology.paths_through(MODULE)[:count], listed, strict=True):
        document = Contribution(
            run=run.id,
            module=MODULE,
            path=path,
            base_version=0,
            base_digest=genesis_version(run.manifest, MODULE).digest,
            payload=BlobRef(digest=entry["digest"], size=entry["size"]),
            steps=run.config.inner.steps,
            tokens=run.tokens_full,
            loss=5.0,
            author=LEADER.peer,
        )
        items.append(stored(run, store, MODULE, seal(LEADER, document), norm=entry["norm"]))
    return items


def state_of(run: Run) -> OuterState:
    """What a leader holds of the module all the time; every page of it is in memory."""
    size = run.layout(MODULE).size
    return OuterState(params=_full(size, 0.5), momentum=_full(size, 1e-3), residual=_full(size, 1e-6))


def _full(size: int, value: float) -> Floats:
    return np.full(size, value, dtype=np.float32)
