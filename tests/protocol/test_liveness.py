"""What peers say of themselves: read strictly, junk left out, and one leader believed by all."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p import strict
from dipaco_p2p.canonical import digest
from dipaco_p2p.config import LivenessConfig
from dipaco_p2p.errors import ConfigError, IntegrityError
from dipaco_p2p.protocol.decrees import Decreed
from dipaco_p2p.protocol.documents import MIRRORS_MAX
from dipaco_p2p.protocol.liveness import (
    ADDRESSES_MAX,
    TEXT_MAX,
    Claim,
    Head,
    Heartbeat,
    heartbeat_interval_s,
    read,
    read_all,
    shown_names,
)
from dipaco_p2p.protocol.records import RECORD_BYTES_MAX, RECORD_VALUES_MAX, Record, read_record, sign_record
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.protocol.versions import Branch
from dipaco_p2p.topology import PathId

ALICE, BOB = PeerId("alice"), PeerId("bob")
ADDRESS = "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW"
BEAT = Heartbeat(addresses=(ADDRESS,), role="seed", owns=True, path=PathId((0, 1)), round=3, tokens_per_s=1.5)
CLAIM = Claim(path=PathId((0, 1)), since_s=1_000_000.0, round=3)
HEAD = Head(
    version=3, digest=digest(b"head"), final=2, weight=300, term=2, mirrors=(ALICE,), granted_by=BOB, grant="ab"
)
Body = Heartbeat | Claim | Head


def plain(body: Body) -> dict[str, Any]:
    """As it comes out of a record."""
    return json.loads(json.dumps(strict.plain(body)))


@pytest.mark.parametrize("body", [BEAT, Heartbeat(), CLAIM, HEAD, Head(version=0, digest=HEAD.digest, term=0)])
def test_what_is_said_is_read(body: Body) -> None:
    assert read(type(body), plain(body)) == body


@pytest.mark.parametrize(
    ("body", "change"),
    [
        (BEAT, {"role": "king"}),
        (BEAT, {"owns": 1}),
        (BEAT, {"addresses": ADDRESS}),
        (BEAT, {"addresses": [ADDRESS] * (ADDRESSES_MAX + 1)}),
        (BEAT, {"addresses": ["/" * (2 * TEXT_MAX + 1)]}),
        (BEAT, {"addresses": [7]}),
        (BEAT, {"doing": "x" * (TEXT_MAX + 1)}),
        (BEAT, {"doing": "two\nlines"}),
        (BEAT, {"doing": "\x1b[2J"}),
        (BEAT, {"name": "x" * (TEXT_MAX + 1)}),
        (BEAT, {"team": "x" * (TEXT_MAX + 1)}),
        (BEAT, {"name": 7}),
        (BEAT, {"name": None}),
        (BEAT, {"path": "P0-x"}),
        (BEAT, {"path": {"indices": [0, -1]}}),
        (BEAT, {"round": -1}),
        (BEAT, {"tokens_per_s": -0.5}),
        (BEAT, {"tokens_per_s": 10**400}),  # an integer that no float can hold
        (CLAIM, {"path": None}),
        (CLAIM, {"since_s": "now"}),
        (CLAIM, {"since_s": 10**400}),
        (CLAIM, {"since_s": float("nan")}),
        (CLAIM, {"released": None}),
        (HEAD, {"digest": "head"}),
        (HEAD, {"term": -1}),
        (HEAD, {"term": 2**41}),
        (HEAD, {"version": 2.0}),
        (HEAD, {"final": -1}),
        (HEAD, {"weight": "300"}),
        (HEAD, {"mirrors": "alice"}),
        (HEAD, {"mirrors": [7]}),
        (HEAD, {"mirrors": [f"peer {number}" for number in range(MIRRORS_MAX + 1)]}),
        (HEAD, {"after": -1}),
        (HEAD, {"granted_by": None}),
        (HEAD, {"grant": 5}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_junk_is_refused_alone_and_left_out_among_others(body: Body, change: dict[str, Any]) -> None:
    kind, junk = type(body), {**plain(body), **change}
    with pytest.raises(IntegrityError):
        read(kind, junk)
    assert read_all(kind, {ALICE: junk, BOB: plain(body)}) == {BOB: body}


@pytest.mark.parametrize("body", [BEAT, CLAIM, HEAD])
def test_a_record_of_a_later_version_is_read_without_the_fields_that_are_new(body: Body) -> None:
    said = {**plain(body), "mood": "good", "neighbours": [{"peer": "bob", "ms": 7}] * 9}
    record = sign_record(Signer(bytes(32)), key="dipaco/test", counter=1, expires_s=1.0, body=said)
    received = read_record(record.to_bytes())  # the signature is over all of it
    assert received.body == said and read(type(body), received.body) == body
    with pytest.raises(IntegrityError):
        read(type(body), {**said, "path" if body is CLAIM else "round" if body is BEAT else "term": "soon"})


@pytest.mark.parametrize("more", ["x" * RECORD_BYTES_MAX, [[]] * RECORD_VALUES_MAX])
def test_new_fields_make_no_record_larger_than_it_may_be(more: object) -> None:
    record = Record(
        key="dipaco/test", peer=ALICE, counter=1, expires_s=1.0, body={**plain(BEAT), "new": more}, signature=""
    )
    with pytest.raises(IntegrityError, match="a record of"):
        read_record(record.to_bytes())


def test_we_cannot_say_what_others_would_refuse() -> None:
    for wrong in ({"doing": "two\nlines"}, {"addresses": (ADDRESS,) * 9}):
        with pytest.raises(ConfigError):
            Heartbeat(**wrong)
    with pytest.raises(ConfigError, match="digest"):
        Head(version=0, digest="", term=0)


def test_the_longest_heartbeat_fits_a_record() -> None:
    longest = Heartbeat(
        addresses=("/" * 2 * TEXT_MAX,) * ADDRESSES_MAX,
        doing="ü" * TEXT_MAX,
        path=PathId((99,) * 32),
        name="\U0001f600" * TEXT_MAX,
        team="\U0001f600" * TEXT_MAX,
    )
    record = sign_record(Signer(bytes(32)), key="dipaco/test", counter=1, expires_s=1.0, body=strict.plain(longest))
    assert len(record.to_bytes()) <= RECORD_BYTES_MAX


def test_a_heartbeat_without_a_name_has_the_bytes_that_it_had_before_there_were_names() -> None:
    assert not {"name", "team"} & plain(BEAT).keys()
    named = dataclasses.replace(BEAT, name="Ada", team="Analysts")
    assert plain(named) == {**plain(BEAT), "name": "Ada", "team": "Analysts"}


@pytest.mark.parametrize(
    "name", ["\x1b[2J", "\u202eevil", "x" * 40, "two\nlines", " ", "...8VhWqZ", "a" + "\u0301" * 9]
)
def test_what_is_no_name_is_shown_as_none_and_keeps_nobody_from_living(name: str) -> None:
    """A machine with older tables of Unicode may see nothing in a name where others do, and they must agree."""
    beat = read(Heartbeat, {**plain(BEAT), "name": name, "team": "Analysts"})
    assert shown_names(ALICE, beat, Decreed()) == ("", "Analysts")


def test_names_are_shown_but_of_peers_that_a_decree_hides_or_bans() -> None:
    beat = Heartbeat(name="Ada", team="Analysts")
    assert (
        shown_names(ALICE, beat, Decreed())
        == shown_names(ALICE, beat, Decreed(banned={BOB: "x"}))
        == ("Ada", "Analysts")
    )
    for state in (Decreed(nameless={ALICE: "x"}), Decreed(banned={ALICE: "x"})):
        assert shown_names(ALICE, beat, state) == ("", "")


def test_two_heartbeats_may_be_lost_before_the_third_renews() -> None:
    config = LivenessConfig(heartbeat_ttl_s=15.0)
    assert 2 * heartbeat_interval_s(config) < config.heartbeat_ttl_s <= 3 * heartbeat_interval_s(config)


def test_a_head_says_how_good_its_branch_is() -> None:
    assert HEAD.branch == Branch(final=2, version=3, weight=300, digest=HEAD.digest)


names = st.sampled_from(
    ["addresses", "name", "role", "owns", "doing", "path", "round", "since_s", "digest", "term", "mirrors", "other"]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400)


@given(st.sampled_from([Heartbeat, Claim, Head]), st.dictionaries(names, scalars | st.lists(scalars), max_size=3))
def test_any_body_is_read_or_left_out(kind: Any, junk: dict[str, Any]) -> None:
    for body in (BEAT, CLAIM, HEAD):
        found = read_all(kind, {ALICE: {**plain(body), **junk}})
        assert all(read(kind, plain(value)) == value for value in found.values())
        said = {**plain(body), **junk}
        assert all(said[name] == has for value in found.values() for name, has in plain(value).items() if name in said)
