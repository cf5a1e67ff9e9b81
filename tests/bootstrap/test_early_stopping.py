"""Early stopping in use: each path at its best round on the holdout, from a folder and from a live swarm."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from serving_harness import (
    COORDINATOR,
    LEADER,
    PRIVATE,
    PROMPT,
    ROUNDS,
    Reading,
    Served,
    make_served,
    run_cli,
    write,
    written,
)
from virtual_time import eventually

from bootstrap.archives import evaluator
from bootstrap.archives.early_stopping import jump
from bootstrap.coordinator.stage import SeedStage
from bootstrap.use.export import Wish, export_run
from bootstrap.use.generate import Request
from dipaco_p2p.clock import SystemClock
from dipaco_p2p.core.routing.router import decode_router
from dipaco_p2p.errors import ConfigError, IntegrityError, Unreachable
from dipaco_p2p.node.stages import Stages
from dipaco_p2p.owner.retention import Thinned
from dipaco_p2p.program.history import History
from dipaco_p2p.swarm.api import Reply
from dipaco_p2p.swarm.stage_scope import ScopedSwarm
from dipaco_p2p.topology import PathId
from dipaco_p2p.use.best_rounds import Best, best_rounds, read_evaluations, read_serving, serving_header

HOLDOUT = {
    "P0-0-0": [9.0, 4.0, 3.0, 5.0],
    "P0-0-1": [9.0, 4.0, 5.0, 6.0],
    "P0-1-0": [9.0, 6.0, 5.0, 4.0],
    "P0-1-1": [2.0, 4.0, 5.0, 6.0],
}
BEST = {"P0-0-0": 2, "P0-0-1": 1, "P0-1-0": 3, "P0-1-1": 0}
GREEDY = Request(prompt=PROMPT, tokens_max=40, temperature=0)
BESTS = replace(GREEDY, best=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    found = make_served(tmp_path_factory.mktemp("served"))
    found.write_evaluations(HOLDOUT)
    return found


@pytest.fixture(scope="module")
def never_judged(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(tmp_path_factory.mktemp("unjudged"))


@pytest.fixture
def unjudged(never_judged: Served) -> Iterator[Served]:
    yield never_judged
    (never_judged.store.folder / "evaluations.jsonl").unlink(missing_ok=True)


# -- from a folder


@pytest.mark.parametrize("path", BEST)
def test_a_path_writes_with_the_modules_of_its_best_round(served: Served, path: str) -> None:
    text, [said] = write(served, replace(BESTS, path=path))
    assert text == write(served, replace(GREEDY, path=path, version=BEST[path]))[0] != ""
    assert said.startswith(f"{path}: L0.M0 version {BEST[path]}, ")
    assert said.endswith(f"; best on the holdout: round {BEST[path]}")


def test_the_best_rounds_write_something_else_than_the_newest(served: Served) -> None:
    for path, version in BEST.items():
        is_newest = write(served, replace(BESTS, path=path))[0] == write(served, replace(GREEDY, path=path))[0]
        assert is_newest == (version == ROUNDS)


def test_the_router_is_that_of_the_newest_sharding(served: Served) -> None:
    def named(request: Request) -> str:
        return write(served, request)[1][-1].split(":")[0]

    prompts = [PROMPT, "Another text altogether, 0123456789 0123456789", "=" * 40, "a b c d e f g h i j k"]
    paths = [named(replace(BESTS, prompt=prompt)) for prompt in prompts]
    assert paths == [named(replace(GREEDY, prompt=prompt)) for prompt in prompts]
    assert len(set(paths)) >= 2


def test_each_path_that_is_switched_to_is_at_its_own_best_round(served: Served) -> None:
    _, said = write(served, replace(BESTS, every=16, tokens_max=100))
    paths = [line.split(":")[0] for line in said]
    assert len(set(paths)) >= 2
    assert all(line.endswith(f"round {BEST[path]}") for path, line in zip(paths, said, strict=True))


@pytest.mark.parametrize("path", ["P0-0-0", "P0-1-1"])
def test_an_export_holds_the_best_round_and_says_why(served: Served, tmp_path: Path, path: str) -> None:
    asyncio.run(export_run(served.open(), Wish(path=path, best=True), tmp_path / "out"))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in served.model(PathId.parse(path), BEST[path]).state_dict().items():
        np.testing.assert_array_equal(tensors[name], value.numpy())
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"- round: {BEST[path]} of {ROUNDS}, the best of {path} on held-out text" in card
    assert f"sequences that are routed to it: {HOLDOUT[path][BEST[path]] + 0.5:.4f} nats" in card
    assert f"validation of the whole grid at version {BEST[path]}," in card
    token_router = decode_router((tmp_path / "out" / "token_router.safetensors").read_bytes())
    np.testing.assert_array_equal(token_router.weights, served.token_router.weights)


def test_without_early_stopping_the_card_does_not_speak_of_it(served: Served, tmp_path: Path) -> None:
    asyncio.run(export_run(served.open(), Wish(path="P0-0-0"), tmp_path / "out"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "early stopping" not in card and "sequences that are routed to it: 5.5000 nats" in card


def test_a_private_run_has_best_rounds_too(tmp_path: Path) -> None:
    served = make_served(tmp_path, model=PRIVATE)
    assert str(served.run.topology) == "2x2x4p"
    served.write_evaluations({str(path): [3.0, 2.0, 2.5, 2.5] for path in served.run.topology.paths()})
    text, [said] = write(served, replace(BESTS, path="P1-0-2"))
    assert said == ("P1-0-2: L0.M1 version 1, L1.M0 version 1, L2.M2 version 1; best on the holdout: round 1")
    assert text == write(served, replace(GREEDY, path="P1-0-2", version=1))[0]


@pytest.mark.parametrize("losses", [[None] * 4, [float("nan")] * 4], ids=["no holdout", "diverged"])
def test_where_the_holdout_says_nothing_the_newest_round_is_taken(tmp_path: Path, losses: list[float | None]) -> None:
    served = make_served(tmp_path)
    served.write_evaluations(dict.fromkeys(HOLDOUT, losses))
    assert asyncio.run(served.open().best(PathId((0, 0, 1)))) == Best(version=ROUNDS, loss=None)


# -- what cannot be done


def test_the_commands_take_best(served: Served, tmp_path: Path) -> None:
    code, output, errors = run_cli(
        "generate", str(served.root), PROMPT, "--best", "--max-tokens", "40", "--temperature", "0"
    )
    text, said = write(served, BESTS)
    assert (code, output, errors) == (0, text + "\n", said[0] + "\n")
    to = tmp_path / "out"
    assert run_cli("export", str(served.root), "--path", "P0-0-1", "--to", str(to), "--best")[0] == 0
    assert "- round: 1 of 3" in (to / "README.md").read_text()


@pytest.mark.parametrize("command", ["generate", "export"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--best", "--version", "0"), "error: `--best` with `--version 0`: each path has a best round of its own"),
        (("--best",), "has been judged yet"),
    ],
    ids=["two ways", "unjudged"],
)
def test_what_cannot_be_taken_is_one_line_and_a_hint(
    unjudged: Served, tmp_path: Path, command: str, flags: tuple[str, ...], words: str
) -> None:
    rest = {"generate": (PROMPT,), "export": ("--path", "P0-0-0", "--to", str(tmp_path / "out"))}
    code, output, errors = run_cli(command, str(unjudged.root), *rest[command], *flags)
    [line, hint] = errors.splitlines()
    assert (code, output) == (2, "") and words in line and hint.startswith("hint: ")
    assert not (tmp_path / "out").exists()


def test_evaluations_of_another_run_are_refused(tmp_path: Path) -> None:
    served = make_served(tmp_path)
    served.write_evaluations({"P0-0": [1.0]})
    with pytest.raises(IntegrityError, match="not those of the paths of"):
        write(served, BESTS)


GOOD: dict[str, Any] = {"rounds": BEST, "losses": {"P0-0-0": 3, "P0-1-1": 2.5}}


def test_a_reply_is_read_as_it_was_told(served: Served) -> None:
    rows = read_evaluations(served.store.folder / "evaluations.jsonl")
    found = read_serving(json.loads(json.dumps(serving_header(rows))), served.run)
    assert {str(path): best.version for path, best in found.items()} == best_rounds(rows) == BEST
    assert {str(path): best.loss for path, best in found.items()} == {
        path: HOLDOUT[path][version] + 0.5 for path, version in BEST.items()
    }
    assert read_serving(serving_header([]), served.run) == {}
    assert read_serving({"rounds": BEST}, served.run)[PathId((0, 0, 1))] == Best(version=1, loss=None)
    assert read_serving(GOOD, served.run)[PathId((0, 0, 0))] == Best(version=2, loss=3)


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"rounds": []},
        {"rounds": None},
        {"rounds": BEST, "losses": []},
        {"rounds": BEST, "more": 1},
        {"rounds": {"P0-0-0": 1}},
        {"rounds": BEST | {"P0-2-0": 1}},
        {"rounds": {path.replace("P0", "P00"): version for path, version in BEST.items()}},
        *({"rounds": BEST | {"P0-1-0": value}} for value in (-1, ROUNDS + 1, 10**400, 1.0, True, "1", None, [1])),
        {"rounds": BEST, "losses": {"P0-2-0": 1.0}},
        *(
            {"rounds": BEST, "losses": {"P0-1-0": value}}
            for value in (-1.0, 1e7, 10**400, float("nan"), float("inf"), True, "1", None, {})
        ),
    ],
    ids=lambda header: f"{header!r:.60}",
)
def test_a_reply_that_is_not_as_it_should_be_is_refused_in_one_line(served: Served, header: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError) as caught:
        read_serving(header, served.run)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 120


# -- from a live swarm


@asynccontextmanager
async def beside_a_seed(served: Served, folder: Path) -> AsyncIterator[Reading]:
    """A reader, and a real seed stage over a finished grid."""
    found, run = Reading(served, folder), served.open().run
    swarm = found.network.join(COORDINATOR)
    stage = SeedStage(run, swarm, served.store, sequences=_no_sequences, clock=found.clock)
    stage.begin()
    Stages(swarm).add(run)
    await asyncio.sleep(1.0)
    yield found
    stage.cancel()


def _no_sequences() -> Any:
    raise AssertionError("a finished grid is not sharded again")


@pytest.mark.parametrize("request_", [BESTS, replace(BESTS, every=16), replace(BESTS, path="P0-0-1")])
async def test_a_seed_node_tells_the_best_rounds_of_its_evaluator(
    served: Served, tmp_path: Path, request_: Request
) -> None:
    async with beside_a_seed(served, tmp_path) as swarm:
        assert await written(await swarm.read(), request_) == await written(served.open(), request_)


async def test_what_a_seed_node_judges_itself_is_what_it_tells(unjudged: Served, tmp_path: Path) -> None:
    path = unjudged.store.folder / "evaluations.jsonl"
    async with beside_a_seed(unjudged, tmp_path) as swarm:
        await eventually(lambda: len(read_evaluations(path)) == ROUNDS + 1)
        run, rows = await swarm.read(), read_evaluations(path)
        found = {str(path): await run.best(path) for path in run.run.topology.paths()}
        assert {name: best.version for name, best in found.items()} == best_rounds(rows)
        for name, best in found.items():
            assert best.loss == rows[best.version]["paths"][name]["loss"]
        assert any(best.loss is not None for best in found.values())


async def test_a_loss_beyond_any_number_is_judged_and_so_are_the_rounds_after_it(
    unjudged: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measure, measured = unjudged.store.folder / "evaluations.jsonl", evaluator.window_nats, [0]

    def window_nats(model: Any, tokens: Any) -> Any:
        measured[0] += 1
        return measure(model, tokens) + (1e6 if measured[0] == 1 else 0.0)  # e to this power is no float

    monkeypatch.setattr(evaluator, "window_nats", window_nats)
    async with beside_a_seed(unjudged, tmp_path):
        await eventually(lambda: len(read_evaluations(path)) == ROUNDS + 1)
        rows = read_evaluations(path)
        assert [row["version"] for row in rows] == list(range(ROUNDS + 1))
        assert rows[0]["perplexity"] == math.inf and all(math.isfinite(row["perplexity"]) for row in rows[1:])


async def test_a_round_that_cannot_be_judged_does_not_keep_later_ones_from_it(
    unjudged: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, judge = unjudged.store.folder / "evaluations.jsonl", evaluator.Evaluator.evaluate

    def evaluate(self: Any, version: int, **named: Any) -> Any:
        if version == 1:
            raise ZeroDivisionError("nobody thought of this")
        return judge(self, version, **named)

    monkeypatch.setattr(evaluator.Evaluator, "evaluate", evaluate)
    async with beside_a_seed(unjudged, tmp_path):
        await eventually(lambda: [row["version"] for row in read_evaluations(path)] == [0, *range(2, ROUNDS + 1)])


async def test_a_live_export_says_the_round_and_its_loss(served: Served, tmp_path: Path) -> None:
    async with beside_a_seed(served, tmp_path / "reader") as swarm:
        await export_run(await swarm.read(), Wish(path="P0-0-1", best=True), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- round: 1 of 3, the best of P0-0-1 on held-out text" in card
    assert "sequences that are routed to it: 4.5000 nats" in card


def serve_only(swarm: Reading, header: dict[str, Any]) -> None:
    """A coordinator that answers but these."""

    async def serving(sender: str, question: dict[str, Any], body: bytes) -> Reply:
        return Reply(header)

    seed = swarm.network.join(COORDINATOR)
    Stages(seed).add(swarm.served.run)
    ScopedSwarm(seed, swarm.served.run.id).serve("run.serving", serving)


async def test_a_run_that_was_not_judged_yet_says_so(served: Served, tmp_path: Path) -> None:
    swarm = Reading(served, tmp_path)
    serve_only(swarm, {"rounds": {}, "losses": {}})
    with pytest.raises(ConfigError, match="no round of run:.* has been judged yet"):
        await (await swarm.read()).best(PathId((0, 0, 0)))


async def test_a_coordinator_that_talks_nonsense_is_refused(served: Served, tmp_path: Path) -> None:
    swarm = Reading(served, tmp_path)
    serve_only(swarm, {"rounds": BEST | {"P0-0-0": 99}})
    with pytest.raises(IntegrityError, match="P0-0-0 cannot be served with round `99` of 3"):
        await (await swarm.read()).best(PathId((0, 0, 0)))


async def test_nobody_but_the_coordinator_is_asked(served: Served, tmp_path: Path) -> None:
    async def lying(sender: str, question: dict[str, Any], body: bytes) -> Reply:
        raise AssertionError("asked")

    swarm = Reading(served, tmp_path)
    leader = swarm.network.join(LEADER)
    Stages(leader).add(swarm.served.run)
    ScopedSwarm(leader, swarm.served.run.id).serve("run.serving", lying)
    run = await swarm.read(leader.peer, expected=swarm.served.run.id)
    with pytest.raises(Unreachable, match="the coordinator, which judges the rounds, does not answer") as caught:
        await run.best(PathId((0, 0, 0)))
    assert "leave --version and --best out" in caught.value.hint


# -- rounds that do damage


def rows(*losses: float | None) -> list[dict[str, Any]]:
    """Evaluations with these routed losses; of the two modules only L1.M1 follows them."""
    return [
        {"version": number, "loss": loss, "modules": {"L1.M0": 3.0, "L1.M1": loss}}
        for number, loss in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ((5.0,), None),
        ((5.0, 4.0, 4.2), None),  # momentum overshoots
        ((5.0, 4.0, 4.3), 1),
        ((5.0, 4.0, 4.1, 4.3), 1),  # in two steps
        ((5.0, 4.0, 4.3, 4.6), None),  # said already
        ((5.0, 4.0, 4.3, 3.9, 4.2), 3),
        ((5.0, 4.0, math.nan), 1),
        ((5.0, 4.0, None), 1),
        ((math.inf, math.inf), None),
    ],
)
def test_a_jump_of_the_loss_is_told_once_with_the_round_to_go_back_to(
    losses: tuple[float | None, ...], best: int | None
) -> None:
    found = jump(rows(*losses))
    assert (found and found.best) == best
    if found is not None:
        assert found.version == len(losses) - 1 and list(found.modules) == ["L1.M1"]


@pytest.mark.parametrize(
    ("thinned", "to"), [(Thinned(), 1), (Thinned(versions=1), 0), (Thinned(versions=1, snapshots=(1,)), 1)]
)
def test_the_coordinator_is_told_what_to_go_back_to(
    capsys: pytest.CaptureFixture[str], thinned: Thinned, to: int
) -> None:
    """The best round before the damage, or the newest before that one of which the archive has the parameters."""
    events: list[dict[str, Any]] = []
    history = History(None, SystemClock())
    history.listen(events.append)
    archive = SimpleNamespace(thinning=SimpleNamespace(of=lambda module: thinned))
    stage: Any = SimpleNamespace(_node=SimpleNamespace(history=history), _archive=archive)
    SeedStage._propose_rollback(stage, rows(5.0, 4.0, 4.2))
    assert (events, capsys.readouterr().out) == ([], "")
    SeedStage._propose_rollback(stage, rows(5.0, 4.0, 4.5))
    del events[0]["t"]
    assert events[0] == {
        "ev": "rollback_proposed",
        "version": 2,
        "to": to,
        "nats": 0.5,
        "modules": {"L1.M1": 0.5},
    }
    told = capsys.readouterr().out
    assert "round 2 did damage" in told and "(L1.M1 by 0.50)" in told and f"rollback MODULE {to}`" in told
