"""Who is no leader, no mirror and no coordinator, and says so: forged grants, versions, manifests, scores."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from hostile_harness import HONEST, Attacker, Battlefield, Target

from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.errors import IntegrityError, WrongRun
from dipaco_p2p.node.items import items_reply, read_items
from dipaco_p2p.node.stages import fetch_stages
from dipaco_p2p.protocol.documents import BlobRef, Contribution, Custody, Grant, Scores, Sharding, seal, unseal
from dipaco_p2p.protocol.liveness import Heartbeat
from dipaco_p2p.protocol.records import peers_key
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.strict import plain
from dipaco_p2p.swarm.api import Handler, Reply
from dipaco_p2p.topology import ModuleId, PathId

pytestmark = pytest.mark.libp2p

MODULE, PATH = "L1.M0", PathId((0, 0))
GONE = "f" * 64


def grant(
    attacker: Attacker, *, author: PeerId | None = None, term: int = 2**40, after: int = 0, **changes: Any
) -> Any:
    """A grant to the attacker, signed by the attacker, whoever it says has signed it."""
    document = Grant(
        run=attacker.run.id,
        module=ModuleId.parse(MODULE),
        term=term,
        leader=attacker.peer,
        mirrors=(),
        after=after,
        author=author or attacker.peer,
    )
    return attacker.sealed("grant", plain(dataclasses.replace(document, **changes)))


@contextlib.contextmanager
def served(field: Battlefield, method: str, answer: Handler) -> Iterator[None]:
    """The attacker answers `method` so, while the block runs."""
    handlers = field.attacker.swarm._dispatcher._handlers  # type: ignore[attr-defined]
    name = field.attacker.run.id[:16] + "/" + method if method != "run.manifest" else method
    handlers[name] = answer
    try:
        yield
    finally:
        del handlers[name]


def shown_mandate(field: Battlefield) -> contextlib.AbstractContextManager[None]:
    """Whoever asks the attacker for its mandate gets what it made up."""
    grants = [unseal(Grant, grant(field.attacker))]

    async def answer(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        return items_reply(grants)

    return served(field, "module.mandate", answer)


def test_calls_for_leaders_get_a_stranger_a_reason(field: Battlefield) -> None:
    """Whatever grant it shows: none, one of its own, one with the coordinator's name and its own signature."""

    async def attack(target: Target, grant: Any) -> None:
        module: dict[str, Any] = {"module": MODULE} | ({} if grant is None else {"grant": grant})
        contribution = await field.attacker.contribution(field.leader, PATH, ModuleId.parse(MODULE), b"x" * 100)
        version = await field.attacker.head(field.leader, ModuleId.parse(MODULE))
        assert version is not None
        forged = dataclasses.replace(version, version=version.version + 1, author=field.attacker.peer)
        sealed = {
            "contribution": seal(field.attacker.swarm.signer, contribution).to_dict(),
            "version": seal(field.attacker.swarm.signer, forged).to_dict(),
        }
        expected = {"malformed", "not-leader"} if grant is not None else {"not-leader", "payload-missing"}
        calls = {
            "mirror.contribution": module | {"contribution": sealed["contribution"]},
            "mirror.version": module | {"version": sealed["version"], "final": 0, "final_signature": ""},
            "mirror.follow": module,
        }
        for method, header in calls.items():
            reason = await field.attacker.ask(target, method, header)
            assert reason in expected, f"{method}: {reason}"

    with field.attacked(), shown_mandate(field):
        for target in (field.seed, field.leader):
            for shown in (None, grant(field.attacker), grant(field.attacker, author=field.seed.peer)):
                field.background.run(attack(target, shown))


MALFORMED: dict[str, dict[str, Any]] = {
    "no module": {},
    "a module that is none": {"module": "L9.M9"},
    "a module with a path in it": {"module": "../identity.key"},
    "a module of many digits": {"module": "L" + "1" * 4000 + ".M0"},
    "a module in lists": {"module": [["L1.M0"]]},
}
METHODS = (
    "mirror.state",
    "mirror.chain",
    "mirror.open",
    "mirror.follow",
    "module.mandate",
    "module.round",
    "module.next",
)


def test_malformed_questions_are_refused_by_every_method(field: Battlefield) -> None:
    async def attack(target: Target) -> None:
        for method in METHODS:
            for name, header in MALFORMED.items():
                reason = await field.attacker.ask(target, method, header | {"after": 0, "wait_s": 0.0})
                assert reason in ("malformed", "wrong-module", "not-leader"), f"{method}, {name}: {reason}"
        for after in (-1, 0.5, "1", True, [1], None):
            assert await field.attacker.ask(target, "mirror.chain", {"module": MODULE, "after": after}) == "malformed"
        for wait_s in (-1, 11, 1e300, 10**4000, "1", None):
            header = {"module": MODULE, "after": 0, "wait_s": wait_s}
            assert await field.attacker.ask(target, "module.next", header) in ("malformed", "not-leader")

    with field.attacked():
        for target in (field.seed, field.leader):
            field.background.run(attack(target))


def test_a_stranger_has_no_work_measured_or_repeated(field: Battlefield) -> None:
    """An audit is a round's training: whoever leads no module gets none, of its own work or of a hundred others'."""

    async def attack(target: Target) -> None:
        contribution = await field.attacker.contribution(field.leader, PATH, ModuleId.parse(MODULE), b"x" * 100)
        lies = [dataclasses.replace(contribution, tokens=number, steps=2**40) for number in range(1, 101)]
        for is_audit in (False, True):
            headers = [{"contribution": seal(field.attacker.swarm.signer, lie).to_dict()} for lie in lies]
            asked = (field.attacker.ask(target, "module.appraise", each | {"is_audit": is_audit}) for each in headers)
            assert set(await asyncio.gather(*asked)) <= {"not-leader", "busy"}
        for wrong in (1, "yes", [], None, {}, 10**4000):
            header = headers[0] | {"is_audit": wrong}
            assert await field.attacker.ask(target, "module.appraise", header) == "malformed"

    with field.attacked():
        for target in (field.seed, field.leader):
            field.background.run(attack(target))


def test_nobody_takes_a_module_from_a_leader_that_lives(field: Battlefield) -> None:
    async def attack() -> None:
        for term in (0, 1, 2, 3, 100, 2**40, 2**41, 10**4000, -1, 0.5, "1", None):
            for mandate in ([], [grant(field.attacker)], [grant(field.attacker, author=field.seed.peer)], [{}], "x"):
                header = {"module": MODULE, "term": term, "mirrors": [], "mandate": mandate}
                reason = await field.attacker.ask(field.seed, "archive.adopt", header)
                assert reason in ("not-leader", "malformed"), f"{term} {reason}"
        mirrors: list[Any] = [["x"] * 1000, [field.attacker.peer], [1], "x", [field.leader.peer] * 2]
        for named in mirrors:
            header = {"module": MODULE, "term": 2, "mirrors": named, "mandate": []}
            assert await field.attacker.ask(field.seed, "archive.adopt", header) in ("not-leader", "malformed")

    leading = len(field.leader.program.events("leads"))
    with field.attacked(), shown_mandate(field):
        field.background.run(attack())
    assert len(field.leader.program.events("leads")) == leading


def test_a_stranger_who_shows_a_grant_and_then_says_nothing_holds_nobody_up(field: Battlefield) -> None:
    """Its mandate is asked for; it takes the question, and lets it lie."""
    asked = asyncio.Event()

    async def silent(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        asked.set()
        await asyncio.sleep(60)
        return Reply()

    async def attack(target: Target) -> set[str]:
        header = {"module": MODULE, "grant": grant(field.attacker)}
        asks = (field.attacker.ask(target, "mirror.state", header) for _ in range(8))
        return {str(said) for said in await asyncio.gather(*asks, return_exceptions=True)}

    with field.attacked(), served(field, "module.mandate", silent):
        calls = [field.background.start(attack(target)) for target in (field.seed, field.leader)]
        field.assert_goes_on()
        field.assert_goes_on()
        for call in calls:
            assert HONEST not in call.result(60)
    assert asked.is_set()


def test_long_polls_by_the_hundred_are_bounded(field: Battlefield) -> None:
    """Each of them with as large a header as may be."""

    async def attack() -> list[str]:
        head = await field.attacker.head(field.leader, ModuleId.parse(MODULE))
        after = head.version if head else 0
        header = {"module": MODULE, "after": after, "wait_s": 10.0, "junk": [0] * 16_000}
        polls = (field.attacker.ask(field.leader, "module.next", header) for _ in range(200))
        return [str(said) for said in await asyncio.gather(*polls, return_exceptions=True)]

    with field.attacked():
        assert "busy" in field.background.run(attack())


def test_scores_that_are_lies_are_refused(field: Battlefield) -> None:
    async def attack() -> None:
        for change, reason in {
            (): "other",
            (("run", GONE),): "wrong-run",
            (("author", field.leader.peer),): "malformed",
            (("path", "P0-9"),): "malformed",
            (("sharding", 9),): "malformed",
            (("modules", (GONE,) * 1000),): "other",
            (("path", "P" + "-".join(["0"] * 40)),): "malformed",
        }.items():
            scores = Scores(
                run=field.run.id,
                sharding=1,
                path=PATH,
                modules=(GONE, GONE),
                table=BlobRef.of(b"nothing"),
                author=field.attacker.peer,
            )
            header = {"scores": field.attacker.sealed("scores", plain(scores) | dict(change))}
            assert await field.attacker.ask(field.seed, "run.scores", header) == reason, change
        table = b"\0" * 400
        await field.attacker.upload(field.seed, table)
        scores = dataclasses.replace(scores, table=BlobRef.of(table))
        header = {"scores": seal(field.attacker.swarm.signer, scores).to_dict()}
        assert await field.attacker.ask(field.seed, "run.scores", header) == "other"

    with field.attacked():
        field.background.run(attack())


def test_a_sharding_that_the_coordinator_did_not_sign_is_none(field: Battlefield) -> None:
    async def attack() -> None:
        shards = tuple(field.run.manifest.shards)
        blob = BlobRef.of(b"router")
        document = Sharding(
            run=field.run.id,
            number=1,
            from_round=1,
            router=blob,
            token_router=blob,
            shards=shards,
            author=field.seed.peer,
        )
        contribution = await field.attacker.contribution(field.leader, PATH, ModuleId.parse(MODULE), b"x" * 100)
        sealed = seal(field.attacker.swarm.signer, dataclasses.replace(contribution, sharding=1)).to_dict()
        for author in (field.seed.peer, field.attacker.peer):
            forged = field.attacker.sealed("sharding", plain(document) | {"author": author})
            header = {"contribution": sealed, "sharding": forged}
            assert await field.attacker.ask(field.leader, "module.contribute", header) == "malformed"

    with field.attacked():
        field.background.run(attack())


def test_a_newcomer_that_asks_a_liar_for_the_run_is_told_so(field: Battlefield) -> None:
    """A manifest that somebody else signed, or changed, or one of lists: an error of one line, and not a run."""
    true = canonical_bytes([field.run.sealed.to_dict()])
    manifest = plain(field.run.manifest)
    answers = {
        "another author": canonical_bytes([field.attacker.sealed("manifest", manifest)]),
        "its own author": canonical_bytes(
            [field.attacker.sealed("manifest", manifest | {"author": field.attacker.peer})]
        ),
        "one byte": true.replace(b'"rounds":', b'"roundz":', 1),
        "three stages": canonical_bytes([field.run.sealed.to_dict()] * 3),
        "no JSON": b"\xff\xfe",
        "lists": b"[" * 100_000,
        "a number": b"1" * 100_000,
        "nothing": b"",
    }

    async def attack() -> None:
        for name, answer in answers.items():

            async def lie(peer: PeerId, header: dict[str, Any], body: bytes, answer: bytes = answer) -> Reply:
                return Reply({}, answer)

            with served(field, "run.manifest", lie), pytest.raises((IntegrityError, WrongRun)):
                await fetch_stages(field.bystander, field.attacker.peer, expected=field.run.id)
                raise AssertionError(name)

    with field.attacked():
        field.background.run(attack())


def test_what_a_stranger_may_read_is_what_everybody_may(field: Battlefield) -> None:
    """Chains, open contributions and mandates are public; asking for them again and again costs nobody else."""

    async def attack(target: Target) -> None:
        for method in ("mirror.chain", "mirror.open", "module.mandate"):
            header = {"module": MODULE, "after": "" if method == "mirror.open" else 0}
            said = await asyncio.gather(*(field.attacker.ask(target, method, header) for _ in range(12)))
            assert set(said) <= {HONEST, "busy"}, method
        page = await field.attacker.call(target, "module.mandate", {"module": MODULE})
        assert all(one.document.leader == field.leader.peer for one in (await read_items(Grant, page))[-1:])

    with field.attacked():
        for target in (field.seed, field.leader):
            field.background.run(attack(target))


def test_a_stranger_that_calls_itself_a_seed_is_handed_nothing(field: Battlefield) -> None:
    """Attack: liars that said "kept" were named in 77 of 80 receipts as the second disk."""
    attacker, volunteer, asked = field.new_attacker("false-seed"), field.leader.program, list[str]()

    async def keep(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        asked.append(id_ := unseal(Contribution, header["contribution"]).id)
        return Reply({"custody": plain(Custody.sign(attacker.swarm.signer, id_))})

    async def write(peer: PeerId, header: dict[str, Any], body: bytes) -> Reply:
        return Reply({"have": header["size"], "done": True, "range": 2**20})

    heartbeat = Heartbeat(role="seed", owns=True, addresses=attacker.swarm.addresses)
    attacker.scoped.serve("mirror.contribution", keep)
    attacker.scoped.serve("blob.write", write)
    with field.attacked():
        field.background.run(attacker.scoped.put(peers_key(attacker.run.id), plain(heartbeat), ttl_s=20.0))
        before = len(volunteer.events("receipt"))
        volunteer.wait_event("receipt", count=before + 12)
    assert asked == []
    assert all(attacker.peer not in event["holders"] for event in volunteer.events("receipt"))
