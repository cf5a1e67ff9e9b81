"""The payloads of contributions: they lie in the store, and are decoded only while somebody looks at them."""

from __future__ import annotations

from functools import partial

from ..core.compress import Compressed
from ..errors import IntegrityError
from ..protocol.documents import Contribution, Sealed
from ..topology import ModuleId
from .recompute import Admitted
from .run import Run
from .store import Store


class PayloadLost(IntegrityError):
    """The payload of a contribution that should be in the store is not there any more, or was damaged."""

    def __init__(self, message: str, *, contribution: str) -> None:
        super().__init__(message)
        self.contribution = contribution


def stored(
    run: Run, store: Store, module: ModuleId, sealed: Sealed[Contribution], *, norm: float | None = None
) -> Admitted:
    """A contribution to `module` whose outer gradient is read from `store` each time; reading raises PayloadLost."""
    return Admitted(sealed, partial(read_gradient, run, store, module, sealed), norm)


def read_gradient(run: Run, store: Store, module: ModuleId, sealed: Sealed[Contribution]) -> Compressed:
    """Raises PayloadLost, and IntegrityError for what is no outer gradient of `module`."""
    return run.read_contribution(read_payload(store, sealed), module)


def read_payload(store: Store, sealed: Sealed[Contribution]) -> bytes:
    """Raises PayloadLost."""
    name = sealed.document.payload.digest
    try:
        payload = store.get(name)
    except IntegrityError as error:  # damaged on disk, and removed
        raise PayloadLost(str(error), contribution=sealed.id) from None
    if payload is None:
        raise PayloadLost(f"blob {name[:8]} is missing", contribution=sealed.id)
    return payload
