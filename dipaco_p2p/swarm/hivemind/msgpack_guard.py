"""Whether msgpack from a stranger may be parsed at all, told from its tokens without building anything.

A parser that trusts its input pays for it: an array may announce as many items as there are bytes, each costs fifty
bytes of memory or more, and extension types nested 200 deep, which takes 730 bytes, overflow the C stack of msgpack
1.x and end the process.
Format: github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

from typing import NamedTuple

DICTIONARY_CODE = 0x50
"""hivemind's extension type for a dictionary; inside is msgpack again, without extensions."""


class _Token(NamedTuple):
    """One token: where what follows it begins, how many items it announces, and its extension type, if it has one."""

    end: int
    items: int = 0
    extension: int | None = None
    payload: int = 0


def is_modest(data: bytes, *, items_max: int) -> bool:
    """Whether `data` is one value, or one dictionary of hivemind's, of at most `items_max` items in all."""
    try:
        first = _token(data, 0)
        if first.extension is None:
            return _has_room(data, items_max)
        is_whole = first.extension == DICTIONARY_CODE and first.end == len(data)
        return is_whole and _has_room(data[first.payload :], items_max)
    except IndexError:  # it ends within a token
        return False


def _has_room(data: bytes, left: int) -> bool:
    """Whether `data` has no extension types and announces no more items than `left`."""
    position = 0
    while position < len(data):
        token = _token(data, position)
        left -= 1 + token.items
        if left < 0 or token.extension is not None:
            return False
        position = token.end
    return position == len(data)


# First byte: (bytes of the length, what it counts); and the sizes of what has no length.
_LENGTHS = {
    0xC4: (1, "bytes"),
    0xC5: (2, "bytes"),
    0xC6: (4, "bytes"),
    0xC7: (1, "extension"),
    0xC8: (2, "extension"),
    0xC9: (4, "extension"),
    0xD9: (1, "bytes"),
    0xDA: (2, "bytes"),
    0xDB: (4, "bytes"),
    0xDC: (2, "array"),
    0xDD: (4, "array"),
    0xDE: (2, "map"),
    0xDF: (4, "map"),
}
_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def _token(data: bytes, start: int) -> _Token:
    """The token at `start`; raises IndexError if `data` ends before it does."""
    kind, after = data[start], start + 1
    if kind in _LENGTHS:
        length_bytes, counts = _LENGTHS[kind]
        length = int.from_bytes(data[after : after + length_bytes], "big")
        return _sized(data, after + length_bytes, length, counts)
    if kind in _FIXED_EXTENSIONS:
        return _sized(data, after, _FIXED_EXTENSIONS[kind], "extension")
    if 0x80 <= kind <= 0x9F:
        return _sized(data, after, kind & 0x0F, "map" if kind < 0x90 else "array")
    return _sized(data, after, kind & 0x1F if 0xA0 <= kind <= 0xBF else _FIXED.get(kind, 0), "bytes")


def _sized(data: bytes, after: int, length: int, counts: str) -> _Token:
    if counts == "extension":
        token = _Token(after + 1 + length, extension=data[after], payload=after + 1)
    elif counts == "bytes":
        token = _Token(after + length)
    else:
        token = _Token(after, items=length if counts == "array" else 2 * length)
    if token.end > len(data):
        raise IndexError(token.end)
    return token
