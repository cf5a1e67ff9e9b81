"""Invitations as people meet them: the code that a command prints, the home that keeps it, runs of the invited."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_harness import write_corpus
from runtime_harness import World
from stages_harness import Home, play_whole, run_file
from tiny_run import SEED_NUMBER, make_run, signer, tiny_config
from typer.testing import CliRunner
from virtual_time import eventually

from bootstrap.archives.verify import verify_stages
from bootstrap.cli import app as bootstrap
from bootstrap.folder import write_stage
from dipaco_p2p.config import INVITE, LIST, AdmissionConfig
from dipaco_p2p.errors import ConfigError, DipacoError, IntegrityError, Refused, WrongRun
from dipaco_p2p.node.invitations import Chain, invite, read_code, why_not, write_code
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.store import Store
from dipaco_p2p.program.examination import Level
from dipaco_p2p.protocol.decrees import Decreed
from dipaco_p2p.protocol.invitations import LINKS_MAX
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.swarm.identity import write
from dipaco_p2p.ticket import ALPHABET
from dipaco_p2p.use.folder import GRID, WARMUP, RunFolder
from peers.cli import app as peers
from peers.doctor.examine import judge_admission
from peers.invitations import NAME, RUNS_MAX, check_admitted, invitations_for, keep, kept

INVITED = AdmissionConfig(policy=INVITE)
ANNA, BERT, CARA = signer(61), signer(62), signer(63)
NOTHING = Decreed()


def run_of(folder: Path, admission: AdmissionConfig = INVITED) -> Run:
    return make_run(Store(folder), replace(tiny_config(), admission=admission))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return run_of(tmp_path / "store")


@pytest.fixture
def folder(tmp_path: Path, run: Run) -> Path:
    """A coordinator's."""
    write_stage(Store(tmp_path / "run" / GRID), run.sealed)
    write(tmp_path / "run" / "identity.key", bytes([SEED_NUMBER]) * 32)
    return tmp_path / "run"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Anna's."""
    write(tmp_path / "anna" / "identity.key", bytes([61]) * 32)
    return tmp_path / "anna"


def said(app: object, *words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "400"})  # type: ignore[arg-type]
    assert "Traceback" not in done.output
    return done.exit_code, done.output.strip()


def chain_of(run: Run, *numbers: int) -> Chain:
    """From the coordinator over all of these."""
    found: Chain = ()
    for author, number in zip([SEED_NUMBER, *numbers], numbers, strict=False):
        found = invite(signer(author), run.origin, signer(number).peer, at_s=1.5, held=found)
    return found


# -- the code


@pytest.mark.parametrize("length", range(1, LINKS_MAX + 1))
def test_a_code_holds_a_whole_chain_in_one_word(run: Run, length: int) -> None:
    chain = chain_of(run, *range(61, 61 + length))
    word = write_code(chain)
    assert word.isalnum() and len(word) <= 1000
    for text in (word, f" {word[:40]}\n{word[40:]} ", word.upper()):
        assert read_code(text).chain(run) == chain


def test_a_typo_is_named_and_no_other_word_is_a_code(run: Run) -> None:
    word = write_code(chain_of(run, 61))
    place = 50
    other = ALPHABET[ALPHABET.index(word[place]) ^ 1]
    with pytest.raises(ConfigError, match=f"character {place + 1} is `{other}`, and should most likely be"):
        read_code(word[:place] + other + word[place + 1 :])
    for text, words in ((word[:-3], "typo"), ("dipaco1qqqqqq", "begins with invite1"), ("", "is not an invitation")):
        with pytest.raises(ConfigError, match=words):
            read_code(text)


def test_a_code_is_for_its_run_and_not_to_be_forged(run: Run, tmp_path: Path) -> None:
    another = run_of(tmp_path / "another", AdmissionConfig(policy=LIST, peers=(ANNA.peer,)))
    with pytest.raises(WrongRun, match=f"is to {run.name}, not {another.name}"):
        read_code(write_code(chain_of(run, 61))).chain(another)
    forged = invite(CARA, run.origin, ANNA.peer, at_s=1.0)
    with pytest.raises(IntegrityError, match="invitation 1 of this code is not signed by"):
        read_code(write_code(forged)).chain(run)


# -- the commands, and the home


def test_a_coordinator_invites_and_the_home_keeps_it_for_later_starts(folder: Path, home: Path, run: Run) -> None:
    code, word = said(bootstrap, "invite", folder, ANNA.peer)
    assert code == 0 and word.startswith("invite1")
    given = invitations_for(run, ANNA.peer, home, read_code(word))
    check_admitted(run, ANNA.peer, given, NOTHING)
    assert kept(home, run.origin) == ()
    keep(home, run.origin, given)
    later = invitations_for(run, ANNA.peer, home, None)
    assert later == given and why_not(run, ANNA.peer, later, NOTHING) == ""


def test_a_volunteer_invites_with_the_chain_that_it_keeps(home: Path, run: Run) -> None:
    code, complaint = said(peers, "invite", BERT.peer, "--home", home)
    assert code == 2 and "was not invited to any run" in complaint and "--invitation" in complaint
    keep(home, run.origin, chain_of(run, 61))
    code, word = said(peers, "invite", BERT.peer, "--home", home)
    assert code == 0
    chain = read_code(word).chain(run)
    assert [each.document.peer for each in chain] == [ANNA.peer, BERT.peer]
    assert why_not(run, BERT.peer, chain, NOTHING) == ""
    keep(home, "ab" * 32, chain_of(run, 61))
    code, complaint = said(peers, "invite", BERT.peer, "--home", home)
    assert code == 2 and "2 runs" in complaint and "--run" in complaint
    assert said(peers, "invite", BERT.peer, "--home", home, "--run", run.name)[0] == 0


@pytest.mark.parametrize(
    ("peer", "words"), [("nobody", "not an Ed25519 peer id: 'nobody'"), (ANNA.peer, "invite itself")]
)
def test_nobody_else_can_be_invited(home: Path, run: Run, peer: str, words: str) -> None:
    keep(home, run.origin, chain_of(run, 61))
    code, complaint = said(peers, "invite", peer, "--home", home)
    assert code == 2 and words in complaint


def test_the_longest_chain_goes_no_further(home: Path, run: Run) -> None:
    keep(home, run.origin, chain_of(run, *range(80, 80 + LINKS_MAX - 1), 61))
    code, complaint = said(peers, "invite", BERT.peer, "--home", home)
    assert code == 2 and f"{LINKS_MAX} invitations, and none may follow" in complaint


def test_only_the_coordinator_of_a_run_of_the_invited_invites(folder: Path, tmp_path: Path) -> None:
    assert said(bootstrap, "invite", tmp_path / "nothing", ANNA.peer)[0] == 2
    assert not (tmp_path / "nothing").exists()
    code, complaint = said(bootstrap, "invite", folder, "nobody")
    assert code == 2 and "peer id" in complaint
    (folder / "identity.key").unlink()
    write(folder / "identity.key", bytes([7]) * 32)
    assert said(bootstrap, "invite", folder, ANNA.peer)[0] == 8
    write_stage(Store(tmp_path / "open" / GRID), run_of(tmp_path / "store 2", AdmissionConfig()).sealed)
    code, complaint = said(bootstrap, "invite", tmp_path / "open", ANNA.peer)
    assert code == 2 and "is `open`" in complaint


def test_a_home_keeps_few_runs_and_says_when_its_file_is_damaged(home: Path, run: Run) -> None:
    for number in range(RUNS_MAX + 1):
        keep(home, f"{number:064x}", chain_of(run, 61))
    assert len(json.loads((home / NAME).read_bytes())) == RUNS_MAX and kept(home, "0" * 64) == ()
    keep(home, run.origin, chain_of(run, 61))
    (home / NAME).write_bytes((home / NAME).read_bytes().replace(ANNA.peer.encode(), CARA.peer.encode()))
    with pytest.raises(IntegrityError, match="damaged on disk"):
        kept(home, run.origin)
    (home / NAME).write_text("{")
    assert said(peers, "invite", BERT.peer, "--home", home)[0] == 8


# -- who joins


def refusal(run: Run, chain: Chain, decreed: Decreed = NOTHING) -> DipacoError:
    with pytest.raises(Refused) as caught:
        check_admitted(run, ANNA.peer, chain, decreed)
    assert (caught.value.exit_code, caught.value.reason) == (7, Reason.UNINVITED)
    assert "\n" not in f"{caught.value}{caught.value.hint}" and ANNA.peer in caught.value.hint
    return caught.value


def test_who_is_not_admitted_is_told_what_to_do_and_ends_with_code_7(run: Run, tmp_path: Path) -> None:
    assert "--invitation" in refusal(run, ()).hint and "no invitation" in str(refusal(run, ()))
    assert "banned" in str(refusal(run, chain_of(run, 62, 61), Decreed(banned={BERT.peer: "noise"})))
    listed = run_of(tmp_path / "listed", AdmissionConfig(policy=LIST, peers=(BERT.peer,)))
    assert "not on this run's list" in str(refusal(listed, ()))
    for other, chain in ((run, chain_of(run, 62, 61)), (run_of(tmp_path / "open", AdmissionConfig()), ())):
        check_admitted(other, ANNA.peer, chain, NOTHING)


def test_an_invitation_for_somebody_else_is_noticed_before_the_start(run: Run, home: Path) -> None:
    with pytest.raises(ConfigError, match=f"is for {BERT.peer}, and this volunteer is {ANNA.peer}"):
        invitations_for(run, ANNA.peer, home, read_code(write_code(chain_of(run, 62))))


def test_the_doctor_says_the_policy_and_what_is_missing(run: Run, home: Path, tmp_path: Path) -> None:
    missing = judge_admission(run, home)
    assert missing.level is Level.WARN and ANNA.peer in missing.remedy and "by invitation" in missing.found
    assert judge_admission(run, tmp_path / "nobody").level is Level.WARN
    keep(home, run.origin, chain_of(run, 61))
    assert judge_admission(run, home).level is Level.OK
    everybody = judge_admission(run_of(tmp_path / "open", AdmissionConfig()), tmp_path / "nobody")
    assert everybody.level is Level.OK and "open" in everybody.found


# -- whole runs


@pytest.mark.slow
def test_a_run_of_the_invited_goes_from_its_warm_up_to_its_end(tmp_path: Path) -> None:
    file = run_file(write_corpus(tmp_path / "corpus.jsonl"), admission=INVITED)
    home = Home(tmp_path, file)
    play_whole(home)
    assert set(home.heads(WARMUP).values()) == {2} and set(home.heads(GRID).values()) == {3}
    assert [report.problem for report in verify_stages(RunFolder(home.folder))] == [""] * 5


@pytest.mark.slow
async def test_when_an_inviter_is_banned_those_below_it_leave_and_the_others_go_on(tmp_path: Path) -> None:
    config = replace(tiny_config(rounds=8, min_paths=1), admission=INVITED)
    async with World(tmp_path, config=config) as world:
        chains = {1: chain_of(world.run, 1), 2: chain_of(world.run, 2), 3: chain_of(world.run, 1, 3)}
        volunteers = {number: world.join(number) for number in chains}
        for number, chain in chains.items():
            volunteers[number].node.invitations.own = chain
        ledgers = world.seed.archive.ledgers
        await eventually(lambda: any(ledger.standings.has_worked(signer(3).peer) for ledger in ledgers.values()))
        decrees = world.seed.node.decrees
        decrees.issue(signer(SEED_NUMBER), "ban", at_s=0.0, peer=signer(1).peer, reason="a test")
        with pytest.raises(Refused, match="has banned this volunteer"):
            await volunteers[1].done()
        with pytest.raises(Refused, match="is revoked") as caught:
            await volunteers[3].done()
        assert (caught.value.reason, caught.value.exit_code) == (Reason.UNINVITED, 7)
        await volunteers[2].done()
        assert {ledger.head.version for ledger in ledgers.values()} == {8}
