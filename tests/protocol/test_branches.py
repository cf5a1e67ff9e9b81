"""Of two branches all peers keep the same one, and never one that ends before what the coordinator has signed."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p.canonical import digest
from dipaco_p2p.protocol.branches import Branch, is_final
from dipaco_p2p.protocol.documents import BlobRef, ModuleVersion, Sealed, cosign, seal
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.topology import ModuleId

COORDINATOR, LEADER, MIRROR = (Signer(bytes([number]) * 32) for number in range(1, 4))
BASE = Branch(final=2, version=5, weight=500, digest=digest(b"b"))
SMALLER, GREATER = sorted((digest(b"x"), digest(b"y")))

branches = st.builds(
    Branch,
    final=st.integers(0, 2),
    version=st.integers(0, 2),
    weight=st.integers(0, 2),
    digest=st.sampled_from([SMALLER, GREATER]),
)


@pytest.mark.parametrize(
    "better",
    [
        {"final": 3},
        {"final": 3, "version": 3, "weight": 1},
        {"version": 6},
        {"version": 6, "weight": 1},
        {"weight": 501},
    ],
    ids=str,
)
def test_final_comes_before_version_and_version_before_weight(better: dict[str, int]) -> None:
    for name in (SMALLER, GREATER):
        other = dataclasses.replace(BASE, digest=name, **better)  # type: ignore[arg-type]
        assert other.is_better(BASE) and not BASE.is_better(other)


def test_the_smaller_digest_settles_what_is_equal_in_all_else() -> None:
    one, other = (dataclasses.replace(BASE, digest=name) for name in (SMALLER, GREATER))
    assert one.is_better(other) and not other.is_better(one)
    assert not one.is_better(one)


@given(branches, branches)
def test_of_two_branches_one_is_better(one: Branch, other: Branch) -> None:
    assert one.is_better(other) + other.is_better(one) == (one != other)


@given(st.lists(branches, min_size=2, max_size=4))
def test_the_order_in_which_branches_are_seen_does_not_matter(some: list[Branch]) -> None:
    def better(one: Branch, other: Branch) -> Branch:
        return other if other.is_better(one) else one

    assert len({functools.reduce(better, order) for order in itertools.permutations(some)}) == 1


def version(number: int, *, author: Signer = LEADER) -> Sealed[ModuleVersion]:
    """As far as branches look at it."""
    return seal(
        author,
        ModuleVersion(
            run=digest(b"run"),
            module=ModuleId(1, 0),
            version=number,
            parent=digest(b"parent") if number else "",
            snapshot=BlobRef.of(f"snapshot {number}".encode()),
            update=None,
            state=None,
            shares=(),
            clip_norm=None,
            lr=0.7,
            momentum=0.9,
            norm_rule="sqrt",
            weight=100 * number,
            term=number,
            grant=digest(b"grant") if number else "",
            author=author.peer,
        ),
    )


def cosigned(sealed: Sealed[ModuleVersion], *signers: Signer) -> Sealed[ModuleVersion]:
    return sealed.cosigned({signer.peer: cosign(signer, sealed) for signer in signers})


def test_final_is_what_the_coordinator_made_or_cosigned() -> None:
    plain = version(1)
    assert not is_final(plain, coordinator=COORDINATOR.peer)
    assert not is_final(cosigned(plain, MIRROR), coordinator=COORDINATOR.peer)
    assert is_final(cosigned(plain, MIRROR, COORDINATOR), coordinator=COORDINATOR.peer)
    assert is_final(version(1, author=COORDINATOR), coordinator=COORDINATOR.peer)
