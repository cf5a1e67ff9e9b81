"""`plan --probe`: whether paths would pay on this text, before a volunteer spends a watt.

One model is warmed up, or taken from the run's checkpoint. Then, for each way to cut the text, it goes on from there on
each cluster alone, and all of these models read text that is held back. A sequence's loss under the best of them is the
least that any router could reach with these clusters, and that under a random one what no router reaches. The same is
done with clusters drawn by lot, since the best of several is better by chance, too.

What routing gains is what a sequence's own model is better than the mean of the same models. Against it stands what
DiLoCo gains of as many steps: what the mean of the parameters that went on by lot is better than the mean of these
models. So it does not count that one set of models came out better than another, by chance. A router is judged on the
tokens that it has not seen; clusters of whole documents have seen all, and are a bound. What the outer steps of later
rounds add is left out on both sides.

Sources of the clusterings: DiPaCo (arXiv 2403.10616) section 2.4; whole documents by tf-idf, a singular value
decomposition and balanced k-means, as in c-BTM (arXiv 2303.14177).

n sequences, P clusters, D features, V words.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dipaco_p2p.config import PREFIX_TOKENS
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.model.engine import on_device, spare_device
from dipaco_p2p.core.model.inner import InnerLoop, InnerResult, StepReport
from dipaco_p2p.core.model.shards import HeldOut, Shard
from dipaco_p2p.core.model.transformer import PathModel, load_modules, path_model
from dipaco_p2p.core.routing.evaluate import WINDOW, window_nats
from dipaco_p2p.core.routing.features import token_counts, token_features
from dipaco_p2p.core.routing.kmeans import fit_kmeans
from dipaco_p2p.core.routing.unigram import fit_tiny

from ..genesis.prepare import first_flats
from ..progress import stage
from ..runfile import RunFile
from ..text.sequences import prepare_sequences

Labels = NDArray[np.int64]
Doubles = NDArray[np.float64]

CLUSTERS_MAX = 4
"""A larger grid is probed with as many: each costs as many steps as the first."""
BYTES_MAX = 4_000_000
READ_MAX = 192
"""Sequences of held-back text that all models read."""
PREFIXES = (32, 64, 128)
WORDS_MAX, DIRECTIONS = 4096, 32
"""Of tf-idf: the most frequent tokens, and the directions that are kept of them."""
BY_LOT, WHOLE = "by lot", "whole documents, tf-idf"
SURE, LEAST = 3.0, 0.01
"""By how many standard errors, and by how many nats, routing must be ahead. The best of several ways is looked at, and
the error does not know the chance of training; and less than 1 % of perplexity is not worth a grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What one way to cut the text came to, in nats per token."""

    name: str
    seen: int
    """First tokens that do not count: a router reads them."""
    routed: float
    """Each sequence under the model of its own cluster."""
    best: float
    random: float

    @property
    def gap(self) -> float:
        """The most that any router could gain."""
        return self.random - self.best

    @property
    def gain(self) -> float:
        """What its own routing gains."""
        return self.random - self.routed


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The result of a probe."""

    clusters: int
    warmup_steps: int
    """0: from a checkpoint."""
    steps: int
    sequences: int
    kinds: tuple[Kind, ...]
    """The last one is by lot."""
    diloco: float
    ahead: float
    """Nats per token by which the best kind's routing gains more than DiLoCo does; negative if less."""
    error: float
    """Its standard error, over documents."""

    @property
    def best(self) -> Kind:
        """The kind whose own routing gains most."""
        return max((kind for kind in self.kinds if kind.name not in (WHOLE, BY_LOT)), key=lambda kind: kind.gain)

    @property
    def is_grid(self) -> bool:
        """Whether a grid is worth it on this text."""
        return self.ahead > max(SURE * self.error, LEAST)

    def document(self) -> dict[str, Any]:
        """For programs."""
        gaps = {"kinds": [{**asdict(kind), "gap": kind.gap, "gain": kind.gain} for kind in self.kinds]}
        return {**asdict(self), **gaps, "best": self.best.name, "says": "grid" if self.is_grid else "diloco"}

    def lines(self) -> Iterator[str]:
        """For people: a table, and the one line that a coordinator reads."""
        began = f"{self.warmup_steps} steps of warm-up" if self.warmup_steps else "from the checkpoint"
        yield (
            f"probe: {began}, then {self.steps} on each of {self.clusters} clusters; nats a token of {self.sequences} "
            "held-back sequences"
        )
        yield f"  {'':<26}{'its own':>9}{'best':>9}{'random':>9}{'gap':>9}{'gain':>9}"
        for kind in self.kinds:
            values = (kind.routed, kind.best, kind.random, kind.gap, kind.gain)
            yield f"  {kind.name:<26}{''.join(f'{value:>9.3f}' for value in values)}"
        lot = self.kinds[-1].random
        yield f"  {'DiLoCo, one round':<26}{self.diloco:>9.3f}{'':>9}{lot:>9.3f}{'':>9}{lot - self.diloco:>9.3f}"
        side, says = "more than" if self.ahead > 0 else "less than", "grid" if self.is_grid else "DiLoCo"
        by = f"{self.best.name} gains {abs(self.ahead):.3f} nats a token {side} DiLoCo"
        yield f"{says}: {by}, standard error {self.error:.3f}"


def probe(file: RunFile, *, steps: int) -> Probe:
    """Probe the text of a run with `steps` steps on each cluster, and as many of warm-up. Raises DipacoError."""
    corpus = replace(file.corpus, bytes_max=min(file.corpus.bytes_max, BYTES_MAX))
    with tempfile.TemporaryDirectory() as folder:
        _, sequences = prepare_sequences(replace(file, corpus=corpus), Path(folder))
    flats = first_flats(file)
    return on_device(
        spare_device(), lambda device: _Probing(file, flats, steps, device).run(sequences.train, sequences.validation)
    )


class _Probing:
    def __init__(self, file: RunFile, flats: Sequence[Floats], steps: int, device: str) -> None:
        config = file.run
        self._inner, self._seed, self._model = config.inner, config.seed, config.model.one_path()
        self._flats = list(flats)
        self._steps = steps
        self._warmup_steps = 0 if file.checkpoint else steps
        self._clusters = min(config.model.path_count, CLUSTERS_MAX)
        self._device = device

    def run(self, train: HeldOut, held: HeldOut) -> Probe:
        held = HeldOut(tokens=held.tokens[:READ_MAX], documents=held.documents[:READ_MAX])
        loop = InnerLoop(self._inner, self._warmup_steps + self._steps, self._model, device=self._device, seed=0)
        if self._warmup_steps:
            with stage("Warming up", total=self._warmup_steps) as advance:
                self._flats = self._trained(loop, train.tokens, first=0, advance=advance).flats
        state, cuts = loop.state_bytes(), dict(self._cuts(train, held))
        tables: dict[str, Doubles] = {}
        mean = [np.zeros_like(flat) for flat in self._flats]
        for name, (labels, _) in cuts.items():
            with stage(f"Probing {name}", total=self._clusters * self._steps) as advance:
                columns = []
                for cluster in range(self._clusters):
                    loop.load_state(state)
                    result = self._trained(
                        loop, train.tokens[labels == cluster], first=self._warmup_steps, advance=advance, done=cluster
                    )
                    columns.append(self._read(result.flats, held))
                    if name == BY_LOT:
                        for total, flat in zip(mean, result.flats, strict=True):
                            total += flat / self._clusters
                tables[name] = np.stack(columns, axis=2)
        return self._result(tables, {name: own for name, (_, own) in cuts.items()}, self._read(mean, held), held)

    def _trained(
        self, loop: InnerLoop, tokens: NDArray[np.int32], *, first: int, advance: Any, done: int = 0
    ) -> InnerResult:
        def on_step(report: StepReport) -> bool:
            advance(done * self._steps + report.step - first + 1)
            return True

        return loop.run(self._flats, Shard(tokens=tokens), first_step=first, steps=self._steps, on_step=on_step)

    def _read(self, flats: Sequence[Floats], held: HeldOut) -> Doubles:
        """Nats (n, J) of each held-back sequence, by windows of its tokens."""
        model = PathModel(self._model).to(self._device)
        load_modules(model, flats)
        return window_nats(model, held.tokens)

    def _cuts(self, train: HeldOut, held: HeldOut) -> Iterator[tuple[str, tuple[Labels, Labels]]]:
        """By name the clusters of the text to train on, and of what is held back."""
        frozen = path_model(self._model, self._flats).to(self._device)
        width, first = self._model.width, None
        for length in PREFIXES:
            if length >= train.tokens.shape[1]:
                break
            own, other = (
                token_features(frozen, part.tokens[:, :length], at=[length])[:, 0, width:] for part in (train, held)
            )
            router = fit_kmeans(own, path_count=self._clusters, seed=self._seed)
            labels = router.assign(own)
            first = labels if first is None else first
            yield f"k-means, {length} tokens", (labels, router.assign(other))
        assert first is not None
        vocab_size = self._model.vocab_size
        tiny = fit_tiny(train.tokens, first, path_count=self._clusters, vocab_size=vocab_size)
        seen = (token_counts(part.tokens[:, :PREFIX_TOKENS], vocab_size=vocab_size) for part in (train, held))
        yield "tiny models, 32 tokens", (tiny.assign(next(seen)), tiny.assign(next(seen)))
        yield WHOLE, by_document(train, held, clusters=self._clusters, seed=self._seed)
        lots = np.random.default_rng(self._seed)
        yield BY_LOT, (self._lots(lots, len(train.tokens)), self._lots(lots, len(held.tokens)))

    def _lots(self, lots: np.random.Generator, count: int) -> Labels:
        return lots.permutation(np.arange(count) % self._clusters)

    def _result(
        self, tables: Mapping[str, Doubles], own: Mapping[str, Labels], diloco: Doubles, held: HeldOut
    ) -> Probe:
        kinds, gains = list[Kind](), dict[str, Doubles]()
        for name, table in tables.items():
            seen = next((length for length in PREFIXES if name.endswith(f", {length} tokens")), PREFIX_TOKENS)
            nats = self._after(table, seen)
            routed = nats[np.arange(len(nats)), own[name]]
            by_chance = self._after(tables[BY_LOT], seen).mean(axis=1) - self._after(diloco, seen)
            gains[name] = nats.mean(axis=1) - routed - by_chance
            losses = {"routed": routed.mean(), "best": nats.min(axis=1).mean(), "random": nats.mean()}
            kinds.append(Kind(name=name, seen=seen, **{key: float(value) for key, value in losses.items()}))
        found = Probe(
            clusters=self._clusters,
            warmup_steps=self._warmup_steps,
            steps=self._steps,
            sequences=len(held.tokens),
            kinds=tuple(kinds),
            diloco=float(self._after(diloco, PREFIX_TOKENS).mean()),
            ahead=0.0,
            error=0.0,
        )
        ahead, error = over_documents(gains[found.best.name], held.documents)
        return replace(found, ahead=ahead, error=error)

    def _after(self, nats: Doubles, seen: int) -> Doubles:
        """Nats per token (n, ...) after the first `seen`, of nats (n, J, ...)."""
        found: Doubles = nats[:, (seen - PREFIX_TOKENS) // WINDOW :].sum(axis=1) / (self._model.context - seen)
        return found


def by_document(train: HeldOut, held: HeldOut, *, clusters: int, seed: int) -> tuple[Labels, Labels]:
    """Clusters of whole documents: of each sequence of both parts that of its document."""
    numbers, sizes = np.unique(train.tokens, return_counts=True)
    words = np.sort(numbers[np.argsort(-sizes, kind="stable")[:WORDS_MAX]])
    (first, own), (second, other) = (_documents(part, words) for part in (train, held))
    weights = np.log((1 + len(first)) / (1 + (first > 0).sum(axis=0))) + 1
    points, seen = (_unit(np.log1p(counts) * weights) for counts in (first, second))
    torch.manual_seed(seed)
    rank = min(DIRECTIONS, *points.shape)
    _, _, directions = torch.svd_lowrank(torch.from_numpy(points).float(), q=rank)
    low = [_unit(part @ directions.double().numpy()).astype(np.float32) for part in (points, seen)]
    router = fit_kmeans(low[0], path_count=clusters, seed=seed)
    return router.assign(low[0])[own], router.assign(low[1])[other]


def _documents(part: HeldOut, words: NDArray[np.int32]) -> tuple[Doubles, Labels]:
    """How often each of `words` (V,) is in each document (d, V), and the row of each sequence's (n,)."""
    _, rows = np.unique(part.documents, return_inverse=True)
    places = np.searchsorted(words, part.tokens).clip(max=len(words) - 1)
    is_word = words[places] == part.tokens
    counts = np.zeros((int(rows.max()) + 1, len(words)))
    np.add.at(counts, (np.broadcast_to(rows[:, None], places.shape)[is_word], places[is_word]), 1.0)
    return counts, rows


def _unit(values: Doubles) -> Doubles:
    found: Doubles = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)
    return found


def over_documents(values: Doubles, documents: NDArray[np.int32]) -> tuple[float, float]:
    """The mean of `values` (n,), and its standard error if documents are drawn and their sequences are not."""
    _, rows = np.unique(documents, return_inverse=True)
    mean = float(values.mean())
    off = np.bincount(rows, weights=values - mean)
    count = len(off)
    spread = math.sqrt(float(np.square(off).sum()) * count / max(count - 1, 1)) / len(values)
    return mean, spread if count > 1 else math.inf
