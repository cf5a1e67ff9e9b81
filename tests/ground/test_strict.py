"""Strict loading: every refusal names the place, the value and a way out; nothing is converted on the quiet."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass, field, fields
from typing import Any, NewType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco_p2p.config import InnerConfig, LevelConfig, ModelConfig, OuterConfig, RoundsConfig, RunConfig
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.strict import added, bounded, load, plain
from dipaco_p2p.topology import PathId

Name = NewType("Name", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    size: int = bounded(26, low=10, high=36)
    pressure: float = bounded(2.5, low=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bike:
    owner: Name
    gears: int = bounded(1, high=30)
    colour: str = bounded("red", choices=("red", "green"))
    bell: bool = False
    front: Wheel = field(default_factory=Wheel)
    spares: tuple[Wheel, ...] = ()
    marks: tuple[int, ...] = bounded((), low=0, high=9)
    route: PathId | None = None
    trailer: Wheel | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shed:
    bikes: tuple[Bike, ...] = bounded((), items=2)
    gate: Wheel = added(Wheel())


def bike(**values: object) -> Bike:
    return load(Bike, {"owner": "me", **values}, where="the shed")


def refusal(**values: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        bike(**values)
    return caught.value


def test_what_is_not_said_is_the_default() -> None:
    assert bike() == Bike(owner=Name("me"))


def test_every_kind_of_field_is_read() -> None:
    read = bike(
        gears=7,
        colour="green",
        bell=True,
        front={"size": 20},
        spares=[{"size": 20}, {}],
        marks=[0, 9],
        route="P0-1",
        trailer={"pressure": 3},
    )
    assert read == Bike(
        owner=Name("me"),
        gears=7,
        colour="green",
        bell=True,
        front=Wheel(size=20),
        spares=(Wheel(size=20), Wheel()),
        marks=(0, 9),
        route=PathId((0, 1)),
        trailer=Wheel(pressure=3.0),
    )
    assert bike(route=None, trailer=None) == bike()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gears": "7"}, "`gears` in the shed must be a whole number, not `7`"),
        ({"gears": 7.0}, "`gears` in the shed must be a whole number, not `7.0`"),
        ({"gears": True}, "`gears` in the shed must be a whole number, not `True`"),
        ({"gears": None}, "`gears` in the shed must be a whole number, not nothing"),
        ({"gears": 31}, "`gears` in the shed is 31, but must be at most 30"),
        ({"bell": 1}, "`bell` in the shed must be true or false, not `1`"),
        ({"owner": 7}, "`owner` in the shed must be a text, not `7`"),
        ({"colour": ["red"]}, "`colour` in the shed must be a text, not a list"),
        ({"colour": "blue"}, "`colour` in the shed is `blue`"),
        ({"front": 26}, "front of the shed must be a table, not `26`"),
        ({"front": {"size": 9}}, "`size` in front of the shed is 9, but must be from 10 to 36"),
        ({"front": {"size": 37}}, "`size` in front of the shed is 37, but must be from 10 to 36"),
        ({"front": {"pressure": 0.4}}, "`pressure` in front of the shed is 0.4, but must be at least 0.5"),
        ({"front": {"pressure": True}}, "`pressure` in front of the shed must be a number, not `True`"),
        ({"front": {"pressure": math.nan}}, "`pressure` in front of the shed must be finite, not nan"),
        ({"front": {"pressure": math.inf}}, "`pressure` in front of the shed must be finite, not inf"),
        ({"front": {"pressure": 10**400}}, "`pressure` in front of the shed must be finite, not a number of 1329 bits"),
        ({"spares": {"size": 20}}, "`spares` in the shed must be a list, not a table"),
        ({"spares": "ab"}, "`spares` in the shed must be a list, not `ab`"),
        ({"spares": [{}, {"size": 9}]}, "`size` in spares of the shed, item 2 is 9, but must be from 10 to 36"),
        ({"marks": [1, "2"]}, "`marks` in the shed, item 2 must be a whole number, not `2`"),
        ({"marks": [1, 10]}, "`marks` in the shed is 10, but must be from 0 to 9"),
        ({"route": "Q0"}, "`Q0` is not a path"),
        ({"route": {"indices": [0, 1]}}, "`route` in the shed must be a text, not a table"),
        ({"route": 0}, "`route` in the shed must be a text, not `0`"),
        ({"trailer": {"size": 9}}, "`size` in trailer of the shed is 9, but must be from 10 to 36"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_refusal_says_where_and_what(values: dict[str, object], message: str) -> None:
    assert str(refusal(**values)) == message


@pytest.mark.parametrize("edge", [10, 36])
def test_bounds_are_inside(edge: int) -> None:
    assert bike(front={"size": edge}).front.size == edge


def test_an_integer_stands_for_a_float_and_becomes_one() -> None:
    pressure = bike(front={"pressure": 3}).front.pressure
    assert pressure == 3.0 and type(pressure) is float


def test_an_unknown_key_is_refused_with_the_nearest_name() -> None:
    assert str(refusal(gaers=3)) == "unknown key `gaers` in the shed"
    assert refusal(gaers=3).hint == "did you mean `gears`?"
    assert refusal(front={"sise": 20}).hint == "did you mean `size`?"
    assert refusal(front={"qqq": 20}).hint == "known keys: size, pressure"


def test_a_choice_is_refused_with_the_nearest_one() -> None:
    assert refusal(colour="gren").hint == "did you mean `green`?"
    assert refusal(colour="?").hint == "choose one of red, green"


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="`owner` is missing in the shed"):
        load(Bike, {}, where="the shed")


@pytest.mark.parametrize("value", [None, [], "owner", 7])
def test_only_a_table_is_loaded(value: object) -> None:
    with pytest.raises(ConfigError, match="the shed must be a table, not"):
        load(Bike, value, where="the shed")


def test_plain_is_the_inverse() -> None:
    full = bike(spares=[{}, {"size": 20}], marks=[1, 2], route="P0-1", trailer={})
    assert load(Bike, json.loads(json.dumps(plain(full))), where="the shed") == full
    assert plain(full)["route"] == "P0-1"
    assert set(plain(full)) == {one.name for one in fields(Bike)}


def test_items_are_counted_before_any_is_looked_at() -> None:
    assert len(load(Shed, {"bikes": [{"owner": "me"}] * 2}, where="the yard").bikes) == 2
    with pytest.raises(ConfigError, match="`bikes` in the yard has 3 items, limit 2"):
        load(Shed, {"bikes": ["no bike at all"] * 3}, where="the yard")


def test_an_added_field_is_written_only_where_it_is_not_the_default() -> None:
    assert plain(Shed()) == {"bikes": []} and load(Shed, {"bikes": []}, where="the yard") == Shed()
    wide = Shed(gate=Wheel(size=36))
    assert plain(wide) == {"bikes": [], "gate": {"size": 36, "pressure": 2.5}}
    assert load(Shed, plain(wide), where="the yard") == wide


def test_the_default_run_survives_json_and_toml() -> None:
    assert load(RunConfig, json.loads(json.dumps(plain(RunConfig()))), where="a run") == RunConfig()
    text = "[rounds]\nrounds = 3\n[[model.levels]]\nembedding = true\nhead = true\n[[model.levels]]\nblocks = 1"
    levels = (LevelConfig(embedding=True, head=True), LevelConfig(blocks=1))
    expected = RunConfig(rounds=RoundsConfig(rounds=3), model=ModelConfig(levels=levels))
    assert load(RunConfig, tomllib.loads(text), where="a run") == expected


runs = st.builds(
    RunConfig,
    name=st.from_regex(r"[A-Za-z0-9]{1,20}", fullmatch=True),
    seed=st.integers(0, 2**31 - 1),
    inner=st.builds(InnerConfig, steps=st.integers(1, 10**6), lr=st.floats(0, 1), beta1=st.floats(0, 0.99)),
    outer=st.builds(OuterConfig, norm_rule=st.sampled_from(["sqrt", "rda"])),
    rounds=st.builds(RoundsConfig, min_paths=st.integers(1, 4), grace_s=st.floats(0, 1e9)),
)


@given(runs)
def test_any_run_survives_json(run: RunConfig) -> None:
    assert load(RunConfig, json.loads(json.dumps(plain(run))), where="a run") == run


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**400), 10**400) | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from([one.name for one in fields(Bike)] + ["other"])


@given(st.dictionaries(names, junk))
def test_junk_is_refused_by_a_config_error_only(values: dict[str, Any]) -> None:
    try:
        loaded = load(Bike, values, where="the shed")
    except ConfigError as error:
        assert str(error)
    else:
        assert load(Bike, plain(loaded), where="the shed") == loaded


@pytest.mark.parametrize("kind", [list, dict])
def test_a_value_that_is_deep_or_long_is_refused_in_few_words(kind: type) -> None:
    value: Any = 0
    for _ in range(100_000):
        value = [value] if kind is list else {"x": value}
    said = "a list" if kind is list else "a table"
    assert str(refusal(gears=value)) == f"`gears` in the shed must be a whole number, not {said}"
    while value:  # else the collector would need as deep a stack
        value = value[0] if kind is list else value["x"]
