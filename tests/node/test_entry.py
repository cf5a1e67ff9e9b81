"""An entry is read from a ticket, a file, a link or an address, and from nothing else; nothing is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import signer

from dipaco_p2p.errors import ConfigError, WrongRun
from dipaco_p2p.node.entry import Entry, is_entry, read_entry
from dipaco_p2p.protocol.signing import public_key_of
from dipaco_p2p.ticket import SeedPlace, Ticket, write_ticket

COORDINATOR, OTHER = signer(1).peer, signer(2).peer
ADDRESSES = (f"/ip4/203.0.113.7/tcp/31337/p2p/{COORDINATOR}", f"/dns/seed.example.org/tcp/4/p2p/{OTHER}")
TICKET = write_ticket(
    Ticket(
        run="ab" * 32,
        coordinator=public_key_of(COORDINATOR),
        seeds=(
            SeedPlace(place="/ip4/203.0.113.7/tcp/31337", key=public_key_of(COORDINATOR)),
            SeedPlace(place="/dns/seed.example.org/tcp/4", key=public_key_of(OTHER)),
        ),
        name="home",
    )
)


def ticket_to(place: str, *, run: str = "ab" * 32) -> str:
    return write_ticket(Ticket(run=run, coordinator=bytes(32), seeds=(SeedPlace(place=place, key=bytes(32)),)))


ENTRY = Entry(addresses=ADDRESSES, run="ab" * 32, coordinator=COORDINATOR, name="home")


@pytest.mark.parametrize(
    "text",
    [
        TICKET,
        f"  {TICKET}\n",
        f"{TICKET[:70]}\n{TICKET[70:]}",
        f"dipaco-peer join {TICKET}",
        f"dipaco://{TICKET}",
        f"https://example.org/join?from=mail#{TICKET}",
    ],
    ids=["bare", "spaces", "broken", "command", "scheme", "fragment"],
)
def test_a_ticket_is_found_wherever_it_is_written(text: str) -> None:
    assert read_entry(text) == ENTRY


def test_a_file_that_contains_a_ticket_is_as_good(tmp_path: Path) -> None:
    file = tmp_path / "ticket.txt"
    file.write_text(f"Join us:\n\n    dipaco-peer join {TICKET}\n\nsee https://example.org\n")
    assert read_entry(str(file)) == ENTRY and is_entry(str(file))


def test_an_address_demands_no_run_unless_the_user_does() -> None:
    assert read_entry(ADDRESSES[0]) == Entry(addresses=ADDRESSES[:1])
    assert read_entry(ADDRESSES[0], run="run:abcd").run == "abcd"


def test_a_run_beside_a_ticket_must_be_the_tickets() -> None:
    assert read_entry(TICKET, run="run:abab") == ENTRY
    with pytest.raises(WrongRun, match="ticket is for run:abababab, not run:12345678"):
        read_entry(TICKET, run="1234567890")


@pytest.mark.parametrize("link", ["https://example.org/join", "https://example.org/#", f"https://x.org/{TICKET}"])
def test_a_link_without_a_ticket_behind_the_hash_is_refused_and_not_fetched(link: str) -> None:
    with pytest.raises(ConfigError, match="no ticket") as refused:
        read_entry(link)
    assert "nothing is fetched" in refused.value.hint


@pytest.mark.parametrize("text", ["hello", "", "/ip4/127.0.0.1/tcp/31337", "/no/such/file"])
def test_what_is_nothing_of_it_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_entry(text)
    assert "dipaco1" in refused.value.hint and "/ip4/203.0.113.7" in refused.value.hint


def test_a_typo_is_told_as_one() -> None:
    wrong = "q" if TICKET[30] != "q" else "p"
    with pytest.raises(ConfigError, match=f"character 31 is `{wrong}`"):
        read_entry(TICKET[:30] + wrong + TICKET[31:])


def test_of_two_tickets_in_a_file_none_is_guessed(tmp_path: Path) -> None:
    other = write_ticket(
        Ticket(run="cd" * 32, coordinator=bytes(32), seeds=(SeedPlace(place="/ip4/1.2.3.4/tcp/5", key=bytes(32)),))
    )
    (tmp_path / "two").write_text(f"{TICKET}\n{other}\n{TICKET}")
    with pytest.raises(ConfigError, match="holds 2 tickets"):
        read_entry(str(tmp_path / "two"))


def test_a_place_that_no_peer_can_have_is_refused() -> None:
    word = write_ticket(
        Ticket(run="ab" * 32, coordinator=bytes(32), seeds=(SeedPlace(place="/dns/a b/tcp/5", key=bytes(32)),))
    )
    with pytest.raises(ConfigError, match="not the address of a peer"):
        read_entry(word)


def test_a_folder_is_no_entry_and_an_address_is(tmp_path: Path) -> None:
    assert not is_entry(str(tmp_path)) and not is_entry("no-such-folder")
    assert all(map(is_entry, [ADDRESSES[0], TICKET, "https://example.org/#x", f"dipaco://{TICKET}"]))
    assert not is_entry("x" * 5000)


def test_a_ticket_is_remembered_by_its_run_and_an_address_by_itself() -> None:
    assert read_entry(TICKET).key == "ab" * 32
    assert read_entry(ADDRESSES[0], run="abab").key == ADDRESSES[0]
