"""A run's tokenizer is the coordinator's file: the library gets only the shapes that a run may have."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving_harness import TOKENIZER

from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.use.tokenizer import SPLITS, Tokenizer

FOUND: dict[str, Any] = json.loads(TOKENIZER)
BYTE_LEVEL, MODEL = FOUND["pre_tokenizer"], FOUND["model"]
TEXT = "naïve \N{FIRE}  the 12345 words' ends,\n\n and it's END <|end|>"
AGAIN = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 16}
STAGES = {"type": "Sequence", "normalizers": [AGAIN] * 5}


def split(pattern: dict[str, str], **changes: Any) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False, **changes}


def pieces(*parts: Any) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(parts)}}


WORDS = split({"Regex": SPLITS[0]})
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a letter becomes a million": ({"normalizer": STAGES}, "normalizer"),
    "a normalizer that only loses": ({"normalizer": {"type": "Lowercase"}}, "normalizer"),
    "a regex without end": (pieces(split({"Regex": "(?:(a+)+)+$"}), BYTE_LEVEL), "pattern"),
    "a split at a text": (pieces(split({"String": " "}), BYTE_LEVEL), "pattern"),
    "a split that drops text": (pieces(split({"Regex": SPLITS[0]}, behavior="Removed"), BYTE_LEVEL), "behavior"),
    "an inverted split": (pieces(split({"Regex": SPLITS[0]}, invert=True), BYTE_LEVEL), "invert"),
    "a thousand splits": (pieces(*[WORDS] * 1000, BYTE_LEVEL), "pre_tokenizer"),
    "splits without bytes": (pieces(WORDS), "pre_tokenizer"),
    "a sequence of nothing": (pieces(), "pre_tokenizer"),
    "a sequence in a sequence": (pieces(pieces(BYTE_LEVEL)["pre_tokenizer"]), "pre_tokenizer"),
    "no pre-tokenizer": ({"pre_tokenizer": None}, "pre_tokenizer"),
    "a space before each text": ({"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}}, "add_prefix_space"),
    "a flag that is a number": ({"pre_tokenizer": BYTE_LEVEL | {"use_regex": 1}}, "use_regex"),
    "a decoder that explodes": ({"decoder": {"type": "Sequence", "decoders": [AGAIN] * 5}}, "decoder"),
    "padding": ({"padding": {"strategy": {"Fixed": 2**40}}}, "padding"),
    "truncation": ({"truncation": {"max_length": 0}}, "truncation"),
    "tokens around a text": ({"post_processor": {"type": "TemplateProcessing"}}, "post_processor"),
    "another model": ({"model": MODEL | {"type": "Unigram"}}, "model.type"),
    "a model without a type": ({"model": {"vocab": {}, "merges": []}}, "model"),
    "chance": ({"model": MODEL | {"dropout": 0.5}}, "model.dropout"),
    "a prefix of a megabyte": ({"model": MODEL | {"continuing_subword_prefix": "a" * 2**20}}, "prefix"),
    "an unknown part": ({"later": []}, "later"),
    "a letter that is no byte": ({"model": MODEL | {"vocab": MODEL["vocab"] | {"\N{FIRE}": 260}}}, "model.vocab"),
    "numbers with gaps": ({"model": MODEL | {"vocab": MODEL["vocab"] | {"aaa": 2**31}}}, "model.vocab"),
    "a token beside the vocabulary": ({"added_tokens": [{"id": 7, "content": "zz"}]}, "added_tokens"),
    "an empty token": ({"added_tokens": [{"id": 7, "content": ""}]}, "added_tokens"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_shape_that_no_run_has_is_refused_by_its_name(name: str) -> None:
    change, said = HOSTILE[name]
    with pytest.raises(IntegrityError, match=f"a tokenizer with `[a-z_.]*{said}") as caught:
        Tokenizer(json.dumps(FOUND | change).encode())
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "change",
    [
        {},
        pieces(WORDS, BYTE_LEVEL | {"use_regex": False}),
        pieces(split({"Regex": SPLITS[1]}), BYTE_LEVEL | {"use_regex": False}),
        pieces({"type": "Digits", "individual_digits": True}, BYTE_LEVEL),
    ],
    ids=["GPT-2", "Llama 3", "Qwen 2", "SmolLM"],
)
def test_the_ways_in_which_known_models_cut_texts_are_taken(change: dict[str, Any]) -> None:
    tokenizer = Tokenizer(json.dumps(FOUND | change).encode())
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode(TEXT)) <= len(TEXT.encode()) <= len(tokenizer.encode(TEXT)) * tokenizer.longest


def test_a_part_that_stands_there_twice_counts_as_it_was_looked_at() -> None:
    twice = f'{{"normalizer": {json.dumps(STAGES)}, {json.dumps(FOUND)[1:]}'
    assert json.loads(twice) == FOUND
    assert Tokenizer(twice.encode()).encode("a" * 16) == Tokenizer(TOKENIZER).encode("a" * 16)


def test_a_file_nested_too_deeply_is_no_tokenizer() -> None:
    with pytest.raises(IntegrityError, match="not a tokenizer"):
        Tokenizer(b"[" * 10**6)
