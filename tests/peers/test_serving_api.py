"""`dipaco-peer serve` as clients see it: OpenAI's own client, over HTTP, against the plain model and the evaluator."""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from serving_harness import CONTEXT, PROMPT, ROUNDS, TIED, TOKENIZER, VOCAB_SIZE, WARMUP, Served, make_served, publish

from bootstrap.archives.evaluator import Evaluator
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.program.web import listening, serve_app
from dipaco_p2p.topology import PathId
from dipaco_p2p.use.folder import RunFolder
from dipaco_p2p.use.served import FolderPlace
from dipaco_p2p.use.tokenizer import END_ID, Tokenizer
from peers.serving.answers import Text
from peers.serving.api import BODY_BYTES_MAX, Stream, make_app
from peers.serving.engine import Engine, Written

TOKENS = Tokenizer(TOKENIZER).encode(PROMPT)
PATH = "P0-1-0"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(tmp_path_factory.mktemp("served"))


def over_http(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Plays a test in real time, which sockets need."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


class Site:
    """A server in this process, and OpenAI's client of it."""

    def __init__(self, engine: Engine, address: str, key: str) -> None:
        self.engine = engine
        self.address = address
        self.client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=key or "none", max_retries=0)

    async def complete(self, prompt: Any = PROMPT, *, model: str = "auto", **options: Any) -> Any:
        options = {"temperature": 0, "max_tokens": 12} | options
        return await self.client.completions.create(model=model, prompt=prompt, **options)

    async def post(self, body: Any = None, **options: Any) -> httpx2.Response:
        """Whatever OpenAI's client would not send."""
        async with httpx2.AsyncClient() as client:
            content = options.pop("content", json.dumps({"prompt": PROMPT, "max_tokens": 1} | (body or {})))
            headers = {"Content-Type": "application/json"} | options.pop("headers", {})
            return await client.post(f"{self.address}/v1/completions", content=content, headers=headers)


@asynccontextmanager
async def site(served: Served, *, key: str = "", streams_max: int = 16) -> AsyncIterator[Site]:
    engine = Engine(FolderPlace(RunFolder(served.root, is_read_only=True)), memory_bytes=1 << 30)
    await engine.follow()
    with listening("127.0.0.1", 0, refused="", hint="") as listener:
        app = make_app(engine, key=key, streams_max=streams_max)
        serving = asyncio.create_task(serve_app(app, listener))
        found = Site(engine, f"http://127.0.0.1:{listener.getsockname()[1]}", key)
        async with found.client:
            yield found
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    engine.close()


@torch.no_grad()
def greedy(served: Served, path: PathId, tokens: Sequence[int], count: int) -> list[int]:
    model, text = served.model(path), list(tokens)
    for _ in range(count):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(tokens) :]


def decode(tokens: Sequence[int]) -> str:
    return Tokenizer(TOKENIZER).decode(tokens)


@over_http
async def test_the_models_are_auto_and_the_paths_with_their_versions(served: Served) -> None:
    async with site(served) as found:
        models = (await found.client.models.list()).data
        one = await found.client.models.retrieve(PATH)
    assert [model.id for model in models] == ["auto", *map(str, served.run.topology.paths())]
    assert one.model_extra is not None and one.model_extra["dipaco"]["versions"] == dict.fromkeys(
        map(str, PathId.parse(PATH).modules()), ROUNDS
    )


@over_http
async def test_text_and_token_ids_give_what_the_path_writes(served: Served) -> None:
    expected = decode(greedy(served, PathId.parse(PATH), TOKENS, 12))
    async with site(served) as found:
        for prompt in (PROMPT, TOKENS):
            answer = await found.complete(prompt, model=PATH)
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "length")
            assert (answer.model, answer.usage.prompt_tokens, answer.usage.completion_tokens) == (PATH, len(TOKENS), 12)


@over_http
async def test_auto_routes_and_tells_which_path_wrote_and_why(served: Served) -> None:
    async with site(served) as found:
        answer = await found.complete()
        [turn] = answer.dipaco["turns"]
        assert answer.model == turn["path"] == max(turn["scores"], key=turn["scores"].get)
        assert turn["scores"].keys() == {str(path) for path in served.run.topology.paths()}
        assert answer.choices[0].text == (await found.complete(model=turn["path"])).choices[0].text
        again = await found.complete(extra_body={"every": 16}, max_tokens=36)
    assert [turn["at"] for turn in again.dipaco["turns"]] == [0, 16, 32]


@over_http
async def test_several_prompts_are_answered_in_their_order(served: Served) -> None:
    async with site(served) as found:
        prompts = [PROMPT, "the end", "é"]
        together = await found.complete(prompts)
        alone = [(await found.complete(prompt)).choices[0].text for prompt in prompts]
        ids = await found.complete([TOKENS, TOKENS[:5]])
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == alone
    assert len(ids.choices) == 2 and ids.choices[0].text == alone[0]


@over_http
async def test_a_stream_is_the_whole_in_pieces(served: Served) -> None:
    options: dict[str, Any] = {"logprobs": 2, "echo": True, "temperature": 1, "seed": 5, "max_tokens": 30}
    async with site(served) as found:
        whole = await found.complete(**options)
        stream = await found.complete(**options, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    *pieces, last = chunks
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [getattr(piece.choices[0].logprobs, name) for piece in pieces if piece.choices[0].logprobs]
        assert sum(parts, []) == getattr(whole.choices[0].logprobs, name)
    assert len(pieces) > 30 and last.choices == [] and last.usage == whole.usage
    assert pieces[0].dipaco["turns"] == whole.dipaco["turns"]
    assert {piece.model for piece in pieces} == {whole.model}


@torch.no_grad()
def plain_chances(served: Served, path: str, tokens: Sequence[int]) -> torch.Tensor:
    return served.model(PathId.parse(path))(torch.tensor([tokens]))[0].log_softmax(dim=1)


@over_http
async def test_echo_and_logprobs_are_those_of_the_plain_model(served: Served) -> None:
    async with site(served) as found:
        answer = await found.complete(echo=True, logprobs=3, model=PATH)
    told = answer.choices[0].logprobs
    tokens = [*TOKENS, *greedy(served, PathId.parse(PATH), TOKENS, 12)]
    chances = plain_chances(served, PATH, tokens)
    assert answer.choices[0].text == decode(tokens) and "".join(told.tokens[: len(TOKENS)]) == PROMPT
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    for place in range(1, len(tokens)):
        assert told.token_logprobs[place] == pytest.approx(float(chances[place - 1, tokens[place]]), abs=1e-4)
        best = sorted(told.top_logprobs[place].values(), reverse=True)[:3]
        assert best == pytest.approx(chances[place - 1].topk(3).values.tolist(), abs=1e-4)
        assert told.top_logprobs[place][told.tokens[place]] == told.token_logprobs[place]
    assert told.text_offset[len(TOKENS) - 1] == len("".join(told.tokens[: len(TOKENS) - 1]))


@over_http
async def test_the_routed_perplexity_is_the_evaluator_s(served: Served) -> None:
    evaluator = Evaluator(served.run, served.store, SeedArchive(served.run, served.store))
    expected = evaluator.evaluate(ROUNDS).routed.perplexity
    nats, count, paths = 0.0, 0, set()
    async with site(served) as found:
        for tokens in evaluator.held_out["validation"].tokens.tolist():
            answer = await found.complete(tokens, echo=True, logprobs=0, max_tokens=0)
            chances = answer.choices[0].logprobs.token_logprobs
            assert len(chances) == len(tokens) == CONTEXT
            nats, count = nats - sum(chances[32:]), count + len(chances[32:])
            paths.add(answer.model)
    assert math.exp(nats / count) == pytest.approx(expected, rel=1e-3) and len(paths) > 1


@over_http
async def test_the_seed_decides_a_sampled_text_and_top_p_narrows_it(served: Served) -> None:
    async with site(served) as found:
        texts = [(await found.complete(temperature=1.5, seed=seed)).choices[0].text for seed in (1, 1, 2)]
        free = {(await found.complete(temperature=1.5)).choices[0].text for _ in range(3)}
        narrow = await found.complete(temperature=1.5, top_p=1e-6, seed=1)
        assert narrow.choices[0].text == (await found.complete()).choices[0].text
    assert texts[0] == texts[1] != texts[2] and len(free) == 3


@over_http
async def test_a_stop_ends_a_text_before_it_also_in_a_stream(served: Served) -> None:
    async with site(served) as found:
        text = (await found.complete(temperature=1, seed=3, max_tokens=30)).choices[0].text
        stop = text[10:13]
        for stream in (False, True):
            answer = await found.complete(temperature=1, seed=3, max_tokens=30, stop=["\0", stop], stream=stream)
            chunks = [chunk async for chunk in answer] if stream else [answer]
            assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
            assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        (" \n a b ", (), "a b "),
        ("a\n\nUser: b", ("\nUser:",), "a\n"),
        ("a\nUse", ("\nUser:",), "a\nUse"),
        ("abcabd", ("abd", "zz"), "abc"),
        (" \nUser: b", ("\nUser:",), ""),
        (" \nUse", ("\nUser:",), "Use"),
        ("é\N{FIRE}!", ("!",), "é\N{FIRE}"),
    ],
)
def test_a_text_is_shown_up_to_its_stop_without_white_space_before_it(
    text: str, stops: tuple[str, ...], shown: str
) -> None:
    tokenizer, pieces = Tokenizer(TOKENIZER), []
    found = Text(tokenizer, stops, is_stripped=True)
    for token in tokenizer.encode(text):
        if not found.is_stopped:
            pieces.append(found.add(Written(token=token)))
    assert "".join(pieces) + found.rest() == shown


def test_what_may_become_a_stop_waits_and_nothing_else() -> None:
    tokenizer = Tokenizer(TOKENIZER)
    found = Text(tokenizer, ("xyz",), is_stripped=False)
    letters = [found.add(Written(token=tokenizer.encode(letter)[0])) for letter in "axyaxx"]
    assert letters == ["a", "", "", "xya", "", "x"] and found.rest() == "x"


@over_http
async def test_the_end_of_a_document_ends_a_text(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = greedy(served, PathId.parse(PATH), TOKENS, 1)
    monkeypatch.setattr("peers.serving.api.END_ID", tokens[0])
    async with site(served) as found:
        answer = await found.complete(model=PATH)
    assert END_ID == 0 and (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")


@over_http
async def test_a_conversation_is_the_plain_template_of_it(served: Served) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": [{"type": "text", "text": "c{}"}]},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    async with site(served) as found:
        options: dict[str, Any] = {"model": "auto", "temperature": 0, "max_tokens": 9, "logprobs": True}
        answer = await found.client.chat.completions.create(messages=messages, top_logprobs=2, **options)
        plain = await found.complete("ab\n\nUser: c{}\nAssistant: d\nUser: e\nAssistant:", max_tokens=9)
        stream = await found.client.chat.completions.create(messages=messages, stream=True, **options)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    choice = answer.choices[0]
    assert choice.message.content == plain.choices[0].text.lstrip() == "".join(pieces)
    assert choice.message.role == "assistant" and answer.model == plain.model
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 9
    assert b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content).decode() == plain.choices[0].text


@over_http
async def test_sixteen_streams_at_once_are_what_each_is_alone(served: Served) -> None:
    async def text(found: Site, seed: int) -> str:
        stream = await found.complete(temperature=1, seed=seed, max_tokens=30, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async with site(served) as found:
        together = await asyncio.gather(*(text(found, seed) for seed in range(16)))
        assert together == [await text(found, seed) for seed in range(16)]
    assert len(set(together)) == 16


@over_http
async def test_a_new_version_comes_while_a_stream_runs(tmp_path: Path) -> None:
    served = make_served(tmp_path, versions=1)
    async with site(served) as found:
        expected = (await found.complete(max_tokens=30)).choices[0].text
        stream = await found.complete(max_tokens=30, stream=True)
        chunks = [await anext(stream) for _ in range(5)]
        for module in served.run.topology.modules():
            publish(served, module, 2)
        await found.engine.follow()
        newer = await found.complete()
        chunks += [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    versions = [turn["versions"] for one in (chunks[0], newer) for turn in one.dipaco["turns"]]
    assert [set(found.values()) for found in versions] == [{1}, {2}]


# -- what cannot be done is said as OpenAI's API says it


@pytest.mark.parametrize(
    ("options", "code", "param", "words"),
    [
        ({"prompt": [1] * (CONTEXT + 1)}, "context_length_exceeded", "prompt", f"a path sees {CONTEXT}"),
        ({"prompt": ""}, "invalid_value", "prompt", "is empty"),
        ({"prompt": [VOCAB_SIZE]}, "invalid_value", "prompt", "token ids from 0 to"),
        ({"prompt": [-1]}, "invalid_value", "prompt", "token ids from 0 to"),
        ({"prompt": {"a": 1}}, "invalid_value", "prompt", "a list of token ids"),
        ({"prompt": ["a"] * 65}, "invalid_value", "prompt", "up to 64"),
        ({"max_tokens": 5000}, "invalid_value", "max_tokens", "from 0 to 4096"),
        ({"max_tokens": True}, "invalid_value", "max_tokens", "a whole number"),
        ({"temperature": "hot"}, "invalid_value", "temperature", "from 0 to 2"),
        ({"temperature": float("nan")}, "invalid_value", "temperature", "from 0 to 2"),
        ({"top_p": 2}, "invalid_value", "top_p", "from 0 to 1"),
        ({"logprobs": 21}, "invalid_value", "logprobs", "from 0 to 20"),
        ({"stop": ["a"] * 5}, "invalid_value", "stop", "up to 4"),
        ({"stop": ""}, None, None, ""),
        ({"stream": "yes"}, "invalid_value", "stream", "true or false"),
        ({"every": 15}, "invalid_value", "every", "a multiple of 16"),
        ({"every": 16, "model": PATH}, "invalid_value", "every", "nothing is left to route"),
        ({"n": 2}, "unsupported_parameter", "n", "not supported"),
        ({"n": 1, "presence_penalty": 0.0, "user": "me"}, None, None, ""),
    ],
)
@over_http
async def test_a_value_that_cannot_be_used_is_a_400(
    served: Served, options: dict[str, Any], code: str | None, param: str | None, words: str
) -> None:
    async with site(served) as found:
        response = await found.post(options)
    if code is None:
        assert response.status_code == 200
        return
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    assert error["type"] == "invalid_request_error" and words in error["message"]


@pytest.mark.parametrize("name", ["P0-2-0", "P0-0", "gpt-4", "\N{FIRE}" * 999])
@over_http
async def test_an_unknown_path_is_a_404(served: Served, name: str) -> None:
    async with site(served) as found:
        with pytest.raises(openai.NotFoundError, match="/v1/models lists the paths") as caught:
            await found.complete(model=name)
        with pytest.raises(openai.NotFoundError):
            await found.client.models.retrieve("P9-9-9")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("messages", [[], "hello", [{"role": "user"}], [{"role": "me", "content": "a"}], [7]])
@over_http
async def test_a_conversation_that_is_none_is_a_400(served: Served, messages: Any) -> None:
    async with site(served) as found:
        with pytest.raises(openai.BadRequestError, match="`messages` must be a list") as caught:
            await found.client.chat.completions.create(model="auto", messages=messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        ("{", {}, 400),
        ("[]", {}, 400),
        ("[" * 100_000, {}, 400),
        ('{"prompt": "\\ud800"}', {}, 400),
        ('"' + "a" * BODY_BYTES_MAX + '"', {}, 413),
        ("{}", {"Content-Type": "text/plain"}, 415),
        *(("{}", {"Host": host}, 403) for host in ("evil.example", "a{b.evil.example:8000", 'a"b.example', "[", "")),
    ],
)
@over_http
async def test_what_is_no_request_is_refused(
    served: Served, content: str, headers: dict[str, str], status: int
) -> None:
    async with site(served) as found:
        response = await found.post(content=content, headers=headers)
        async with httpx2.AsyncClient() as client:
            missing = await client.get(f"{found.address}/v2")
    assert response.status_code == status and response.json()["error"]["message"]
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"


@over_http
async def test_without_a_model_yet_clients_are_told_to_wait(tmp_path: Path) -> None:
    served = make_served(tmp_path, model=TIED, stage=WARMUP, versions=0)
    async with site(served) as found:
        with pytest.raises(openai.InternalServerError, match="no model yet: no round of .* has ended") as caught:
            await found.complete()
        response = await found.post()
        assert (caught.value.code, response.status_code) == ("model_not_ready", 503)
        assert int(response.headers["Retry-After"]) > 0
        for module in served.run.topology.modules():
            publish(served, module, 1)
        await found.engine.follow()
        answer = await found.complete()
    assert answer.choices[0].text and answer.dipaco["turns"][0]["scores"] == {}


@over_http
async def test_with_a_key_nothing_is_answered_without_it(served: Served) -> None:
    async with site(served, key="a long word") as found:
        assert (await found.complete()).choices[0].text
        for key in ("", "another", "\N{FIRE}"):
            response = await found.post(headers={"Authorization": f"Bearer {key}".encode()} if key else {})
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        with pytest.raises(openai.AuthenticationError):
            await found.client.with_options(api_key="another").models.list()


@over_http
async def test_a_stream_too_many_is_a_429_until_a_place_is_free(served: Served) -> None:
    async with site(served, streams_max=2) as found:
        streams = [await found.complete(max_tokens=4096, stream=True) for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as caught:
            await found.complete()
        assert caught.value.code == "rate_limit_exceeded"
        await streams[0].close()
        await until(lambda: len(held(found)) == 1)
        assert (await found.complete()).choices[0].text
        await streams[1].close()
        await until(lambda: not held(found))


def held(found: Site) -> list[str]:
    """Modules that texts are using, those of one path counted once."""
    users = max((module.users for module in found.engine._shelf._modules.values()), default=0)
    return ["text"] * users


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
@over_http
async def test_whoever_hangs_up_ends_its_text(served: Served, stream: bool) -> None:
    async with site(served) as found:
        # Minutes, if nobody stopped it.
        asking = asyncio.create_task(found.complete([PROMPT] * 64, max_tokens=4096, stream=stream))
        if stream:
            await (await asking).close()
        else:
            await until(lambda: bool(held(found)))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not held(found))
        assert found.engine.memory_bytes < 1 << 20


@over_http
async def test_a_stream_that_cannot_be_sent_is_closed_at_once() -> None:
    closed: list[bool] = []

    async def source() -> AsyncGenerator[str]:
        try:
            yield "a"
        finally:
            closed.append(True)

    async def send(message: Any) -> None:
        raise OSError("nobody is there")

    text = source()
    await anext(text)
    with pytest.raises(OSError):
        await Stream(text, text).stream_response(send)
    assert closed


@over_http
async def test_a_module_that_is_lost_is_an_error_also_inside_a_stream(tmp_path: Path) -> None:
    served = make_served(tmp_path)
    async with site(served) as found:
        lost = {(await found.engine.now.served.version(module)).digest for module in served.run.topology.modules()}
        stream = await found.complete(stream=True, max_tokens=40, extra_body={"every": 16})
        for digest in lost:
            for blob in (served.store.folder / "blobs").rglob(digest):
                blob.unlink()
        await found.client.models.list()
        with pytest.raises(openai.APIError, match="the model cannot be read: blob .* is missing"):
            async for _ in stream:
                pass
        found.engine._shelf._modules.clear()
        with pytest.raises(openai.InternalServerError, match="the model cannot be read") as caught:
            await found.complete()
    assert caught.value.code == "model_unavailable"
