"""The invitations of one peer: the chain that it shows, those that it was shown, and the code that people pass on.

    code = "invite1" + Bech32m (ticket.py) of:  format u8 = 1 | the first 8 bytes of the run's id
           | for each invitation, the coordinator's first:  public key of who is invited 32 | at_s u32 | signature 64

Numbers are big-endian. Who signed each follows from the one before it. A code is no secret: it is for one peer alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..config import INVITE, NEWER_HINT
from ..errors import ConfigError, IntegrityError, Refused, WrongRun
from ..protocol.decrees import Decreed
from ..protocol.documents import Sealed, is_signed, seal
from ..protocol.invitations import LINKS_MAX, Invitation, broken, objection
from ..protocol.reasons import Reason
from ..protocol.signing import PeerId, Signer, peer_of, public_key_of
from ..ticket import read_word, write_word
from .authority import Decrees
from .run import Run

Chain = tuple[Sealed[Invitation], ...]
"""The coordinator's invitation first."""

SHOWN_MAX = 1024
"""Chains that a leader remembers: those of whom others forward work. Whoever brings its own shows its chain again."""
PREFIX = "invite"
FORMAT = 1
RUN_BYTES = 8
_HEAD = struct.Struct(f">B{RUN_BYTES}s")
_LINK = struct.Struct(">32sI64s")
ASK_HINT = "ask whoever invited you for it: `dipaco-peer invite` or `dipaco-bootstrap invite` prints it"


class Invitations:
    """What this peer shows and was shown, in one stage of a run."""

    def __init__(self, run: Run, decrees: Decrees) -> None:
        self._run = run
        self._decrees = decrees
        self.own: Chain = ()
        """Shown with every contribution of ours."""
        self._shown: dict[PeerId, Chain] = {}
        """By whom it leads to; the one that was shown longest ago first."""

    def learn(self, author: PeerId, chain: Chain) -> None:
        """What came with work of `author`. Raises Refused for a chain that does not lead to it."""
        if not chain or self._run.config.admission.policy != INVITE:
            return
        documents = [sealed.document for sealed in chain]
        if words := broken(author, documents, run=self._run.origin, coordinator=self._run.manifest.author):
            raise Refused(words, reason=Reason.UNINVITED)
        self._shown.pop(author, None)
        self._shown[author] = chain
        if len(self._shown) > SHOWN_MAX:
            del self._shown[next(iter(self._shown))]

    def require(self, author: PeerId, has_worked: Callable[[PeerId], bool], *, promised: PeerId | None = None) -> None:
        """Raise Refused unless the run takes work of `author`, by the newest chain that we were shown.

        `promised` is who brings it and may have given a receipt, which a ban does not take back. The coordinator need
        not show how its author was let in; of anybody else's word that is all that we can check, unless some chain
        counts work of the author."""
        decreed, is_invite = self._decrees.state, self._run.config.admission.policy == INVITE
        if promised == self._run.manifest.author or (promised and is_invite and has_worked(author)):
            return
        decreed = replace(decreed, banned={}) if promised else decreed
        words = why_not(self._run, author, self._shown.get(author, ()), decreed, has_worked=has_worked)
        if words:
            raise Refused(words, reason=Reason.UNINVITED)


def why_not(
    run: Run, peer: PeerId, chain: Chain, decreed: Decreed, *, has_worked: Callable[[PeerId], bool] = lambda peer: True
) -> str:
    """Why a run does not take work of `peer`, which shows `chain`; empty if it does. Without `has_worked` as far as
    anybody can tell who keeps no module's chain."""
    return objection(
        peer,
        [sealed.document for sealed in chain],
        admission=run.config.admission,
        run=run.origin,
        coordinator=run.manifest.author,
        banned=decreed.banned,
        has_worked=has_worked,
    )


def invite(signer: Signer, run: str, peer: PeerId, *, at_s: float, held: Chain = ()) -> Chain:
    """The chain for `peer`; `held` leads to whoever signs, and is empty for the coordinator. Raises ConfigError for
    what is no peer id, and if the chain may not go on."""
    if len(held) >= LINKS_MAX:
        hint = "ask a volunteer that was invited earlier, or the coordinator, to invite it"
        raise ConfigError(f"this volunteer's own chain has {LINKS_MAX} invitations, and none may follow", hint=hint)
    invitation = Invitation(run=run, peer=peer, at_s=int(at_s), author=signer.peer)
    return (*held, seal(signer, invitation))


def write_code(chain: Chain) -> str:
    """A chain as one word."""
    [run] = {sealed.document.run for sealed in chain}
    links = (
        _LINK.pack(public_key_of(sealed.document.peer), sealed.document.at_s, bytes.fromhex(sealed.signature))
        for sealed in chain
    )
    return write_word(PREFIX, _HEAD.pack(FORMAT, bytes.fromhex(run)[:RUN_BYTES]) + b"".join(links))


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What a code says; nobody has looked at its signatures."""

    run_start: str
    links: tuple[tuple[PeerId, int, str], ...]
    """Who is invited, when, and the signature."""

    def chain(self, run: Run) -> Chain:
        """Its invitations to `run`. Raises WrongRun if they are to another, IntegrityError if one is forged."""
        if not run.origin.startswith(self.run_start):
            raise WrongRun(f"the invitation is to run:{self.run_start[:8]}, not {run.name}", hint=ASK_HINT)
        found: list[Sealed[Invitation]] = []
        author = run.manifest.author
        for peer, at_s, signature in self.links:
            sealed = Sealed(Invitation(run=run.origin, peer=peer, at_s=at_s, author=author), signature)
            if not is_signed(sealed):
                raise IntegrityError(f"invitation {len(found) + 1} of this code is not signed by {author}")
            found.append(sealed)
            author = peer
        return tuple(found)


def read_code(text: str) -> Code:
    """What a code says; raises ConfigError for a typo or anything else."""
    word = "".join(text.split())  # mail breaks long lines
    if not word.lower().startswith(f"{PREFIX}1"):
        raise ConfigError(f"`{text[:80]}` is not an invitation: that begins with {PREFIX}1", hint=ASK_HINT)
    try:
        data = read_word(PREFIX, word)
    except ConfigError as error:
        raise ConfigError(f"a typo in the invitation: {error}", hint=error.hint) from None
    if data[:1] != bytes([FORMAT]):
        raise WrongRun(f"an invitation of format {data[:1].hex()}, and this program reads {FORMAT}", hint=NEWER_HINT)
    count, rest = divmod(len(data) - _HEAD.size, _LINK.size)
    if rest or not 1 <= count <= LINKS_MAX:
        raise ConfigError("an invitation whose checksum holds, but not its form", hint=ASK_HINT)
    links = tuple((peer_of(key), at_s, mark.hex()) for key, at_s, mark in _LINK.iter_unpack(data[_HEAD.size :]))
    return Code(run_start=_HEAD.unpack_from(data)[1].hex(), links=links)
