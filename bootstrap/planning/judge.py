"""Judgements on a run that is about to be started: from facts to findings, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dipaco_p2p.program.examination import DAMAGED, WRONG, Finding, failure, fine, warning
from dipaco_p2p.program.text import in_bytes

from .plan import Plan

PASSES_WELL = 4.0
"""Reading a text four times teaches nearly as much as four times the text; more of it does not (arXiv 2305.16264)."""
DOCUMENTS_MIN, DOCUMENTS_A_PATH = 16, 4
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


def documents_min(paths: int) -> int:
    """As `prepare_sequences` demands."""
    return max(DOCUMENTS_MIN, DOCUMENTS_A_PATH * paths)


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
    return fine("tokenizer", f"{words}, trained already" if is_there else f"{words} can be had of this text")


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
        return warning("folder", f"a coordinator is at work in {where}", "nothing to do, unless you want to start it")
    if facts.is_restored:
        return fine("folder", f"{where} was restored from a backup: `start` first catches up with the swarm")
    if facts.stage is not None:
        return fine("folder", f"{where} holds this run in its {facts.stage}: `start` goes on")
    return fine("folder", f"{where} holds no run yet: `start` prepares it")


def judge_clock(is_synchronised: bool | None) -> Finding:
    if is_synchronised is False:
        remedy = "set the clock: timedatectl set-ntp true, or an NTP service of your system"
        return warning("clock", "NTP is not in step; volunteers whose clocks differ cannot join", remedy)
    return fine("clock", "NTP is in step" if is_synchronised else "nobody here says whether NTP is in step")
