"""`dipaco-peer me`: receipts held against the chains."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console
from runtime_harness import finished_run
from tiny_run import make_run, signer, tiny_config

from dipaco_p2p.config import JudgingConfig
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.owner.archive import SeedArchive
from dipaco_p2p.protocol.audits import Audit
from dipaco_p2p.protocol.credit import share_credit
from dipaco_p2p.protocol.decrees import Decreed
from dipaco_p2p.protocol.keeping import KeeperCount, KeepersCount
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.protocol.standing import Findings, Standing
from dipaco_p2p.topology import ModuleId
from peers.me import (
    Chains,
    ModuleAccount,
    _print_sum,
    _table,
    account,
    explained,
    keeping_line,
    print_accounts,
    print_name,
    read_receipts,
    show_me,
    standings_explained,
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Chains]:
    folder = tmp_path_factory.mktemp("run")
    run = finished_run(folder, rounds=2)
    ledgers = SeedArchive(run, Store(folder / "seed")).ledgers
    return run, {module: [sealed.document for sealed in ledger.versions] for module, ledger in ledgers.items()}


def authors(chains: Chains) -> set[PeerId]:
    return {share.peer for chain in chains.values() for version in chain for share in version.shares}


def test_the_accounts_of_all_authors_add_up_to_what_the_chains_count(archive: tuple[Run, Chains]) -> None:
    run, chains = archive
    found = [one for me in authors(chains) for one in account(run, chains, [], {}, me)]
    shares = [share for chain in chains.values() for version in chain for share in version.shares]
    levels, full = len(run.config.model.levels), run.tokens_full
    worth = sum(share_credit(share.tokens, tokens_full=full, levels=levels) for share in shares)
    assert shares and sum(len(one.counted) for one in found) == len(shares)
    assert sum(one.credit for one in found) == pytest.approx(worth)


def test_a_receipt_is_counted_waits_or_is_not_counted(archive: tuple[Run, Chains]) -> None:
    run, chains = archive
    module, chain = next(iter(chains.items()))
    first, rounds = chain[0].shares[0], run.config.rounds.rounds
    lost, late = "a" * 64, "b" * 64
    receipts = {first.contribution: (module, 0), lost: (module, 0), late: (module, rounds - 1)}
    [whole, *_] = account(run, chains, [], receipts, first.peer)
    assert first.contribution in {one.share.contribution for one in whole.counted}
    assert (whole.waiting, whole.not_counted) == ((), (lost, late)), "the run is over: nothing waits"
    [open_, *_] = account(run, {module: chain[:1]}, [], receipts, first.peer)
    assert open_.waiting == (lost, late), "one version behind may still count"


def test_a_stranger_has_nothing(archive: tuple[Run, Chains]) -> None:
    run, chains = archive
    assert all(not one.counted and one.credit == 0 for one in account(run, chains, [], {}, signer(99).peer))


def test_a_leaders_reason_is_shown_as_it_was_said(archive: tuple[Run, Chains]) -> None:
    run, chains = archive
    me, [module, *_] = next(iter(authors(chains))), list(chains)
    reason = "[/b][link=http://e.example]late"
    found = account(run, chains, [], {"ab" * 32: (module, 0)}, me)
    found = [replace(one, reasons={"ab" * 32: reason}) if one.module == module else one for one in found]
    console = Console(file=io.StringIO(), width=200)
    print_accounts([run], [found], console, is_whole=True, now_s=0.0)
    assert cast(io.StringIO, console.file).getvalue().count(reason) == 2, "in the table, and below it"


def test_receipts_come_from_the_history(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    assert read_receipts(history) == {}
    history.write_text(
        '{"ev":"joined","t":1.0}\n{"ev":"receipt","t":2.0,"id":"'
        + "c" * 64
        + '","module":"L1.M0","path":"P0-0","base":3}\n'
    )
    assert read_receipts(history) == {"c" * 64: (ModuleId(1, 0), 3)}


def test_why_work_was_refused_is_said_with_what_to_do() -> None:
    def module(number: int, **reasons: str) -> ModuleAccount:
        ids = tuple(reasons)
        return ModuleAccount(module=ModuleId(1, number), counted=(), waiting=(), not_counted=ids, reasons=reasons)

    told = explained([module(0, a="harmful", b="harmful"), module(1, c="unjudged", d="new-word")])
    assert [line.partition(":")[0] for line in told] == [
        "2 refused as harmful",
        "1 refused as new-word",
        "1 refused as unjudged",
    ]
    assert "dipaco-peer doctor" in told[0] and "docs/protocol.md" in told[1]
    assert explained([module(0)]) == []


def accounts(*standings: Standing) -> list[ModuleAccount]:
    return [
        ModuleAccount(module=ModuleId(1, number), counted=(), waiting=(), not_counted=(), standing=standing)
        for number, standing in enumerate(standings)
    ]


def test_the_standing_follows_from_what_each_chain_found(archive: tuple[Run, Chains]) -> None:
    run, chains = archive
    me = min(authors(chains))
    first, second = list(chains)[:2]
    changed = {
        first: [replace(chains[first][0], findings=Findings(forged=(me,))), chains[first][1]],
        second: [chains[second][0], replace(chains[second][1], findings=Findings(failed=(me,), repeated=(me,)))],
    }
    found = {one.module: one.standing for one in account(run, {**chains, **changed}, [], {}, me)}
    assert found[first].waits == 7 and found[second] == replace(found[second], repeated=1, is_doubted=True)
    assert {found[module].describe(0) for module in list(chains)[2:]} == {"full"}


def test_audits_of_others_work_are_part_of_the_credit(archive: tuple[Run, Chains]) -> None:
    run, chains = archive
    module, me = next(iter(chains)), signer(99).peer
    first, second = chains[module]
    share = replace(first.shares[0], work="ab" * 32)
    audits = (Audit(work=share.work, by=me, tokens=share.tokens),)
    changed = {**chains, module: [replace(first, shares=(share, *first.shares[1:])), replace(second, audits=audits)]}
    config = replace(run.config, judging=JudgingConfig(audited=10))
    trusting = SimpleNamespace(config=config, rounds=run.rounds, tokens_full=run.tokens_full)
    found = {one.module: one for one in account(cast(Run, trusting), changed, [], {}, me)}[module]
    worth = share_credit(share.tokens, tokens_full=run.tokens_full, levels=len(run.config.model.levels))
    assert found.credit == found.audit_credit == worth and [one.version for one in found.audited] == [2]
    shown = io.StringIO()
    _print_sum([found], run, Console(width=200, file=shown), now_s=0.0)
    assert f"of it {worth:,.0f} for 1 audit: works of others" in shown.getvalue()


def test_the_table_says_the_standing_in_each_module(tmp_path: Path) -> None:
    config = replace(tiny_config(), judging=JudgingConfig(audited=10))
    standings = (Standing(repeated=3), Standing(repeated=10), Standing(waits=5), Standing(repeated=10, is_doubted=True))
    shown = io.StringIO()
    table = _table(make_run(Store(tmp_path), config), accounts(*standings), is_whole=False)
    Console(width=100, file=shown).print(table)
    said = [line.rstrip(" │").rpartition("│ ")[2] for line in shown.getvalue().splitlines() if "L1.M" in line]
    assert said == [
        "on probation: 3 of 10 repeated",
        "full",
        "waits: nothing counts for 5 versions",
        "doubted: weighs half",
    ]


def test_what_a_standing_means_is_said_once_with_what_to_do() -> None:
    modules = accounts(Standing(), Standing(is_doubted=True), Standing(waits=5), Standing(repeated=10))
    told = standings_explained(modules, audited=10)
    assert [line.partition(":")[0] for line in told] == [
        "waits in 1 module",
        "doubted in 1 module",
        "on probation in 2 modules",
    ]
    assert "dipaco-peer doctor" in told[0] and "dipaco-peer doctor" in told[1] and "stay online" in told[2]
    assert standings_explained(accounts(Standing(), Standing(repeated=10)), audited=0) == []


def test_the_name_is_told_as_others_are_shown_it() -> None:
    me, beat = signer(1).peer, Heartbeat(name="[red]Ada[/red]", team="Analysts")

    def told(beat: Heartbeat | None, **state: Any) -> str:
        out = io.StringIO()
        print_name(
            me, beat, Decreed(**state), Console(file=out, force_terminal=True, width=80, color_system="standard")
        )
        return out.getvalue().strip("\n")

    assert told(beat) == "shown beside this id: [red]Ada[/red], team Analysts"
    assert told(None) == told(Heartbeat()) == told(beat, banned={me: "noise"}) == ""
    assert told(Heartbeat(name="\x1b[2J", team="\u202eevil")) == ""
    assert told(beat, nameless={me: "an insult"}) == "shown without a name by the coordinator's decree: an insult"


def test_a_folder_where_nobody_lives_is_named(tmp_path: Path) -> None:
    import asyncio

    from dipaco_p2p.clock import SystemClock

    with pytest.raises(ConfigError, match="no identity in"):
        address = "/ip4/127.0.0.1/tcp/1/p2p/" + signer(1).peer
        asyncio.run(show_me(address, tmp_path, expected=None, is_whole=False, clock=SystemClock()))


def test_what_keeping_came_to_is_told_as_the_coordinator_has_signed_it() -> None:
    me, other, coordinator = (signer(number).peer for number in (1, 2, 3))
    kept = (KeeperCount(peer=me, proofs=1, barred_until_s=0.0), KeeperCount(peer=other, proofs=0, barred_until_s=90.0))
    count = KeepersCount(run="ab" * 32, number=1, keepers=kept, author=coordinator)
    assert keeping_line(count, me, now_s=30.0).endswith(": 1 challenge answered right")
    assert keeping_line(count, other, now_s=30.0).startswith("barred as a keeper for 1 min")
    assert keeping_line(count, coordinator, now_s=30.0) == keeping_line(None, me, now_s=30.0) == ""
