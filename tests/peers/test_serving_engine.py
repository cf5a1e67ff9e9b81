"""The engine of `dipaco-peer serve`: the routed path's own text, within its memory, of the versions it began with."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch
from serving_harness import (
    CONTEXT,
    PRIVATE,
    PROMPT,
    ROUNDS,
    TIED,
    TOKENIZER,
    WARMUP,
    Served,
    make_served,
    publish,
    random_router,
)

from dipaco_p2p.config import ModelConfig
from dipaco_p2p.core.model.generate import Reading
from dipaco_p2p.errors import ConfigError, IntegrityError
from dipaco_p2p.protocol.documents import BlobRef
from dipaco_p2p.topology import ModuleId, PathId
from dipaco_p2p.use.folder import RunFolder
from dipaco_p2p.use.served import FolderPlace, _Folder
from dipaco_p2p.use.tokenizer import Tokenizer
from peers.serving import engine as engine_module
from peers.serving.engine import Asked, Busy, Engine, NotReady, Turn, Written

TOKENS = tuple(Tokenizer(TOKENIZER).encode(PROMPT))
GREEDY = Asked(tokens=TOKENS, count=20, temperature=0)
PLENTY = 1 << 30
TRUNK = ModuleId(0, 0)
SIXTEEN = dataclasses.replace(
    TIED, levels=(TIED.levels[0], *(dataclasses.replace(level, modules=4) for level in TIED.levels[1:]))
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(tmp_path_factory.mktemp("served"))


Opener = Callable[..., Awaitable[Engine]]


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Opens engines, which are closed after the test."""
    engines: list[Engine] = []

    async def opened(served: Served, memory_bytes: int = PLENTY) -> Engine:
        engines.append(Engine(FolderPlace(RunFolder(served.root, is_read_only=True)), memory_bytes=memory_bytes))
        await engines[-1].follow()
        return engines[-1]

    yield opened
    for engine in engines:
        engine.close()


async def told(running: AsyncIterator[Turn | list[Written]], count: int | None = None) -> list[Turn | Written]:
    """All that is still to come, one after the other; or no more than `count` events of it."""
    found: list[Turn | Written] = []
    async for event in running:
        found += [event] if isinstance(event, Turn) else event
        count = None if count is None else count - 1
        if count == 0:
            break
    return found


async def text_of(engine: Engine, asked: Asked) -> tuple[list[Turn], list[int]]:
    found = await told(engine.write(asked))
    turns = [event for event in found if isinstance(event, Turn)]
    return turns, [event.token for event in found if isinstance(event, Written) and not event.is_prompt]


@torch.no_grad()
def greedy(served: Served, path: PathId, tokens: tuple[int, ...], count: int, version: int = ROUNDS) -> list[int]:
    """The likeliest token every time, by the plain model."""
    model, text = served.model(path, version), list(tokens)
    for _ in range(count):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(tokens) :]


@torch.no_grad()
def scores_of(served: Served, tokens: tuple[int, ...]) -> np.ndarray:
    """By the formula of the router, with plain torch."""
    mean = served.frozen().hidden(torch.tensor([tokens[:32]]))[0].mean(dim=0).numpy()
    return (mean - served.router.mean) / served.router.scale @ served.router.weights.T


async def test_the_path_with_the_greatest_score_writes_and_the_scores_are_told(served: Served, opened: Opener) -> None:
    engine = await opened(served)
    [turn], tokens = await text_of(engine, GREEDY)
    scores = scores_of(served, TOKENS)
    assert turn.path == served.run.topology.path(int(scores.argmax()))
    told = {str(path): score for path, score in turn.scores}
    for number, path in enumerate(served.run.topology.paths()):
        assert told[str(path)] == pytest.approx(scores[number], rel=1e-4)
    assert [score for _, score in turn.scores] == sorted(told.values(), reverse=True)
    assert tokens == greedy(served, turn.path, TOKENS, 20)
    assert {version.version for version in turn.versions} == {ROUNDS}


async def test_a_path_that_is_named_writes_and_nothing_is_routed(served: Served, opened: Opener) -> None:
    engine = await opened(served)
    for path in served.run.topology.paths():
        [turn], tokens = await text_of(engine, dataclasses.replace(GREEDY, path=path))
        assert (turn.path, turn.scores) == (path, ()) and tokens == greedy(served, path, TOKENS, 20)


async def test_a_text_is_routed_again_every_so_many_tokens(served: Served, opened: Opener) -> None:
    engine = await opened(served)
    turns, tokens = await text_of(engine, dataclasses.replace(GREEDY, every=16, count=36))
    assert len(turns) == 3 and len(tokens) == 36 and all(turn.scores for turn in turns)
    text = list(TOKENS)
    for turn, count in zip(turns, (16, 16, 4), strict=True):
        hidden = served.frozen().hidden(torch.tensor([text]))[0].detach()
        point = torch.cat((hidden[-32:].mean(dim=0), hidden.mean(dim=0))).numpy()
        router = served.token_router
        number = int(((point - router.mean) / router.scale @ router.weights.T).argmax())
        assert turn.path == served.run.topology.path(number)
        text += greedy(served, turn.path, tuple(text), count) if len(text) + count <= CONTEXT else tokens[32:]
    assert len({turn.path for turn in turns}) > 1


async def test_the_prompt_and_the_text_are_told_with_their_chances(served: Served, opened: Opener) -> None:
    engine = await opened(served)
    asked = dataclasses.replace(GREEDY, path=PathId((0, 1, 0)), has_echo=True, top=3)
    found = [event for event in await told(engine.write(asked)) if isinstance(event, Written)]
    assert [event.is_prompt for event in found] == [True] * len(TOKENS) + [False] * 20
    tokens = [event.token for event in found]
    log_probs = served.model(PathId((0, 1, 0)))(torch.tensor([tokens]))[0].detach().log_softmax(dim=1)
    assert found[0].chance is None and found[0].top == ()
    for place, event in enumerate(found[1:]):
        assert event.chance == pytest.approx(float(log_probs[place, event.token]), abs=1e-4)
        values, numbers = log_probs[place].topk(3)
        assert [number for number, _ in event.top] == numbers.tolist()
        assert [chance for _, chance in event.top] == pytest.approx(values.tolist(), abs=1e-4)


async def test_sixteen_texts_at_once_are_what_each_is_alone(served: Served, opened: Opener) -> None:
    engine = await opened(served)
    asked = [dataclasses.replace(GREEDY, temperature=1.0, seed=seed) for seed in range(16)]
    together = await asyncio.gather(*(text_of(engine, one) for one in asked))
    assert together == [await text_of(engine, one) for one in asked]
    assert len({tuple(tokens) for _, tokens in together}) == 16


async def test_a_text_is_handed_over_token_by_token_once_another_comes(
    served: Served, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "ALONE_S", 60.0)
    engine, path = await opened(served), PathId((0, 1, 0))
    asked = dataclasses.replace(GREEDY, path=path)
    async with aclosing(engine.write(asked)) as first, aclosing(engine.write(asked)) as second:
        events = [await anext(first), await anext(first), await anext(second), await anext(second)]
        events += [await anext(first), await anext(second)]
        assert [len(event) for event in events if isinstance(event, list)] == [1] * 4
        await second.aclose()
        rest = await anext(first)
    assert isinstance(rest, list) and [len(rest), rest[-1].token] == [18, greedy(served, path, TOKENS, 20)[-1]]


async def test_a_text_keeps_its_versions_while_a_newer_one_has_the_next(tmp_path: Path, opened: Opener) -> None:
    served = make_served(tmp_path, versions=1)
    engine, path = await opened(served), PathId((0, 1, 0))
    asked = dataclasses.replace(GREEDY, path=path, top=0)
    async with aclosing(engine.write(asked)) as running:
        tokens = await told(running, 2)
        for module in served.run.topology.modules():
            publish(served, module, 2)
        await engine.follow()
        turn, *newer = await told(engine.write(asked))
        tokens += await told(running)
    assert chances(tokens[1:]) == pytest.approx(plain_chances(served, path, tokens[1:], version=1), abs=1e-4)
    assert chances(newer) == pytest.approx(plain_chances(served, path, newer, version=2), abs=1e-4)
    assert abs(sum(chances(newer)) - sum(chances(tokens[1:]))) > 0.01
    assert isinstance(turn, Turn) and {version.version for version in turn.versions} == {2}


async def test_versions_that_nothing_uses_any_more_leave_memory(tmp_path: Path, opened: Opener) -> None:
    served = make_served(tmp_path, versions=1)
    engine = await opened(served)
    asked = dataclasses.replace(GREEDY, path=PathId((0, 1, 0)))
    async with aclosing(engine.write(asked)) as running:
        await anext(running), await anext(running)
        used = engine.memory_bytes
        publish(served, TRUNK, 2)
        await engine.follow()
        assert engine.memory_bytes == used
    await engine.follow()
    others = [module for module in PathId((0, 1, 0)).modules() if module != TRUNK]
    assert engine.memory_bytes == sum(4 * served.run.layout(module).size for module in others)


def chances(events: list[Turn | Written]) -> list[float]:
    return [event.chance for event in events if isinstance(event, Written) and event.chance is not None]


@torch.no_grad()
def plain_chances(served: Served, path: PathId, events: list[Turn | Written], *, version: int) -> list[float]:
    text = [*TOKENS, *(event.token for event in events if isinstance(event, Written))]
    log_probs = served.model(path, version)(torch.tensor([text]))[0].log_softmax(dim=1)
    return [float(log_probs[place - 1, text[place]]) for place in range(len(TOKENS), len(text))]


# -- memory: PRIVATE has three levels, of 2, 2 and 4 modules


def sizes(served: Served) -> tuple[int, int]:
    """Bytes of a path, and of what it has read of a text."""
    path = sum(4 * served.run.layout(module).size for module in served.run.topology.path(0).modules())
    return path, Reading.bytes_max(served.run.config.model)


@pytest.mark.parametrize(("model", "paths"), [(PRIVATE, 4), (SIXTEEN, 16)], ids=["4 paths", "16 paths"])
async def test_all_paths_are_served_in_the_memory_of_one(
    tmp_path: Path, opened: Opener, model: ModelConfig, paths: int
) -> None:
    router = random_router(model.width, seed=1, path_count=paths)
    served = make_served(tmp_path, model=model, router=router, has_token_router=False)
    engine = await opened(served, limit := sum(sizes(served)))
    assert len(engine.now.paths) == paths
    for _ in range(2):
        for path in served.run.topology.paths():
            asked, used = dataclasses.replace(GREEDY, path=path), 0
            async for _event in engine.write(asked):
                used = max(used, engine.memory_bytes)
            assert 0 < used <= limit
    assert (await text_of(engine, GREEDY))[1]  # the frozen model and the path in turn
    assert engine.memory_bytes <= limit


async def test_modules_that_paths_share_are_in_memory_once_and_read_once(
    served: Served, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await opened(served)
    read: list[str] = []
    blob = _Folder.blob

    async def noted(self: _Folder, ref: object) -> bytes:
        read.append(str(ref))
        return await blob(self, ref)  # type: ignore[arg-type]

    monkeypatch.setattr(_Folder, "blob", noted)
    for path in [*served.run.topology.paths()] * 2:
        await text_of(engine, dataclasses.replace(GREEDY, path=path))
    modules = served.run.topology.modules()
    assert len(read) == len(set(read)) == len(list(modules))
    assert engine.memory_bytes == sum(4 * served.run.layout(module).size for module in modules)


async def test_the_least_recently_used_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Opener
) -> None:
    served = make_served(tmp_path, model=PRIVATE, has_token_router=False)
    path_bytes, text_bytes = sizes(served)
    engine = await opened(served, 2 * path_bytes + text_bytes)
    first, second, third = (PathId(indices) for indices in ((0, 0, 0), (1, 1, 3), (0, 1, 1)))
    for path in (first, second, first, third):
        await text_of(engine, dataclasses.replace(GREEDY, path=path))
    read: list[object] = []
    blob = _Folder.blob

    async def noted(self: _Folder, ref: object) -> bytes:
        read.append(ref)
        return await blob(self, ref)  # type: ignore[arg-type]

    monkeypatch.setattr(_Folder, "blob", noted)
    await text_of(engine, dataclasses.replace(GREEDY, path=first))
    assert not read
    await text_of(engine, dataclasses.replace(GREEDY, path=second))
    assert read


async def test_whoever_hangs_up_leaves_the_others_of_its_path_their_tokens(
    served: Served, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "ALONE_S", 0.0)  # a token at a time, also before the others have come
    engine = await opened(served)
    asked = dataclasses.replace(GREEDY, path=PathId((0, 1, 1)))
    leaving = [asyncio.create_task(text_of(engine, asked)) for _ in range(3)]
    staying = [asyncio.create_task(text_of(engine, asked)) for _ in range(3)]
    async with aclosing(engine.write(asked)) as events:
        for _ in range(8):
            await anext(events)
        for task in leaving:
            task.cancel()
    expected = greedy(served, PathId((0, 1, 1)), TOKENS, 20)
    assert [tokens for _, tokens in await asyncio.gather(*staying)] == [expected] * 3
    await asyncio.wait(leaving)
    assert all(task.cancelled() for task in leaving)


async def test_a_turn_that_fails_ends_each_of_its_texts(
    served: Served, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await opened(served)
    path = served.run.topology.path(0)

    def fail(writings: object) -> None:
        raise IntegrityError("out of memory")

    monkeypatch.setattr(engine_module, "write_next", fail)
    texts = [text_of(engine, dataclasses.replace(GREEDY, path=path)) for _ in range(3)]
    async with asyncio.timeout(20):
        found = await asyncio.gather(*texts, return_exceptions=True)
    assert [type(each) for each in found] == [IntegrityError] * 3


async def test_a_text_waits_for_memory_until_another_has_ended(tmp_path: Path, opened: Opener) -> None:
    served = make_served(tmp_path, model=PRIVATE, has_token_router=False)
    engine = await opened(served, sum(sizes(served)))
    first, second = (dataclasses.replace(GREEDY, path=PathId(indices)) for indices in ((0, 0, 0), (1, 1, 3)))
    async with aclosing(engine.write(first)) as running:
        await anext(running), await anext(running)
        waiting = asyncio.create_task(text_of(engine, second))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await asyncio.sleep(0)
    _, tokens = await waiting  # the first was hung up on
    assert tokens == greedy(served, PathId((1, 1, 3)), TOKENS, 20)


async def test_whoever_waits_too_long_for_memory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Opener
) -> None:
    monkeypatch.setattr(engine_module, "WAIT_S_MAX", 0.01)
    served = make_served(tmp_path, model=PRIVATE, has_token_router=False)
    engine = await opened(served, sum(sizes(served)))
    async with aclosing(engine.write(dataclasses.replace(GREEDY, path=PathId((0, 0, 0))))) as running:
        await anext(running), await anext(running)
        with pytest.raises(Busy, match="all memory is in use"):
            await text_of(engine, dataclasses.replace(GREEDY, path=PathId((1, 1, 3))))
    assert (await text_of(engine, dataclasses.replace(GREEDY, path=PathId((1, 1, 3)))))[1]


async def test_a_memory_that_holds_no_path_is_refused(served: Served, opened: Opener) -> None:
    with pytest.raises(ConfigError, match="one path and its text take") as caught:
        await opened(served, sum(sizes(served)) - 1)
    assert caught.value.hint == "raise --memory"


async def test_a_damaged_module_is_an_error_and_others_go_on(tmp_path: Path, opened: Opener) -> None:
    served = make_served(tmp_path)
    engine = await opened(served)
    version = await engine.now.served.version(ModuleId(1, 1))
    [blob] = (served.store.folder / "blobs").rglob(version.digest)
    kept = blob.read_bytes()
    blob.write_bytes(b"no module")
    with pytest.raises(IntegrityError, match="damaged"):
        await text_of(engine, dataclasses.replace(GREEDY, path=PathId((0, 1, 0))))
    assert engine.memory_bytes == 4 * served.run.layout(TRUNK).size
    assert (await text_of(engine, dataclasses.replace(GREEDY, path=PathId((0, 0, 0)))))[1]
    blob.write_bytes(kept)
    assert (await text_of(engine, dataclasses.replace(GREEDY, path=PathId((0, 1, 0)))))[1]


async def test_a_module_that_comes_slowly_holds_up_its_own_paths_alone(
    tmp_path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack: whoever leads one module gave its newest version a few bytes at a time, and no text began any more."""
    served = make_served(tmp_path, model=PRIVATE, has_token_router=False)
    engine = await opened(served)
    slow, quick = PathId((0, 0, 0)), PathId((1, 1, 3))
    held = {version.digest for version in await served.open().path_versions(slow)}
    asked, came, blob = asyncio.Event(), asyncio.Event(), _Folder.blob

    async def slowly(self: _Folder, ref: BlobRef) -> bytes:
        if ref.digest in held:
            asked.set()
            await came.wait()
        return await blob(self, ref)

    monkeypatch.setattr(_Folder, "blob", slowly)
    waiting = [asyncio.create_task(text_of(engine, dataclasses.replace(GREEDY, path=slow))) for _ in range(2)]
    await asyncio.wait_for(asked.wait(), 20)
    async with asyncio.timeout(20):
        assert (await text_of(engine, dataclasses.replace(GREEDY, path=quick)))[1]
    waiting[0].cancel()  # whoever hangs up leaves the other one what it waits for
    await asyncio.gather(waiting[0], return_exceptions=True)
    came.set()
    async with asyncio.timeout(20):
        assert (await waiting[1])[1]


async def test_random_weights_are_no_model(tmp_path: Path, opened: Opener) -> None:
    served = make_served(tmp_path, model=TIED, stage=WARMUP, versions=0)
    engine = await opened(served)
    with pytest.raises(NotReady, match="no round of .* has ended"):
        _ = engine.now
    publish(served, TRUNK, 1)
    await engine.follow()
    assert (await text_of(engine, GREEDY))[1] and math.isfinite(engine.memory_bytes)


async def test_what_was_there_stays_when_the_run_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Opener
) -> None:
    served = make_served(tmp_path)
    engine, place = await opened(served), FolderPlace(RunFolder(tmp_path / "gone", is_read_only=True))
    before = engine.now

    async def fail(self: FolderPlace) -> None:
        raise IntegrityError("a damaged manifest")

    monkeypatch.setattr(FolderPlace, "newest", fail)
    await engine.follow()
    assert engine.now is before
    fresh = Engine(place, memory_bytes=PLENTY)
    await fresh.follow()
    with pytest.raises(NotReady, match="no model yet: a damaged manifest"):
        _ = fresh.now
