"""Signed documents: what is sealed comes back, and nothing else gets through `unseal`."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import signer
from version_harness import COORDINATOR, LEADER, MANIFEST, MODULE, PATH, SHARDS, child

from dipaco_p2p import strict
from dipaco_p2p.canonical import canonical_bytes, digest
from dipaco_p2p.config import SHARES_MAX
from dipaco_p2p.errors import ConfigError, IntegrityError
from dipaco_p2p.protocol.audits import AUDITS_MAX, Audit
from dipaco_p2p.protocol.decrees import ADMIT, REASON_CHARS_MAX, Decree, ShownDecree
from dipaco_p2p.protocol.documents import (
    CUSTODY_MAX,
    DOCUMENT_BYTES_MAX,
    MIRRORS_MAX,
    VALUES_MAX,
    BlobRef,
    Contribution,
    Custody,
    Document,
    Grant,
    Manifest,
    ModuleVersion,
    Receipt,
    Sealed,
    Share,
    cosign,
    document_id,
    is_cosigned,
    is_signed,
    run_name,
    seal,
    unseal,
)
from dipaco_p2p.protocol.expulsion import VOTES_MAX, Expulsion, Vote
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.protocol.standing import FINDINGS_MAX, Findings
from dipaco_p2p.topology import PathId

ALICE, BOB = COORDINATOR, LEADER
RUN = digest(b"run")
BLOB = BlobRef.of(b"bytes")

CONTRIBUTION = Contribution(
    run=RUN,
    module=MODULE,
    path=PATH,
    base_version=3,
    base_digest=digest(b"base"),
    payload=BLOB,
    steps=30,
    tokens=61_440,
    loss=2.5,
    author=ALICE.peer,
)
RECEIPT = Receipt(
    run=RUN,
    contribution=digest(b"contribution"),
    module=MODULE,
    round=3,
    term=1,
    custody=(Custody.sign(BOB, digest(b"contribution")),),
    author=ALICE.peer,
)
SHARE = Share(
    contribution=digest(b"contribution"),
    path=PATH,
    peer=BOB.peer,
    base_version=3,
    weight=1.0,
    tokens=100,
    norm=1.0,
    loss=2.0,
)
GRANT = Grant(run=RUN, module=MODULE, term=1, leader=ALICE.peer, mirrors=(BOB.peer,), author=ALICE.peer)
VERSION = child(shares=(SHARE,), author=ALICE.peer)
DOCUMENTS: tuple[Document, ...] = (CONTRIBUTION, RECEIPT, GRANT, VERSION, MANIFEST)
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.KIND)


def wire(document: Document = CONTRIBUTION) -> dict[str, Any]:
    """What arrives at the other side: plain JSON values."""
    return json.loads(canonical_bytes(seal(ALICE, document).to_dict()))


def resigned(body: dict[str, Any], kind: str = "contribution") -> dict[str, Any]:
    """As a hostile author would send it: any body, with a signature that fits."""
    return {"document": body, "signature": ALICE.sign(kind, canonical_bytes(body))}


@each_document
def test_what_is_sealed_is_unsealed(document: Document) -> None:
    sealed = unseal(type(document), wire(document))
    assert sealed == seal(ALICE, document)
    assert sealed.id == document_id(document)


@each_document
def test_the_bytes_of_a_document_are_made_once(document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: a stranger asks a leader for the same page again and again; to write the two megabytes of one took 0.4 s,
    in which nobody else was heard."""
    sealed = seal(ALICE, document)
    assert (data := sealed.to_bytes()) == canonical_bytes(sealed.to_dict())
    other = dataclasses.replace(sealed, cosignatures={BOB.peer: "signature"})
    assert other.to_bytes() == canonical_bytes(other.to_dict()) != data
    monkeypatch.setattr(strict, "plain", None)
    assert sealed.to_bytes() is data


@each_document
def test_a_document_passes_for_no_other_kind(document: Document) -> None:
    for kind in {type(other) for other in DOCUMENTS} - {type(document)}:
        with pytest.raises(IntegrityError):
            unseal(kind, wire(document))


@each_document
def test_any_changed_field_is_refused(document: Document) -> None:
    good = wire(document)
    for name, value in good["document"].items():
        for other in (None, 1, 2**41, "x", digest(b"x"), BOB.peer, "L0.M0", "P0-0-0", [], {}, True, 0.5):
            if canonical_bytes(other) != canonical_bytes(value):
                with pytest.raises(IntegrityError):
                    unseal(type(document), {**good, "document": {**good["document"], name: other}})


@each_document
def test_a_missing_or_additional_field_is_refused_even_if_signed(document: Document) -> None:
    body = wire(document)["document"]
    for name in body:
        # A field with a default may be left out in a file, but not in a document, which has one form only.
        with pytest.raises(IntegrityError, match=f"`{name}` is missing|is not in canonical form"):
            unseal(type(document), resigned({k: v for k, v in body.items() if k != name}, document.KIND))
    with pytest.raises(IntegrityError, match="unknown key `extra`"):
        unseal(type(document), resigned({**body, "extra": 1}, document.KIND))


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"steps": True},
        {"steps": 30.0},
        {"steps": "30"},
        {"steps": None},
        {"base_version": -1},
        {"tokens": VALUES_MAX + 1},
        {"loss": "2.5"},
        {"loss": 10**400},  # an integer that no float can hold
        {"run": "run"},
        {"base_digest": digest(b"base").upper()},
        {"module": "L1.M"},
        {"module": {"level": 1, "index": 1}},
        {"path": {"indices": [0, 1, 0]}},
        {"payload": {"digest": BLOB.digest, "size": -1}},
        {"payload": {"digest": BLOB.digest[:-1], "size": 5}},
        {"payload": {"digest": BLOB.digest, "size": 5, "codec": "zip"}},
        {"payload": None},
    ],
    ids=str,
)
def test_a_signed_body_of_wrong_type_or_bounds_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(IntegrityError, match="malformed"):
        unseal(Contribution, resigned({**wire()["document"], **change}))


@pytest.mark.parametrize("change", [{"loss": 2}, {"path": "P00-1-0"}, {"module": "L01.M1"}], ids=str)
def test_a_second_spelling_of_the_same_value_is_refused(change: dict[str, object]) -> None:
    """Otherwise one contribution could have two ids, and count twice."""
    with pytest.raises(IntegrityError):
        unseal(Contribution, resigned({**wire()["document"], **change}))


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_say_is_refused(loss: float) -> None:
    good = wire()
    with pytest.raises(IntegrityError):
        unseal(Contribution, {**good, "document": {**good["document"], "loss": loss}})


def test_lone_surrogates_and_bottomless_nesting_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("\ud800", deep):
        good = wire()
        with pytest.raises(IntegrityError):
            unseal(Contribution, {**good, "document": {**good["document"], "loss": value}})


def test_a_document_over_the_limit_is_refused_whatever_it_says() -> None:
    body = wire(VERSION)["document"]
    [share] = body["shares"]
    body["shares"] = [share] * (DOCUMENT_BYTES_MAX // len(canonical_bytes(share)) + 1)
    with pytest.raises(IntegrityError, match="limit"):
        unseal(ModuleVersion, resigned(body, "version"))


def test_a_receipt_names_only_holders_that_signed_for_it() -> None:
    """Attack: 77 of 80 receipts named a disk whose owner had kept nothing, or was never asked."""
    assert RECEIPT.holders == (ALICE.peer, BOB.peer)
    body = wire(RECEIPT)["document"]
    of_another = dataclasses.replace(RECEIPT.custody[0], peer=ALICE.peer)
    for custody in (of_another, Custody.sign(BOB, digest(b"another contribution"))):
        with pytest.raises(IntegrityError, match="has not signed for"):
            unseal(Receipt, resigned({**body, "custody": [strict.plain(custody)]}, "receipt"))
    with pytest.raises(IntegrityError, match="limit"):
        unseal(Receipt, resigned({**body, "custody": body["custody"] * (CUSTODY_MAX + 1)}, "receipt"))


def test_a_version_of_all_places_fits_whatever_its_shares_say() -> None:
    """Attack: 670 small contributions made a version that nobody took, and its module stood still for good."""
    share = dataclasses.replace(
        SHARE,
        path=PathId((255, 255, 255)),
        base_version=VALUES_MAX,
        weight=1 / SHARES_MAX,
        tokens=VALUES_MAX,
        norm=1.2345678901234567e-200,
        loss=-1.2345678901234567e-200,
        state=BlobRef(digest=digest(b"state"), size=VALUES_MAX),
        work=digest(b"work"),
    )
    audits = (Audit(work=share.work, by=ALICE.peer, tokens=VALUES_MAX),) * AUDITS_MAX
    findings = Findings.of(repeated=[(ALICE.peer, share.work)] * FINDINGS_MAX)
    votes = tuple(sorted((Vote(owner=signer(n).peer, signature="ab" * 64) for n in range(VOTES_MAX)), key=str))
    expels = Expulsion(peer=ALICE.peer, found=VALUES_MAX, decrees=1024, votes=votes)
    decree = Decree(
        run=RUN,
        number=1024,
        previous=RUN,
        at_s=1.2345678901234567e9,
        act=ADMIT,
        reason="\U0001f600" * REASON_CHARS_MAX,
        peer=BOB.peer,
        author=ALICE.peer,
    )
    full = dataclasses.replace(
        VERSION,
        shares=(share,) * SHARES_MAX,
        findings=findings,
        audits=audits,
        expels=expels,
        readmits=ShownDecree(decree=decree, signature="ab" * 64),
    )
    assert unseal(ModuleVersion, wire(full))
    body = wire(full)["document"]
    with pytest.raises(IntegrityError, match="limit"):
        unseal(ModuleVersion, resigned({**body, "shares": [*body["shares"], body["shares"][0]]}, "version"))


@pytest.mark.parametrize("signature", ["", "0" * 128, None, 7, [], BOB.sign("contribution", b"")], ids=str)
def test_a_forged_signature_is_refused(signature: object) -> None:
    with pytest.raises(IntegrityError, match="signature"):
        unseal(Contribution, {**wire(), "signature": signature})


def test_nobody_can_write_in_anothers_name() -> None:
    body = wire()["document"]
    forged = {"document": body, "signature": BOB.sign("contribution", canonical_bytes(body))}
    with pytest.raises(IntegrityError, match="author"):
        unseal(Contribution, forged)
    with pytest.raises(AssertionError):
        seal(BOB, CONTRIBUTION)


@pytest.mark.parametrize("value", [None, [], "", {}, {"document": {}}, {"document": {}, "signature": "", "more": 1}])
def test_an_envelope_has_exactly_two_parts(value: object) -> None:
    with pytest.raises(IntegrityError, match="must be an object with"):
        unseal(Contribution, value)


def test_the_id_changes_with_every_field() -> None:
    changes = [{"steps": 31}, {"loss": 2.25}, {"author": BOB.peer}, {"path": PathId((0, 0, 0))}, {"base_version": 2}]
    ids = {document_id(dataclasses.replace(CONTRIBUTION, **change)) for change in changes}
    assert len(ids | {document_id(CONTRIBUTION)}) == len(changes) + 1


def test_the_id_is_the_digest_of_this_text() -> None:
    """Written out, since another program must come to the same id; a change here needs a new PROTOCOL_VERSION."""
    text = (
        f'{{"author":"{ALICE.peer}","base_digest":"{digest(b"base")}","base_version":3,"loss":2.5,"module":"L1.M1",'
        f'"path":"P0-1-0","payload":{{"digest":"{digest(b"bytes")}","size":5}},"run":"{RUN}","sharding":0,"state":null,'
        '"steps":30,"tokens":61440}'
    )
    assert document_id(CONTRIBUTION) == digest(text.encode())


def test_a_manifest_lists_every_module_and_path_in_order() -> None:
    for change in (
        {"genesis": MANIFEST.genesis[::-1]},
        {"genesis": ()},
        {"shards": SHARDS[1:]},
        {"shards": SHARDS * 2},
    ):
        with pytest.raises(ConfigError, match="in order"):
            dataclasses.replace(MANIFEST, **change)


def test_a_manifest_of_another_admission_is_refused() -> None:
    with pytest.raises(IntegrityError, match="admission"):
        unseal(Manifest, resigned({**wire(MANIFEST)["document"], "admission": "closed"}, "manifest"))


def test_a_blob_is_named_by_its_bytes() -> None:
    assert BlobRef.of(b"bytes") == BlobRef(digest=digest(b"bytes"), size=5)
    with pytest.raises(ConfigError, match="not a digest"):
        BlobRef(digest="abc", size=5)


def test_a_version_is_by_its_first_or_by_a_grant() -> None:
    genesis = {"version": 0, "parent": "", "grant": ""}
    dataclasses.replace(VERSION, **genesis)  # type: ignore[arg-type]
    for change in ({"grant": ""}, {"grant": "ab" * 64}, {"parent": ""}, {**genesis, "grant": digest(b"grant")}):
        with pytest.raises(ConfigError):
            dataclasses.replace(VERSION, **change)  # type: ignore[arg-type]


def test_a_group_has_a_leader_and_a_few_other_mirrors() -> None:
    assert GRANT.group == (ALICE.peer, BOB.peer)
    many = tuple(Signer(bytes([50 + number]) * 32).peer for number in range(MIRRORS_MAX + 1))
    dataclasses.replace(GRANT, mirrors=many[:-1])
    for mirrors in (many, (ALICE.peer,), (BOB.peer, BOB.peer)):
        with pytest.raises(ConfigError, match="all of them different"):
            dataclasses.replace(GRANT, mirrors=mirrors)
        with pytest.raises(IntegrityError, match="malformed grant"):
            unseal(Grant, resigned({**wire(GRANT)["document"], "mirrors": list(mirrors)}, "grant"))


def test_a_cosignature_travels_with_its_version_and_changes_nothing_else() -> None:
    sealed = seal(ALICE, VERSION)
    signature = cosign(BOB, sealed)
    assert is_cosigned(sealed, BOB.peer, signature)
    both = sealed.cosigned({BOB.peer: signature})
    assert unseal(ModuleVersion, json.loads(canonical_bytes(both.to_dict()))) == both
    assert (both.id, both.signature, sealed.cosignatures) == (sealed.id, sealed.signature, {})
    alice = {ALICE.peer: cosign(ALICE, sealed)}
    assert set(both.cosigned(alice).cosignatures) == {ALICE.peer, BOB.peer}


def test_a_cosignature_stands_for_one_peer_and_one_version() -> None:
    sealed = seal(ALICE, VERSION)
    signature = cosign(BOB, sealed)
    other = seal(ALICE, dataclasses.replace(VERSION, weight=401))
    assert not is_cosigned(sealed, ALICE.peer, signature), "of another peer"
    assert not is_cosigned(other, BOB.peer, signature), "of another version"
    own = seal(ALICE, VERSION).signature
    assert not is_cosigned(sealed, ALICE.peer, own), "the leader's signature makes no cosignature"
    assert not any(is_cosigned(sealed, BOB.peer, junk) for junk in (None, 7, "", [], "0" * 128))


@pytest.mark.parametrize(
    "cosignatures",
    [
        None,
        [],
        {BOB.peer: None},
        {BOB.peer: "0" * 128},
        {BOB.peer: cosign(ALICE, seal(ALICE, VERSION))},
        {"": cosign(BOB, seal(ALICE, VERSION))},
        {f"peer {number}": "" for number in range(MIRRORS_MAX + 3)},
    ],
    ids=lambda value: str(value)[:30],
)
def test_forged_cosignatures_are_refused(cosignatures: object) -> None:
    with pytest.raises(IntegrityError, match="cosignature"):
        unseal(ModuleVersion, {**wire(VERSION), "cosignatures": cosignatures})


def test_only_versions_are_cosigned() -> None:
    for document in (CONTRIBUTION, RECEIPT, GRANT, MANIFEST):
        with pytest.raises(IntegrityError, match="must be an object"):
            unseal(type(document), {**wire(document), "cosignatures": {}})


@each_document
def test_a_document_put_together_by_hand_is_looked_at(document: Document) -> None:
    sealed = seal(ALICE, document)
    assert is_signed(sealed)
    assert not is_signed(Sealed(document, BOB.sign(document.KIND, b"")))
    assert not is_signed(Sealed(dataclasses.replace(document, author=BOB.peer), sealed.signature))


def test_people_see_eight_digits_of_a_run() -> None:
    assert run_name(RUN) == f"run:{RUN[:8]}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**400), 10**400) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(DOCUMENTS), JSON)
def test_junk_never_raises_anything_else(document: Document, junk: Any) -> None:
    for value in (junk, {"document": junk, "signature": "0" * 128}):
        with pytest.raises(IntegrityError):
            unseal(type(document), value)


@given(st.data(), st.sampled_from(DOCUMENTS[:3]), JSON)
def test_a_signed_field_of_junk_never_raises_anything_else(data: st.DataObject, document: Document, junk: Any) -> None:
    """The author signs what it likes: either it is a document, the same when sent on, or an IntegrityError."""
    body = wire(document)["document"]
    body[data.draw(st.sampled_from(sorted(body)))] = junk
    try:
        value = resigned(body, document.KIND)
    except ValueError:
        return  # it has no bytes that could be signed
    try:
        sealed = unseal(type(document), value)
    except IntegrityError:
        return
    assert canonical_bytes(sealed.to_dict()) == canonical_bytes(value)
