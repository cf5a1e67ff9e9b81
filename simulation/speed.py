"""One process plays all peers, so it checks the same signature and reads the same record many times: here once.

What a signature or a body says is a function of its bytes, so remembering the answer changes nothing that a run does.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.core import cores
from dipaco_p2p.protocol import documents, liveness, records, signing, versions
from dipaco_p2p.protocol.documents import Sealed
from dipaco_p2p.protocol.records import Record
from dipaco_p2p.protocol.signing import PeerId, Signer

SIGNATURES = 1 << 15
PROGRAMS = ("dipaco_p2p.", "peers.", "bootstrap.")


@contextlib.contextmanager
def remembered_signatures() -> Iterator[None]:
    """Check every signature, and read every record and its body, once while the block runs."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(cores, "CORES_MAX", 1))  # threads for a few numbers take longer than work
        signed: set[tuple[PeerId, str, bytes, str]] = set()
        stack.enter_context(mock.patch.object(Signer, "sign", _remembered_sign(Signer.sign, signed)))
        _replace(stack, "verify", signing.verify, _remembered_verify(signing.verify, signed))
        for home, name in ((signing, "public_key_of"), (records, "read_record")):
            original = getattr(home, name)
            _replace(stack, name, original, functools.lru_cache(SIGNATURES)(original))
        _replace(stack, "genesis_version", versions.genesis_version, _remembered_genesis(versions.genesis_version))
        _replace(stack, "unseal", documents.unseal, _remembered_unseal(documents.unseal))
        stack.enter_context(mock.patch.object(Sealed, "id", property(_remembered_id(Sealed.id))))
        stack.enter_context(mock.patch.object(Record, "to_bytes", _remembered_bytes(Record.to_bytes)))
        _replace(stack, "read", liveness.read, _remembered_bodies(liveness.read))
        yield


def _replace(stack: contextlib.ExitStack, name: str, original: object, remembered: object) -> None:
    """Wherever a module of ours has it under this name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith(PROGRAMS) and vars(module).get(name) is original:
            stack.enter_context(mock.patch.object(module, name, remembered))


def _remembered_sign(sign: Callable[..., str], signed: set[tuple[PeerId, str, bytes, str]]) -> Callable[..., str]:
    """`Signer.sign`: what it signs need not be checked."""

    def remembered(self: Signer, kind: str, data: bytes) -> str:
        signature = sign(self, kind, data)
        signed.add((self.peer, kind, data, signature))
        return signature

    return remembered


def _remembered_verify(
    verify: Callable[..., bool], signed: set[tuple[PeerId, str, bytes, str]]
) -> Callable[[PeerId, str, bytes, str], bool]:
    """`signing.verify`, once for each signature that was not made here."""
    known = functools.lru_cache(SIGNATURES)(verify)

    def remembered(peer: PeerId, kind: str, data: bytes, signature: str) -> bool:
        return (peer, kind, data, signature) in signed or known(peer, kind, data, signature)

    return remembered


def _remembered_genesis(genesis: Callable[..., Any]) -> Callable[..., Any]:
    """`versions.genesis_version`, which makes the canonical bytes of the whole manifest each time."""
    known: dict[tuple[int, Any], tuple[Any, Any]] = {}

    def remembered(manifest: Any, module: Any) -> Any:
        key = id(manifest), module
        if key not in known:
            known[key] = manifest, genesis(manifest, module)
        return known[key][1]

    return remembered


def _remembered_unseal(unseal: Callable[..., Any]) -> Callable[..., Any]:
    """`documents.unseal`: each document goes to many peers, and to each of them more than once."""
    known: dict[tuple[type, bytes], Any] = {}

    def remembered(kind: type, value: Any) -> Any:
        try:
            key = kind, canonical_bytes(value)
        except (ValueError, TypeError, RecursionError):  # what a hostile peer may send
            return unseal(kind, value)
        if key not in known:
            known[key] = unseal(kind, value)
        return known[key]

    return remembered


def _remembered_id(original: Any) -> Callable[[Any], str]:
    """`Sealed.id`, which makes the canonical bytes of the document each time."""
    known: dict[int, tuple[Any, str]] = {}

    def remembered(sealed: Any) -> str:
        if id(sealed) not in known:
            known[id(sealed)] = sealed, original.fget(sealed)
        return known[id(sealed)][1]

    return remembered


def _remembered_bytes(to_bytes: Callable[[Record], bytes]) -> Callable[[Record], bytes]:
    """`Record.to_bytes`: each record is offered to many nodes."""
    known: dict[int, tuple[Record, bytes]] = {}

    def remembered(record: Record) -> bytes:
        if id(record) not in known:
            known[id(record)] = record, to_bytes(record)
        return known[id(record)][1]

    return remembered


def _remembered_bodies(read: Callable[..., Any]) -> Callable[..., Any]:
    """`liveness.read` for bodies that are one object, since `read_record` gives one object for the same bytes."""
    known: dict[tuple[int, type], tuple[Any, Any]] = {}

    def remembered(kind: type, body: Any) -> Any:
        key = id(body), kind
        if key not in known:
            known[key] = body, read(kind, body)  # the body is kept, so that no other gets its id
        return known[key][1]

    return remembered
