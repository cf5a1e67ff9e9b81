"""The grid: paths and numbers are the same thing twice, and so are ids and their text."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p.errors import ConfigError
from dipaco_p2p.topology import ModuleId, PathId, Topology


def grid_of(levels: list[tuple[int, bool]]) -> Topology:
    """`(width, is private)` per level; a private level's own width counts only if there is no other."""
    private = tuple(is_private for _, is_private in levels)
    shared = [width for width, is_private in levels if not is_private]
    path_count = math.prod(shared) if shared else levels[0][0]
    widths = tuple(path_count if is_private else width for width, is_private in levels)
    return Topology(widths, private if any(private) else ())


grids = st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=4).map(grid_of)
GRID = Topology((1, 2, 3))


def test_paths_and_modules_are_listed_in_order() -> None:
    assert list(map(str, GRID.paths())) == ["P0-0-0", "P0-0-1", "P0-0-2", "P0-1-0", "P0-1-1", "P0-1-2"]
    assert list(map(str, GRID.modules())) == ["L0.M0", "L1.M0", "L1.M1", "L2.M0", "L2.M1", "L2.M2"]
    assert str(GRID) == "1x2x3"


def test_a_private_level_has_a_module_for_each_path_and_the_flat_mixture_nothing_else() -> None:
    grid = Topology((2, 4, 2), (False, True, False))
    assert str(grid) == "2x4px2" and grid.path_count == 4
    assert list(map(str, grid.paths())) == ["P0-0-0", "P0-1-1", "P1-2-0", "P1-3-1"]
    assert [len(grid.paths_through(ModuleId(1, index))) for index in range(4)] == [1, 1, 1, 1]
    assert PathId((0, 2, 0)) not in grid  # the private module of another path
    flat = Topology((3,), (True,))
    assert list(map(str, flat.paths())) == ["P0", "P1", "P2"]


def test_a_private_level_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="private level 1 has 3 modules"):
        Topology((2, 3, 2), (False, True, False))


@given(grids)
def test_numbers_and_paths_are_inverse(grid: Topology) -> None:
    paths = list(grid.paths())
    assert paths == sorted(set(paths)) and len(paths) == grid.path_count
    assert [grid.number(path) for path in paths] == list(range(grid.path_count))
    assert [grid.path(number) for number in range(grid.path_count)] == paths


@given(grids)
def test_each_level_shares_out_all_paths(grid: Topology) -> None:
    for level, width in enumerate(grid.widths):
        through = [grid.paths_through(ModuleId(level, index)) for index in range(width)]
        assert {len(paths) for paths in through} == {grid.path_count // width}
        assert sorted(itertools.chain(*through)) == list(grid.paths())


@given(grids)
def test_a_path_goes_through_exactly_its_modules(grid: Topology) -> None:
    through = {module: set(grid.paths_through(module)) for module in grid.modules()}
    for path in grid.paths():
        modules = path.modules()
        assert [module.level for module in modules] == list(range(len(grid.widths)))
        assert {module for module, paths in through.items() if path in paths} == set(modules)


@given(grids)
def test_text_and_ids_are_inverse(grid: Topology) -> None:
    assert all(ModuleId.parse(str(module)) == module for module in grid.modules())
    assert all(PathId.parse(str(path)) == path for path in grid.paths())


@given(st.lists(st.integers(0, 999_999), min_size=1, max_size=32).map(tuple))
def test_any_path_within_the_limits_of_its_text_reads_back(indices: tuple[int, ...]) -> None:
    assert PathId.parse(str(PathId(indices))) == PathId(indices)


@pytest.mark.parametrize(
    "text",
    ["", "L1", "L1.M", "L.M1", "l1.m1", "L1.M1 ", " L1.M1", "L1.M1\n", "L-1.M1", "L1.M-1", "L1.M1000000", "L1.M1.M1"]
    + ["L01.M1", "L1.M01", "L\u0661.M1", "L1.M\u00b2", "P0-1"],
)
def test_what_is_no_module_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a module"):
        ModuleId.parse(text)


@pytest.mark.parametrize(
    "text",
    ["", "P", "P-1", "P0-", "P0--1", "p0-1", "P0-1 ", "P0-1\n", "P0.1", "P1000000", "P" + "-".join(["0"] * 33)]
    + ["P00-1", "P0-01", "P\u0660-1", "L1.M1"],
)
def test_what_is_no_path_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a path"):
        PathId.parse(text)


@given(st.text(max_size=12))
def test_one_value_has_one_spelling(text: str) -> None:
    for kind in (ModuleId, PathId):
        try:
            assert str(kind.parse(text)) == text
        except ConfigError as error:
            assert error.hint


@pytest.mark.parametrize("widths", [(), (0,), (1, 0, 2), (2, -1)])
def test_a_grid_without_modules_in_a_level_is_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="has an empty level"):
        Topology(widths)


def test_what_is_not_in_the_grid_is_not() -> None:
    inside = [ModuleId(0, 0), ModuleId(2, 2), PathId((0, 0, 0)), PathId((0, 1, 2))]
    outside = [ModuleId(0, 1), ModuleId(3, 0), ModuleId(-1, 0), ModuleId(1, -1)]
    outside_paths = [PathId((0, 2, 0)), PathId((0, 0)), PathId((0, 0, 0, 0)), PathId((0, 0, -1)), PathId(())]
    assert all(item in GRID for item in inside)
    assert not any(item in GRID for item in [*outside, *outside_paths, "L0.M0", 0, None])


@pytest.mark.parametrize("number", [-1, 6])
def test_a_number_beyond_the_grid_is_our_bug(number: int) -> None:
    with pytest.raises(AssertionError):
        GRID.path(number)


def test_the_number_of_a_foreign_path_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        GRID.number(PathId((0, 2, 0)))


def test_ids_sort_as_numbers_not_as_text() -> None:
    assert sorted([ModuleId(1, 10), ModuleId(1, 9), ModuleId(0, 11)])[0] == ModuleId(0, 11)
    assert PathId((0, 9)) < PathId((0, 10))
