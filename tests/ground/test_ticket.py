"""Tickets survive being copied, name their typos, and never read as what they are not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dipaco_p2p.config import PROTOCOL_VERSION
from dipaco_p2p.errors import ConfigError, WrongRun
from dipaco_p2p.ticket import (
    ALPHABET,
    FORMAT,
    SEEDS_MAX,
    WORD_CHARS_MAX,
    SeedPlace,
    Ticket,
    read_ticket,
    read_word,
    write_ticket,
    write_word,
)

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
TICKET = Ticket(
    run="ab" * 32,
    coordinator=KEY,
    seeds=(
        SeedPlace(place="/ip4/203.0.113.7/tcp/31337", key=KEY),
        SeedPlace(place="/ip6/2001:db8::1/tcp/1", key=OTHER),
        SeedPlace(place="/dns/seed.example.org/tcp/65535", key=KEY),
        SeedPlace(place="/dns4/a.example/tcp/0", key=OTHER),
        SeedPlace(place="/dns6/b.example/tcp/9", key=KEY),
    ),
    name="home-run",
)


def test_a_ticket_reads_back_as_what_was_written() -> None:
    assert read_ticket(write_ticket(TICKET)) == TICKET


def test_capital_letters_are_the_same_ticket() -> None:
    assert read_ticket(write_ticket(TICKET).upper()) == TICKET


def test_a_ticket_of_one_seed_is_a_word_of_a_line() -> None:
    word = write_ticket(replace(TICKET, seeds=TICKET.seeds[:1]))
    assert word.startswith("dipaco1") and len(word) < 150 and word.isalnum()


@pytest.mark.parametrize("seed", range(20))
def test_one_wrong_character_is_found_and_named_with_what_it_should_be(seed: int) -> None:
    chance, word = random.Random(seed), write_ticket(TICKET)
    place = chance.randrange(len("dipaco1"), len(word))
    wrong = chance.choice([char for char in ALPHABET if char != word[place]])
    with pytest.raises(ConfigError, match=f"character {place + 1} is `{wrong}`.*`{word[place]}`"):
        read_ticket(word[:place] + wrong + word[place + 1 :])


@pytest.mark.parametrize("seed", range(20))
def test_swapped_missing_and_doubled_characters_are_noticed(seed: int) -> None:
    chance, word = random.Random(seed), write_ticket(TICKET)
    place = chance.choice([i for i in range(len("dipaco1"), len(word) - 1) if word[i] != word[i + 1]])
    swapped = word[:place] + word[place + 1] + word[place] + word[place + 2 :]
    for damaged in (swapped, word[:place] + word[place + 1 :], word[:place] + word[place] + word[place:], word[:-1]):
        with pytest.raises(ConfigError, match="a typo in the ticket"):
            read_ticket(damaged)


@pytest.mark.parametrize("char", ["b", "i", "o", "1", "-"])
def test_a_character_that_no_ticket_has_is_named(char: str) -> None:
    word = write_ticket(TICKET)
    with pytest.raises(ConfigError, match=f"character 21 is `{char}`"):
        read_ticket(word[:20] + char + word[21:])


def test_mixed_letters_and_endless_words_are_refused() -> None:
    word = write_ticket(TICKET)
    with pytest.raises(ConfigError, match="mixed"):
        read_ticket(word[:-1] + word[-1:].upper() + "Q")
    with pytest.raises(ConfigError, match=f"at most {WORD_CHARS_MAX}"):
        read_ticket("dipaco1" + "q" * WORD_CHARS_MAX)


def test_a_ticket_of_another_protocol_names_both_versions_and_the_upgrade() -> None:
    with pytest.raises(WrongRun, match=f"protocol 99.*speaks {PROTOCOL_VERSION}") as newer:
        read_ticket(write_ticket(replace(TICKET, protocol=99)))
    assert "upgrade" in newer.value.hint or "git pull" in newer.value.hint
    with pytest.raises(WrongRun, match="protocol 1,") as older:
        read_ticket(write_ticket(replace(TICKET, protocol=1)))
    assert "older" in older.value.hint


def test_a_ticket_of_a_later_format_is_a_reason_to_upgrade_not_a_typo() -> None:
    with pytest.raises(WrongRun, match=f"reads {FORMAT}"):
        read_ticket(write_word("dipaco", bytes([FORMAT + 1]) + bytes(90)))


def test_bytes_that_are_no_ticket_are_refused_whatever_they_are() -> None:
    chance, good = random.Random(0), read_word("dipaco", write_ticket(TICKET))
    for _ in range(300):
        cut = bytearray(good[: chance.randrange(1, len(good))] + chance.randbytes(chance.randrange(3)))
        cut[chance.randrange(67, len(cut)) if len(cut) > 67 else 0] = chance.randrange(256)
        try:
            read_ticket(write_word("dipaco", bytes(cut)))
        except (ConfigError, WrongRun):
            continue
        pytest.fail(f"taken: {bytes(cut).hex()}")


@pytest.mark.parametrize("count", [0, SEEDS_MAX + 1])
def test_a_ticket_has_one_to_sixteen_seeds(count: int) -> None:
    with pytest.raises(ConfigError, match="seeds"):
        write_ticket(replace(TICKET, seeds=TICKET.seeds[:1] * count))


def test_seeds_that_make_a_ticket_too_long_are_refused_when_it_is_written() -> None:
    far = SeedPlace(place=f"/dns/{'a' * 250}/tcp/1", key=OTHER)
    with pytest.raises(ConfigError, match="too long"):
        write_ticket(replace(TICKET, seeds=(far,) * 3))


def test_the_word_is_bech32m_as_others_write_it() -> None:
    """Vectors of BIP 350: the same checksum, also over no data at all."""
    assert write_word("a", b"") == "a1lqfn3a"
    assert write_word("abcdef", bytes.fromhex("ffbbcdeb38bdab49ca307b9ac5a928398a418820")) != ""
    assert read_word("a", "A1LQFN3A") == b""
