"""`check`: a run file and this machine are looked at before a start. Nothing is made or changed, and no port is kept.

First facts are gathered, then judged by pure functions: each problem is a finding with one remedy.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dipaco_p2p.config import ADAMW
from dipaco_p2p.errors import ConfigError, CorpusError, DipacoError, EnvironmentUnfit, IntegrityError
from dipaco_p2p.owner.retention import Retention
from dipaco_p2p.program.control.show import show_findings
from dipaco_p2p.program.examination import (
    CLOCK_REMEDY,
    DAMAGED,
    WRONG,
    Finding,
    Level,
    failure,
    fine,
    warning,
)
from dipaco_p2p.program.files import LOCK_NAME, free_disk, is_clock_synchronised, why_unwritable
from dipaco_p2p.program.text import in_bytes
from dipaco_p2p.swarm.hivemind.daemon import wait_port_free

from ..checkpoint import Checkpoint
from ..folder import RESTORED, read_stages
from ..runfile import RunFile, load_run_file, run_folder
from ..text.corpus import documents_min, load_corpus
from .plan import Line, Plan, plan, tokens_of

LINE = Line(up_mbit=10.0, down_mbit=50.0)
"""Of a volunteer at home, as a stated assumption."""


async def examine(path: Path, folder: Path | None) -> list[Finding]:
    """All findings on the run that `path` describes, and on the folder that it would be kept in."""
    try:
        file = load_run_file(path)
        check_checkpoint(file)
    except ConfigError as error:
        return [failure("run file", str(error), error.hint or "docs/define.md lists every key", code=error.exit_code)]
    facts = await asyncio.to_thread(probe_folder, file, folder or run_folder(file))
    corpus, text = await asyncio.to_thread(_corpus, file, facts.path)
    planned = planned_of(file, LINE, text_bytes=text or file.corpus.bytes_max)
    findings = [judge_file(planned), judge_folder(facts), *corpus]
    findings += [*_optimizer(file), *([judge_text(planned)] if text is not None else [])]
    return [*findings, judge_disk(facts, planned), *await _ports(file, facts), judge_clock(is_clock_synchronised())]


def text_bytes_of(file: RunFile) -> int:
    """What the corpus has, without reading it: the size of a local one that is no archive, else the limit."""
    source, limit = Path(file.corpus.source).expanduser(), file.corpus.bytes_max
    if not source.exists() or source.name.endswith((".gz", ".parquet")):
        return limit
    files = [source] if source.is_file() else [each for each in source.rglob("*") if each.is_file()]
    if any(each.name.endswith((".gz", ".parquet")) for each in files):
        return limit
    return max(1, min(limit, sum(each.stat().st_size for each in files)))


def planned_of(
    file: RunFile, line: Line, volunteers: int = 0, *, tokens_per_s: float = 0.0, text_bytes: int | None = None
) -> Plan:
    """The plan of a run file, of whose corpus nothing is read; `text_bytes` if that is known."""
    return plan(
        file.run,
        text_bytes=text_bytes_of(file) if text_bytes is None else text_bytes,
        line=line,
        volunteers=volunteers,
        retention=Retention(**asdict(file.archive)),
        tokens_per_s=tokens_per_s,
    )


def check_checkpoint(file: RunFile) -> None:
    """Raise ConfigError unless the checkpoint that a run begins from is one of its model; no weights are read."""
    if file.checkpoint:
        Checkpoint(Path(file.checkpoint), file.run.model).tokenizer()


def _optimizer(file: RunFile) -> list[Finding]:
    """Whether this machine's torch has it, which takes the moments at the fork; nothing is said where it has."""
    if file.run.inner.optimizer == ADAMW:
        return []
    from dipaco_p2p.core.model.optimizer import check_optimizer

    try:
        check_optimizer(file.run.inner)
    except EnvironmentUnfit as error:
        return [failure("optimizer", str(error), error.hint, code=error.exit_code)]
    return []


# -- the corpus and its tokenizer


def _corpus(file: RunFile, folder: Path) -> tuple[list[Finding], int | None]:
    """What is to be said of the text, and how much there is; None if it cannot be read."""
    from ..text.sequences import FILE

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
    from dipaco_p2p.use.tokenizer import Tokenizer

    from ..text.tokenizer import train_tokenizer

    wanted = file.run.model.vocab_size
    if file.checkpoint:
        return judge_tokenizer(wanted, None, is_there=True)  # it was looked at with the file
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
        problem=why_unwritable(folder),
        free_bytes=free_disk(folder),
        used_bytes=used,
        is_running=is_in_use(folder),
        is_restored=(folder / RESTORED).exists(),
    )
    try:
        if stages := read_stages(folder):  # the first as the run file describes it: growth is decreed later
            newest, is_other = stages[-1].manifest.stage, stages[0].manifest.config != file.run
            return replace(facts, stage=newest, is_other=is_other)
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


PASSES_WELL = 4.0
"""Reading a text four times teaches nearly as much as four times the text; more of it does not (arXiv 2305.16264)."""
SPARE = 1.1
"""Documents, logs and judgements beside the blobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFacts:
    """What a corpus came to."""

    source: str
    documents: int
    text_bytes: int
    long_documents: int
    """That are about a training sequence or longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFacts:
    """The folder that `start` would use."""

    path: Path
    problem: str | None = None
    """Why nothing can be written there."""
    free_bytes: int = 0
    used_bytes: int = 0
    """Of the run that is there."""
    is_running: bool = False
    """Whether a coordinator is at work in it."""
    stage: str | None = None
    """Of the run that is prepared there."""
    is_other: bool = False
    """Whether that run was made from another file."""
    is_restored: bool = False
    """Whether it came out of a backup, and was not started since."""
    damage: str | None = None


def judge_file(plan: Plan) -> Finding:
    words = f"{plan.name}: grid {plan.grid}, {plan.paths} paths, {plan.warmup_rounds} + {plan.rounds} rounds"
    return fine("run file", words)


def judge_corpus(facts: CorpusFacts, *, paths: int) -> Finding:
    """Enough documents to deal out, and enough of them of a sequence's length."""
    least = documents_min(paths)
    words = f"{facts.source}: {facts.documents} documents, {in_bytes(facts.text_bytes)}"
    if facts.documents < least:
        remedy = "add text, or use a smaller grid"
        return failure("corpus", f"{words}; the run needs at least {least} documents", remedy, code=WRONG)
    if facts.long_documents < least:
        found = f"{words}; only {facts.long_documents} of them fill a sequence, about {least} are needed"
        return warning("corpus", found, "add longer documents, or lower `context` in [model]")
    return fine("corpus", words)


def judge_text(plan: Plan) -> Finding:
    """How often each path reads its part."""
    words = f"about {plan.text_tokens:,} tokens, which each path reads {plan.passes:.1f} times over"
    if plan.passes > PASSES_WELL:
        return warning("text", words, "raise `bytes_max` in [corpus] or add text; or train fewer steps")
    return fine("text", words)


def judge_tokenizer(vocab_size: int, problem: str | None, remedy: str = "", *, is_there: bool) -> Finding:
    if problem is not None:
        return failure("tokenizer", problem, remedy or "lower `vocab_size` in [model]", code=WRONG)
    words = f"{vocab_size} tokens"
    return fine("tokenizer", f"{words}, trained already" if is_there else f"{words} can be trained on this text")


def judge_port(name: str, place: str, problem: str | None, remedy: str = "", *, is_ours: bool) -> Finding:
    if problem is None or is_ours:
        return fine(name, f"{place} is {'in use by this run' if is_ours and problem else 'free'}")
    return failure(name, f"{place}: {problem}", remedy or "choose another port in the run file")


def judge_host(host: str) -> Finding:
    if host.startswith("127.") or host == "localhost":
        return warning("host", f"{host}: only this machine can join", 'host = "0.0.0.0" in [node], and open the port')
    return fine("host", f"listens at {host}")


def judge_disk(facts: FolderFacts, plan: Plan) -> Finding:
    if facts.problem is not None:
        remedy = "choose a folder that you may write to: --dir, or `directory` in [node]"
        return failure("disk", f"cannot write to {facts.path}: {facts.problem}", remedy)
    wanted = max(0, int(plan.disk.seed * SPARE) - facts.used_bytes)
    words = f"about {in_bytes(wanted)} to come, {in_bytes(facts.free_bytes)} free in {facts.path}"
    if wanted > facts.free_bytes:
        return failure("disk", words, "free some space, choose another --dir, or plan fewer rounds")
    return fine("disk", words)


def judge_folder(facts: FolderFacts) -> Finding:
    where = str(facts.path)
    if facts.damage is not None:
        return failure("folder", facts.damage, "bring back a backup: dipaco-bootstrap restore", code=DAMAGED)
    if facts.is_other:
        remedy = "choose another --dir, or take the run file back to what it was"
        return failure("folder", f"{where} holds a run of another run file", remedy, code=WRONG)
    if facts.is_running:
        return warning("folder", f"a coordinator is running in {where}", "nothing to do, unless you want to start it")
    if facts.is_restored:
        return fine("folder", f"{where} was restored from a backup: `start` first catches up with the swarm")
    if facts.stage is not None:
        return fine("folder", f"{where} holds this run in its {facts.stage}: `start` resumes it")
    return fine("folder", f"{where} holds no run yet: `start` prepares it")


def judge_clock(is_synchronised: bool | None) -> Finding:
    if is_synchronised is False:
        words = "the clock is not synchronised by NTP; volunteers whose clocks differ cannot join"
        return warning("clock", words, CLOCK_REMEDY)
    return fine(
        "clock",
        "the clock is synchronised by NTP"
        if is_synchronised
        else "cannot tell whether the clock is synchronised by NTP",
    )


# -- what is printed

SCHEMA = "dipaco.check/1"
VERDICTS = {
    Level.OK: "The run can start.",
    Level.WARN: "The run can start; the warnings say what it costs.",
    Level.FAIL: "Fix the failures above, then start the run.",
}


def show(findings: Sequence[Finding], *, is_json: bool) -> int:
    """Print them on the standard output; the exit code."""
    return show_findings(findings, schema=SCHEMA, verdicts=VERDICTS, is_json=is_json)
