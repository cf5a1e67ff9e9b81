"""Why a peer refuses: every reason that goes over the wire, in one enum.

A reason is a short word for programs; the message beside it is for people. A peer of a later version may send a word
that is not listed here, so a reader keeps the text as it came and compares.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """One word for each kind of refusal."""

    WRONG_RUN = "wrong-run"
    WRONG_MODULE = "wrong-module"
    WRONG_PATH = "wrong-path"
    NOT_AUTHOR = "not-author"
    NOT_LEADER = "not-leader"
    STALE_BASE = "stale-base"
    UNKNOWN_BASE = "unknown-base"
    ALREADY_CONTRIBUTED = "already-contributed"
    OVERSIZED = "oversized"
    """A blob larger than the receiver takes."""
    MALFORMED = "malformed"
    UNKNOWN_SHARDING = "unknown-sharding"
    NORM = "norm"
    COMPLETE = "complete"
    FULL = "full"
    """The version counts as many contributions of this path as it may; or a mirror has no room for more strangers'."""
    UNCLAIMED = "unclaimed"
    """Its author's newest claim is not one of the path."""
    COVERED = "covered"
    """Others trained the path when its author claimed it in the middle of the round."""
    TOO_SOON = "too-soon"
    """Its author was through with one path after the other much faster than others are."""
    UNINVITED = "uninvited"
    """The run's admission does not take its author's work: not invited, not on the list, or an inviter is banned."""
    NO_MIRROR = "no-mirror"
    """The contribution is on no second disk yet, so there is no receipt."""
    BANNED = "banned"
    """By the coordinator's decree, as the next two."""
    FROZEN = "frozen"
    ROLLED_BACK = "rolled-back"
    """It began from a version that was undone since: nobody's fault."""
    PAYLOAD_LOST = "payload-lost"
    """Nobody has the payload any more. Only in notes on contributions that expired, as the next one."""
    NOT_FINITE = "not-finite"
    COPIED = "copied"
    """Another author did the same work before (owner/originals.py)."""
    HARMFUL = "harmful"
    """Judges measured that it makes its path worse (gate.py)."""
    LITTLE_GAIN = "little-gain"
    """Judges measured that it gains much less than others' work."""
    NOT_REPEATED = "not-repeated"
    """Auditors repeated its inner steps, and came to something else."""
    UNJUDGED = "unjudged"
    """A part of the work was not to be had; or no judge could measure it, or they do not agree, and no version counts
    earlier work of its author."""

    PAYLOAD_MISSING = "payload-missing"
    """Upload the payload first."""
    CONTRIBUTION_MISSING = "contribution-missing"
    """A version counts a contribution that the mirror lacks."""
    MISSING = "missing"
    """The blob is not here."""
    OFFSET = "offset"
    INTEGRITY = "integrity"
    """The bytes of an upload do not have the digest that it named."""
    UNREACHABLE = "unreachable"
    OTHER = "other"
    """A check of something else than what was judged, or scores of something else than what is wanted."""
    UNKNOWN_PEER = "unknown-peer"
    ENOUGH = "enough"

    BUSY = "busy"
    """Any call may be refused for this reason or one of the next three, or as malformed."""
    OVERSIZE = "oversize"
    """A frame over the limits."""
    UNKNOWN_METHOD = "unknown-method"
    INTERNAL = "internal"
    """The other side failed; its log says why."""


PASSING = {
    Reason.NOT_LEADER,
    Reason.NO_MIRROR,
    Reason.UNCLAIMED,
    Reason.TOO_SOON,
    Reason.FROZEN,
    Reason.PAYLOAD_MISSING,
    Reason.BUSY,
    Reason.INTERNAL,
    Reason.OFFSET,
}
"""Refusals that another try, or another leader, can cure."""

COMMITMENT = (
    Reason.WRONG_RUN,
    Reason.WRONG_MODULE,
    Reason.WRONG_PATH,
    Reason.NOT_AUTHOR,
    Reason.NOT_LEADER,
    Reason.STALE_BASE,
)
"""Why nobody may commit to a contribution (owner/originals.py)."""

ADMISSION = (
    *COMMITMENT,
    Reason.UNKNOWN_BASE,
    Reason.ALREADY_CONTRIBUTED,
    Reason.OVERSIZED,
    Reason.MALFORMED,
    Reason.UNKNOWN_SHARDING,
    Reason.NORM,
    Reason.COMPLETE,
    Reason.FULL,
    Reason.UNCLAIMED,
    Reason.COVERED,
    Reason.TOO_SOON,
    Reason.UNINVITED,
    Reason.NO_MIRROR,
    Reason.BANNED,
    Reason.FROZEN,
    Reason.ROLLED_BACK,
    Reason.COPIED,
    Reason.HARMFUL,
    Reason.LITTLE_GAIN,
    Reason.NOT_REPEATED,
    Reason.UNJUDGED,
)
"""Why a contribution is not admitted (admission.py)."""

NOTED = {*ADMISSION, Reason.PAYLOAD_LOST, Reason.NOT_FINITE} - PASSING
NOTED -= {Reason.WRONG_RUN, Reason.WRONG_MODULE, Reason.NOT_AUTHOR, Reason.UNINVITED}
"""Reasons that say something about the contribution itself: a leader leaves a signed note. The others are about who
asked what of whom."""
