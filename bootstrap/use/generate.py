"""`dipaco-bootstrap generate`: route a prompt, let one path write on, and, on request, route anew every W tokens.

In memory at a time: one path, and the frozen model of the same size that routes; without re-routing first the one,
then the other. A prompt shorter than the 32 tokens that routing looks at is routed by those that there are.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dipaco_p2p.config import PREFIX_TOKENS
from dipaco_p2p.core.model.generate import Sampler, generate, prompt_features, text_features, visible
from dipaco_p2p.core.model.transformer import PathModel, load_modules
from dipaco_p2p.core.routing.evaluate import WINDOW
from dipaco_p2p.core.routing.router import Router
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.node.measuring import assign
from dipaco_p2p.protocol.documents import ModuleVersion
from dipaco_p2p.topology import PathId, Topology
from dipaco_p2p.use.best_rounds import Best
from dipaco_p2p.use.served import ServedRun, check_choice, open_served
from dipaco_p2p.use.tokenizer import END_ID, HALF_CHARACTER, Pieces

Write = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to write, and how."""

    prompt: str
    tokens_max: int = 200
    temperature: float = 0.8
    """0 takes the likeliest token every time."""
    top_k: int = 0
    """0 leaves all tokens in."""
    seed: int = 0
    path: str = ""
    """Empty: the router chooses."""
    version: int | None = None
    """Of every module; None takes the newest of each."""
    best: bool = False
    """Whether each path is taken at its best round on the holdout."""
    every: int = 0
    """Tokens after which the text is routed anew; 0 routes the prompt once."""

    def __post_init__(self) -> None:
        check_choice(version=self.version, best=self.best)


async def generate_from(source: str, request: Request, *, expected: str | None) -> None:
    """Write what follows the prompt to the output, and which path wrote it to the error stream. Raises DipacoError."""
    async with open_served(source, expected=expected) as served:
        await write_on(served, request, write=print_text, say=lambda line: print(line, file=sys.stderr, flush=True))
    print(flush=True)


async def write_on(served: ServedRun, request: Request, *, write: Write, say: Write) -> None:
    """Give `write` the text as it comes, and `say` a line each time that a path begins."""
    check_every(request, context=served.run.config.model.context)
    forced = served.path(request.path) if request.path else None
    tokenizer = await served.tokenizer()
    tokens = tokenizer.encode(request.prompt)
    if not tokens:
        raise ConfigError("the prompt is empty", hint="give it as an argument, or on the standard input")
    choose = await _router(served, request, forced)
    _say_what_is_seen(served, request, len(tokens), say, is_routed=forced is None)
    sampler = Sampler(temperature=request.temperature, top_k=request.top_k, seed=request.seed)
    pieces = Pieces(tokenizer)
    writer = _Writer(served, request, say)
    for count in _counts(request):
        model = await writer.load(choose(tokens))
        for token in generate(model, tokens, count=count, sampler=sampler, end=END_ID):
            if token == END_ID:
                write(pieces.rest())
                return
            tokens.append(token)
            write(pieces.add(token))
            await asyncio.sleep(0)  # so that Ctrl-C is heard, and the swarm answered
    write(pieces.rest())


def check_every(request: Request, *, context: int) -> None:
    """Raise ConfigError unless the text can be routed anew every so many tokens."""
    if not request.every:
        return
    if request.every < 0 or request.every % WINDOW:
        raise ConfigError(f"`--every {request.every}`: not a positive multiple of {WINDOW}")
    if request.every > context:
        raise ConfigError(f"`--every {request.every}`: more than the {context} tokens that a path sees")
    if request.path:
        raise ConfigError(f"`--every {request.every}` with `--path {request.path}`: nothing is left to route")


@dataclass(slots=True)
class _Writer:
    """Holds one path, and loads another when the router says so."""

    served: ServedRun
    request: Request
    say: Write
    path: PathId | None = None
    model: PathModel | None = None

    async def load(self, path: PathId) -> PathModel:
        """The model, with the parameters of `path`."""
        if self.model is None or path != self.path:
            best = await self.served.best(path) if self.request.best else None
            versions = await self.served.path_versions(path, version=best.version if best else self.request.version)
            flats = await self.served.flats(versions)
            self.model = self.model or PathModel(self.served.run.config.model)
            load_modules(self.model, flats)
            self.path = path
            self.say(describe(path, versions, best))
        return self.model


def describe(path: PathId, versions: Sequence[ModuleVersion], best: Best | None) -> str:
    """A path and what it is made of, on one line."""
    made_of = ", ".join(f"{version.module} version {version.version}" for version in versions)
    return f"{path}: {made_of}" + (f"; best on the holdout: round {best.version}" if best else "")


async def _router(served: ServedRun, request: Request, forced: PathId | None) -> Callable[[Sequence[int]], PathId]:
    """What chooses the path for a text so far."""
    topology, version = served.run.topology, request.version
    if forced is not None or (topology.path_count == 1 and not request.every):
        path = forced or topology.path(0)
        return lambda tokens: path
    token_router = await served.token_router(version=version) if request.every else None
    router = await served.router(version=version)
    usable = await served.usable(version=version)
    frozen, has_counts = await served.feature_model(), served.run.config.routing.has_counts
    return _Route(router, token_router, frozen, topology, usable, has_counts)


@dataclass(slots=True)
class _Route:
    """From a text so far to a path that was trained; lets go of the frozen model after the prompt if the text is routed
    once."""

    router: Router
    token_router: Router | None
    frozen: PathModel | None
    topology: Topology
    usable: Sequence[int]
    has_counts: bool

    def __call__(self, tokens: Sequence[int]) -> PathId:
        assert self.frozen is not None, "a prompt is routed once"
        # At first nothing more is known than a router of documents knows.
        if self.token_router is None or len(tokens) <= PREFIX_TOKENS:
            router, found = self.router, prompt_features(self.frozen, tokens, has_counts=self.has_counts)
        else:
            router, found = self.token_router, text_features(self.frozen, tokens)
        if self.token_router is None:
            self.frozen = None
        number = assign(router, found, self.usable)[0]
        return self.topology.path(int(number))


def _counts(request: Request) -> Iterator[int]:
    """How many tokens to write before the text is routed again."""
    left = request.tokens_max
    while left > 0:
        yield min(left, request.every or left)
        left -= request.every or left


def _say_what_is_seen(served: ServedRun, request: Request, count: int, say: Write, *, is_routed: bool) -> None:
    context = served.run.config.model.context
    if is_routed and count < PREFIX_TOKENS and served.run.topology.path_count > 1:
        least = f"fewer than the {PREFIX_TOKENS} that routing looks at"
        say(f"the prompt has {count} tokens, {least}: it is routed by those")
    if count > context:
        last = count - visible(count, context)
        say(f"the prompt has {count} tokens, a path sees {context}: it begins with the last {last}")


def print_text(text: str) -> None:
    """To the output; on a terminal without characters that control it, for strangers trained what writes here."""
    if sys.stdout.isatty():
        text = "".join(char if char.isprintable() or char in "\n\t" else HALF_CHARACTER for char in text)
    sys.stdout.write(text)
    sys.stdout.flush()


def read_prompt(argument: str | None) -> str:
    """The prompt that was given as an argument, else all of the standard input but for the newline at its end."""
    if argument is not None:
        return argument
    if sys.stdin.isatty():
        print("the prompt, then Ctrl-D:", file=sys.stderr, flush=True)
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise ConfigError("the prompt on the standard input is not UTF-8 text") from None
