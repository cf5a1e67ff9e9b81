"""What a user may give to say which run is meant: a ticket, a file or a link with one, or the address of a peer.

A link carries its ticket behind the `#`, which no browser sends anywhere, and nothing is fetched from it:
`https://example.org/join#dipaco1...`, or `dipaco://dipaco1...`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, WrongRun
from ..protocol.signing import PeerId, peer_of
from ..swarm.addresses import read_address
from ..ticket import PREFIX, WORD, Ticket, read_ticket

SCHEMES = ("dipaco://", "https://", "http://")
FILE_BYTES_MAX = 64 * 1024
_ASK_HINT = "ask the coordinator for a ticket: one word that begins with dipaco1"
_WHAT_HINT = (
    "give a ticket (dipaco1...), or a file or link with one; "
    "an address looks like /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW..."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where to knock, and what must be found there."""

    addresses: tuple[str, ...]
    """Of peers, full multiaddrs."""
    run: str | None = None
    """The id of the run's first stage, or the start of any stage's; None: whatever is there."""
    coordinator: PeerId | None = None
    """Who must have signed the run; None: with a `run`, anybody, else the peer that is asked."""
    name: str = ""

    @property
    def key(self) -> str:
        """What is remembered of this entry is remembered under this name."""
        return self.run if self.run is not None and self.coordinator is not None else self.addresses[0]


def is_entry(text: str) -> bool:
    """Whether `text` is meant as an entry, where the folder of a run could be given as well."""
    path = Path(text)
    with contextlib.suppress(OSError):  # a name that is too long for a file
        if path.exists():
            return path.is_file()
    return "/p2p/" in text or bool(WORD.search(text)) or text.startswith(SCHEMES)


def read_entry(text: str, *, run: str | None = None) -> Entry:
    """What `text` leads to; `run` is an id, or its start, that the user demands as well.

    Raises ConfigError for anything else and for a typo, WrongRun for a ticket of another version or run.
    """
    wanted = None if run is None else run.removeprefix("run:")
    word = bare(text)
    if word.startswith("/"):
        read_address(word)
        return Entry(addresses=(word,), run=wanted)
    entry = entry_of(read_ticket(word))
    assert entry.run is not None
    if wanted is not None and not entry.run.startswith(wanted):
        message = f"the ticket is for run:{entry.run[:8]}, not run:{wanted[:8]}"
        raise WrongRun(message, hint="leave --run out: the ticket names its run")
    return entry


def bare(text: str) -> str:
    """The address or the ticket in `text`, without the file, link or line around it. Raises ConfigError."""
    text = text.strip()
    return text if text.startswith("/") and "/p2p/" in text else _word_in(text)


def entry_of(ticket: Ticket) -> Entry:
    """A ticket as an entry; raises ConfigError for an address that no peer can have."""
    addresses = tuple(f"{seed.place}/p2p/{peer_of(seed.key)}" for seed in ticket.seeds)
    for address in addresses:
        read_address(address)
    return Entry(addresses=addresses, run=ticket.run, coordinator=peer_of(ticket.coordinator), name=ticket.name)


def _word_in(text: str) -> str:
    """The ticket in a text, a link or a file; raises ConfigError."""
    if text.lower().startswith(f"{PREFIX}1"):
        return "".join(text.split())  # mail breaks long lines
    if text.startswith(SCHEMES):
        return _word_of_link(text)
    path = Path(text)
    if _is_file(path):
        return _only_word(_head_of(path), f"the file `{path}`")
    return _only_word(text, f"`{text[:80]}`")


def _word_of_link(link: str) -> str:
    scheme, _, rest = link.partition("://")
    place = rest if scheme == "dipaco" else rest.partition("#")[2]
    found = WORD.findall(place)
    if len(found) != 1:
        message = f"the link `{link[:80]}` has no ticket" + ("" if scheme == "dipaco" else " behind a `#`")
        raise ConfigError(message, hint=f"nothing is fetched from links; {_ASK_HINT}")
    return str(found[0])


def _only_word(text: str, where: str) -> str:
    found = list(dict.fromkeys(WORD.findall(text)))
    if not found:
        raise ConfigError(f"{where} is neither a ticket nor a peer's address", hint=_WHAT_HINT)
    if len(found) > 1:
        raise ConfigError(f"{where} holds {len(found)} tickets", hint="give the one that you mean")
    return str(found[0])


def _is_file(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return path.is_file()
    return False


def _head_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES_MAX).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read `{path}`: {error.strerror}", hint="choose a file that you may read") from None
