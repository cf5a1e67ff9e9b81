"""The tokenizer: without loss, the same from the same text, and refusing bytes that are none."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootstrap import runfile
from bootstrap.text import corpus as found
from bootstrap.text import samples as documents
from bootstrap.text import tokenizer as prepare_text
from bootstrap.text.samples import Document
from bootstrap.text.tokenizer import tokenise, train_tokenizer
from dipaco_p2p.errors import CorpusError, IntegrityError
from dipaco_p2p.use.tokenizer import END, END_ID, TOKENIZER_BYTES_MAX, Tokenizer

TEXTS = [inspect.getsource(module) for module in (documents, found, prepare_text, runfile)]
VOCAB_SIZE = 600
DATA = train_tokenizer(TEXTS, vocab_size=VOCAB_SIZE)
TOKENIZER = Tokenizer(DATA)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.text())
def test_every_text_survives(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_a_batch_is_encoded_like_its_texts() -> None:
    assert TOKENIZER.encode_batch(TEXTS) == [TOKENIZER.encode(text) for text in TEXTS]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.text())
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert TOKENIZER.byte_lengths()[tokens].sum() == len(text.encode())
    assert b"".join(map(TOKENIZER.token_bytes, tokens)) == text.encode()


def test_every_token_has_bytes_but_the_end_of_a_document() -> None:
    lengths = TOKENIZER.byte_lengths()
    assert lengths.shape == (VOCAB_SIZE,) and lengths[END_ID] == 0
    assert (np.delete(lengths, END_ID) > 0).all()
    assert TOKENIZER.token_bytes(END_ID) == END.encode()
    assert lengths[TOKENIZER.encode(f"{END}é\N{FIRE}" + TEXTS[0])].sum() == len(f"{END}é\N{FIRE}{TEXTS[0]}".encode())


def test_the_vocabulary_has_the_size_asked_for_and_ids_stay_below_it() -> None:
    assert TOKENIZER.vocab_size == VOCAB_SIZE
    assert max(TOKENIZER.encode("".join(TEXTS))) < VOCAB_SIZE


def test_the_end_of_a_document_is_token_0() -> None:
    assert TOKENIZER.decode([END_ID]) == END


def test_text_that_was_trained_on_takes_fewer_tokens_than_bytes() -> None:
    assert len(TOKENIZER.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_the_same_text_gives_the_same_bytes_in_another_process_with_other_threads() -> None:
    program = (
        "import sys, hashlib; from bootstrap.text.tokenizer import train_tokenizer\n"
        f"data = train_tokenizer(sys.stdin.read().split('\\0'), vocab_size={VOCAB_SIZE})\n"
        "print(hashlib.sha256(data).hexdigest())"
    )
    for threads in ("1", "4"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        done = subprocess.run(
            [sys.executable, "-c", program],
            input="\0".join(TEXTS),
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == hashlib.sha256(DATA).hexdigest() == TOKENIZER.digest


def test_progress_ends_at_the_size_of_the_text() -> None:
    heard: list[int] = []
    train_tokenizer(TEXTS, vocab_size=300, on_progress=heard.append)
    assert heard == sorted(heard)
    assert heard[-1] == sum(len(text.encode()) for text in TEXTS)


def test_too_little_text_for_the_vocabulary_is_refused_with_the_numbers() -> None:
    with pytest.raises(CorpusError, match=r"27 bytes of text give \d+ tokens, not 2048") as caught:
        train_tokenizer(["to be or not to be, to be or"[:27]], vocab_size=2048)
    assert "vocab_size" in caught.value.hint


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"{}",
        b"[1]",
        DATA[:-1],
        b" " * (TOKENIZER_BYTES_MAX + 1),
        DATA.replace(END.encode(), b"<|start|>"),
    ],
    ids=["empty", "no text", "no tokenizer", "a list", "cut", "too large", "no end token"],
)
def test_bytes_that_are_no_tokenizer_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="tokenizer"):
        Tokenizer(data)


def test_documents_become_arrays_in_order_each_with_its_end() -> None:
    many = [Document(f"{text} {i}", "d", "s") for i in range(50) for text in TEXTS[:2]]
    heard: list[int] = []
    arrays = tokenise(many, TOKENIZER, on_progress=heard.append)
    assert heard == [64, 100]
    assert all(array.dtype == np.int32 and array[-1] == END_ID for array in arrays)
    assert [TOKENIZER.decode(array[:-1].tolist()) for array in arrays] == [document.text for document in many]


def test_the_end_token_cannot_be_forged_by_a_text_elsewhere_than_at_the_end() -> None:
    (array,) = tokenise([Document(f"a {END} b", "d", "s")], TOKENIZER)
    assert np.flatnonzero(array == END_ID).tolist() == [len(array) - 1]
    assert TOKENIZER.decode(array[:-1].tolist()) == f"a {END} b"


def test_the_file_is_plain_json_of_the_library() -> None:
    assert json.loads(DATA)["model"]["type"] == "BPE"
