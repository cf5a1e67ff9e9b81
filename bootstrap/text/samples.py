"""A document, and the one rule by which documents are taken when there are more than fit.

Every source of text is a stream per domain; the next document always comes from the domain that has the fewest bytes
so far. So domains get near-equal shares as far as each reaches, and the result is the same on every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """One text. `domain` is only for reports: routing never sees it. `source` is a relative name, never a path."""

    text: str
    domain: str
    source: str

    @property
    def size_bytes(self) -> int:
        return len(self.text.encode())


def balanced(
    streams: Mapping[str, Iterable[Document]], *, bytes_max: int = 0, documents_max: int = 0
) -> list[Document]:
    """Documents of all streams, poorest domain first, until the text reaches `bytes_max` or the count its limit.

    A limit of 0 is none. A document that would go over `bytes_max` ends its stream, so the limit is never passed.
    """
    open_streams: dict[str, Iterator[Document]] = {name: iter(stream) for name, stream in streams.items()}
    taken_bytes = dict.fromkeys(open_streams, 0)
    documents: list[Document] = []
    while open_streams and not (documents_max and len(documents) >= documents_max):
        poorest = min(open_streams, key=lambda name: taken_bytes[name])
        document = next(open_streams[poorest], None)
        size_bytes = document.size_bytes if document else 0
        if document is None or (bytes_max and sum(taken_bytes.values()) + size_bytes > bytes_max):
            del open_streams[poorest]
            continue
        taken_bytes[poorest] += size_bytes
        documents.append(document)
    return documents
