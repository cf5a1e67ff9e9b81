"""The ticket: one line that is all a volunteer needs to join a run.

    ticket = "dipaco1" + Bech32m of:  format u8 = 1 | protocol u16 | run 32 | coordinator's public key 32
             | name: length u8, ASCII | seeds, then volunteers: count u8, then each:
               kind u8 (4 ip4, 6 ip6, 1 dns, 2 dns4, 3 dns6; +128: the coordinator itself)
               | host: 4 bytes, 16 bytes, or length u8 and ASCII | port u16 | public key 32, but of the coordinator

Numbers are big-endian. A ticket is no secret and gives no rights: it pins the run and who made it, and says where to
knock. Whoever hands it over is believed for that, so it should come from where the coordinator is known.

Bech32m (BIP 350): characters of 5 bits each, of which the last six are a checksum, a BCH code over GF(32). Up to 1023
characters it notices any three wrong ones, and others but for one in a thousand million; a single typo is found.
"""

from __future__ import annotations

import ipaddress
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from .config import NEWER_HINT, PROTOCOL_VERSION, check_protocol
from .errors import ConfigError, WrongRun

PREFIX = "dipaco"
FORMAT = 1
KEY_BYTES = 32
SEEDS_MAX = 16
NAME_CHARS_MAX = 64
WORD = re.compile(r"(?<![A-Za-z0-9])(?:dipaco1[a-z0-9]{6,}|DIPACO1[A-Z0-9]{6,})", re.ASCII)
"""Where in a text a ticket may stand; whether it is one, `read_ticket` says."""
_HINT = "ask the coordinator for it: `dipaco-bootstrap ticket` prints it"
_KINDS = {"ip4": 4, "ip6": 6, "dns": 1, "dns4": 2, "dns6": 3}
_NAMES = {number: kind for kind, number in _KINDS.items()}
_OF_COORDINATOR = 128
_HEAD = struct.Struct(f">BH{KEY_BYTES}s{KEY_BYTES}s")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedPlace:
    """Where a peer of the run can be dialled: `place` is a multiaddr without the peer, `key` its public key."""

    place: str
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a ticket says."""

    run: str
    """The id of the run's first stage."""
    coordinator: bytes
    """The public key that signed the run."""
    seeds: tuple[SeedPlace, ...]
    """Where the run is entered, in order: its seeds, then volunteers (node/doorplate.py)."""
    protocol: int = PROTOCOL_VERSION
    name: str = ""
    """What the coordinator calls the run; for people only."""


def write_ticket(ticket: Ticket) -> str:
    """The line; raises ConfigError if the seeds do not fit into it."""
    if not 1 <= len(ticket.seeds) <= SEEDS_MAX:
        raise ConfigError(f"a ticket with {len(ticket.seeds)} seeds", hint=f"name from 1 to {SEEDS_MAX}")
    head = _HEAD.pack(FORMAT, ticket.protocol, bytes.fromhex(ticket.run), ticket.coordinator)
    seeds = b"".join(_seed_bytes(seed, ticket.coordinator) for seed in ticket.seeds)
    data = head + _text(ticket.name) + bytes([len(ticket.seeds)]) + seeds
    if len(data) > (WORD_CHARS_MAX - 16) * 5 // 8:
        raise ConfigError(f"a ticket of {len(data)} bytes is too long to be copied", hint="name fewer seeds")
    return write_word(PREFIX, data)


def read_ticket(word: str) -> Ticket:
    """What the line says. Raises ConfigError for a typo, WrongRun for a ticket of another version."""
    try:
        data = read_word(PREFIX, word)
    except ConfigError as error:
        raise ConfigError(f"a typo in the ticket: {error}", hint=error.hint) from None
    if data[:1] != bytes([FORMAT]):
        raise WrongRun(f"a ticket of format {data[:1].hex()}, and this program reads {FORMAT}", hint=NEWER_HINT)
    if len(data) >= _HEAD.size:
        check_protocol(_HEAD.unpack_from(data)[1], who="the ticket's run")
    try:
        return _parsed(data)
    except (ValueError, IndexError, KeyError, struct.error):
        raise ConfigError("a ticket whose checksum holds, but not its form", hint=_HINT) from None


def _parsed(data: bytes) -> Ticket:
    """Raises ValueError, IndexError, KeyError or struct.error for what is no ticket."""
    _, protocol, run, coordinator = _HEAD.unpack_from(data)
    rest = _Bytes(data[_HEAD.size :])
    name = rest.text()
    seeds = tuple(_seed(rest, coordinator) for _ in range(rest.number()))
    if rest.left or not 1 <= len(seeds) <= SEEDS_MAX or len(name) > NAME_CHARS_MAX or not name.isprintable():
        raise ValueError("too much or too little")
    return Ticket(run=run.hex(), coordinator=coordinator, seeds=seeds, protocol=protocol, name=name)


def _seed_bytes(seed: SeedPlace, coordinator: bytes) -> bytes:
    _, kind, host, _, port = seed.place.split("/")
    is_own = seed.key == coordinator
    number = _KINDS[kind] + (_OF_COORDINATOR if is_own else 0)
    where = ipaddress.ip_address(host).packed if kind in ("ip4", "ip6") else _text(host)
    return bytes([number]) + where + struct.pack(">H", int(port)) + (b"" if is_own else seed.key)


def _seed(rest: _Bytes, coordinator: bytes) -> SeedPlace:
    number = rest.number()
    kind = _NAMES[number & ~_OF_COORDINATOR]
    host = str(ipaddress.ip_address(rest.take(4 if kind == "ip4" else 16))) if kind[:2] == "ip" else rest.text()
    [port] = struct.unpack(">H", rest.take(2))
    key = coordinator if number & _OF_COORDINATOR else rest.take(KEY_BYTES)
    return SeedPlace(place=f"/{kind}/{host}/tcp/{port}", key=key)


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode("ascii")


class _Bytes:
    """What is left to read."""

    def __init__(self, data: bytes) -> None:
        self.left = data

    def take(self, length: int) -> bytes:
        """The next bytes; raises IndexError if there are fewer."""
        if len(self.left) < length:
            raise IndexError(length)
        taken, self.left = self.left[:length], self.left[length:]
        return taken

    def number(self) -> int:
        return self.take(1)[0]

    def text(self) -> str:
        return self.take(self.number()).decode("ascii")


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
