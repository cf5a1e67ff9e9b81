"""Looking at a run file and this machine before a start: nothing is made or changed, and no port is kept."""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from dipaco_p2p.errors import ConfigError, CorpusError, DipacoError, EnvironmentUnfit, IntegrityError
from dipaco_p2p.program.examination import DAMAGED, WRONG, Finding, failure
from dipaco_p2p.program.files import LOCK_NAME
from dipaco_p2p.program.system import existing, free_disk, output_of
from dipaco_p2p.swarm.hivemind.daemon import wait_port_free

from ..folder import GRID, MANIFEST, WARMUP, read_stage
from ..recovery.marker import NAME as RESTORED
from ..runfile import RunFile, load_run_file, run_folder
from .judge import (
    CorpusFacts,
    FolderFacts,
    judge_clock,
    judge_corpus,
    judge_disk,
    judge_file,
    judge_folder,
    judge_host,
    judge_port,
    judge_text,
    judge_tokenizer,
)
from .plan import Line, Plan, plan, tokens_of

LINE = Line(up_mbit=10.0, down_mbit=50.0)
"""Of a volunteer at home, as a stated assumption."""


async def examine(path: Path, folder: Path | None) -> list[Finding]:
    """All findings on the run that `path` describes, and on the folder that it would be kept in."""
    try:
        file = load_run_file(path)
    except ConfigError as error:
        return [failure("run file", str(error), error.hint or "docs/define.md lists every key", code=error.exit_code)]
    facts = await asyncio.to_thread(probe_folder, file, folder or run_folder(file))
    corpus, text = await asyncio.to_thread(_corpus, file, facts.path)
    planned = plan(file.run, text_bytes=text or file.corpus.bytes_max, line=LINE)
    findings = [judge_file(planned), judge_folder(facts), *corpus]
    findings += [judge_text(planned)] if text is not None else []
    return [*findings, judge_disk(facts, planned), *await _ports(file, facts), _clock()]


def text_bytes_of(file: RunFile) -> int:
    """What the corpus has, without reading it: the size of a local one that is no archive, else the limit."""
    source, limit = Path(file.corpus.source).expanduser(), file.corpus.bytes_max
    if not source.exists() or source.name.endswith((".gz", ".parquet")):
        return limit
    files = [source] if source.is_file() else [each for each in source.rglob("*") if each.is_file()]
    if any(each.name.endswith((".gz", ".parquet")) for each in files):
        return limit
    return max(1, min(limit, sum(each.stat().st_size for each in files)))


def planned_of(file: RunFile, line: Line, volunteers: int) -> Plan:
    """The plan of a run file, of whose corpus nothing is read."""
    return plan(file.run, text_bytes=text_bytes_of(file), line=line, volunteers=volunteers)


# -- the corpus and its tokenizer


def _corpus(file: RunFile, folder: Path) -> tuple[list[Finding], int | None]:
    """What is to be said of the text, and how much there is; None if it cannot be read."""
    from ..corpus import load_corpus
    from ..sequences import FILE

    tokenizer = folder / "tokenizer.json"
    try:
        documents = load_corpus(file.corpus, seed=file.run.seed)
    except CorpusError as error:
        remedy = error.hint or "see `source` in [corpus]"
        if (folder / FILE).exists() and tokenizer.exists():  # it is not read again
            remedy += "; the run that is prepared does without"
        return [failure("corpus", " ".join(str(error).split()), remedy, code=WRONG)], None
    model = file.run.model
    sizes = [document.size_bytes for document in documents]
    facts = CorpusFacts(
        source=file.corpus.source,
        documents=len(sizes),
        text_bytes=sum(sizes),
        long_documents=sum(tokens_of(size, model.vocab_size) >= model.context for size in sizes),
    )
    findings = [judge_corpus(facts, paths=file.run.topology.path_count)]
    return [*findings, _tokenizer(file, [document.text for document in documents], tokenizer)], facts.text_bytes


def _tokenizer(file: RunFile, texts: list[str], path: Path) -> Finding:
    """The one that is there must fit; else one is trained and forgotten, which says whether there is text enough."""
    from ..tokenizer import Tokenizer, train_tokenizer

    wanted = file.run.model.vocab_size
    try:
        data = path.read_bytes() if path.exists() else train_tokenizer(_first(texts), vocab_size=wanted)
        found = Tokenizer(data).vocab_size
    except CorpusError:
        try:
            found = Tokenizer(train_tokenizer(texts, vocab_size=wanted)).vocab_size
        except CorpusError as error:
            return judge_tokenizer(wanted, str(error), error.hint, is_there=False)
    except IntegrityError as error:
        return failure("tokenizer", f"{path}: {error}", "remove it, and it is made again", code=DAMAGED)
    problem = None if found == wanted else f"{path} has {found} tokens, the run file says {wanted}"
    return judge_tokenizer(wanted, problem, "choose another --dir", is_there=path.exists())


SAMPLE_BYTES = 2 * 2**20
"""Of text that a tokenizer is tried on first: what a part is enough for, all of it is enough for."""


def _first(texts: list[str]) -> list[str]:
    found, size = [], 0
    for text in texts:
        found.append(text)
        size += len(text)
        if size >= SAMPLE_BYTES:
            break
    return found


# -- the folder


def probe_folder(file: RunFile, folder: Path) -> FolderFacts:
    """What is in the folder; nothing is made, and no lock is kept."""
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
    facts = FolderFacts(
        path=folder,
        problem=_problem_with(folder),
        free_bytes=free_disk(folder),
        used_bytes=used,
        is_running=is_in_use(folder),
        is_restored=(folder / RESTORED).exists(),
    )
    try:
        for name in (GRID, WARMUP):
            run = read_stage(folder / name / "documents" / f"{MANIFEST}.json")
            if run is not None:
                return replace(facts, stage=name, is_other=run.manifest.config != file.run)
    except DipacoError as error:
        return replace(facts, damage=str(error))
    return facts


def is_in_use(folder: Path) -> bool:
    """Whether a process holds the folder's lock."""
    try:
        handle = os.open(folder / LOCK_NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _problem_with(folder: Path) -> str | None:
    try:
        with tempfile.NamedTemporaryFile(dir=existing(folder), prefix=".dipaco-check-"):
            return None
    except OSError as error:
        return error.strerror or str(error)


# -- ports and clock


async def _ports(file: RunFile, facts: FolderFacts) -> list[Finding]:
    node, page = file.node, file.leaderboard
    wanted = [("port", node.host, node.port)]
    if page.serve:
        wanted.append(("page", page.host, page.port))
    findings = [judge_host(node.host)]
    for name, host, port in wanted:
        problem, remedy = await _taken(host, port)
        place = f"{host}:{port}" if port else f"{host}, any port"
        findings.append(judge_port(name, place, problem, remedy, is_ours=facts.is_running))
    if page.serve and node.port and node.port == page.port:
        remedy = "give [node] and [leaderboard] different ports"
        findings.append(failure("page", f"port {page.port} is wanted twice", remedy, code=WRONG))
    return findings


async def _taken(host: str, port: int) -> tuple[str | None, str]:
    if not port:
        return None, ""
    try:
        await wait_port_free(host, port)
    except EnvironmentUnfit as error:
        return str(error), error.hint
    return None, ""


def _clock() -> Finding:
    said = output_of("timedatectl", "show", "--property=NTPSynchronized", "--value")
    return judge_clock({"yes": True, "no": False}.get((said or "").strip()))
