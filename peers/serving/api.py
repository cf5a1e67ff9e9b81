"""The OpenAI-compatible API of an engine: models, completions, chat completions; and a page to talk with it.

Beside what OpenAI's says, an answer has `dipaco`: which path writes from where on, of which versions, and the scores
that the router gave. A request may say `every`: tokens after which the text is routed again.
Whatever a client sends is checked before any work, and whoever hangs up ends its text.
Source: https://platform.openai.com/docs/api-reference, completions and chat.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from dipaco_p2p.core.routing.evaluate import WINDOW
from dipaco_p2p.errors import ConfigError, DipacoError
from dipaco_p2p.topology import PathId
from dipaco_p2p.use.tokenizer import END_ID

from .answers import Answer, ChatCompletion, Completion, Delta, versions_of
from .engine import Asked, Busy, Engine, NotReady, Snapshot, Turn
from .terms import LOOPBACK

log = logging.getLogger(__name__)

AUTO = "auto"
BODY_BYTES_MAX = 1 << 20
PROMPTS_MAX = 64
"""Of one request; they are written one after the other."""
TOKENS_MAX = 4096
"""Of one text."""
TOP_MAX = 20
CHANCES_MAX = 1 << 17
"""That one answer tells of. Each takes some 100 bytes until it is sent, and time in which nobody else is answered."""
STOPS_MAX = 4
STOP_CHARS_MAX = 64
RETRY_AFTER_S = 5
ROLES = {"system": "{}\n\n", "developer": "{}\n\n", "user": "User: {}\n", "assistant": "Assistant: {}\n"}
"""The plain template of a conversation: these models have learnt to go on with a text, and no format."""
BEGIN, NEXT_TURN = "Assistant:", "\nUser:"
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **{name: (1,) for name in ("n", "best_of")},
    **{name: (0,) for name in ("presence_penalty", "frequency_penalty")},
    **{name: ({}, [], "") for name in ("logit_bias", "suffix", "tools", "functions")},
    "response_format": ({"type": "text"},),
}
"""What OpenAI's API knows and this one does not: only values that change nothing are taken."""
PAGE = Path(__file__).parent / "page"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

PAGES = {"": "index.html", "page.css": "page.css", "page.js": "page.js"}
GONE = Response(status_code=499)
"""For whoever has hung up, and does not read it."""

_OURS = re.compile(f"(?i)({'|'.join(re.escape(f'[{host}]' if ':' in host else host) for host in LOOPBACK)})(:[0-9]+)?")
"""The Host header of a request for this machine (`LOOPBACK`). Starlette's URL will not do: of a Host that it takes for
malformed it says the address that was dialled, and browsers send `a{b.example`."""

R = TypeVar("R")


class Problem(Exception):
    """A request that is not answered, as OpenAI's API says it."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @classmethod
    def of(cls, error: Exception) -> Problem:
        """Of whatever stops an answer."""
        if isinstance(error, Problem):
            return error
        if isinstance(error, NotReady):
            return cls(503, str(error), code="model_not_ready")
        if isinstance(error, Busy):
            return cls(503, f"{error}; try again, or raise --memory", code="busy")
        if isinstance(error, DipacoError):
            return cls(503, f"the model cannot be read: {error}", code="model_unavailable")
        assert isinstance(error, HTTPException)
        return cls(error.status_code, f"no such address: {error.detail}", code="not_found")


def make_app(engine: Engine, *, key: str, streams_max: int) -> Starlette:
    """All addresses. With a `key` every request must bear it; without, requests must be for this very machine."""
    api = _Api(engine, key=key, streams_max=streams_max)
    routes = [
        Route("/v1/models", api.models),
        Route("/v1/models/{name}", api.model),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        *(Route(f"/{name}", _page_of(file)) for name, file in PAGES.items()),
    ]

    async def answer(request: Request, error: Exception) -> Response:
        problem = Problem.of(error)
        headers = HEADERS | ({"Retry-After": str(RETRY_AFTER_S)} if problem.status in (429, 503) else {})
        return JSONResponse(problem.body, problem.status, headers)

    kinds = (Problem, NotReady, Busy, DipacoError, HTTPException)
    return Starlette(routes=routes, exception_handlers={kind: answer for kind in kinds})


class _Api:
    def __init__(self, engine: Engine, *, key: str, streams_max: int) -> None:
        self._engine = engine
        self._key = key
        self._streams_max = streams_max
        self._streams = 0
        self._began_s = int(time.time())

    async def models(self, request: Request) -> Response:
        self._admit(request)
        now = self._engine.now
        return JSONResponse({"object": "list", "data": [self._model(now, path) for path in (None, *now.paths)]})

    async def model(self, request: Request) -> Response:
        self._admit(request)
        now = self._engine.now
        return JSONResponse(self._model(now, _path(now, request.path_params["name"])))

    async def completions(self, request: Request) -> Response:
        body = await self._body(request)
        now, prompt = self._engine.now, body.get("prompt")
        is_one = isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(t, int) for t in prompt))
        prompts = [prompt] if is_one else prompt
        if not isinstance(prompts, list) or not 1 <= len(prompts) <= PROMPTS_MAX:
            message = f"a text or a list of token ids, or a list of up to {PROMPTS_MAX} of either"
            raise Problem(400, f"`prompt` must be {message}", code="invalid_value", param="prompt")
        top = _number(body, "logprobs", None, 0, TOP_MAX)
        echo = _flag(body, "echo")
        wish = _wish(body, now, default=16, top=None if top is None else int(top), has_echo=echo)
        asked = [Asked(tokens=await _tokens(now, one, "prompt"), **wish) for one in prompts]
        return await self._answer(request, body, Completion(now.tokenizer, asked, _stops(body)))

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        now = self._engine.now
        tokens = await _tokens(now, _conversation(body.get("messages")), "messages")
        top = int(_number(body, "top_logprobs", 0, 0, TOP_MAX) or 0) if _flag(body, "logprobs") else None
        body.setdefault("max_tokens", body.get("max_completion_tokens"))
        wish = _wish(body, now, default=now.run.config.model.context, top=top, has_echo=False)
        asked = [Asked(tokens=tokens, **wish)]
        return await self._answer(request, body, ChatCompletion(now.tokenizer, asked, (*_stops(body), NEXT_TURN)))

    async def _answer(self, request: Request, body: dict[str, Any], answer: Answer) -> Response:
        """All of it, or as it comes; in both cases a problem before the first token is a status of its own."""
        tops = ((1 + one.top, one) for one in answer.asked if one.top is not None)
        told = sum(each * (one.count + one.has_echo * len(one.tokens)) for each, one in tops)
        if told > CHANCES_MAX:
            message = f"{told} log-probabilities are asked for, limit {CHANCES_MAX}: ask for fewer, or for fewer texts"
            raise Problem(400, message, code="invalid_value", param="logprobs")
        deltas = self._deltas(answer)
        if not _flag(body, "stream"):
            async with aclosing(deltas):
                whole = await _unless_gone(request, _all(deltas))
            return GONE if whole is None else JSONResponse(answer.whole(whole), headers=HEADERS)
        options = body.get("stream_options")
        has_usage = isinstance(options, dict) and options.get("include_usage") is True
        try:
            first = await _unless_gone(request, _beginning(deltas))
        except BaseException:
            await deltas.aclose()
            raise
        if first is None:
            await deltas.aclose()
            return GONE
        return Stream(_events(first, deltas, answer, has_usage=has_usage), deltas)

    async def _deltas(self, answer: Answer) -> AsyncGenerator[list[Delta]]:
        """The texts one after the other, in pieces: those together that come together."""
        with self._place():
            for index, asked in enumerate(answer.asked):
                text, reason, count = answer.text(), "length", 0
                async with aclosing(self._engine.write(asked)) as events:
                    async for event in events:
                        if isinstance(event, Turn):
                            yield [Delta(index=index, turn=event, at=count)]
                            continue
                        found: list[Delta] = []
                        for written in event:
                            if written.token == END_ID and not written.is_prompt:
                                reason = "stop"
                                break
                            count += not written.is_prompt
                            found.append(Delta(index=index, text=text.add(written), written=written))
                            if text.is_stopped:
                                reason = "stop"
                                break
                        yield found
                        if reason == "stop":
                            break
                yield [Delta(index=index, text=text.rest(), reason=reason)]

    @contextmanager
    def _place(self) -> Iterator[None]:
        """One of the places for texts; raises Problem when all are taken."""
        if self._streams >= self._streams_max:
            message = f"{self._streams} texts are being written, and there are no more places"
            raise Problem(429, message, code="rate_limit_exceeded")
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    def _model(self, now: Snapshot, path: PathId | None) -> dict[str, Any]:
        versions = {} if path is None else {"versions": versions_of(now.of(path))}
        entry = {"id": AUTO if path is None else str(path), "object": "model", "created": self._began_s}
        return entry | {"owned_by": now.run.name, "dipaco": {"run": now.run.origin, **versions}}

    def _admit(self, request: Request) -> None:
        """Raise Problem for whoever has not the key; without one, for a page elsewhere that speaks by a browser."""
        if self._key:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._key.encode()):
                raise Problem(401, "no key, or a wrong one: `Authorization: Bearer KEY`", code="invalid_api_key")
        elif not _OURS.fullmatch(request.headers.get("host", LOOPBACK[0])):
            message = f"without a key only {', '.join(LOOPBACK)} may be asked for"
            raise Problem(403, message, code="wrong_host")

    async def _body(self, request: Request) -> dict[str, Any]:
        self._admit(request)
        # A page of another site cannot send this type unasked.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Problem(415, "the content type must be application/json", code="invalid_content_type")
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > BODY_BYTES_MAX:
                raise Problem(413, f"a request of more than {BODY_BYTES_MAX} bytes", code="request_too_large")
        try:
            body = json.loads(bytes(data))
            json.dumps(body, ensure_ascii=False).encode()  # half a character by its escape is no text
        except (ValueError, RecursionError):
            raise Problem(400, "the body is not valid JSON", code="invalid_json") from None
        if not isinstance(body, dict):
            raise Problem(400, "the body is not a JSON object", code="invalid_json")
        for name, values in NEUTRAL.items():
            if body.get(name) is not None and body[name] not in values:
                raise Problem(400, f"`{name}` is not supported here", code="unsupported_parameter", param=name)
        return body


# -- what a request says


def _wish(body: dict[str, Any], now: Snapshot, *, default: int, top: int | None, has_echo: bool) -> dict[str, Any]:
    """All of an `Asked` but the tokens."""
    path = _path(now, body.get("model", AUTO))
    every = int(_number(body, "every", 0, 0, now.run.config.model.context) or 0)
    if every % WINDOW or (every and path is not None):
        what = f"not a multiple of {WINDOW}" if every % WINDOW else f"nothing is left to route for {path}"
        raise Problem(400, f"`every` {every}: {what}", code="invalid_value", param="every")
    if every and now.token_router is None:
        message = f"{now.run.name} has no router that can be asked inside a text"
        raise Problem(400, message, code="invalid_value", param="every")
    count = _number(body, "max_tokens", None, 0, TOKENS_MAX)
    top_p = _number(body, "top_p", 1.0, 0.0, 1.0, is_whole=False)
    seed = _number(body, "seed", None, -(2**63), 2**63 - 1)
    return {
        "path": path,
        "every": every,
        "count": min(default, TOKENS_MAX) if count is None else int(count),
        "temperature": float(_number(body, "temperature", 1.0, 0.0, 2.0, is_whole=False) or 0.0),
        "top_p": max(float(top_p or 0.0), 1e-9),
        "seed": secrets.randbits(63) if seed is None else int(seed) % 2**64,
        "top": top,
        "has_echo": has_echo,
    }


def _path(now: Snapshot, name: object) -> PathId | None:
    """The path that a model's name means; None for the one that the router chooses. Raises Problem."""
    if name == AUTO:
        return None
    try:
        return now.served.path(str(name)[:80])
    except ConfigError as error:
        message = f"{error}; `{AUTO}` routes, /v1/models lists the paths"
        raise Problem(404, message, code="model_not_found", param="model") from None


async def _tokens(now: Snapshot, prompt: object, param: str) -> tuple[int, ...]:
    """A prompt as token ids; raises Problem."""
    context, vocab_size = now.run.config.model.context, now.run.config.model.vocab_size
    if isinstance(prompt, str):
        length, longest = len(prompt.encode()), now.tokenizer.longest
        if length > context * longest:  # before the work: no token stands for more
            message = (
                f"the prompt has {length} bytes, and a path sees {context} tokens of {longest} at most: shorten it"
            )
            raise Problem(400, message, code="context_length_exceeded", param=param)
        [found] = await asyncio.to_thread(now.tokenizer.encode_batch, [prompt])  # a batch leaves Python to others
        tokens = tuple(found)
    elif isinstance(prompt, list) and all(type(token) is int and 0 <= token < vocab_size for token in prompt):
        tokens = tuple(prompt)
    else:
        message = f"`{param}`: not a text, nor token ids from 0 to {vocab_size - 1}"
        raise Problem(400, message, code="invalid_value", param=param)
    if not tokens:
        raise Problem(400, f"`{param}` is empty", code="invalid_value", param=param)
    if len(tokens) > context:
        message = f"the prompt has {len(tokens)} tokens, and a path sees {context}: shorten it"
        raise Problem(400, message, code="context_length_exceeded", param=param)
    return tokens


def _conversation(messages: object) -> str:
    """The messages in the plain template, up to where the answer begins; raises Problem."""
    try:
        if not isinstance(messages, list) or not messages:
            raise TypeError
        turns = [ROLES[message["role"]].format(_content(message["content"])) for message in messages]
    except (KeyError, TypeError):
        message = f"a list of messages with a `content` that is text and a `role` of {', '.join(ROLES)}"
        raise Problem(400, f"`messages` must be {message}", code="invalid_value", param="messages") from None
    return "".join(turns) + BEGIN


def _content(content: Any) -> str:
    """A text, or the texts of its parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    found = body.get("stop")
    stops = [found] if isinstance(found, str) and found else found or []
    if not isinstance(stops, list) or len(stops) > STOPS_MAX or not all(map(_is_stop, stops)):
        message = f"`stop` must be up to {STOPS_MAX} texts of up to {STOP_CHARS_MAX} characters"
        raise Problem(400, message, code="invalid_value", param="stop")
    return tuple(stops)


def _is_stop(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= STOP_CHARS_MAX


def _number(
    body: dict[str, Any], name: str, default: float | None, low: float, high: float, *, is_whole: bool = True
) -> float | None:
    value = body.get(name)
    if value is None:
        return default
    is_right = isinstance(value, int) if is_whole else isinstance(value, (int, float))
    if isinstance(value, bool) or not is_right or not low <= value <= high:
        what = "a whole number" if is_whole else "a number"
        raise Problem(400, f"`{name}` must be {what} from {low:g} to {high:g}", code="invalid_value", param=name)
    return float(value) if not is_whole else value


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name) or False
    if not isinstance(value, bool):
        raise Problem(400, f"`{name}` must be true or false", code="invalid_value", param=name)
    return value


# -- how it is sent


async def _all(deltas: AsyncIterator[list[Delta]]) -> list[Delta]:
    return [delta async for found in deltas for delta in found]


async def _beginning(deltas: AsyncIterator[list[Delta]]) -> list[Delta]:
    """Up to the first token."""
    first: list[Delta] = []
    async for found in deltas:
        first += found
        if any(delta.written is not None or delta.reason is not None for delta in found):
            break
    return first


async def _events(
    first: list[Delta], deltas: AsyncIterator[list[Delta]], answer: Answer, *, has_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events; those that come together are sent together."""
    try:
        yield "".join(_event(answer.chunk(delta)) for delta in first)
        async for found in deltas:
            yield "".join(_event(answer.chunk(delta)) for delta in found)
        if has_usage:
            yield _event(answer.last())
        yield "data: [DONE]\n\n"
    except (NotReady, Busy, DipacoError) as error:
        yield _event(Problem.of(error).body)


def _event(value: object) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


class Stream(StreamingResponse):
    """Events; what they are made from is closed as soon as they end, or the client hangs up."""

    def __init__(self, events: AsyncIterator[str], source: AsyncGenerator[Any]) -> None:
        headers = HEADERS | {"X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._source = source

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._source):
            await super().stream_response(send)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, R]) -> R | None:
    """The result of `work`; None as soon as the client has hung up, and `work` is then cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = working, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _page_of(name: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """One of the page's own files."""
    kind = {"html": "text/html", "css": "text/css", "js": "text/javascript"}[name.rpartition(".")[2]]
    data = (PAGE / name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(data, media_type=f"{kind}; charset=utf-8", headers=HEADERS)

    return answer
