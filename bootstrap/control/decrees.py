"""The coordinator's decrees, from what somebody typed to what is signed: checked against the run before anything is
written. A running coordinator does it when it is asked; without one the command does, in the run's folder.

    <dir>/decrees/documents/decree-00000001.json     the log (dipaco_p2p/node/authority.py)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.errors import ConfigError, IntegrityError, NotRunning
from dipaco_p2p.node.authority import Decrees
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.run import Run
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.owner.retention import Thinned
from dipaco_p2p.program.control.client import ask
from dipaco_p2p.program.files import folder_lock
from dipaco_p2p.protocol.decrees import (
    ADMIT,
    APPOINT,
    BAN,
    DISMISS,
    FREEZE,
    GROW,
    GROW_AHEAD,
    HIDE_NAME,
    OF_PEER,
    ROLLBACK,
    SHOW_NAME,
    UNFREEZE,
    Decree,
    Rebuilt,
)
from dipaco_p2p.protocol.documents import DOCUMENT_BYTES_MAX, Sealed
from dipaco_p2p.protocol.manifest import STAGES, WARMUP, WORKERS_MAX
from dipaco_p2p.protocol.signing import PeerId, Signer, public_key_of, short
from dipaco_p2p.protocol.versions import Damage, damage_by
from dipaco_p2p.strict import plain
from dipaco_p2p.topology import ModuleId
from dipaco_p2p.use.folder import RunFolder
from dipaco_p2p.words import printable

from ..archives.rebuild import make_rebuilt
from ..folder import DECREES, coordinators_key, require_caught_up
from .commands import TIMEOUT_S, chosen_folder, print_json
from .requests import Request

SCHEMA = "dipaco.coordinator.decrees/1"
ABBREVIATION_CHARS_MIN = 4
HOLDS_HINT = "`dipaco-bootstrap decrees` lists all decrees, and what is in force"
AMBIGUOUS_SHOWN_MAX = 4
SHARD_BYTES, GENESIS_BYTES, WORKER_BYTES = 190, 290, 60
"""What a path, a module and a worker take at most in a manifest."""
SEQUENCES_MIN = 8
"""For each path of a grid that grows: with fewer its router may find no text for one, and the stage could not begin."""


class Decreeing:
    """Of one open stage: what may be decreed about it."""

    def __init__(
        self,
        decrees: Decrees,
        signer: Signer,
        run: Run,
        ledgers: Mapping[ModuleId, Ledger],
        alive: Iterable[PeerId] = (),
        *,
        thinned: Callable[[ModuleId], Thinned] = lambda module: Thinned(),
        reached: Callable[[ModuleId], int] | None = None,
        rebuild: Callable[[Damage], Rebuilt | None] = lambda damage: None,
    ) -> None:
        """`alive` are peers that are heard of now; `thinned` is what the archive has dropped of a module, `reached` the
        newest version of one that anybody tells of: None while nobody can be heard. `rebuild` keeps the work of others
        where a ban undoes that of its peer."""
        self._decrees = decrees
        self._signer = signer
        self._run = run
        self._ledgers = ledgers
        self._alive = alive
        self._thinned = thinned
        self._reached = reached
        self._rebuild = rebuild

    def issue(self, request: Request, *, at_s: float) -> dict[str, Any]:
        """Sign it and keep it; how it is listed. Raises ConfigError for what makes no sense, and nothing is written."""
        values = self._of_peer(request) if request.ask in OF_PEER else {}
        if request.ask == ROLLBACK:
            values = self._of_module(request)
        elif request.ask == GROW:
            values = self._of_growth(request)
        elif request.ask == FREEZE and self._decrees.is_frozen:
            raise ConfigError(f"the run is frozen already: {self._decrees.state.frozen}", hint=HOLDS_HINT)
        elif request.ask == UNFREEZE and not self._decrees.is_frozen:
            raise ConfigError("the run is not frozen", hint=HOLDS_HINT)
        if request.undo and request.ask != BAN:
            raise ConfigError(f"`{request.ask}` undoes no work", hint="`rollback` takes one module back")
        if request.corpus and request.ask != GROW:
            raise ConfigError(f"`{request.ask}` brings no text", hint="`grow` does")

        return self._signed(request, request.ask, at_s, **values)

    async def undo(self, request: Request, peer: PeerId, *, now_s: Callable[[], float]) -> list[dict[str, Any]]:
        """After the ban of `peer`: take every module back that is built on its work, and rebuild it from the work of
        others where that can be done. How the decrees are listed, and how many contributions of others go or stay."""
        rows = []
        for module, ledger in sorted(self._ledgers.items()):
            due = ledger.due(self._decrees)
            versions = [sealed.document for sealed in ledger.versions]
            damage = damage_by(peer, versions, due=None if due is None else due.document)
            if damage is None or ledger.is_complete:
                continue
            rebuilt = await asyncio.to_thread(self._rebuild, damage)
            if ledger.is_complete:  # by now
                continue
            kept = (version for version in reversed(damage.sound) if not self._thinned(module).lacks(version))
            to = damage.to if rebuilt is not None else next(kept, 0)
            what = {"stage": self._run.id, "module": module, "to": to, "after": damage.after, "rebuilt": rebuilt}
            rows.append(self._signed(request, ROLLBACK, now_s(), **what) | {"others": damage.others})
        return rows

    def _signed(self, request: Request, act: str, at_s: float, **what: Any) -> dict[str, Any]:
        return self._row(self._decrees.issue(self._signer, act, at_s=at_s, reason=request.reason, **what))

    def sequences_needed(self, request: Request) -> int:
        """How many sequences the text of a growth must have to train on: of each path that it opens, 8. Raises
        ConfigError for a growth that makes no sense, before any text is read."""
        self._of_growth(request)
        grown = self._run.manifest.config.grown(request.levels)
        return SEQUENCES_MIN * (grown.model.path_count - self._run.topology.path_count)

    def listed(self) -> dict[str, Any]:
        """All of them, and what holds."""
        state = self._decrees.state
        return {
            "schema": SCHEMA,
            "run": self._run.name,
            "frozen": state.frozen,
            "banned": [{"peer": peer, "reason": reason} for peer, reason in sorted(state.banned.items())],
            "seeds": sorted(state.seeds),
            "nameless": [{"peer": peer, "reason": reason} for peer, reason in sorted(state.nameless.items())],
            "decrees": [self._row(sealed) for sealed in self._decrees.log],
        }

    def _row(self, sealed: Sealed[Decree]) -> dict[str, Any]:
        decree = sealed.document
        is_rollback, is_growth = decree.act == ROLLBACK, decree.act == GROW
        return {
            "number": decree.number,
            "at_s": decree.at_s,
            "act": decree.act,
            "peer": decree.peer,
            "module": str(decree.module) if is_rollback else None,
            "to": decree.to if is_rollback or is_growth else None,
            "after": decree.after if is_rollback or is_growth else None,
            "version": self._version_of(decree) if is_rollback else None,
            "reason": decree.reason,
            "id": sealed.id,
            "levels": list(decree.levels) if is_growth else None,
            "corpus": decree.corpus or None,
            "without": [] if decree.rebuilt is None else list(decree.rebuilt.without),
        }

    def _version_of(self, decree: Decree) -> int | None:
        """The version that carried a rollback out; None while none has, or one of another stage."""
        assert decree.module is not None
        ledger = self._ledgers.get(decree.module) if decree.stage == self._run.id else None
        found = (one.document for one in (ledger.versions if ledger is not None else ()))
        return next((one.version for one in found if one.rollback is not None and one.rollback.decree == decree), None)

    # -- whether it makes sense

    def _of_peer(self, request: Request) -> dict[str, Any]:
        peer, state = self._peer(request.peer), self._decrees.state
        banned, seeds, nameless = state.banned, state.seeds, state.nameless
        if peer == self._run.manifest.author:
            raise ConfigError(f"the coordinator itself: `{request.ask}` is about others", hint="name another peer")
        if request.ask == BAN and peer in banned and not request.undo:
            raise ConfigError(f"...{short(peer)} is banned already: {banned[peer]}", hint=HOLDS_HINT)
        is_expelled = any(ledger.standings.expelled(peer) is not None for ledger in self._ledgers.values())
        if request.ask == ADMIT and peer not in banned and not is_expelled:
            raise ConfigError(f"...{short(peer)} is not banned", hint=HOLDS_HINT)
        if request.ask == APPOINT and peer in banned:
            raise ConfigError(f"...{short(peer)} is banned: {banned[peer]}", hint="`dipaco-bootstrap admit` undoes it")
        if (request.ask == APPOINT and peer in seeds) or (request.ask == DISMISS and peer not in seeds):
            is_or_not = "is" if peer in seeds else "is not"
            raise ConfigError(f"...{short(peer)} {is_or_not} a seed node by decree", hint=HOLDS_HINT)
        if request.ask == HIDE_NAME and peer in nameless:
            raise ConfigError(f"the name of ...{short(peer)} is hidden already: {nameless[peer]}", hint=HOLDS_HINT)
        if request.ask == SHOW_NAME and peer not in nameless:
            raise ConfigError(f"the name of ...{short(peer)} is not hidden", hint=HOLDS_HINT)
        return {"peer": peer}

    def _peer(self, text: str) -> PeerId:
        """Whom `text` means: an id, known or not, or the end of one that is known."""
        try:
            public_key_of(PeerId(text))
            return PeerId(text)
        except IntegrityError:
            end = text.lstrip(".")
        found = sorted({peer for peer in self._known() if peer.endswith(end)})
        hint = "give the whole id; `dipaco-bootstrap peers` lists those that are alive"
        if len(end) < ABBREVIATION_CHARS_MIN or not found:
            raise ConfigError(f"`{text[:80]}` is neither a peer id nor the end of a known one", hint=hint)
        if len(found) > 1:
            shown = ", ".join(found[:AMBIGUOUS_SHOWN_MAX])
            raise ConfigError(f"{len(found)} peers end with `{end}`: {shown}", hint=hint)
        return found[0]

    def _known(self) -> Iterator[PeerId]:
        yield from self._alive
        yield from self._decrees.state.banned
        yield from self._decrees.state.seeds
        yield from self._decrees.state.nameless
        yield self._run.manifest.author
        for ledger in self._ledgers.values():
            for sealed in ledger.versions:
                yield from (share.peer for share in sealed.document.shares)
            yield from ledger.standings.waiting

    def _of_module(self, request: Request) -> dict[str, Any]:
        module = ModuleId.parse(request.module)
        if module not in self._run.topology:
            known = ", ".join(map(str, self._run.topology.modules()))
            raise ConfigError(f"this run has no {module}", hint=f"its modules are {known[:200]}")
        head, rounds = self._ledgers[module].head.version, self._run.rounds
        if head >= rounds:
            hint = "the stage is over for it; generate and export take an earlier `--version`"
            raise ConfigError(f"{module} has its last version, {head}: none may follow to go back with", hint=hint)
        if request.version >= head:
            hint = "`dipaco-bootstrap modules` lists them"
            raise ConfigError(f"{module} is at version {head}: it cannot go back to {request.version}", hint=hint)
        if (thinned := self._thinned(module)).lacks(request.version):
            hint = f"the newest before it that the archive keeps is {thinned.kept_before(request.version)}"
            raise ConfigError(f"version {request.version} of {module} is not kept, as [archive] says", hint=hint)
        return {"stage": self._run.id, "module": module, "to": request.version, "after": head}

    def _of_growth(self, request: Request) -> dict[str, Any]:
        run = self._run
        if run.manifest.stage == WARMUP:
            message = f"{run.name} is still in its warm-up, which has one path"
            raise ConfigError(message, hint="wait until the grid is open; the run file says how large that is")
        if run.growth is not None:
            grid = "x".join(map(str, run.growth.levels))
            raise ConfigError(f"a growth to {grid} after round {run.growth.to} is decreed already", hint=HOLDS_HINT)
        if run.manifest.stage == STAGES[-1]:
            raise ConfigError(f"{run.name} has grown {len(STAGES) - 2} times, and cannot once more")
        if request.corpus and request.levels == run.topology.widths:
            message = f"the grid is {run.topology} already: no path would be opened for the new text"
            raise ConfigError(message, hint="give at least one level more modules")
        grown = run.manifest.config.grown(request.levels)
        fed = run.topology.path_count if request.corpus else grown.model.path_count  # others have the new text
        sequences = sum(ref.sequences for ref in run.manifest.shards) // run.config.routing.overlap
        if sequences < SEQUENCES_MIN * fed:
            message = f"the text has {sequences} sequences, which {fed} paths cannot share"
            raise ConfigError(message, hint=f"each path needs {SEQUENCES_MIN} at the very least: grow by fewer modules")
        known, modules = run.topology, len(grown.topology.modules())
        more = SHARD_BYTES * (grown.model.path_count - known.path_count) + GENESIS_BYTES * modules
        more += WORKER_BYTES * (WORKERS_MAX - len(run.manifest.workers))
        if len(canonical_bytes(plain(run.manifest))) + more > DOCUMENT_BYTES_MAX:
            message = f"a grid of {modules} modules and {grown.model.path_count} paths is too large for one manifest"
            raise ConfigError(message, hint=f"that has at most {DOCUMENT_BYTES_MAX} bytes: grow by fewer modules")
        if self._reached is None:
            message = "the coordinator is not running: others may be further than it knows"
            raise ConfigError(message, hint="start it, then repeat the command")
        head = max(max(ledger.head.version, self._reached(module)) for module, ledger in self._ledgers.items())
        soonest = head + GROW_AHEAD
        if soonest >= run.rounds:
            message = (
                f"the newest version is {head} of {run.rounds}: no round is left in which a larger grid could train"
            )
            raise ConfigError(message, hint="begin another run from its checkpoint: `dipaco-bootstrap export`")
        at = request.version or soonest
        if not soonest <= at < run.rounds:
            message = f"the grid cannot grow after round {at}"
            raise ConfigError(message, hint=f"name one from {soonest} to {run.rounds - 1}: all must hear of it before")
        return {"stage": run.id, "to": at, "after": head, "levels": request.levels, "corpus": request.corpus}


def decrees_in(folder: RunFolder, run: Run) -> Decrees:
    """The coordinator's own; raises IntegrityError if they were damaged."""
    return Decrees(run, folder.store(DECREES), must_be_whole=True)


def offline(root: Path, *, is_read_only: bool = False) -> Decreeing:
    """For a run whose coordinator does not run, and whose lock is held unless it is only read. Raises ConfigError where
    there is no run."""
    folder = RunFolder(root, is_read_only=is_read_only)
    run, store = folder.require()
    signer = coordinators_key(root, run)
    archive = SeedArchive(run, store)
    return Decreeing(
        decrees_in(folder, run),
        signer,
        run,
        archive.ledgers,
        thinned=archive.thinning.of,
        rebuild=partial(make_rebuilt, run, store, archive),
    )


def read_levels(text: str) -> tuple[int, ...]:
    """Numbers of modules as somebody types them, `1,2,4` or `1x2x4`; nothing for no text. Raises ConfigError."""
    words = text.replace("x", ",").split(",") if text else []
    if not all(word.strip().isascii() and word.strip().isdecimal() and len(word) <= 6 for word in words):
        hint = "write the number of modules of each level, as 1,2,4"
        raise ConfigError(f"`{text[:80]}` does not say how many modules the levels have", hint=hint)
    return tuple(map(int, words))


def source_here(source: str) -> str:
    """What `--corpus` means in the folder that the command runs in: the coordinator runs in another."""
    path = Path(source).expanduser()
    return str(path.resolve()) if source and path.exists() else source


LONG_S = 4 * 3600.0
"""For an answer where text is read first, perhaps from the hub, or versions are rebuilt."""
LOCKED_HINT = "its coordinator may be starting or ending: try again"


def decree(given: Path | None, request: Request) -> None:
    """Have what `request` asks for signed, and say so."""
    folder = chosen_folder(given)
    request = replace(request, corpus=source_here(request.corpus))
    try:
        row = ask(folder, request, timeout_s=LONG_S if request.corpus or request.undo else TIMEOUT_S).body
        print(told_all(row), flush=True)
    except NotRunning:
        _require_run(folder)
        with folder_lock(folder, hint=LOCKED_HINT):
            require_caught_up(folder)
            decreeing = offline(folder)
            row = decreeing.issue(request, at_s=time.time())
            if request.undo:
                row["undone"] = asyncio.run(decreeing.undo(request, PeerId(row["peer"]), now_s=time.time))
        print(told_all(row), "the coordinator is not running: peers hear of it when it starts again", sep="\n")


def show(given: Path | None, *, is_json: bool) -> None:
    """The log, the oldest first, and what holds."""
    folder = chosen_folder(given)
    try:
        found = ask(folder, Request(ask="decrees"), timeout_s=TIMEOUT_S).body
    except NotRunning:
        _require_run(folder)
        found = offline(folder, is_read_only=True).listed()
    if is_json:
        print_json(found)
    else:
        print("\n".join(lines(found)), flush=True)


def lines(found: dict[str, Any]) -> list[str]:
    """For people."""
    rows = [f"{_when(row['at_s'])}  {told(row)}" for row in found["decrees"]]
    holds = [f"frozen: {printable(found['frozen'])}"] if found["frozen"] is not None else []
    if found["banned"]:
        holds.append("banned: " + ", ".join(f"...{each['peer'][-6:]}" for each in found["banned"]))
    if found["seeds"]:
        holds.append("further seed nodes: " + ", ".join(f"...{peer[-6:]}" for peer in found["seeds"]))
    if found.get("nameless"):  # a coordinator that was started before there were names does not say
        holds.append("names hidden: " + ", ".join(f"...{each['peer'][-6:]}" for each in found["nameless"]))
    return [*rows, f"{found['run']}: " + ("; ".join(holds) or "nobody is banned, nothing is frozen")]


def told(row: dict[str, Any]) -> str:
    """One decree in one line."""
    about = row["act"]
    if row["peer"] is not None:
        about += f" {row['peer']}"
    if row.get("levels"):  # a coordinator that was started before grids grew does not say
        about += f" to {'x'.join(map(str, row['levels']))} after round {row['to']}"
        about += f", with the text {row['corpus'][:8]}" if row.get("corpus") else ""
    if row["module"] is not None:
        done = "not carried out yet" if row["version"] is None else f"done by version {row['version']}"
        about += f" {row['module']} from {row['after']} to {row['to']}"
        if row.get("without"):  # a coordinator that was started before versions were rebuilt does not say
            about += ", rebuilt without " + ", ".join(f"...{peer[-6:]}" for peer in row["without"])
        about += f" ({done})"
    return f"decree {row['number']}: {about}" + (f": {printable(row['reason'])}" if row["reason"] else "")


def told_all(row: dict[str, Any]) -> str:
    """The same with what was undone, and what that costs others; or with what was read."""
    undone = (
        f"{told(each)}; {each['others']} contributions of others " + ("stay" if each.get("without") else "go with it")
        for each in row.get("undone", ())
    )
    return "\n".join([told(row), *undone, *([_read(row["text"])] if "text" in row else [])])


def _read(text: dict[str, Any]) -> str:
    """What became of the text that a growth brings."""
    left = [f"{text['duplicates']} duplicates"] * bool(text["duplicates"])
    left += [f"{text['short']} shorter than a sequence"] * bool(text["short"])
    out = f", left out: {', '.join(left)}" if left else ""
    return (
        f"the new text: {text['documents']} documents{out}; {text['train']} sequences for {text['paths']} new paths, "
        f"{text['held_out']} held out"
    )


def _when(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def _require_run(folder: Path) -> None:
    """Before a lock would make the folder."""
    if not (folder / "identity.key").is_file():
        raise ConfigError(f"`{folder}` holds no run", hint="give the folder that `start --dir` was given")
