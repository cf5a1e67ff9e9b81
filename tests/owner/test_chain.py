"""What a mirror and the archive take: from the leader only, and nothing that they cannot make again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mirror_harness import MODULE, ONE, OTHER, Shelf, on_shelf, refusal, require_no
from tiny_run import SEED_NUMBER, gradient_bytes, granted, signer
from trickling import trickle
from virtual_time import eventually

from dipaco_p2p.config import RunConfig
from dipaco_p2p.errors import IntegrityError, Refused, Unreachable
from dipaco_p2p.node.calls import GetBranch, GetChain, GetOpen
from dipaco_p2p.node.items import items_reply
from dipaco_p2p.node.ledger import Ledger
from dipaco_p2p.node.node import LEAST_BYTES_S, WAIT_S, serve_store
from dipaco_p2p.node.run import APPRAISALS_BYTES_MAX
from dipaco_p2p.owner.outer_state import KeptState
from dipaco_p2p.protocol.documents import BlobRef, ModuleVersion, Sealed, cosign, is_cosigned, seal
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.protocol.versions import Branch
from dipaco_p2p.swarm.memory import MemorySwarm
from dipaco_p2p.topology import ModuleId

both = pytest.mark.parametrize("keeps_everything", [False, True], ids=["mirror", "archive"])


@both
async def test_an_honest_version_is_made_again_kept_and_cosigned(tmp_path: Path, keeps_everything: bool) -> None:
    async with on_shelf(tmp_path, keeps_everything=keeps_everything) as shelf:
        shelf.adopt(ONE, term=1)
        for number in (1, 2, 3):
            version, made = shelf.version(number)
            signature = await shelf.keep(version)
            assert is_cosigned(version, shelf.node.peer, signature)
            assert shelf.ledger.versions[-1] == version.cosigned({shelf.node.peer: signature})
            for blob in (made.snapshot, made.update, made.state_blob):
                assert shelf.node.store.get(BlobRef.of(*blob).digest) == b"".join(blob), "it made them itself"
        assert Ledger(shelf.run, shelf.node.store, MODULE).versions == shelf.ledger.versions
        assert shelf.ledger.final == (3 if keeps_everything else 0)


@both
async def test_the_same_version_twice_changes_nothing(tmp_path: Path, keeps_everything: bool) -> None:
    async with on_shelf(tmp_path, keeps_everything=keeps_everything) as shelf:
        shelf.adopt(ONE, term=1)
        version, _ = shelf.version(1)
        signatures = await asyncio.gather(shelf.keep(version), shelf.keep(version))
        assert len(set(signatures)) == 1 and await shelf.keep(version) == signatures[0]
        assert len(shelf.ledger.versions) == 1


Lie = Callable[[Shelf, ModuleVersion], ModuleVersion]


def invented_update(shelf: Shelf, version: ModuleVersion) -> ModuleVersion:
    return replace(version, update=shelf.node.store.put(gradient_bytes(shelf.run, MODULE, seed=99)))


def invented_parameters(shelf: Shelf, version: ModuleVersion) -> ModuleVersion:
    return replace(version, snapshot=BlobRef.of(shelf.node.store.get(version.parent) or b"no genesis here"))


def invented_state(shelf: Shelf, version: ModuleVersion) -> ModuleVersion:
    return replace(version, state=shelf.node.store.put(b"momentum"))


def wrong_weight(shelf: Shelf, version: ModuleVersion) -> ModuleVersion:
    one, other = version.shares
    return replace(version, shares=(replace(one, weight=0.25), replace(other, weight=0.75)))


def a_share_less(shelf: Shelf, version: ModuleVersion) -> ModuleVersion:
    [one, _] = version.shares
    return replace(version, shares=(replace(one, weight=1.0),), weight=one.tokens)


def more_tokens(shelf: Shelf, version: ModuleVersion) -> ModuleVersion:
    one, other = version.shares
    return replace(version, shares=(replace(one, tokens=one.tokens + 1), other), weight=version.weight + 1)


def heavier_chain(shelf: Shelf, version: ModuleVersion) -> ModuleVersion:
    return replace(version, weight=version.weight + 1)


def another_author(shelf: Shelf, version: ModuleVersion) -> ModuleVersion:
    one, other = version.shares
    return replace(version, shares=(replace(one, peer=OTHER.peer), other))


def lower_loss(shelf: Shelf, version: ModuleVersion) -> ModuleVersion:
    one, other = version.shares
    return replace(version, shares=(replace(one, loss=0.1), other))


def another_order(shelf: Shelf, version: ModuleVersion) -> ModuleVersion:
    return replace(version, shares=version.shares[::-1])


def other_settings(shelf: Shelf, version: ModuleVersion) -> ModuleVersion:
    return replace(version, lr=version.lr * 2)


def clipped_but_not_averaged_so(shelf: Shelf, version: ModuleVersion) -> ModuleVersion:
    return replace(version, clip_norm=1e-6)


def fresh_without_need(shelf: Shelf, version: ModuleVersion) -> ModuleVersion:
    return replace(version, is_fresh=True)


def no_update(shelf: Shelf, version: ModuleVersion) -> ModuleVersion:
    return replace(version, update=None)


def no_state(shelf: Shelf, version: ModuleVersion) -> ModuleVersion:
    return replace(version, state=None)


LIES: tuple[Lie, ...] = (
    invented_update,
    invented_parameters,
    invented_state,
    wrong_weight,
    a_share_less,
    more_tokens,
    heavier_chain,
    another_author,
    lower_loss,
    another_order,
    other_settings,
    clipped_but_not_averaged_so,
    fresh_without_need,
    no_update,
    no_state,
)


@both
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
async def test_a_lying_leader_is_not_cosigned(tmp_path: Path, lie: Lie, keeps_everything: bool) -> None:
    async with on_shelf(tmp_path, keeps_everything=keeps_everything) as shelf:
        shelf.adopt(ONE, term=1)
        first, _ = shelf.version(1)
        await shelf.keep(first)
        honest, _ = shelf.version(2)
        await require_no(shelf.keep(seal(ONE, lie(shelf, honest.document))))
        assert shelf.ledger.head.version == 1 and shelf.node.store.documents("version-") == [
            f"version-{MODULE}-00000001"
        ]
        signature = await shelf.keep(honest)
        assert is_cosigned(honest, shelf.node.peer, signature), "and the honest one is taken still"


@both
@pytest.mark.parametrize(("number", "size"), [(1, 1.0), (3, 0.05), (3, 1e-7)], ids=["at the start", "long", "tiny"])
async def test_a_leader_that_counts_any_norm_is_not_cosigned(
    tmp_path: Path, number: int, size: float, keeps_everything: bool
) -> None:
    """Attack: only the leader looked at norms, and the coordinator signed forty versions of garbage in a second."""
    async with on_shelf(tmp_path, keeps_everything=keeps_everything) as shelf:
        shelf.adopt(ONE, term=1)
        for before in range(1, number):
            await shelf.keep(shelf.version(before)[0])
        garbage, _ = shelf.version(number, size=size, variant=1)
        await require_no(shelf.keep(garbage))
        assert shelf.ledger.head.version == number - 1
        await shelf.keep(shelf.version(number)[0])


@both
async def test_a_leader_that_counts_too_many_of_one_path_is_not_cosigned(
    tmp_path: Path, keeps_everything: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_shelf(tmp_path, keeps_everything=keeps_everything) as shelf:
        shelf.adopt(ONE, term=1)
        version, _ = shelf.version(1)
        monkeypatch.setattr(RunConfig, "places", lambda config, module: 0)
        await require_no(shelf.keep(version))
        monkeypatch.setattr(RunConfig, "places", lambda config, module: 1)
        await shelf.keep(version)


async def test_nobody_vouches_for_what_only_a_friend_of_its_leader_has_made_again(tmp_path: Path) -> None:
    """Attack: garbage that the leader's second mirror had cosigned was taken ready made by the mirror that the
    coordinator chose. It made the next version again, and trainers believed its word for both."""
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        hostile, group = shelf.world.peer(1), (shelf.node.peer, OTHER.peer)
        await hostile.presence.beat()
        await shelf.node.watch.refresh()
        assert shelf.node.mandates.believes(MODULE, granted(shelf.run, MODULE, term=1, leader=ONE.peer, mirrors=group))
        garbage, made = shelf.version(1, size=1.0, variant=1, is_handed_in=False)
        for blob in (made.snapshot, made.update, made.state_blob):
            hostile.store.put(b"".join(blob))
        serve_store(hostile.swarm, hostile.store)
        shown = Ledger(shelf.run, hostile.store, MODULE)
        shown.append(garbage.cosigned({OTHER.peer: cosign(OTHER, garbage)}))

        async def branch(sender: str, request: GetBranch) -> Branch:
            return shown.branch

        async def chain(sender: str, request: GetChain) -> Any:
            return items_reply(shown.versions[request.after :])

        async def opens(sender: str, request: GetOpen) -> Any:
            return items_reply([])

        for call, answer in ((GetBranch, branch), (GetChain, chain), (GetOpen, opens)):
            call.serve(hostile.swarm, answer)
        await require_no(shelf.keep(shelf.version(2)[0]))
        assert shelf.ledger.head.version == 0


@both
async def test_a_version_that_counts_what_is_not_here_is_refused_until_it_is(
    tmp_path: Path, keeps_everything: bool
) -> None:
    async with on_shelf(tmp_path, keeps_everything=keeps_everything) as shelf:
        shelf.adopt(ONE, term=1)
        version, _ = shelf.version(1, is_handed_in=False)
        assert await refusal(shelf.keep(version)) == "contribution-missing"
        for path in (0, 1):
            shelf.chain.keep_contribution(ONE.peer, shelf.contribution(1, path=path)[0])
        await shelf.keep(version)
        assert shelf.ledger.head.version == 1


@both
async def test_an_invented_contribution_is_not_counted(tmp_path: Path, keeps_everything: bool) -> None:
    """It is here and signed, but its base is none of this chain."""
    async with on_shelf(tmp_path, keeps_everything=keeps_everything) as shelf:
        shelf.adopt(ONE, term=1)
        first, _ = shelf.version(1)
        await shelf.keep(first)
        honest, _ = shelf.version(2)
        odd = shelf.contribution(2, base=1)[0]
        wrong = seal(signer(30), replace(odd.document, base_digest="7" * 64))
        shelf.chain.add(wrong)
        one = honest.document.shares[0]
        lie = replace(one, contribution=wrong.id)
        shares = tuple(sorted((lie, honest.document.shares[1]), key=lambda share: (share.path, share.contribution)))
        document = replace(honest.document, shares=shares)
        assert await refusal(shelf.keep(seal(ONE, document))) == Reason.UNKNOWN_BASE
        await shelf.keep(honest)


@both
async def test_only_the_leader_of_the_newest_term_hands_in(tmp_path: Path, keeps_everything: bool) -> None:
    async with on_shelf(tmp_path, keeps_everything=keeps_everything) as shelf:
        version, _ = shelf.version(1)
        contribution, _ = shelf.contribution(2, base=0)
        assert await refusal(shelf.keep(version)) == Reason.NOT_LEADER, "nobody was granted anything yet"
        shelf.adopt(ONE, term=1)
        assert await refusal(shelf.keep(version, sender=OTHER)) == Reason.NOT_LEADER
        await shelf.keep(version)
        shelf.adopt(OTHER, term=2)
        second, _ = shelf.version(2)
        assert await refusal(shelf.keep(second)) == Reason.NOT_LEADER
        with pytest.raises(Refused) as caught:
            shelf.chain.keep_contribution(ONE.peer, contribution)
        assert caught.value.reason == Reason.NOT_LEADER
        shelf.chain.keep_contribution(OTHER.peer, contribution)
        assert contribution.id in shelf.ledger.open


@both
async def test_whoever_took_over_while_a_leaders_calls_waited_finds_the_chain_as_it_was(
    tmp_path: Path, keeps_everything: bool
) -> None:
    """Once a mirror led from version 0, and a call of the former leader that had waited made its chain go to 1: no
    trainer was ever shown that version, and all waited for it without an end."""
    async with on_shelf(tmp_path, keeps_everything=keeps_everything) as shelf:
        shelf.adopt(ONE, term=1)
        versions = [shelf.version(1)[0], shelf.version(2)[0]]
        async with shelf.node.averaging:  # the first waits here, the others for the first
            waiting = [asyncio.ensure_future(shelf.keep(version)) for version in versions]
            waiting.append(asyncio.ensure_future(shelf.chain.welcome(ONE.peer)))
            await asyncio.sleep(1)
            shelf.adopt(shelf.node.swarm.signer, term=2)
        assert [await refusal(work) for work in waiting] == [Reason.NOT_LEADER] * 3
        assert shelf.ledger.versions == [] and len(shelf.ledger.open) == 4, "as the new leader found it"


async def led_by_one(shelf: Shelf) -> MemorySwarm:
    """A leader of whom blobs can be had."""
    member = shelf.world.peer(1)
    assert member.peer == ONE.peer
    await member.presence.beat()
    await shelf.node.watch.refresh()
    shelf.adopt(ONE, term=1)
    assert isinstance(member.swarm, MemorySwarm)
    return member.swarm


@both
@pytest.mark.parametrize("blob", ["snapshot", "update", "state", "appraisals"])
async def test_of_a_version_that_names_more_than_can_be_nothing_is_fetched(
    tmp_path: Path, blob: str, keeps_everything: bool
) -> None:
    """Attack: appraisals of 2^40 bytes, from a leader that sent quickly, filled the coordinator's memory."""
    async with on_shelf(tmp_path, keeps_everything=keeps_everything) as shelf:
        served: list[str] = []
        ref = replace(trickle(await led_by_one(shelf), bytes(2**20), on_asked=served.append), size=2**40)
        version = replace(shelf.version(1)[0].document, **{blob: ref})
        with pytest.raises(IntegrityError, match="limit"):
            await shelf.keep(seal(ONE, version))
        assert not served


@both
async def test_a_leader_that_trickles_holds_a_chain_until_the_next_grant_at_most(
    tmp_path: Path, keeps_everything: bool
) -> None:
    """Attack: what judges said, as large as may be and a little at a time, and no later leader's version was taken."""
    async with on_shelf(tmp_path, keeps_everything=keeps_everything) as shelf:
        served: list[str] = []
        said = trickle(await led_by_one(shelf), bytes(APPRAISALS_BYTES_MAX), on_asked=served.append)
        evil = seal(ONE, replace(shelf.version(1)[0].document, appraisals=said))
        held = asyncio.ensure_future(shelf.keep(evil))
        await eventually(lambda: bool(served))
        shelf.adopt(OTHER, term=2)
        honest, _ = shelf.version(1, leader=OTHER, term=2)
        async with asyncio.timeout(WAIT_S):
            await shelf.keep(honest, sender=OTHER)
        assert await refusal(held) == Reason.NOT_LEADER


@both
async def test_a_leader_that_trickles_is_waited_for_as_long_as_a_thin_line_takes(
    tmp_path: Path, keeps_everything: bool
) -> None:
    async with on_shelf(tmp_path, keeps_everything=keeps_everything) as shelf:
        swarm = await led_by_one(shelf)
        await shelf.keep(shelf.version(1)[0])  # so that only one blob is asked for
        said = trickle(swarm, bytes(2**18))
        evil = seal(ONE, replace(shelf.version(2)[0].document, appraisals=said))
        async with asyncio.timeout(WAIT_S + said.size / LEAST_BYTES_S + 1):
            with pytest.raises(Unreachable, match="did not come in"):
                await shelf.keep(evil)


async def test_a_leader_that_lists_what_it_trickles_has_a_new_mirror_for_the_time_of_one(tmp_path: Path) -> None:
    """Attack: each of 16,384 contributions would have had a time of its own, while the chain takes nothing else."""
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        swarm, listed = await led_by_one(shelf), []
        for number in range(20):
            payload = trickle(swarm, bytes([number]) * shelf.run.payload_bytes_max(MODULE))
            honest = shelf.contribution(1, variant=number)[0].document
            listed.append(seal(signer(30), replace(honest, payload=payload)))
        listed.sort(key=lambda sealed: sealed.id)

        async def branch(sender: str, request: GetBranch) -> Branch:
            return Ledger(shelf.run, shelf.world.peer(60).store, MODULE).branch

        async def opens(sender: str, request: GetOpen) -> Any:
            return items_reply(sealed for sealed in listed if sealed.id > request.after)

        GetBranch.serve(swarm, branch)
        GetOpen.serve(swarm, opens)
        async with asyncio.timeout(3 * (WAIT_S + shelf.run.payload_bytes_max(MODULE) / LEAST_BYTES_S)):
            await shelf.chain.welcome(ONE.peer)


async def test_an_outer_state_that_is_only_trickled_is_lost_after_some_tries(tmp_path: Path) -> None:
    """Attack: nobody else has it, the own disk has lost it, and the next leader never led."""
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        swarm = await led_by_one(shelf)
        await shelf.keep(shelf.version(1)[0])
        head = shelf.ledger.head
        assert head.state is not None
        trickle(swarm, bytes(head.state.size))
        shelf.node.store.drop(head.state.digest)
        async with asyncio.timeout(4 * (WAIT_S + head.state.size / LEAST_BYTES_S)):
            assert await KeptState(shelf.node).read_patiently(head, holders=[ONE.peer]) is None


async def test_who_is_not_in_the_group_takes_nothing(tmp_path: Path) -> None:
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        sealed = granted(shelf.run, MODULE, term=1, leader=ONE.peer, mirrors=(OTHER.peer,))
        assert shelf.node.mandates.believes(MODULE, sealed)
        version, _ = shelf.version(1)
        assert await refusal(shelf.keep(version)) == Reason.BUSY


@both
async def test_a_leader_hands_in_what_it_made_in_an_earlier_term(tmp_path: Path, keeps_everything: bool) -> None:
    """Its group changed before the version came over."""
    async with on_shelf(tmp_path, keeps_everything=keeps_everything) as shelf:
        first, _ = shelf.version(1, term=1)
        second, _ = shelf.version(2, term=2)
        shelf.adopt(ONE, term=1)
        shelf.adopt(ONE, term=2)
        for version in (first, second):
            await shelf.keep(version)
        assert [sealed.document.term for sealed in shelf.ledger.versions] == [1, 2]


@both
async def test_a_contribution_needs_its_run_module_and_payload(tmp_path: Path, keeps_everything: bool) -> None:
    async with on_shelf(tmp_path, keeps_everything=keeps_everything) as shelf:
        shelf.adopt(ONE, term=1)
        contribution, _ = shelf.contribution(1)
        odd: dict[str, Any]
        for odd, reason in (
            ({"run": "0" * 64}, Reason.WRONG_RUN),
            ({"payload": BlobRef(digest="1" * 64, size=5)}, "payload-missing"),
            ({"payload": replace(contribution.document.payload, size=5)}, "payload-missing"),
            ({"module": ModuleId(2, 0)}, Reason.WRONG_MODULE),
        ):
            wrong = seal(signer(30), replace(contribution.document, **odd))
            with pytest.raises(Refused) as caught:
                shelf.chain.keep_contribution(ONE.peer, wrong)
            assert caught.value.reason == reason
        assert not shelf.ledger.open
        shelf.chain.keep_contribution(ONE.peer, contribution)
        assert list(Ledger(shelf.run, shelf.node.store, MODULE).open) == [contribution.id], "it is on disk"


async def test_payloads_leave_the_disk_of_a_mirror_when_they_are_final_and_old_blobs_as_well(tmp_path: Path) -> None:
    async with on_shelf(tmp_path, keeps_everything=False, rounds=9) as shelf:
        shelf.adopt(ONE, term=1)
        made: list[Sealed[ModuleVersion]] = []
        for number in range(1, 6):
            version, _ = shelf.version(number)
            payloads = [sealed.document.payload.digest for sealed in shelf.ledger.open.values()]
            assert len(payloads) == 2
            await shelf.keep(version)
            assert all(shelf.node.store.size(name) is not None for name in payloads), "another branch may win yet"
            shelf.chain.note_final(number, cosign(signer(SEED_NUMBER), version))
            assert all(shelf.node.store.size(name) is None for name in payloads)
            made.append(version)
        here = [shelf.node.store.size(sealed.document.digest) is not None for sealed in made]
        assert here == [False, False, True, True, True]


async def test_a_trainer_keeps_the_chain_and_its_newest_snapshot(tmp_path: Path) -> None:
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        mirror, store = shelf.chain, shelf.node.store
        found = [shelf.version(number, is_handed_in=False) for number in (1, 2, 3)]
        versions = [sealed for sealed, _ in found]
        mirror.note(versions[:2], found[1][1].snapshot)
        mirror.note(versions[2:], found[2][1].snapshot)
        mirror.note(versions[1:], found[2][1].snapshot)  # nothing new
        again = Ledger(shelf.run, store, MODULE)
        assert again.versions == shelf.ledger.versions == versions
        assert store.get(versions[2].document.digest) == b"".join(found[2][1].snapshot)
        assert all(shelf.node.peer not in sealed.cosignatures for sealed in again.versions), "it made nothing again"


async def test_an_owner_knows_better_than_what_it_reads(tmp_path: Path) -> None:
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        shelf.adopt(ONE, term=1)
        version, made = shelf.version(1)
        shelf.chain.note([version], made.snapshot)
        assert shelf.ledger.versions == []


async def test_a_trainer_follows_to_another_branch_but_not_away_from_what_is_final(tmp_path: Path) -> None:
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        first, _ = shelf.version(1, is_handed_in=False)
        second, made = shelf.version(2, is_handed_in=False)
        shelf.chain.note([first, second], made.snapshot)
        branch, branch_made = shelf.version(1, leader=OTHER, term=2, is_handed_in=False, variant=1)
        shelf.chain.note([branch], branch_made.snapshot)
        assert shelf.ledger.versions == [branch]
        shelf.ledger.cosign(1, {signer(SEED_NUMBER).peer: cosign(signer(SEED_NUMBER), branch)})
        shelf.chain.note([first, second], made.snapshot)
        assert shelf.ledger.head == branch.document


async def test_the_same_work_gives_the_same_bytes_whoever_led(tmp_path: Path) -> None:
    async with on_shelf(tmp_path, keeps_everything=False) as shelf:
        one, _ = shelf.version(1)
        other, _ = shelf.version(1, leader=OTHER, term=2)
        assert one.document.digest == other.document.digest and one.id != other.id
