"""The outer state after a version, which the next one is made from: kept here, or fetched from whoever has it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from ..core.arrays import Floats
from ..core.model.layout import decode_module
from ..core.outer.outer_step import OuterState
from ..errors import BlobMissing, IntegrityError, SwarmError, Unreachable
from ..node.node import Reader, fetch_kept
from ..node.reading import holders_of
from ..protocol.documents import ModuleVersion
from ..protocol.signing import PeerId

log = logging.getLogger(__name__)

TRIES = 3
RETRY_S = 0.5


class KeptState:
    """That of one module which this peer leads or mirrors; the newest one stays in memory."""

    def __init__(self, node: Reader) -> None:
        self._node = node
        self._newest: tuple[ModuleVersion, OuterState] | None = None

    def note(self, version: ModuleVersion, state: OuterState) -> None:
        """This is the state after `version`, the newest that was made here."""
        self._newest = version, state

    def is_here(self, version: ModuleVersion) -> bool:
        """Whether momentum and residual after `version` are on this disk."""
        return version.state is None or self._node.store.size(version.state.digest) is not None

    async def fetch(self, version: ModuleVersion, peer: PeerId) -> None:
        """Have on this disk what the next version is made from, of `peer` if it has that: an archive may have no
        parameters, and a trainer has no outer state. Raises SwarmError without parameters."""
        try:
            await fetch_kept(self._node, version.snapshot, holders=[peer])
        except SwarmError:
            await fetch_kept(
                self._node, version.snapshot, holders=holders_of(self._node, version.module, version.version)
            )
        if version.state is not None:
            with contextlib.suppress(SwarmError):
                await fetch_kept(self._node, version.state, holders=[peer])

    async def read(self, version: ModuleVersion, *, holders: Sequence[PeerId] = ()) -> OuterState | None:
        """Parameters, momentum and residual after `version`; None if the last two are nowhere to be had.

        Raises BlobMissing if even the parameters are not, and Unreachable if a holder does not give them in time.
        """
        if self._newest is not None:
            made, known = self._newest
            # The digest alone would not do: a rollback has an earlier version's.
            if (made.version, made.digest, made.state) == (version.version, version.digest, version.state):
                return known
        params = await self._params(version, holders)
        try:
            data = None if version.state is None else await fetch_kept(self._node, version.state, holders=holders)
            return OuterState.restored(params, data)
        except (BlobMissing, IntegrityError) as error:
            log.warning("%s: the outer state of version %d is lost: %s", version.module, version.version, error)
            return None

    async def read_patiently(self, version: ModuleVersion, *, holders: Sequence[PeerId]) -> OuterState | None:
        """As `read`, after some tries: momentum must not be lost with a message. What nobody gives in time is lost."""
        for number in range(TRIES):
            if number:
                await self._node.clock.sleep(RETRY_S)
            try:
                if (state := await self.read(version, holders=holders)) is not None:
                    return state
            except Unreachable as error:  # what came is kept for the next try
                log.warning("%s: the outer state of version %d: %s", version.module, version.version, error)
        return None

    async def read_params(self, version: ModuleVersion, *, holders: Sequence[PeerId] = ()) -> OuterState:
        """A fresh outer state at `version`, for when its own is lost."""
        return OuterState.fresh(await self._params(version, holders))

    async def _params(self, version: ModuleVersion, holders: Sequence[PeerId]) -> Floats:
        data = await fetch_kept(self._node, version.snapshot, holders=holders)
        return decode_module(data, self._node.run.layout(version.module))
