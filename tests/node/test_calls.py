"""Every call as bytes, and what its door refuses: nothing unsound reaches a handler, or comes out of a reply."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from dipaco_p2p.canonical import canonical_bytes, digest
from dipaco_p2p.clock import SystemClock
from dipaco_p2p.errors import IntegrityError, Refused
from dipaco_p2p.node import calls
from dipaco_p2p.node.calls import CALLS
from dipaco_p2p.node.items import CheckPage, Page
from dipaco_p2p.protocol.decrees import DECREES_MAX
from dipaco_p2p.protocol.documents import (
    BlobRef,
    Contribution,
    Custody,
    Grant,
    ModuleVersion,
    Receipt,
    Scores,
    Sealed,
    Sharding,
    seal,
)
from dipaco_p2p.protocol.gate import DRAW, Appraisal
from dipaco_p2p.protocol.judgement import Check
from dipaco_p2p.protocol.keeping import NONCE_CHARS, PROOF_BYTES_MAX, KeeperCount, KeepersCount
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.protocol.versions import Branch
from dipaco_p2p.swarm import frames
from dipaco_p2p.swarm.api import Reply, Swarm
from dipaco_p2p.swarm.calls import (
    COUNT_MAX,
    DialBackMe,
    DialedBack,
    Done,
    Range,
    ReadBlob,
    Request,
    WriteBlob,
    Written,
    decode,
    encode,
)
from dipaco_p2p.swarm.memory import MemoryNetwork
from dipaco_p2p.topology import ModuleId, PathId

ALICE, BOB = Signer(bytes([1]) * 32), Signer(bytes([2]) * 32)
RUN, ID, BLOB = digest(b"run"), digest(b"a contribution"), BlobRef.of(b"a blob")
MODULE, PATH = ModuleId(0, 1), PathId((0, 1))
TIMEOUT_S = 5.0

APPRAISAL = seal(
    BOB,
    Appraisal(
        run=RUN,
        work=ID,
        of=ALICE.peer,
        tokens=1,
        gain=0.5,
        error=0.1,
        draw=BOB.sign(DRAW, ID.encode()),
        author=BOB.peer,
    ),
)
CONTRIBUTION = seal(
    ALICE,
    Contribution(
        run=RUN,
        module=MODULE,
        path=PATH,
        base_version=2,
        base_digest=ID,
        sharding=0,
        payload=BLOB,
        state=None,
        steps=1,
        tokens=1,
        loss=1.0,
        author=ALICE.peer,
    ),
)
GRANT = seal(ALICE, Grant(run=RUN, module=MODULE, term=1, leader=BOB.peer, author=ALICE.peer))
CUSTODY = Custody.sign(BOB, ID)
RECEIPT = seal(
    ALICE,
    Receipt(run=RUN, contribution=ID, module=MODULE, round=1, term=1, custody=(CUSTODY,), author=ALICE.peer),
)
SHARDING = seal(
    ALICE,
    Sharding(run=RUN, number=1, from_round=1, router=BLOB, token_router=BLOB, shards=(), author=ALICE.peer),
)
SCORES = seal(ALICE, Scores(run=RUN, sharding=1, path=PATH, modules=(ID, ID), table=BLOB, author=ALICE.peer))
CHECK = seal(
    ALICE,
    Check(
        run=RUN,
        version=1,
        path=PATH,
        modules=(ID, ID),
        sharding=0,
        validation=ID,
        nats=1.0,
        tokens=1,
        at_s=0.0,
        author=ALICE.peer,
    ),
)
KEEPER = KeeperCount(peer=BOB.peer, proofs=3, barred_until_s=0.0)
KEEPERS = seal(ALICE, KeepersCount(run=RUN, number=1, keepers=(KEEPER,), author=ALICE.peer))
VERSION = seal(
    ALICE,
    ModuleVersion(
        run=RUN,
        module=MODULE,
        version=1,
        parent=ID,
        snapshot=BLOB,
        update=BLOB,
        state=None,
        shares=(),
        clip_norm=None,
        lr=1.0,
        momentum=0.0,
        norm_rule="none",
        weight=0,
        term=1,
        grant=ID,
        author=ALICE.peer,
    ),
)
OF_MODULE: dict[str, Any] = {"module": MODULE, "grant": GRANT}
SHOWN: dict[str, Any] = {"module": "L0.M1", "grant": GRANT.to_dict()}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request and a reply, each with its header on the wire."""

    request: Request[Any]
    header: dict[str, Any]
    reply: Any = field(default_factory=Done)
    replied: dict[str, Any] = field(default_factory=dict)
    wrong: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """By name on the wire, beyond what the types and bounds already say."""


PAGE: Page[Any] = Page({}, b"[]")
CASES = {
    type(case.request).METHOD: case
    for case in (
        Case(
            request=DialBackMe(port=31337),
            header={"port": 31337},
            reply=DialedBack(reached=True, host="192.0.2.1"),
            replied={"reached": True, "host": "192.0.2.1"},
        ),
        Case(
            request=ReadBlob(digest=ID, offset=1, length=2),
            header={"digest": ID, "offset": 1, "length": 2},
            reply=Range(size=9, body=b"bc"),
            replied={"size": 9},
            wrong={"digest": ("", "../etc", ID[:-1])},
        ),
        Case(
            request=WriteBlob(digest=ID, size=3, offset=1, body=b"bc"),
            header={"digest": ID, "size": 3, "offset": 1},
            reply=Written(have=3, done=True, range=4096),
            replied={"have": 3, "done": True, "range": 4096},
            wrong={"digest": ("", "../etc", ID[:-1])},
        ),
        Case(request=calls.GetManifests(), header={}, reply=Reply({}, b"[]")),
        Case(request=calls.GetDecrees(after=3), header={"after": 3}, reply=PAGE),
        Case(request=calls.GetShardings(after=3), header={"after": 3}, reply=PAGE),
        Case(
            request=calls.GetWork(path="P0-1"),
            header={"path": "P0-1"},
            reply=calls.Scoring(sharding=1, path=PATH, snapshots=(BLOB,)),
            replied={"sharding": 1, "path": "P0-1", "snapshots": [{"digest": BLOB.digest, "size": BLOB.size}]},
        ),
        Case(request=calls.GiveScores(scores=SCORES), header={"scores": SCORES.to_dict()}),
        Case(request=calls.GetJudgements(from_=3), header={"from": 3}, reply=PAGE),
        Case(
            request=calls.GetMeasure(),
            header={},
            reply=calls.Wanted(path=PATH, version=2, sharding=1, snapshots=(BLOB, BLOB), untrained=(PATH,)),
            replied={
                "path": "P0-1",
                "version": 2,
                "sharding": 1,
                "snapshots": 2 * [{"digest": BLOB.digest, "size": BLOB.size}],
                "untrained": ["P0-1"],
            },
        ),
        Case(request=calls.GiveCheck(check=CHECK), header={"check": CHECK.to_dict()}),
        Case(
            request=calls.GetChecks(from_=3),
            header={"from": 3},
            reply=CheckPage(next=4, body=b"[]"),
            replied={"next": 4},
        ),
        Case(
            request=calls.GetServing(),
            header={},
            reply=calls.Serving(rounds={"P0-1": 2}, losses={"P0-1": 3.5}),
            replied={"rounds": {"P0-1": 2}, "losses": {"P0-1": 3.5}},
        ),
        Case(
            request=calls.Commit(contribution=CONTRIBUTION),
            header={"contribution": CONTRIBUTION.to_dict()},
            reply=Done(),
            replied={},
        ),
        Case(
            request=calls.Contribute(contribution=CONTRIBUTION, sharding=SHARDING),
            header={"contribution": CONTRIBUTION.to_dict(), "sharding": SHARDING.to_dict()},
            reply=calls.Receipted(receipt=RECEIPT),
            replied={"receipt": RECEIPT.to_dict()},
        ),
        Case(
            request=calls.Forward(**OF_MODULE, contribution=CONTRIBUTION),
            header=SHOWN | {"contribution": CONTRIBUTION.to_dict()},
            reply=calls.Receipted(receipt=RECEIPT),
            replied={"receipt": RECEIPT.to_dict()},
        ),
        Case(
            request=calls.GetVersions(module=MODULE, after=3, digest=ID, weight=7, wait_s=10.0),
            header={"module": "L0.M1", "after": 3, "digest": ID, "weight": 7, "wait_s": 10.0},
            reply=PAGE,
            wrong={"digest": ("zz", ID[:-1])},
        ),
        Case(request=calls.GetOpenRound(module=MODULE), header={"module": "L0.M1"}, reply=Reply({}, b"a round")),
        Case(request=calls.GetReceipts(module=MODULE, after=ID), header={"module": "L0.M1", "after": ID}, reply=PAGE),
        Case(request=calls.GetRejections(module=MODULE, after=ID), header={"module": "L0.M1", "after": ID}, reply=PAGE),
        Case(
            request=calls.Appraise(contribution=CONTRIBUTION, sharding=SHARDING, is_audit=True),
            header={"contribution": CONTRIBUTION.to_dict(), "sharding": SHARDING.to_dict(), "is_audit": True},
            reply=calls.Appraised(appraisal=APPRAISAL),
            replied={"appraisal": APPRAISAL.to_dict()},
        ),
        Case(
            request=calls.GetDraw(module=MODULE, work=ID),
            header={"module": "L0.M1", "work": ID},
            reply=calls.Draw(signature="ab" * 64),
            replied={"signature": "ab" * 64},
            wrong={"work": ("zz", ID[:-1])},
        ),
        Case(
            request=calls.GetVote(**OF_MODULE, peer=BOB.peer, found=3, decrees=2),
            header=SHOWN | {"peer": BOB.peer, "found": 3, "decrees": 2},
            reply=calls.Voted(signature="ab" * 64),
            replied={"signature": "ab" * 64},
            wrong={"peer": ("nobody", ""), "found": (0, -1), "decrees": (-1, DECREES_MAX + 1)},
        ),
        Case(request=calls.Take(**OF_MODULE), header=SHOWN),
        Case(request=calls.GetMandate(module=MODULE), header={"module": "L0.M1"}, reply=PAGE),
        Case(
            request=calls.GetBranch(**OF_MODULE),
            header=SHOWN,
            reply=Branch(final=1, version=2, weight=3, digest=ID),
            replied={"final": 1, "version": 2, "weight": 3, "digest": ID},
        ),
        Case(request=calls.GetChain(**OF_MODULE, after=3), header=SHOWN | {"after": 3}, reply=PAGE),
        Case(request=calls.GetOpen(**OF_MODULE, after=ID), header=SHOWN | {"after": ID}, reply=PAGE),
        Case(
            request=calls.KeepContribution(**OF_MODULE, contribution=CONTRIBUTION, sharding=SHARDING),
            header=SHOWN | {"contribution": CONTRIBUTION.to_dict(), "sharding": SHARDING.to_dict()},
            reply=calls.Kept(custody=CUSTODY),
            replied={"custody": {"peer": BOB.peer, "signature": CUSTODY.signature}},
        ),
        Case(
            request=calls.KeepVersion(**OF_MODULE, version=VERSION, final=1, final_signature="ab"),
            header=SHOWN | {"version": VERSION.to_dict(), "final": 1, "final_signature": "ab"},
            reply=calls.Cosigned(cosignature="cd"),
            replied={"cosignature": "cd"},
        ),
        Case(
            request=calls.TellFinal(**OF_MODULE, final=1, final_signature="ab"),
            header=SHOWN | {"final": 1, "final_signature": "ab"},
            reply=calls.Final(final=2),
            replied={"final": 2},
        ),
        Case(request=calls.Follow(**OF_MODULE), header=SHOWN),
        Case(
            request=calls.KeepEvidence(**OF_MODULE, appraisals=(APPRAISAL,)),
            header=SHOWN | {"appraisals": [APPRAISAL.to_dict()]},
            wrong={"appraisals": ([{}], [APPRAISAL.to_dict()] * (calls.APPRAISALS_MAX + 1))},
        ),
        Case(request=calls.GetEvidence(**OF_MODULE), header=SHOWN, reply=PAGE),
        Case(
            request=calls.GetContributions(ids=(ID,)),
            header={"ids": [ID]},
            reply=PAGE,
            wrong={"ids": ([ID] * (calls.IDS_MAX + 1),)},
        ),
        Case(
            request=calls.Adopt(module=MODULE, term=2, mirrors=(BOB.peer,), mandate=(GRANT,)),
            header={"module": "L0.M1", "term": 2, "mirrors": [BOB.peer], "mandate": [GRANT.to_dict()]},
            reply=calls.Granted(grant=GRANT),
            replied={"grant": GRANT.to_dict()},
            wrong={"mirrors": (["nobody"], [BOB.peer] * (calls.MIRRORS_MAX + 1))},
        ),
        Case(
            request=calls.Prove(digest=ID, offset=1, length=2, nonce="a1" * 16),
            header={"digest": ID, "offset": 1, "length": 2, "nonce": "a1" * 16},
            reply=calls.Proven(proof=ID),
            replied={"proof": ID},
            wrong={"digest": ("", ID[:-1]), "length": (0, PROOF_BYTES_MAX + 1), "nonce": ("", "-" * NONCE_CHARS)},
        ),
        Case(
            request=calls.GetKeepers(),
            header={},
            reply=calls.Counted(count=KEEPERS),
            replied={"count": KEEPERS.to_dict()},
        ),
    )
}
OF_TYPE: dict[Any, tuple[Any, ...]] = {
    int: ("1", 1.5, True, []),
    float: ("1", True, {}),
    bool: (1, "yes"),
    str: (7, [], {}),
    ModuleId: (7, "nonsense", {}),
    PathId: (7, "nonsense", {}),
    Sealed: (7, [], {}, {"document": {}, "signature": "00"}, CONTRIBUTION.to_dict() | {"signature": "00" * 64}),
    tuple: (7, {}, "x", [7], [{}]),
    dict: (7, [], "x", {"P0-1": "x"}),
    Custody: (7, [], {}, {"peer": BOB.peer}),
}
"""What is not a value of the type."""


def wrong_values(kind: Any, hint: Any, known: dataclasses.Field[Any]) -> Iterator[Any]:
    """What a field must not be: of other types, and just out of its bounds."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        [hint] = [one for one in typing.get_args(hint) if one is not type(None)]
    yield from OF_TYPE[typing.get_origin(hint) or getattr(hint, "__supertype__", hint)]
    if known.metadata.get("low") is not None:
        yield known.metadata["low"] - 1
    if known.metadata.get("high") is not None:
        yield known.metadata["high"] + 1


def unsound(kind: Any, header: dict[str, Any], more: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """The header with one thing wrong at a time."""
    hints = typing.get_type_hints(kind)
    for known in dataclasses.fields(kind):
        wire = known.name.rstrip("_")
        if known.name != "body":
            if known.default is dataclasses.MISSING and known.default_factory is dataclasses.MISSING:
                yield {name: value for name, value in header.items() if name != wire}
                yield header | {wire: None}
            for value in (*wrong_values(kind, hints[known.name], known), *more.get(wire, ())):
                yield header | {wire: value}


def test_every_call_has_a_case() -> None:
    assert CASES.keys() == CALLS.keys() and len(CALLS) == 38


@pytest.mark.parametrize("method", CASES)
def test_a_call_has_the_bytes_that_it_always_had_and_is_read_as_it_was_sent(method: str) -> None:
    case = CASES[method]
    kind, body = type(case.request), getattr(case.request, "body", b"")
    header, sent = encode(case.request)
    assert canonical_bytes(header) == canonical_bytes(case.header) and sent == body
    assert frames.read_request(frames.request(kind.METHOD, header, body)) == (method, case.header)
    assert decode(kind, case.header | {"of_a_later_version": 1}, body, where="it") == case.request
    replied, answered = encode(case.reply)
    assert canonical_bytes(replied) == canonical_bytes(case.replied) and answered == getattr(case.reply, "body", b"")


@pytest.mark.parametrize("method", CASES)
async def test_a_request_with_anything_wrong_is_malformed_and_no_handler_runs(method: str) -> None:
    case, ran = CASES[method], []
    kind, body = type(case.request), getattr(case.request, "body", b"")

    async def handler(sender: object, request: object) -> Any:
        ran.append(request)
        return case.reply

    client, server = two_swarms()
    kind.serve(server, handler)
    for header in unsound(kind, case.header, case.wrong):
        with pytest.raises(Refused) as refused:
            await client.call(server.peer, method, header, body, timeout_s=TIMEOUT_S)
        assert refused.value.reason == Reason.MALFORMED and ran == [], header
    assert await case.request.call(client, server.peer, timeout_s=TIMEOUT_S) == case.reply
    assert ran == [case.request]


@pytest.mark.parametrize("method", [method for method, case in CASES.items() if case.replied])
async def test_a_reply_with_anything_wrong_does_not_reach_the_caller(method: str) -> None:
    case = CASES[method]
    client, server = two_swarms()
    said: list[dict[str, Any]] = []

    async def answer(sender: object, header: object, body: bytes) -> Reply:
        return Reply(said[-1], getattr(case.reply, "body", b""))

    server.serve(method, answer)
    for header in unsound(type(case.reply), case.replied, {}):
        said.append(header)
        with pytest.raises(IntegrityError):
            await case.request.call(client, server.peer, timeout_s=TIMEOUT_S)
    assert said
    said.append(case.replied | {"of_a_later_version": 1})
    assert await case.request.call(client, server.peer, timeout_s=TIMEOUT_S) == case.reply


def two_swarms() -> tuple[Swarm, Swarm]:
    network = MemoryNetwork(0, SystemClock())
    return network.join(ALICE), network.join(BOB)


def test_what_is_not_there_is_left_out() -> None:
    assert encode(calls.GetChain(module=MODULE, after=0)) == ({"module": "L0.M1", "after": 0}, b"")
    assert encode(calls.Scoring()) == ({}, b"") and encode(calls.Scoring(wait=True)) == ({"wait": True}, b"")
    assert decode(calls.GetDecrees, {}, b"", where="it") == calls.GetDecrees()


def test_half_a_piece_of_work_is_none() -> None:
    for header in ({"path": "P0-1"}, {"sharding": 1, "snapshots": []}):
        with pytest.raises(IntegrityError, match="go together"):
            decode(calls.Scoring, header, b"", where="it")


def test_the_largest_offset_is_exact_in_every_reader() -> None:
    assert float(COUNT_MAX) + 1 == 2**53


def test_reasons_of_calls_are_words_that_fit_into_a_refusal() -> None:
    assert all(set(kind.REFUSES) <= set(Reason) for kind in CALLS.values())
    assert all(len(reason) <= frames.REASON_CHARS_MAX for reason in Reason)
