"""A copy of everything that any disk of a run ever held, to make the chains of a light archive again from.

A light archive has no contributions. No program in the run reads the copy. Each file is named by its digest, so the
copy can lack a file but cannot falsify one.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.store import Store
from dipaco_p2p.protocol.documents import BlobRef, Contribution, Sealed

from .patches import Patches


class Witness:
    """Sees what is written, from `watch` on."""

    def __init__(self, begin: Path) -> None:
        """`begin` is the folder of the run before anybody has started."""
        self._blobs = {path.name: path.read_bytes() for path in (begin / "blobs").glob("*/*")}
        self._contributions: dict[str, bytes] = {}

    def watch(self, stack: contextlib.ExitStack) -> None:
        """Until the stack is closed."""
        patches = Patches(stack)

        @patches.wrap(Store, "put")
        def put(original: Any, store: Store, data: bytes) -> BlobRef:
            ref: BlobRef = original(store, data)
            self._blobs[ref.digest] = bytes(data)
            return ref

        @patches.wrap(Store, "keep")
        def keep(original: Any, store: Store, ref: BlobRef, *parts: Any, **named: Any) -> None:
            original(store, ref, *parts, **named)
            self._blobs[ref.digest] = b"".join(map(bytes, parts))

        @patches.wrap(Store, "finish_partial")
        def finish_partial(original: Any, store: Store, path: Path, name: str) -> None:
            original(store, path, name)
            self._blobs[name] = store.get(name) or b""

        @patches.wrap(Ledger, "add")
        def add(original: Any, ledger: Ledger, sealed: Sealed[Contribution]) -> None:
            original(ledger, sealed)
            self._contributions[sealed.id] = canonical_bytes(sealed.to_dict())

    def beside(self, archive: Path, folder: Path) -> Store:
        """The chains of an archive, in a folder with all that makes them again."""
        documents = folder / "documents"
        shutil.copytree(archive / "documents", documents)
        for path in documents.glob("thinned-*.json"):
            path.unlink()
        store = Store(folder)
        for name, data in self._contributions.items():
            store.write_document(f"contribution-{name}", data)
        for data in self._blobs.values():
            store.put(data)
        return store
