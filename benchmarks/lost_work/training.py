"""The text, the start of a draw, and the loss of a case: every result is a function of the draw and the text.

n sequences, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.methods.data import Data, Ints, read_documents, split_sequences
from benchmarks.methods.grid import Grid, WarmStart
from benchmarks.methods.jobs import GRIDS, WARMUP_STEPS
from bootstrap.text.samples import Document
from bootstrap.text.tokenizer import Tokenizer, tokenise, train_tokenizer
from dipaco_p2p.config import PREFIX_TOKENS, InnerConfig
from dipaco_p2p.core.arrange import arrange
from dipaco_p2p.core.arrays import Floats
from dipaco_p2p.core.evaluate import counted_tokens, losses
from dipaco_p2p.core.features import features
from dipaco_p2p.core.inner import InnerLoop
from dipaco_p2p.core.kmeans import fit_kmeans
from dipaco_p2p.core.layout import module_layout
from dipaco_p2p.core.model import PathModel, initial_modules, load_modules
from dipaco_p2p.core.router import Router
from dipaco_p2p.core.shards import Shard

from .cases import CONTEXT, VOCAB_SIZE, Case, LossJob, LossyGrid, untrained_path

OWN_KINDS = {".py": "code", ".md": "documents", ".toml": "configuration"}
BYTES_MAX = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Start:
    """What all cases of a draw have in common."""

    job: LossJob
    warm: WarmStart
    router: Router
    shards: list[Shard]
    report: Floats
    """Features (n, D) of the sequences that are reported on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Perplexity of what one case has trained, on text that nobody trained on."""

    perplexity: float
    elsewhere: float | None = None
    """The same, when what is routed to a path that was never trained goes to its next best path."""


def read_text(corpus: Path | None) -> Data:
    """The sequences of a corpus, or of this project's own text. Raises CorpusError."""
    if corpus is None:
        root = Path(__file__).parents[2]
        documents = own_documents(root)
    else:
        documents = read_documents([str(corpus)], bytes_max=BYTES_MAX)
    tokenizer = Tokenizer(train_tokenizer((document.text for document in documents), vocab_size=VOCAB_SIZE))
    domains = [document.domain for document in documents]
    return split_sequences(domains, tokenise(documents, tokenizer), tokenizer.byte_lengths(), context=CONTEXT)


def own_documents(root: Path) -> list[Document]:
    """The text of this project: what is in its folders, hidden ones left out."""
    found = []
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.suffix in OWN_KINDS and not any(part.startswith(".") for part in name.split("/")) and path.is_file():
            found.append(Document(path.read_text(), OWN_KINDS[path.suffix], name))
    return found


def prepare(data: Data, job: LossJob, *, fast: bool) -> Start:
    """Warm up the one path that the grid is forked from, and route by it."""
    model = LossJob(method="start", seed=job.seed, grid="1", width=job.width).model
    first = initial_modules(model, seed=job.seed)
    total = WARMUP_STEPS + job.steps
    loop = InnerLoop(InnerConfig(), total, model, device="cpu", seed=job.seed, fast=fast)
    flats = [first[level] for level in range(len(GRIDS["1"]))]
    flats = loop.run(flats, Shard(tokens=data.train.tokens), first_step=0, steps=WARMUP_STEPS).flats
    frozen = PathModel(model)
    load_modules(frozen, flats)
    train, report = (features(frozen, part.tokens[:, :PREFIX_TOKENS]) for part in (data.train, data.report))
    router = fit_kmeans(train, path_count=job.model.path_count, seed=job.seed)
    sizes = [module_layout(job.model, level).size for level in range(len(job.model.levels))]
    router = arrange(router, job.model.topology, sizes, seed=job.seed)
    tensors: dict[str, Floats] = {}
    for level, flat in enumerate(flats):
        tensors |= module_layout(model, level).split(flat)
    chosen = router.assign(train)
    shards = [Shard(tokens=data.train.tokens[chosen == number]) for number in range(job.model.path_count)]
    warm = WarmStart(tensors=tensors, optimizer=loop.state_bytes())
    return Start(job=job, warm=warm, router=router, shards=shards, report=report)


def result_of(data: Data, start: Start, case: Case, *, fast: bool) -> Result:
    """Train all rounds of a case, and evaluate."""
    job = start.job
    grid = LossyGrid(job, start.warm, start.shards, case=case, fast=fast)
    for number in range(job.rounds):
        grid.round(number, lambda report: True)
    order = start.router.top(start.report, 2)
    routed = perplexity(grid, data, order[:, 0])
    if not case.untrained:
        return Result(perplexity=routed)
    untrained = untrained_path(job.seed, job.model.path_count)
    chosen = np.where(order[:, 0] == untrained, order[:, 1], order[:, 0])
    return Result(perplexity=routed, elsewhere=perplexity(grid, data, chosen))


def perplexity(grid: Grid, data: Data, chosen: Ints) -> float:
    """Of all reported sequences, each under the path that `chosen` (n,) gives it."""
    model, nats = PathModel(grid.job.model), 0.0
    for number in np.unique(chosen).tolist():
        load_modules(model, grid.flats(number))
        nats += float(losses(model, data.report.tokens[chosen == number]).sum())
    return float(np.exp(nats / (len(chosen) * counted_tokens(data.report.tokens.shape[1]))))
