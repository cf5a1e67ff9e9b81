"""What writes: texts with the newest versions of a run, routed as the run routes, several at a time.

Rule 1: a text keeps the versions that it began with, while what begins later has newer ones.
Rule 2: modules are in memory once, however many paths and texts use them. Beyond the limit the least recently used of
those that no text is using go; whoever needs more waits until texts have ended. A text counts with what it has read.
Rule 3: one thread computes, one token of each text in turn; texts of one path whose turn has come take it together. A
text that is alone takes several turns at once, but the first, which somebody waits for.
Rule 4: a run whose first stage has no round behind it has no model yet: its weights are random.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from dipaco_p2p.config import PREFIX_TOKENS
from dipaco_p2p.core.arrays import Array
from dipaco_p2p.core.model.generate import Reading, Sampler, Writing, prompt_features, text_features, write_next
from dipaco_p2p.core.model.transformer import PathModel
from dipaco_p2p.core.routing.router import Router
from dipaco_p2p.errors import ConfigError, DipacoError, WrongRun
from dipaco_p2p.node.measuring import assign
from dipaco_p2p.node.run import Run
from dipaco_p2p.program.text import size
from dipaco_p2p.protocol.documents import ModuleVersion
from dipaco_p2p.topology import ModuleId, PathId
from dipaco_p2p.use.served import Place, ServedRun
from dipaco_p2p.use.tokenizer import END_ID, Tokenizer

log = logging.getLogger(__name__)

FOLLOW_S = 10.0
"""Between two looks for new versions."""
WAIT_S_MAX = 60.0
"""For memory that other texts use."""
ALONE_S = 0.02
"""In which a text that is alone is written on before anybody hears of it: each hand-over costs as much as a small model
takes for a token."""
ROWS = 64
"""Tokens of a prompt whose logits are in memory at a time."""

R = TypeVar("R")
Tensors = dict[str, Tensor]
Versions = tuple[ModuleVersion, ...]


class NotReady(Exception):
    """There is no model yet, or none that can be read; the message says why."""


class Busy(Exception):
    """Others use the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The run at one moment: all that a text needs to keep."""

    served: ServedRun
    tokenizer: Tokenizer
    versions: dict[ModuleId, ModuleVersion]
    router: Router | None
    token_router: Router | None
    usable: tuple[int, ...]
    """Numbers of the paths that were trained, among which to route."""

    @property
    def run(self) -> Run:
        return self.served.run

    def of(self, path: PathId) -> Versions:
        return tuple(self.versions[module] for module in path.modules())

    @property
    def paths(self) -> list[PathId]:
        """Those that were trained."""
        return [self.run.topology.path(number) for number in self.usable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to write."""

    tokens: tuple[int, ...]
    """At least one, and no more than a context."""
    count: int
    path: PathId | None = None
    """None: the router chooses."""
    every: int = 0
    """Tokens after which the text is routed again; 0: once."""
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    top: int | None = None
    """How many of the likeliest tokens to tell of beside each one; None tells of no chances at all."""
    has_echo: bool = False
    """Whether the prompt's own tokens are told of, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """From here on `path` writes, made of `versions`."""

    path: PathId
    versions: Versions
    scores: tuple[tuple[PathId, float], ...] = ()
    """Those of the router for all trained paths, the greatest first; empty where nothing was routed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One token of the text."""

    token: int
    is_prompt: bool = False
    chance: float | None = None
    """Its logarithm; None if nobody asked, and for the first token of a prompt."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens there, with the logarithms of theirs."""


class _Step(NamedTuple):
    """A text that waits for its next token."""

    writing: Writing
    top: int | None


class Engine:
    """Writes with what `place` has; `follow` must have looked there before."""

    def __init__(self, place: Place, *, memory_bytes: int, device: str = "cpu") -> None:
        self._place = place
        self._shelf = _Shelf(memory_bytes)
        self._device = device
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="serving")
        self._texts = 0
        """Being written now."""
        self._waiting: dict[tuple[str, ...], tuple[list[_Step], asyncio.Task[list[Written]]]] = {}
        """By modules, those whose turn comes next, and what comes of it."""
        self._turns = asyncio.Lock()
        self._now: Snapshot | None = None
        self._problem = "the newest versions are still on their way"

    @property
    def now(self) -> Snapshot:
        """What a text that begins now is written with. Raises NotReady."""
        if self._now is None:
            raise NotReady(f"no model yet: {self._problem}")
        return self._now

    async def follow(self) -> None:
        """Look for what is new. Raises WrongRun, and ConfigError if no path fits into memory; `now` says what else
        failed."""
        try:
            found = await snapshot_of(await self._place.newest(), self._now)
        except (ConfigError, WrongRun):
            raise
        except DipacoError as error:
            self._problem = str(error)
            log.info("nothing new: %s", error)
            return
        if not found.run.manifest.origin and not any(version.version for version in found.versions.values()):
            self._problem = f"no round of {found.run.name} has ended"
            return
        run, spare = found.run, Reading.bytes_max(found.run.config.model)
        paths = ([4 * run.layout(module).size for module in path.modules()] for path in found.paths)
        self._shelf.require(spare + max(map(sum, paths)))
        self._now = found
        self._shelf.forget({version.digest for version in (*found.versions.values(), *found.served.feature_versions())})

    async def write(self, asked: Asked) -> AsyncGenerator[Turn | list[Written]]:
        """A text, a few tokens at a time, to `<|end|>` or the last of `asked.count`. Close it when nobody reads on.
        Raises NotReady, Busy, and DipacoError for versions that cannot be had."""
        now, text, left = self.now, list(asked.tokens), asked.count
        sampler = Sampler(temperature=asked.temperature, top_p=asked.top_p, seed=asked.seed)
        is_first = True
        while is_first or left:
            turn = await self._turn(now, asked, text)
            yield turn
            async with self._leased(now, turn.versions, has_text=True) as model:
                reading = Reading(model)
                if is_first and asked.has_echo:
                    yield await self._do(partial(_echo, reading, asked))
                writing, is_first = Writing(reading, text, sampler=sampler), False
                modules = tuple(version.digest for version in turn.versions)
                until = left - min(left, asked.every or left)
                while left > until:
                    count = 1 if left == asked.count else left - until
                    found = await self._next(modules, _Step(writing, asked.top), count)
                    yield found
                    if found[-1].token == END_ID:
                        return
                    text += [written.token for written in found]
                    left -= len(found)

    async def _next(self, model: tuple[str, ...], step: _Step, count: int) -> list[Written]:
        """The next token of a text, or if it is alone up to `count`. While it waits for its turn, others of the same
        modules join it."""
        if self._texts == 1:
            return await self._do(partial(self._write_alone, step, count))
        if model not in self._waiting:
            steps: list[_Step] = []
            self._waiting[model] = steps, asyncio.create_task(self._together(model, steps))
        steps, turn = self._waiting[model]
        steps.append(step)
        place = len(steps) - 1
        return [(await asyncio.shield(turn))[place]]  # whoever hangs up leaves the others their turn

    def _write_alone(self, step: _Step, count: int) -> list[Written]:
        """Until the text ends, another one comes, or its reader has waited for long enough."""
        until_s, found = time.monotonic() + ALONE_S, _write_each([step])
        while len(found) < count and found[-1].token != END_ID and self._texts == 1 and time.monotonic() < until_s:
            found += _write_each([step])
        return found

    async def _together(self, model: tuple[str, ...], steps: list[_Step]) -> list[Written]:
        async with self._turns:
            del self._waiting[model]  # from now on others wait for the next turn
            return await self._do(partial(_write_each, steps))

    async def _turn(self, now: Snapshot, asked: Asked, text: list[int]) -> Turn:
        """Which path goes on with `text`."""
        if asked.path is not None or now.router is None:
            path = asked.path or now.run.topology.path(0)
            return Turn(path=path, versions=now.of(path))
        # At first nothing more is known than a router of documents knows.
        by_token = now.token_router if asked.every and len(text) > PREFIX_TOKENS else None
        async with self._leased(now, now.served.feature_versions()) as frozen:
            has_counts = now.run.config.routing.has_counts

            def work() -> Array:
                if by_token is None:
                    return prompt_features(frozen, text, has_counts=has_counts)
                return text_features(frozen, text)

            features = await self._do(work)
        router = by_token or now.router
        scores = router.scores(features)[0]
        path = now.run.topology.path(int(assign(router, features, now.usable)[0]))
        order = sorted(now.usable, key=lambda number: -scores[number])
        told = tuple((now.run.topology.path(number), float(scores[number])) for number in order)
        return Turn(path=path, versions=now.of(path), scores=told)

    @asynccontextmanager
    async def _leased(
        self, now: Snapshot, versions: Sequence[ModuleVersion], *, has_text: bool = False
    ) -> AsyncIterator[PathModel]:
        """The path of these versions in memory, with room for what it reads of a text, until the end of the block."""
        run, by_digest = now.run, {version.digest: version for version in versions}
        sizes = {digest: 4 * run.layout(version.module).size for digest, version in by_digest.items()}

        async def load(digest: str) -> Tensors:
            version = by_digest[digest]
            [flat] = await now.served.flats((version,))

            def work() -> Tensors:
                parts = run.layout(version.module).split(flat)
                # A copy: views of a blob are read-only, which torch warns about.
                return {name: torch.from_numpy(part.copy()).to(self._device) for name, part in parts.items()}

            return await self._do(work)

        spare = Reading.bytes_max(run.config.model) if has_text else 0
        async with self._shelf.held(sizes, spare, load) as modules:
            self._texts += has_text
            try:
                yield await self._do(lambda: _path_of(run, [modules[version.digest] for version in versions]))
            finally:
                self._texts -= has_text

    async def _do(self, work: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)

    @property
    def memory_bytes(self) -> int:
        """That modules and texts have now."""
        return self._shelf.used


async def snapshot_of(served: ServedRun, before: Snapshot | None) -> Snapshot:
    """`served` as it now is; what has not changed since `before` is not read again. Raises DipacoError."""
    topology = served.run.topology
    versions = {module: await served.version(module) for module in topology.modules()}
    is_same = before is not None and before.run.id == served.run.id
    has_routers = served.router_ref() is not None
    return Snapshot(
        served=served,
        tokenizer=before.tokenizer if before is not None and is_same else await served.tokenizer(),
        versions=versions,
        router=await served.router() if has_routers else None,
        token_router=await served.token_router() if served.token_router_ref() is not None else None,
        usable=tuple(await served.usable()) if has_routers else (0,),
    )


def _path_of(run: Run, modules: Sequence[Tensors]) -> PathModel:
    """A path whose parameters are those of the modules, not copies."""
    model = PathModel(run.config.model)
    model.load_state_dict({name: part for module in modules for name, part in module.items()}, assign=True)
    return model.requires_grad_(False)


def _echo(reading: Reading, asked: Asked) -> list[Written]:
    """The prompt, token by token; afterwards `reading` has read all of it but the last token."""
    first, *rest = asked.tokens
    told = [Written(token=first, is_prompt=True)]
    for start in range(0, len(rest), ROWS):
        part = rest[start : start + ROWS]
        rows = reading.read_each(asked.tokens[start : start + len(part)])
        told += [_written(token, row, asked.top, is_prompt=True) for token, row in zip(part, rows, strict=True)]
    return told


def _write_each(steps: Sequence[_Step]) -> list[Written]:
    """The next token of each of these texts, which are of the same modules."""
    found = write_next([step.writing for step in steps])
    return [_written(token, logits, step.top) for step, (token, logits) in zip(steps, found, strict=True)]


def _written(token: int, logits: Array, top: int | None, *, is_prompt: bool = False) -> Written:
    if top is None:
        return Written(token=token, is_prompt=is_prompt)
    exact = logits.astype(np.float64)
    chances = exact - exact.max()
    chances -= math.log(np.exp(chances).sum())
    best = np.argsort(-chances, kind="stable")[:top]
    likeliest = tuple((int(number), float(chances[number])) for number in best)
    return Written(token=token, is_prompt=is_prompt, chance=float(chances[token]), top=likeliest)


@dataclass(slots=True)
class _Module:
    """One module in memory."""

    size: int
    users: int = 0
    tensors: Tensors | None = None
    """None until it is there."""
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Shelf:
    """Modules in memory by name, the least recently used first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._modules: OrderedDict[str, _Module] = OrderedDict()
        self._spare = 0
        self._entering = asyncio.Lock()
        self._left = asyncio.Event()

    @property
    def used(self) -> int:
        return self._spare + sum(module.size for module in self._modules.values())

    def require(self, count: int) -> None:
        """Raise ConfigError unless this much fits at all."""
        if count > self._bytes_max:
            message = f"a memory of {size(self._bytes_max)}, but one path and its text take {size(count)}"
            raise ConfigError(message, hint="raise --memory")

    def forget(self, but: set[str]) -> None:
        """Put away what nobody uses and is not among `but`."""
        for name in [name for name, module in self._modules.items() if not module.users and name not in but]:
            del self._modules[name]

    @asynccontextmanager
    async def held(
        self, sizes: dict[str, int], spare: int, load: Callable[[str], Awaitable[Tensors]]
    ) -> AsyncIterator[dict[str, Tensors]]:
        """The modules of these names and sizes, and room for `spare` bytes beside them. Raises Busy, and as `load`."""
        has_entered = False
        try:
            async with self._entering:  # one after the other: whoever waits for much is not overtaken for ever
                await self._make_room(sizes, spare)
                self._spare += spare
                for name, count in sizes.items():
                    self._modules.setdefault(name, _Module(count)).users += 1
                    self._modules.move_to_end(name)
                has_entered = True
            for name in sizes:  # whoever has this module may be slow, and others have entered meanwhile
                module = self._modules[name]
                async with module.loading:
                    module.tensors = module.tensors or await load(name)
            yield {name: self._modules[name].tensors or {} for name in sizes}
        finally:
            if has_entered:
                self._leave(sizes, spare)

    async def _make_room(self, sizes: dict[str, int], spare: int) -> None:
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                while not self._has_room(sizes, spare):
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            raise Busy("all memory is in use by other texts") from None

    def _has_room(self, sizes: dict[str, int], spare: int) -> bool:
        """Whether it is there now, once what nobody uses has gone."""
        needed = spare + sum(count for name, count in sizes.items() if name not in self._modules)
        unused = [name for name, module in self._modules.items() if not module.users and name not in sizes]
        while unused and self.used + needed > self._bytes_max:
            del self._modules[unused.pop(0)]
        return self.used + needed <= self._bytes_max

    def _leave(self, sizes: dict[str, int], spare: int) -> None:
        self._spare -= spare
        for name in sizes:
            module = self._modules[name]
            module.users -= 1
            if module.tensors is None and not module.users:  # it could not be loaded
                del self._modules[name]
        self._left.set()
