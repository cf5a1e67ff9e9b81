"""Whose work a run takes: everybody's, that of the listed, or that of whom a chain of invitations leads to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from version_harness import COORDINATOR, MANIFEST

from dipaco_p2p.canonical import canonical_bytes, digest
from dipaco_p2p.config import INVITE, LIST, LISTED_MAX, AdmissionConfig
from dipaco_p2p.errors import ConfigError, IntegrityError
from dipaco_p2p.protocol.documents import Manifest, document_id, seal, unseal
from dipaco_p2p.protocol.invitations import LINKS_MAX, Invitation, is_listed, objection
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.strict import load, plain

RUN = digest(b"the run")
ANNA, BERT, CARA, DORA, EVE = (Signer(bytes([number]) * 32) for number in range(11, 16))
INVITED = AdmissionConfig(policy=INVITE)

Chain = list[Invitation]


def invitation(author: Signer, peer: Signer, *, run: str = RUN) -> Invitation:
    return Invitation(run=run, peer=peer.peer, at_s=100, author=author.peer)


def chain(*signers: Signer) -> Chain:
    """From the coordinator over all of these."""
    return [invitation(author, peer) for author, peer in zip([COORDINATOR, *signers], signers, strict=False)]


def against(
    author: Signer,
    shown: Sequence[Invitation],
    *,
    admission: AdmissionConfig = INVITED,
    banned: Sequence[Signer] = (),
    idle: Sequence[Signer] = (),
) -> str:
    return objection(
        author.peer,
        shown,
        admission=admission,
        run=RUN,
        coordinator=COORDINATOR.peer,
        banned={signer.peer for signer in banned},
        has_worked=lambda peer: peer not in {signer.peer for signer in idle},
    )


@pytest.mark.parametrize("signers", [(ANNA,), (BERT, ANNA), (CARA, BERT, ANNA)])
def test_a_chain_from_the_coordinator_lets_its_last_peer_in(signers: tuple[Signer, ...]) -> None:
    assert against(signers[-1], chain(*signers)) == ""


FORGED: dict[str, tuple[Callable[[], Chain], str]] = {
    "nothing is shown": (lambda: [], "showed no invitation"),
    "it begins with a volunteer": (lambda: chain(CARA, BERT, ANNA)[1:], "invitation 1 is by"),
    "its end is cut off": (lambda: chain(CARA, BERT, ANNA)[:-1], "is for"),
    "its middle is cut out": (lambda: [chain(CARA, BERT, ANNA)[0], chain(CARA, BERT, ANNA)[2]], "invitation 2 is by"),
    "it is the other way round": (lambda: chain(CARA, BERT, ANNA)[::-1], "invitation 1 is by"),
    "somebody else signs in between": (lambda: [chain(CARA)[0], invitation(EVE, ANNA)], "invitation 2 is by"),
    "it is for somebody else": (lambda: chain(CARA, EVE), "is for"),
    "the first is to another run": (
        lambda: [dataclasses.replace(each, run=digest(b"another")) for each in chain(ANNA)],
        "invitation 1 is to run:",
    ),
    "the last is to another run": (
        lambda: [*chain(CARA), invitation(CARA, ANNA, run=digest(b"another"))],
        "invitation 2 is to run:",
    ),
    "it goes on for too long": (lambda: chain(*[CARA, BERT] * (LINKS_MAX // 2), ANNA), "limit"),
}


@pytest.mark.parametrize("what", FORGED)
def test_no_other_chain_lets_anybody_in(what: str) -> None:
    make, words = FORGED[what]
    assert words in against(ANNA, make())


@pytest.mark.parametrize("banned", [BERT, CARA, ANNA])
def test_a_ban_cuts_off_everybody_below(banned: Signer) -> None:
    """Cara has invited Bert, and Bert Anna; Dora was invited by Cara as well."""
    assert "banned" in against(ANNA, chain(CARA, BERT, ANNA), banned=[banned])
    assert ("banned" in against(DORA, chain(CARA, DORA), banned=[banned])) is (banned is CARA)


def test_who_has_not_worked_invites_nobody_and_needs_no_work_to_be_invited() -> None:
    assert "no work" in against(ANNA, chain(CARA, BERT, ANNA), idle=[CARA])
    assert "no work" in against(ANNA, chain(CARA, BERT, ANNA), idle=[BERT])
    assert against(ANNA, chain(CARA, BERT, ANNA), idle=[ANNA, COORDINATOR]) == ""


def test_the_coordinator_needs_no_invitation_and_an_open_run_asks_nobody() -> None:
    listed = AdmissionConfig(policy=LIST, peers=(ANNA.peer,))
    for admission in (INVITED, listed, AdmissionConfig()):
        assert against(COORDINATOR, [], admission=admission) == ""
    assert against(EVE, [], admission=AdmissionConfig()) == ""


def test_a_list_knows_its_peers_and_no_invitation_adds_to_it() -> None:
    listed = AdmissionConfig(policy=LIST, peers=(ANNA.peer,))
    assert against(ANNA, [], admission=listed) == ""
    assert "not on this run's list" in against(BERT, chain(BERT), admission=listed)


def test_who_is_not_on_a_list_is_not_listened_to_but_appointed_seeds_are() -> None:
    listed = AdmissionConfig(policy=LIST, peers=(ANNA.peer,))

    def heard(signer: Signer, admission: AdmissionConfig = listed) -> bool:
        return is_listed(signer.peer, admission=admission, coordinator=COORDINATOR.peer, seeds={DORA.peer})

    assert [heard(signer) for signer in (ANNA, COORDINATOR, DORA, EVE)] == [True, True, True, False]
    assert heard(EVE, INVITED) and heard(EVE, AdmissionConfig())


# -- the documents


def test_an_invitation_comes_back_from_the_wire_and_a_changed_one_does_not() -> None:
    sealed = seal(COORDINATOR, chain(ANNA)[0])
    assert unseal(Invitation, sealed.to_dict()) == sealed
    for changes in ({"peer": EVE.peer}, {"author": EVE.peer}, {"run": digest(b"another")}, {"at_s": 101}):
        forged = {**sealed.to_dict(), "document": {**sealed.to_dict()["document"], **changes}}
        with pytest.raises(IntegrityError, match="signature"):
            unseal(Invitation, forged)


@pytest.mark.parametrize(
    "changes", [{"run": "abc"}, {"peer": "nobody"}, {"peer": COORDINATOR.peer}, {"at_s": -1}, {"at_s": 2**32}]
)
def test_what_is_no_invitation_is_refused(changes: dict[str, Any]) -> None:
    document = plain(invitation(COORDINATOR, ANNA)) | changes
    signature = COORDINATOR.sign(Invitation.KIND, canonical_bytes(document))
    with pytest.raises(IntegrityError, match="malformed invitation"):
        unseal(Invitation, {"document": document, "signature": signature})


def test_a_manifest_from_before_there_were_policies_keeps_its_id() -> None:
    assert document_id(MANIFEST) == "50794f3a722b8774c04ce48e8d675531c4ab4bff025aaf9402902aeec4a49204"
    assert "admission" not in plain(MANIFEST.config)


def test_a_policy_is_in_the_manifest_and_comes_back() -> None:
    admission = AdmissionConfig(policy=LIST, peers=(ANNA.peer, BERT.peer))
    config = dataclasses.replace(MANIFEST.config, admission=admission)
    manifest = dataclasses.replace(MANIFEST, config=config, admission=LIST)
    sealed = seal(COORDINATOR, manifest)
    assert unseal(Manifest, sealed.to_dict()) == sealed and sealed.id != document_id(MANIFEST)
    with pytest.raises(ConfigError, match="in the config"):
        dataclasses.replace(MANIFEST, config=config)
    nobody = dataclasses.replace(config, admission=AdmissionConfig(policy=LIST, peers=("nobody",)))
    with pytest.raises(ConfigError, match="peer id"):
        dataclasses.replace(MANIFEST, config=nobody, admission=LIST)


def test_the_default_written_out_is_another_spelling_and_refused() -> None:
    document = plain(MANIFEST)
    document["config"]["admission"] = plain(AdmissionConfig())
    signature = COORDINATOR.sign(Manifest.KIND, canonical_bytes(document))
    with pytest.raises(IntegrityError, match="canonical"):
        unseal(Manifest, {"document": document, "signature": signature})


@pytest.mark.parametrize(
    "values",
    [
        {"policy": "closed"},
        {"policy": LIST},
        {"policy": INVITE, "peers": (ANNA.peer,)},
        {"peers": (ANNA.peer,)},
        {"policy": LIST, "peers": (ANNA.peer, ANNA.peer)},
        {"policy": LIST, "peers": tuple(f"peer {number}" for number in range(LISTED_MAX + 1))},
    ],
)
def test_a_policy_and_its_list_go_together(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="policy|admission"):
        load(AdmissionConfig, values, where="[admission]")


def test_the_longest_list_fits_into_a_manifest() -> None:
    peers = tuple(Signer(number.to_bytes(32, "big")).peer for number in range(1, LISTED_MAX + 1))
    config = dataclasses.replace(MANIFEST.config, admission=AdmissionConfig(policy=LIST, peers=peers))
    sealed = seal(COORDINATOR, dataclasses.replace(MANIFEST, config=config, admission=LIST))
    assert unseal(Manifest, sealed.to_dict()).id == sealed.id
