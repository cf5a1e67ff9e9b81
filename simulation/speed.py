"""One process plays all peers, so it checks the same signature and reads the same record many times: here once.

What a signature or a body says is a function of its bytes, so remembering the answer changes nothing that a run does.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Hashable, Iterator
from typing import Any, cast
from unittest import mock

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.core import arrays
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
        stack.enter_context(
            mock.patch.object(arrays, "CORES_MAX", 1)
        )  # threads for a few numbers take longer than work
        signed: set[tuple[PeerId, str, bytes, str]] = set()
        stack.enter_context(mock.patch.object(Signer, "sign", _remembered_sign(Signer.sign, signed)))
        replace_everywhere(stack, "verify", signing.verify, _remembered_verify(signing.verify, signed))
        for home, name in ((signing, "public_key_of"), (records, "read_record")):
            original = getattr(home, name)
            replace_everywhere(stack, name, original, functools.lru_cache(SIGNATURES)(original))
        genesis = versions.genesis_version  # makes the canonical bytes of the whole manifest each time
        replace_everywhere(
            stack, "genesis_version", genesis, _once(genesis, lambda manifest, module: (id(manifest), module))
        )
        replace_everywhere(stack, "unseal", documents.unseal, _remembered_unseal(documents.unseal))
        stack.enter_context(mock.patch.object(Sealed, "id", property(_once(cast(Any, Sealed.id).fget))))
        stack.enter_context(mock.patch.object(Record, "to_bytes", _once(Record.to_bytes)))
        # `read_record` gives one object for the same bytes.
        replace_everywhere(stack, "read", liveness.read, _once(liveness.read, lambda kind, body: (kind, id(body))))
        yield


def replace_everywhere(stack: contextlib.ExitStack, name: str, original: object, changed: object) -> None:
    """In every module of the programs that has `original` under this name, until the stack is closed."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith(PROGRAMS) and vars(module).get(name) is original:
            stack.enter_context(mock.patch.object(module, name, changed))


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


def _once(function: Callable[..., Any], key: Callable[..., Hashable] = id) -> Callable[..., Any]:
    """`function`, once for each `key` of its arguments; these are kept, so that no other object gets their `id`."""
    known: dict[Hashable, tuple[Any, Any]] = {}

    def remembered(*arguments: Any) -> Any:
        name = key(*arguments)
        if name not in known:
            known[name] = arguments, function(*arguments)
        return known[name][1]

    return remembered
