"""Bytes as one word that survives being copied: Bech32m (BIP 350), with the place of a single typo.

The word is a prefix, `1`, and characters of 5 bits each, of which the last six are a checksum: a BCH code over
GF(32). Up to 1023 characters it notices any three wrong ones, and others but for one in a thousand million; one wrong
character can also be found again.
"""

from __future__ import annotations

from collections.abc import Iterable

from .errors import ConfigError

ALPHABET = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
"""Neither `1`, `b`, `i` nor `o`, which look like others."""
WORD_CHARS_MAX = 1000
CHECKSUM_CHARS = 6
_GENERATOR = (0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)
_BECH32M = 0x2BC830A3
_COPY_HINT = "copy it again, from its first to its last character"


def write_word(prefix: str, data: bytes) -> str:
    """`data` as a word; the caller keeps it below `WORD_CHARS_MAX`."""
    values = _regroup(data, 8, 5)
    check = _polymod([*_expanded(prefix), *values, *([0] * CHECKSUM_CHARS)]) ^ _BECH32M
    values += [check >> 5 * (CHECKSUM_CHARS - 1 - place) & 31 for place in range(CHECKSUM_CHARS)]
    word = prefix + "1" + "".join(ALPHABET[value] for value in values)
    assert len(word) <= WORD_CHARS_MAX, "the caller keeps it short"
    return word


def read_word(prefix: str, word: str) -> bytes:
    """The bytes in `word`; raises ConfigError, and names the typo if there is just one."""
    if len(word) > WORD_CHARS_MAX:
        raise ConfigError(f"{len(word)} characters, but at most {WORD_CHARS_MAX} are possible", hint=_COPY_HINT)
    if word not in (word.lower(), word.upper()):
        raise ConfigError("small and capital letters are mixed", hint=_COPY_HINT)
    word = word.lower()
    for place, char in enumerate(word[len(prefix) + 1 :], start=len(prefix) + 2):
        if char not in ALPHABET:
            raise ConfigError(f"character {place} is `{char}`, which never stands there", hint=_COPY_HINT)
    values = [ALPHABET.index(char) for char in word[len(prefix) + 1 :]]
    if len(values) < CHECKSUM_CHARS or _polymod([*_expanded(prefix), *values]) != _BECH32M:
        raise ConfigError(_typo(prefix, values), hint=_COPY_HINT)
    return bytes(_regroup(values[:-CHECKSUM_CHARS], 5, 8, is_padded=False))


def _typo(prefix: str, values: list[int]) -> str:
    """What is wrong with characters whose checksum does not hold, if one other character would make it hold."""
    wanted = _polymod([*_expanded(prefix), *values]) ^ _BECH32M
    for error in range(1, 32):
        syndrome = error
        for back in range(len(values)):
            if syndrome == wanted:
                place = len(values) - 1 - back
                wrong, right = ALPHABET[values[place]], ALPHABET[values[place] ^ error]
                return f"character {len(prefix) + 2 + place} is `{wrong}`, and should most likely be `{right}`"
            syndrome = _polymod([0], start=syndrome)
    return "its checksum does not hold, so characters are missing or wrong"


def _polymod(values: Iterable[int], *, start: int = 1) -> int:
    check = start
    for value in values:
        top, check = check >> 25, (check & 0x1FFFFFF) << 5 ^ value
        for bit, generator in enumerate(_GENERATOR):
            check ^= generator if top >> bit & 1 else 0
    return check


def _expanded(prefix: str) -> list[int]:
    codes = prefix.encode("ascii")
    return [*(code >> 5 for code in codes), 0, *(code & 31 for code in codes)]


def _regroup(values: Iterable[int], width: int, to: int, *, is_padded: bool = True) -> list[int]:
    """The same bits, `to` at a time; what is left over is filled with zeros, or dropped."""
    held, bits, groups = 0, 0, []
    for value in values:
        held, bits = held << width | value, bits + width
        while bits >= to:
            bits -= to
            groups.append(held >> bits & (1 << to) - 1)
        held &= (1 << bits) - 1
    return [*groups, held << to - bits] if is_padded and bits else groups
