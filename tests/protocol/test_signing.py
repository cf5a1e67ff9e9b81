from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.protocol.signing import PeerId, Signer, peer_of, public_key_of, short, verify

ALICE, BOB = Signer(bytes([1]) * 32), Signer(bytes([2]) * 32)


def test_peer_id_is_the_libp2p_id_of_the_key() -> None:
    # From the libp2p peer id specification's test vector for Ed25519: private key, and the public key inside the id.
    private = bytes.fromhex("7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d")
    public = "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    signer = Signer(private)
    assert signer.public_key.hex() == public
    assert signer.peer.startswith("12D3KooW") and len(signer.peer) == 52
    assert public_key_of(signer.peer).hex() == public


def test_peer_and_key_are_inverse() -> None:
    for byte in range(64):
        key = bytes([byte]) * 32
        assert public_key_of(peer_of(key)) == key


def test_signature_is_of_one_peer_kind_and_data() -> None:
    signature = ALICE.sign("record", b"data")
    assert verify(ALICE.peer, "record", b"data", signature)
    assert not verify(BOB.peer, "record", b"data", signature)
    assert not verify(ALICE.peer, "manifest", b"data", signature)
    assert not verify(ALICE.peer, "record", b"datum", signature)
    assert not verify(ALICE.peer, "record", b"data", signature.upper())


@given(st.text(max_size=140), st.text(max_size=140))
def test_garbage_is_never_verified_and_never_raises(peer: str, signature: str) -> None:
    assert not verify(PeerId(peer), "record", b"", signature)
    assert not verify(ALICE.peer, "record", b"", signature)


@pytest.mark.parametrize("peer", ["", "1", "12D3KooW", "0" * 52, "Qm" + "a" * 44, "1" * 65, ALICE.peer + "1", None, 7])
def test_what_is_no_ed25519_id_is_refused(peer: object) -> None:
    with pytest.raises(IntegrityError):
        public_key_of(peer)  # type: ignore[arg-type]


def test_the_key_is_not_printed() -> None:
    assert repr(ALICE) == f"Signer({ALICE.peer})"
    assert ALICE.peer.endswith(short(ALICE.peer)) and len(short(ALICE.peer)) == 6
