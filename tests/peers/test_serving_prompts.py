"""`dipaco-peer serve` and the tokens of a prompt: what makes them, how many may come of it, and who waits meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
import serving_harness
from serving_harness import CONTEXT, PROMPT, TOKENIZER, make_served

from dipaco_p2p.use.folder import RunFolder
from dipaco_p2p.use.served import FolderPlace
from dipaco_p2p.use.tokenizer import HALF_CHARACTER, Pieces, Tokenizer
from peers.serving.api import make_app
from peers.serving.engine import Engine

LONGEST = Tokenizer(TOKENIZER).longest


@asynccontextmanager
async def client_of(folder: Path) -> AsyncIterator[httpx2.AsyncClient]:
    engine = Engine(FolderPlace(RunFolder(make_served(folder).root, is_read_only=True)), memory_bytes=1 << 30)
    await engine.follow()
    transport = httpx2.ASGITransport(make_app(engine, key="", streams_max=16))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


async def complete(client: httpx2.AsyncClient, prompt: str) -> httpx2.Response:
    return await client.post("/v1/completions", json={"model": "auto", "prompt": prompt, "max_tokens": 2})


def test_a_run_whose_tokenizer_explodes_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: a prompt of sixteen letters took a gigabyte, and all others waited for it."""
    again = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 16}
    stages = {"normalizer": {"type": "Sequence", "normalizers": [again] * 5}}
    monkeypatch.setattr(serving_harness, "TOKENIZER", json.dumps(json.loads(TOKENIZER) | stages).encode())

    async def ask() -> None:
        async with client_of(tmp_path / "run") as client:
            answer = await complete(client, "a" * 16)
        assert answer.status_code == 503 and "no model yet: a tokenizer with `normalizer`" in answer.text

    asyncio.run(ask())


def test_a_prompt_of_too_many_bytes_is_refused_before_it_is_cut_to_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, encode_batch = list[int](), Tokenizer.encode_batch

    def noted(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
        cut.extend(map(len, texts))
        return encode_batch(tokenizer, texts)

    monkeypatch.setattr(Tokenizer, "encode_batch", noted)

    async def ask() -> None:
        async with client_of(tmp_path / "run") as client:
            for more, words in ((1, f"{CONTEXT * LONGEST + 1} bytes"), (0, "tokens, and a path sees")):
                answer = await complete(client, "a" * (CONTEXT * LONGEST + more))
                assert answer.status_code == 400 and "context_length_exceeded" in answer.text
                assert words in answer.text

    asyncio.run(ask())
    assert cut == [CONTEXT * LONGEST]


def test_halves_of_characters_cost_no_more_than_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: a prompt of them, to be echoed; each was decoded with all before it, while nobody was answered."""
    tokenizer = Tokenizer(TOKENIZER)
    [half] = [token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == b"\x80"]
    pieces = Pieces(tokenizer)
    monkeypatch.setattr(Tokenizer, "decode", None)  # it costs as much as all that came before
    assert [pieces.add(half) for _ in range(100)] == [HALF_CHARACTER] * 100


def test_more_chances_than_memory_should_hold_are_refused(tmp_path: Path) -> None:
    """Attack: a request of 20 kB for 262,144 tokens and the 20 likeliest of each: 518 MB before anything was sent."""

    async def ask() -> None:
        async with client_of(tmp_path / "run") as client:
            asked = {"model": "auto", "prompt": [PROMPT] * 64, "max_tokens": 4096, "logprobs": 20}
            answer = await client.post("/v1/completions", json=asked)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "logprobs"
            answer = await client.post("/v1/completions", json=asked | {"max_tokens": 1, "logprobs": 2})
            assert answer.status_code == 200

    asyncio.run(ask())


def test_others_are_answered_while_a_prompt_is_cut_to_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cutting, encode_batch = threading.Event(), Tokenizer.encode_batch

    def slowly(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
        assert cutting.wait(20)
        return encode_batch(tokenizer, texts)

    monkeypatch.setattr(Tokenizer, "encode_batch", slowly)

    async def ask() -> None:
        async with client_of(tmp_path / "run") as client:
            asked = asyncio.ensure_future(complete(client, PROMPT))
            await asyncio.sleep(0.1)
            assert (await client.get("/v1/models")).json()["data"] and not asked.done()
            cutting.set()
            answer = (await asked).json()
        assert answer["usage"]["prompt_tokens"] == len(Tokenizer(TOKENIZER).encode(PROMPT))

    asyncio.run(ask())
