"""The chain of versions: what may follow what, what counts once, and one head for all."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from version_harness import (
    CONFIG,
    COORDINATOR,
    GENESIS,
    MANIFEST,
    MODULE,
    ROUNDS,
    chain,
    child,
    share,
    shares,
)

from dipaco_p2p.canonical import digest
from dipaco_p2p.errors import IntegrityError
from dipaco_p2p.protocol.documents import (
    ModuleVersion,
    Sealed,
    cosign,
    document_id,
    seal,
)
from dipaco_p2p.protocol.signing import PeerId, Signer
from dipaco_p2p.protocol.versions import Branch, Tally, check_chain, check_successor, genesis_version, is_final
from dipaco_p2p.topology import ModuleId


def test_the_genesis_is_what_the_manifest_says() -> None:
    for module in CONFIG.topology.modules():
        genesis = genesis_version(MANIFEST, module)
        assert (genesis.module, genesis.version, genesis.run) == (module, 0, document_id(MANIFEST))
        assert genesis.digest == digest(f"genesis {module}".encode())
        assert (genesis.lr, genesis.shares, genesis.update, genesis.state) == (0.5, (), None, None)
        assert (genesis.weight, genesis.term, genesis.grant) == (0, 0, "")


def test_a_good_successor_is_taken() -> None:
    check_successor(GENESIS, child(), MANIFEST)
    check_successor(GENESIS, child(term=4), MANIFEST)
    check_successor(GENESIS, child(shares=shares("only")), MANIFEST)
    check_successor(GENESIS, child(is_fresh=True), MANIFEST)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"run": digest(b"another run")}, "another run or module"),
        ({"module": ModuleId(1, 0)}, "another run or module"),
        ({"version": 0, "parent": "", "grant": ""}, "does not follow"),
        ({"version": 2}, "does not follow"),
        ({"parent": digest(b"another parent")}, "does not follow"),
        ({"lr": 0.7}, "outer settings"),
        ({"momentum": 0.0}, "outer settings"),
        ({"norm_rule": "rda"}, "outer settings"),
        ({"weight": 0}, "weighs 0, after 0"),
        ({"weight": 299}, "weighs 299, after 0"),
        ({"weight": 301}, "weighs 301, after 0"),
        ({"update": None}, "no update or no state"),
        ({"state": None}, "no update or no state"),
        ({"shares": ()}, "without any contribution"),
        ({"shares": shares("a", "b")[::-1]}, "not in order"),
        ({"shares": shares("a", "a")}, "twice"),
        ({"shares": shares("a", "b")[:1]}, "sum to 0.5"),
        ({"shares": (share("a", weight=1.0 + 1e-8),)}, "sum to"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_each_breach_is_found(change: dict[str, Any], why: str) -> None:
    with pytest.raises(IntegrityError, match=why):
        check_successor(GENESIS, child(**change), MANIFEST)


def test_an_older_term_does_not_follow_a_newer_one() -> None:
    first = child(term=2)
    check_successor(first, child(first, term=2), MANIFEST)
    with pytest.raises(IntegrityError, match="term 1, after term 2"):
        check_successor(first, child(first, term=1), MANIFEST)


def test_nothing_follows_the_last_version() -> None:
    versions = [GENESIS]
    for _ in range(ROUNDS):
        versions.append(child(versions[-1]))
        check_successor(*versions[-2:], MANIFEST)
    with pytest.raises(IntegrityError, match=f"ends with version {ROUNDS}"):
        check_successor(versions[-1], child(versions[-1]), MANIFEST)


def test_rounding_of_many_weights_is_forgiven() -> None:
    many = shares(*(f"contribution {number}" for number in range(300)))
    check_successor(GENESIS, child(shares=many), MANIFEST)


def test_a_chain_is_taken_from_the_genesis_on() -> None:
    first = child()
    second = child(first)
    check_chain([], MANIFEST, MODULE)
    check_chain(chain(first), MANIFEST, MODULE)
    check_chain(chain(first, second), MANIFEST, MODULE)


def test_a_chain_with_a_gap_a_swap_or_of_another_module_is_refused() -> None:
    first = child()
    second = child(first)
    for broken in (chain(second), chain(second, first), chain(first, first), chain(first, child(second))):
        with pytest.raises(IntegrityError, match="does not follow"):
            check_chain(broken, MANIFEST, MODULE)
    with pytest.raises(IntegrityError, match="another run or module"):
        check_chain(chain(first), MANIFEST, ModuleId(1, 0))


def test_a_contribution_counts_once_in_a_chain() -> None:
    first = child(shares=shares("a", "b"))
    second = child(first, shares=shares("c", "d", base=1))
    third = child(second, shares=shares("e", "a", base=2))
    check_chain(chain(first, second), MANIFEST, MODULE)
    with pytest.raises(IntegrityError, match=f"{digest(b'a')[:8]} counts twice"):
        check_chain(chain(first, second, third), MANIFEST, MODULE)


def test_an_author_counts_once_per_path_and_base_in_a_chain() -> None:
    first = child(shares=shares("a"))
    again = dataclasses.replace(share("another payload"), peer=PeerId("peer a"))
    with pytest.raises(IntegrityError, match="counts twice"):
        check_chain(chain(first, child(first, shares=(again,))), MANIFEST, MODULE)
    later = dataclasses.replace(again, base_version=1)
    check_chain(chain(first, child(first, shares=(later,))), MANIFEST, MODULE)


def test_a_base_that_is_too_old_or_not_a_base_is_found() -> None:
    first, second = child(), child(child())
    check_successor(second, child(second, shares=shares("late", base=1)), MANIFEST)  # staleness 1
    for parent, base in ((second, 0), (second, 3), (first, 2)):
        with pytest.raises(IntegrityError, match="base"):
            check_successor(parent, child(parent, shares=shares("wrong", base=base)), MANIFEST)


def test_the_weight_of_a_chain_is_all_that_it_counted() -> None:
    first = child(shares=(share("a", tokens=100),))
    second = child(first, shares=(share("b", tokens=30, base=1),))
    assert (first.weight, second.weight) == (100, 130)
    check_chain(chain(first, second), MANIFEST, MODULE)
    with pytest.raises(IntegrityError, match="weighs 30, after 100"):
        check_chain(chain(first, dataclasses.replace(second, weight=30)), MANIFEST, MODULE)


def test_what_a_given_up_branch_counted_may_count_again() -> None:
    first = child(shares=shares("a"))
    second = child(first, shares=shares("b", base=1))
    tally = Tally()
    for version in (first, second):
        tally.check(version)
        tally.add(version)
    with pytest.raises(IntegrityError, match="counts twice"):
        tally.check(second)
    tally.drop_after(1)
    tally.check(second)
    assert tally.counted == {digest(b"a"): 1}
    with pytest.raises(IntegrityError, match="counts twice"):
        tally.check(first)


MIRROR = Signer(bytes([3]) * 32)
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


def cosigned(sealed: Sealed[ModuleVersion], *signers: Signer) -> Sealed[ModuleVersion]:
    return sealed.cosigned({signer.peer: cosign(signer, sealed) for signer in signers})


def test_final_is_what_the_coordinator_made_or_cosigned() -> None:
    [plain] = chain(child())
    assert not is_final(plain, coordinator=COORDINATOR.peer)
    assert not is_final(cosigned(plain, MIRROR), coordinator=COORDINATOR.peer)
    assert is_final(cosigned(plain, MIRROR, COORDINATOR), coordinator=COORDINATOR.peer)
    assert is_final(seal(COORDINATOR, child(author=COORDINATOR.peer)), coordinator=COORDINATOR.peer)
