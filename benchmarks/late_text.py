"""`python -m benchmarks.late_text`: what a text reaches that comes with a growth, beside runs that had it all along, or
never.

In one process, one path after the other, with the project's own inner loop, codec, outer step and routing; nobody dies
and nothing is late. Three runs of the same rounds, from the same random weights and with the same held-out text:

    from the start   1x4 on both texts
    later            1x2 on the first text; after half of the rounds it grows to 1x4 with the second one
    never            1x2 on the first text alone

The tokenizer is that of the first text in all of them. A path trains as many steps a round everywhere, so that the new
text is trained half as long in `later`: what is asked is what is left of that at the end, not what an equal number of
steps gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.report import JsonFile, run_benchmark, show, table, write_json
from bootstrap.genesis.prepare import MOMENT_STEPS, moments
from bootstrap.genesis.routing import first_router
from bootstrap.runfile import RunFile
from bootstrap.text.added import joined
from bootstrap.text.corpus import found_documents
from bootstrap.text.sequences import Sequences, split
from bootstrap.text.tokenizer import tokenise, train_tokenizer
from dipaco_p2p.config import InnerConfig, LevelConfig, ModelConfig, RoundsConfig, RunConfig, WarmupConfig
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.model.inner import InnerLoop
from dipaco_p2p.core.model.shards import Shard
from dipaco_p2p.core.model.transformer import initial_modules, path_model
from dipaco_p2p.core.outer.compress import compress
from dipaco_p2p.core.outer.outer_step import OuterState, Share, average, outer_gradient, outer_step, weights
from dipaco_p2p.core.routing.evaluate import counted_tokens, window_nats
from dipaco_p2p.core.routing.features import document_features
from dipaco_p2p.core.routing.grown import labels_beside, router_beside
from dipaco_p2p.core.routing.router import Paths, Router
from dipaco_p2p.topology import ModuleId
from dipaco_p2p.use.tokenizer import Tokenizer

FIRST, SECOND = ("python", "docs", "licence", "readme"), ("c",)
"""Domains of the text that is found on a machine."""
WIDE = 4
"""Paths where there are two texts; half of them where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Both texts of a seed."""

    first: Sequences
    second: Sequences


class Grid:
    """One run: all modules of a grid, and a worker for each path."""

    def __init__(self, config: RunConfig, tokens: NDArray[np.int32]) -> None:
        """Warmed up on `tokens` as one path, and forked."""
        self.config, self.number = config, 0
        start, loop = list(initial_modules(config.model, seed=config.seed).values()), self._loop()
        flats = loop.run(start, Shard(tokens=tokens), first_step=0, steps=config.warmup_steps).flats
        self.states = {module: OuterState.fresh(flats[module.level]) for module in config.topology.modules()}
        self.router = first_router(config, self.features(tokens), tokens)
        self._take_up(tokens, self.router.assign(self.features(tokens)))

    def features(self, tokens: NDArray[np.int32]) -> Floats:
        """By the weights with which the stage begins."""
        return document_features(path_model(self.config.model, self._frozen()), tokens, has_counts=False)

    def grow(self, paths: int, first: NDArray[np.int32], second: NDArray[np.int32]) -> None:
        """To so many paths, the new ones for the `second` text, as bootstrap/genesis/growth.py does it."""
        before, parents = self.config.topology, self.router.assign(self.features(first))
        self.config = self.config.grown((1, paths))
        after = self.config.topology
        self.states = {module: self.states[after.parent(module, before)] for module in after.modules()}
        self._begun = None
        tokens = np.concatenate([first, second])
        points = self.features(tokens)
        labels = labels_beside(points, parents, before=before, after=after, seed=self.config.seed)
        self.router = router_beside(self.config, points, tokens, labels)
        self._take_up(tokens, labels)

    def round(self) -> None:
        """All paths train, then all modules step."""
        config, step = self.config, self.config.warmup_steps + self.number * self.config.inner.steps
        made: dict[ModuleId, list[tuple[Share, Any]]] = {module: [] for module in self.states}
        for place, path in enumerate(config.topology.paths()):
            flats, shard = [self.states[module].params for module in path.modules()], self._shards[place]
            found = self._loops[place].run(flats, shard, first_step=step, steps=config.inner.steps)
            share = Share(path=str(path), shard_size=shard.tokens.size, tokens=found.tokens)
            for module, before, flat in zip(path.modules(), flats, found.flats, strict=True):
                owed, key = outer_gradient(before, flat), (place, module)
                sent, self._owed[key] = compress(owed, self._owed.get(key), codec=config.compression.uplink)
                made[module].append((share, sent))
        full = config.inner.steps * config.inner.batch * config.model.context
        for module, parts in made.items():
            shares, gradients = [share for share, _ in parts], [gradient for _, gradient in parts]
            alphas, paths = weights(shares, tokens_full=full), [share.path for share in shares]
            gradient = average(gradients, alphas, rule=config.outer.norm_rule, paths=paths)
            lr, momentum, codec = config.outer.lr, config.outer.momentum, config.compression.downlink
            self.states[module] = outer_step(self.states[module], gradient, lr=lr, momentum=momentum, codec=codec)[0]
        self.number += 1

    def loss(self, tokens: NDArray[np.int32]) -> float:
        """Nats per token, each sequence under the path that the router gives it."""
        assigned, total = self.router.assign(self.features(tokens)), 0.0
        for place, path in enumerate(self.config.topology.paths()):
            rows = tokens[assigned == place]
            if len(rows):
                flats = [self.states[module].params for module in path.modules()]
                total += float(window_nats(path_model(self.config.model, flats), rows).sum())
        return total / (len(tokens) * counted_tokens(self.config.model.context))

    router: Router
    _begun: list[Floats] | None = None
    _shards: list[Shard]
    _loops: list[InnerLoop]
    _owed: dict[tuple[int, ModuleId], Floats]

    def _frozen(self) -> list[Floats]:
        if self._begun is None:
            self._begun = [self.states[module].params for module in self.config.topology.path(0).modules()]
        return self._begun

    def _take_up(self, tokens: NDArray[np.int32], labels: Paths) -> None:
        """Shards, and optimizers with moments that were taken at the weights as they are."""
        paths = list(self.config.topology.paths())
        self._shards = [Shard(tokens=tokens[labels == place]) for place in range(len(paths))]

        def at(step: int) -> tuple[list[Floats], Shard]:
            place = step % len(paths)
            return [self.states[module].params for module in paths[place].modules()], self._shards[place]

        state = moments(self.config, at)
        self._loops, self._owed = [self._loop(place) for place in range(len(paths))], {}
        for loop in self._loops:
            loop.load_state(state)

    def _loop(self, place: int = 0) -> InnerLoop:
        config = self.config
        return InnerLoop(config.inner, config.total_steps, config.model, device="cpu", seed=config.seed + 7919 * place)


def compare(texts: Texts, config: RunConfig) -> dict[str, dict[str, float]]:
    """The loss of each run on each text."""
    half, rounds = config.rounds.rounds // 2, config.rounds.rounds
    first, second, both = texts.first.train.tokens, texts.second.train.tokens, joined([texts.first, texts.second])
    narrow = replace(config, model=_model(WIDE // 2))
    begun = {"from the start": (config, both.train.tokens), "later": (narrow, first), "never": (narrow, first)}
    runs = {name: Grid(*start) for name, start in begun.items()}
    for number in range(rounds):
        if number == half:
            runs["later"].grow(WIDE, first, second)
        for run in runs.values():
            run.round()
    parts = {"first text": texts.first.validation.tokens, "second text": texts.second.validation.tokens}
    return {name: {part: run.loss(tokens) for part, tokens in parts.items()} for name, run in runs.items()}


def read_texts(config: RunConfig, *, bytes_max: int) -> Texts:
    """From what is found on this machine, near-copies left out."""
    documents = found_documents(bytes_max=bytes_max, seed=config.seed)
    of = {name: [one for one in documents if one.domain in name] for name in (FIRST, SECOND)}
    data = train_tokenizer((one.text for one in of[FIRST]), vocab_size=config.model.vocab_size)
    file = RunFile(run=config)
    first, second = (split(tokenise(of[name], Tokenizer(data)), file) for name in (FIRST, SECOND))
    return Texts(first=first, second=second)


def _model(paths: int) -> ModelConfig:
    levels = LevelConfig(embedding=True, head=True, blocks=1), LevelConfig(modules=paths, blocks=2)
    return ModelConfig(vocab_size=1024, width=64, heads=4, ffn_width=128, context=128, levels=levels)


def _row(losses: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """In per cent of perplexity, as the goals are said."""
    start, later, never = (losses[name] for name in ("from the start", "later", "never"))

    def above(one: float, other: float) -> float:
        return 100 * (float(np.exp(one - other)) - 1)

    return {
        "second text, later over from the start, %": above(later["second text"], start["second text"]),
        "second text, never over from the start, %": above(never["second text"], start["second text"]),
        "first text, later over never, %": above(later["first text"], never["first text"]),
        "first text, later over from the start, %": above(later["first text"], start["first text"]),
    }


def main(
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many, from 0 on.")] = 2,
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Of the grid, in all.")] = 16,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Inner steps of a round.")] = 20,
    warmup: Annotated[int, typer.Option("--warmup", min=1, help="Rounds of the warm-up.")] = 6,
    bytes_max: Annotated[int, typer.Option("--bytes", min=100_000, help="Of all text that is found.")] = 8_000_000,
    to: JsonFile = None,
) -> None:
    """Losses of three runs on two texts, one of which comes later in one run and never in another."""
    rows = []
    for seed in range(seeds):
        config = RunConfig(
            seed=seed,
            model=_model(WIDE),
            warmup=WarmupConfig(rounds=warmup),
            inner=InnerConfig(steps=steps),
            rounds=RoundsConfig(rounds=rounds),
        )
        losses = compare(read_texts(config, bytes_max=bytes_max), config)
        flat = {f"{run}, {part}": float(np.exp(loss)) for run, parts in losses.items() for part, loss in parts.items()}
        rows.append({"seed": seed, **flat, **_row(losses)})
        shown = [(name, f"{value:.2f}") for name, value in rows[-1].items()]
        show(table("perplexity at the end of each run, and what one is above another", ("", ""), shown))
    write_json(to, {"rows": rows, "moment_steps": MOMENT_STEPS})


if __name__ == "__main__":
    run_benchmark(main)
