"""Training the tokenizer of a run on its corpus, and the tokens of documents.

Training the same texts in the same order gives the same bytes, which are passed on as a JSON file
(dipaco_p2p/use/tokenizer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from dipaco_p2p.errors import CorpusError
from dipaco_p2p.use.tokenizer import END, END_ID, Tokenizer

from .samples import Document

TOKEN_CHARS_MAX = 32
"""No token is a whole ruler of dashes: it would waste a place in the vocabulary."""


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, on_progress: Callable[[int], None] = lambda done: None
) -> bytes:
    """Train on all `texts`; `on_progress` hears how many bytes (UTF-8) have been read so far.

    Raises CorpusError if the texts hold too few repeated pairs for `vocab_size` tokens.
    """
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=TOKEN_CHARS_MAX,
        show_progress=False,
    )
    bytes_read = 0

    def counted() -> Iterator[str]:
        nonlocal bytes_read
        for text in texts:
            yield text
            bytes_read += len(text.encode())
            on_progress(bytes_read)

    bpe.train_from_iterator(counted(), trainer)
    if bpe.get_vocab_size() != vocab_size:
        reached = f"{bytes_read} bytes of text give {bpe.get_vocab_size()} tokens, not {vocab_size}"
        raise CorpusError(
            f"the corpus is too small for its vocabulary: {reached}", hint="add text, or lower `vocab_size`"
        )
    return bpe.to_str().encode()


BATCH_DOCUMENTS = 64
"""Documents handed to the tokenizer at once: enough to keep its threads busy, few enough to show progress."""


def tokenise(
    documents: Sequence[Document], tokenizer: Tokenizer, *, on_progress: Callable[[int], None] = lambda done: None
) -> list[NDArray[np.int32]]:
    """The tokens of each document, each ended by `<|end|>`, in the same order.

    Cutting them to sequences is the work of core/model/shards.py. `on_progress` hears how many documents are done.
    """
    arrays: list[NDArray[np.int32]] = []
    for start in range(0, len(documents), BATCH_DOCUMENTS):
        texts = [document.text for document in documents[start : start + BATCH_DOCUMENTS]]
        arrays.extend(np.array([*ids, END_ID], dtype=np.int32) for ids in tokenizer.encode_batch(texts))
        on_progress(len(arrays))
    return arrays
