"""The coordinator's decrees: who is banned, whether the run is frozen, which module goes back to which version, whose
archives count beside its own, whose names nobody shows, and after which round the grid grows.

- They are one chain for the whole run: numbered from 1 on, each names the one before, so a peer that has a decree and
  all that it names lacks none before it. Only the coordinator's signature counts.
- What holds is a fold over the chain: later decrees change what earlier ones said, nothing is ever taken back from it.
- A ban is about what comes after it: receipts that were given before stay good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ..config import LEVELS_MAX, MODULES_MAX
from ..errors import ConfigError, IntegrityError
from ..strict import added, bounded
from ..topology import ModuleId
from .references import BlobRef
from .signing import VALUES_MAX, PeerId, require_digest, require_peers

DECREES_MAX = 1024
"""Of one run: every peer keeps all of them, at most 1 kB each."""
REASON_CHARS_MAX = 200
"""Of the coordinator's words: they stand on terminals of people."""

BAN, ADMIT, FREEZE, UNFREEZE, ROLLBACK, APPOINT, DISMISS, HIDE_NAME, SHOW_NAME, GROW = ACTS = (
    "ban",
    "admit",
    "freeze",
    "unfreeze",
    "rollback",
    "appoint",
    "dismiss",
    "hide-name",
    "show-name",
    "grow",
)
"""All that a decree can say. Whoever does not know one can read neither that decree nor any after it: a further act
comes with a further version of the protocol."""
GROW_AHEAD = 2
"""Versions between the newest one when a growth is decreed and the last one of its stage: everybody has heard of it by
then, whatever round is open somewhere."""
WITHOUT_MAX = 64
"""Peers that one rollback leaves out: those of several bans, where the chain has not carried out the decree before."""
OF_PEER = (BAN, ADMIT, APPOINT, DISMISS, HIDE_NAME, SHOW_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """What a rollback brings in place of an earlier version's parameters: those that the versions since would have
    given without the contributions of some peers. The coordinator has computed it; whoever has the contributions can
    do so again (owner/rollback.py)."""

    without: tuple[PeerId, ...] = bounded(items=WITHOUT_MAX)
    snapshot: BlobRef
    """The parameters."""
    state: BlobRef
    """The outer state that goes with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decree:
    """The coordinator's word on a run that goes on; what it needs besides depends on the act."""

    KIND: ClassVar[str] = "decree"
    run: str
    """The id of the run's first stage: a decree holds in all of them."""
    number: int = bounded(low=1, high=DECREES_MAX)
    previous: str
    """The id of the decree before; empty for number 1."""
    at_s: float = bounded(low=0.0, high=float(VALUES_MAX))
    """Unix time on the coordinator's clock; for display only."""
    act: str = bounded(choices=ACTS)
    reason: str
    """For people; may be empty where something is undone."""
    peer: PeerId | None = None
    """Who is banned or admitted again, is appointed or dismissed as a further seed node, or whose name is hidden or
    shown again."""
    stage: str = ""
    """Of a rollback: the id of the stage that the module is of; of a growth: the stage that ends."""
    module: ModuleId | None = None
    to: int = bounded(0, low=0, high=VALUES_MAX)
    """Of a rollback: the version whose parameters come back, or from which on versions are rebuilt. Of a growth: the
    stage's last version."""
    after: int = bounded(0, low=0, high=VALUES_MAX)
    """The newest version when it was decreed: of the module, the one that undoes is greater; or of any, of a growth."""
    rebuilt: Rebuilt | None = added(None)
    """Of a rollback that keeps the work of others in the versions after `to`, up to `after`."""
    levels: tuple[int, ...] = added((), items=LEVELS_MAX)
    """Of a growth: how many modules each level has afterwards."""
    corpus: str = added("")
    """Of a growth that brings text: the digest of its sequences, which the coordinator keeps; empty: it brings none."""
    author: PeerId

    def __post_init__(self) -> None:
        require_digest(self.run, *([self.previous] if self.number > 1 else []))
        if self.number == 1 and self.previous:
            raise ConfigError("the first decree has none before it")
        if len(self.reason) > REASON_CHARS_MAX or not self.reason.isprintable():
            hint = "say it shorter, without control characters"
            raise ConfigError(f"a reason is one line of up to {REASON_CHARS_MAX} characters", hint=hint)
        if not self.reason.strip() and self.act in (BAN, FREEZE, ROLLBACK, HIDE_NAME):
            raise ConfigError(f"a {self.act} needs a reason", hint="the volunteers read it")
        self._check_peer()
        self._check_rollback()
        self._check_growth()

    def _check_peer(self) -> None:
        if (self.peer is not None) != (self.act in OF_PEER):
            raise ConfigError(f"a decree names a peer if it is one of {', '.join(OF_PEER)}, and else none")
        if self.peer is not None:
            require_peers(self.peer)
        if self.peer == self.author:
            raise ConfigError(f"the coordinator cannot {self.act} itself")

    def _check_rollback(self) -> None:
        if self.act == ROLLBACK:
            require_digest(self.stage)
            if self.module is None or not self.to < self.after:
                raise ConfigError("a rollback names a module, and a version before its newest")
            return
        if self.rebuilt is not None:
            raise ConfigError(f"a {self.act} rebuilds nothing")
        if self.act != GROW and (self.stage or self.module is not None or self.to or self.after):
            raise ConfigError(f"a {self.act} names no module and no version")

    def _check_growth(self) -> None:
        if self.act != GROW:
            if self.levels or self.corpus:
                raise ConfigError(f"a {self.act} names no levels and no text")
            return
        require_digest(self.stage, *filter(None, [self.corpus]))
        if self.module is not None or not self.levels or not all(1 <= width <= MODULES_MAX for width in self.levels):
            raise ConfigError("a growth names the modules of each level, and no single module")
        if self.to < self.after + GROW_AHEAD:
            raise ConfigError(f"a growth after round {self.to}, {GROW_AHEAD} at least must lie before it")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownDecree:
    """What a version shows that carries a decree out: the decree, as the coordinator signed it."""

    decree: Decree
    signature: str
    """The coordinator's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decreed:
    """What holds by all decrees so far."""

    banned: Mapping[PeerId, str] = field(default_factory=dict)
    """With the reason of each."""
    frozen: str | None = None
    """Why nothing is trained; None while the run goes on."""
    rollbacks: Mapping[tuple[str, ModuleId], int] = field(default_factory=dict)
    """By stage and module the number of the newest decree."""
    seeds: frozenset[PeerId] = frozenset()
    """Whose archives count beside the coordinator's own."""
    growths: Mapping[str, int] = field(default_factory=dict)
    """By stage the number of the decree that ends it: the first one, since peers may have ended their part by it."""
    nameless: Mapping[PeerId, str] = field(default_factory=dict)
    """Whose name and team nobody shows, with the reason of each."""

    def hides(self, peer: PeerId) -> bool:
        """Whether its name and team are not to be shown."""
        return peer in self.banned or peer in self.nameless

    def after(self, decree: Decree) -> Decreed:
        """The same with one decree more."""
        if decree.act in (FREEZE, UNFREEZE):
            return replace(self, frozen=decree.reason if decree.act == FREEZE else None)
        if decree.act == ROLLBACK:
            assert decree.module is not None, "checked when it was made"
            return replace(self, rollbacks={**self.rollbacks, (decree.stage, decree.module): decree.number})
        if decree.act == GROW:
            return replace(self, growths={decree.stage: decree.number, **self.growths})
        assert decree.peer is not None, "checked when it was made"
        if decree.act in (APPOINT, DISMISS):
            seeds = self.seeds | {decree.peer} if decree.act == APPOINT else self.seeds - {decree.peer}
            return replace(self, seeds=seeds)
        said = {decree.peer: decree.reason} if decree.act in (BAN, HIDE_NAME) else {}
        if decree.act in (HIDE_NAME, SHOW_NAME):
            return replace(self, nameless=_without(self.nameless, decree.peer) | said)
        return replace(self, banned=_without(self.banned, decree.peer) | said)


def _without(reasons: Mapping[PeerId, str], peer: PeerId) -> dict[PeerId, str]:
    return {each: reason for each, reason in reasons.items() if each != peer}


def check_next(decree: Decree, *, number: int, previous: str, run: str, coordinator: PeerId) -> None:
    """Raise IntegrityError unless it is the coordinator's, and follows decree `number`, whose id is `previous`."""
    if decree.run != run or decree.author != coordinator:
        raise IntegrityError(f"decree {decree.number} is not this run's coordinator's")
    if decree.number != number + 1 or decree.previous != previous:
        raise IntegrityError(f"decree {decree.number} does not follow decree {number}")
