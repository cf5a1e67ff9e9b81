"""Who signed what: one Ed25519 key per peer is its libp2p identity and signs all that it says.

A peer id is the libp2p id of an Ed25519 key: base58 of the identity multihash of the protobuf public key, so the id
*is* the key and no key exchange is needed (libp2p specification, "Peer Ids and Keys"). What is signed starts with the
protocol's name and the kind of thing, so that a signature of one kind can never pass for another.
"""

from __future__ import annotations

import functools
from typing import NewType

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ..canonical import digest, is_digest
from ..errors import ConfigError, IntegrityError

PeerId = NewType("PeerId", str)

KEY_BYTES = 32
SIGNATURE_CHARS = 128
PEER_ID_CHARS_MAX = 64
LOT_DIGITS = 13
"""Hexadecimal digits of a digest that a lot is read from."""
KEYS_REMEMBERED_MAX = 4096
"""Keys of peers that were read from their ids lately: a leaderboard meets the same few thousand again and again."""
_DOMAIN = b"dipaco-p2p/1/"
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGITS = frozenset("0123456789abcdef")

# Multihash: code 0 (identity), 36 bytes; protobuf PublicKey: field 1 (type) = 1 (Ed25519), field 2 (data) of 32 bytes.
_ID_PREFIX = b"\x00\x24\x08\x01\x12\x20"


class Signer:
    """A private key, and what can be done with it; the key itself never leaves this object."""

    def __init__(self, private_key_bytes: bytes) -> None:
        assert len(private_key_bytes) == KEY_BYTES, "an Ed25519 private key has 32 bytes"
        self._key = Ed25519PrivateKey.from_private_bytes(private_key_bytes)
        self.public_key = self._key.public_key().public_bytes_raw()
        self.peer = peer_of(self.public_key)

    def sign(self, kind: str, data: bytes) -> str:
        """The signature of `data` as something of `kind`: 128 lower-case hex digits."""
        return self._key.sign(_signed_bytes(kind, data)).hex()

    def lot(self, kind: str, data: bytes) -> float:
        """A number from 0 to 1 that is always the same for the same `data`, and that nobody else can foresee."""
        return int(digest(self.sign(kind, data).encode())[:LOT_DIGITS], 16) / 16.0**LOT_DIGITS

    def __repr__(self) -> str:
        return f"Signer({self.peer})"


def verify(peer: PeerId, kind: str, data: bytes, signature: str) -> bool:
    """Whether `peer` signed `data` as something of `kind`; False, never an exception, for whatever is malformed."""
    if not isinstance(signature, str) or len(signature) != SIGNATURE_CHARS or not _DIGITS.issuperset(signature):
        return False
    try:
        key = _key_of(peer)
        key.verify(bytes.fromhex(signature), _signed_bytes(kind, data))
    except (IntegrityError, InvalidSignature, ValueError):
        return False
    return True


def peer_of(public_key: bytes) -> PeerId:
    """The peer id of an Ed25519 public key of 32 bytes."""
    assert len(public_key) == KEY_BYTES, "an Ed25519 public key has 32 bytes"
    return PeerId(_base58(_ID_PREFIX + public_key))


@functools.lru_cache(maxsize=KEYS_REMEMBERED_MAX)
def _key_of(peer: PeerId) -> Ed25519PublicKey:
    """The key inside `peer`, ready for use; raises IntegrityError or ValueError."""
    return Ed25519PublicKey.from_public_bytes(public_key_of(peer))


@functools.lru_cache(maxsize=KEYS_REMEMBERED_MAX)
def public_key_of(peer: PeerId) -> bytes:
    """The 32 bytes of the public key inside `peer`; raises IntegrityError if it is not an Ed25519 peer id."""
    try:
        data = _from_base58(peer)
    except ValueError:
        data = b""
    if len(data) != len(_ID_PREFIX) + KEY_BYTES or not data.startswith(_ID_PREFIX):
        raise IntegrityError(f"not an Ed25519 peer id: {str(peer)[:PEER_ID_CHARS_MAX]!r}")
    return data[len(_ID_PREFIX) :]


def short(peer: PeerId) -> str:
    """The last six characters, for people: every Ed25519 id starts alike."""
    return peer[-6:]


def _signed_bytes(kind: str, data: bytes) -> bytes:
    assert kind and kind.isascii() and "\0" not in kind, "a kind is a short ASCII word"
    return _DOMAIN + kind.encode() + b"\0" + data


def _base58(data: bytes) -> str:
    number, digits = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        digits = _BASE58[digit] + digits
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + digits


def _from_base58(text: object) -> bytes:
    """The bytes that `text` spells; raises ValueError. The bound keeps the quadratic conversion harmless."""
    if not isinstance(text, str) or not text or len(text) > PEER_ID_CHARS_MAX:
        raise ValueError("not a short text")
    number = 0
    for char in text:
        number = number * 58 + _BASE58.index(char)
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")


VALUES_MAX = 2**40
"""Of counts, sizes and numbers of versions: more than any run needs, and exact in every JSON reader."""


def require_digest(*texts: str) -> None:
    """Raise ConfigError for what has not the form of a digest."""
    for text in texts:
        if not is_digest(text):
            raise ConfigError(f"`{text[:80]}` is not a digest")


def require_peers(*peers: PeerId) -> None:
    """Raise ConfigError for what is no peer id: others chose these words, and they are signed and told on."""
    for peer in peers:
        try:
            public_key_of(peer)
        except IntegrityError as error:
            raise ConfigError(str(error)) from None
