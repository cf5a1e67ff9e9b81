"""From documents to token arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from .documents import Document
from .tokenizer import END_ID, Tokenizer

BATCH_DOCUMENTS = 64
"""Documents handed to the tokenizer at once: enough to keep its threads busy, few enough to show progress."""


def tokenise(
    documents: Sequence[Document], tokenizer: Tokenizer, *, on_progress: Callable[[int], None] | None = None
) -> list[NDArray[np.int32]]:
    """The tokens of each document, each ended by `<|end|>`, in the same order.

    Cutting them to sequences is the work of core/shards.py. `on_progress` hears how many documents are done.
    """
    arrays: list[NDArray[np.int32]] = []
    for start in range(0, len(documents), BATCH_DOCUMENTS):
        texts = [document.text for document in documents[start : start + BATCH_DOCUMENTS]]
        arrays.extend(np.array([*ids, END_ID], dtype=np.int32) for ids in tokenizer.encode_batch(texts))
        if on_progress is not None:
            on_progress(len(arrays))
    return arrays
