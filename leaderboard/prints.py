"""What a database remembers of texts whose signatures this program has checked, so that it need not check them at every
start.

A print is a keyed hash (BLAKE2b) of a stored text. Its key is a file of its own beside the database, readable by its
owner only: who changes a row cannot make its print, and a database that comes from elsewhere has none that holds here.
Either way the signature is checked as ever. The key signs nothing, and nobody else has a use for it. `rebuild` looks at
no prints.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
from pathlib import Path

KEY_BYTES = 32
PRINT_BYTES = 16

log = logging.getLogger(__name__)


class Prints:
    """Makes and compares prints under one key; without a key there are none."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key

    @classmethod
    def beside(cls, database: Path | None) -> Prints:
        """Under the key beside `database`, which is made if need be; None for a database in memory. A folder where no
        key can be kept costs time, and nothing else."""
        if database is None:
            return cls(None)
        try:
            return cls(_key(database.with_suffix(".key")))
        except OSError as error:
            log.info("no key beside %s: every signature will be checked at every start: %s", database, error)
            return cls(None)

    def of(self, kind: str, id_: str, text: str) -> bytes | None:
        """The print of a stored text, with what it is stored as."""
        if self._key is None:
            return None
        data = "\n".join((kind, id_, text)).encode()  # only the text could hold a line break, and it is the last
        return hashlib.blake2b(data, key=self._key, digest_size=PRINT_BYTES).digest()

    def holds(self, kind: str, id_: str, text: str, print_: bytes | None) -> bool:
        """Whether that is what this print was made of."""
        if "\n" in kind or "\n" in id_:
            return False
        ours = self.of(kind, id_, text)
        return ours is not None and print_ is not None and hmac.compare_digest(ours, print_)


def _key(path: Path) -> bytes:
    """Read, or made; one that others can read, or that is cut short, is replaced: nothing but time is lost."""
    try:
        key = path.read_bytes()
        if len(key) == KEY_BYTES and not path.stat().st_mode & 0o077:
            return key
        path.unlink()
    except FileNotFoundError:
        pass
    key = secrets.token_bytes(KEY_BYTES)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(key)
    return key
