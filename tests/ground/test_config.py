"""`RunConfig`: the defaults are a run that works, and each rule between its values has its refusal."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from dipaco_p2p import __version__
from dipaco_p2p.canonical import canonical_bytes
from dipaco_p2p.config import (
    PREFIX_TOKENS,
    InnerConfig,
    LevelConfig,
    LivenessConfig,
    ModelConfig,
    OuterConfig,
    RoundsConfig,
    RoutingConfig,
    RunConfig,
    WarmupConfig,
    check_protocol,
)
from dipaco_p2p.errors import ConfigError, WrongRun
from dipaco_p2p.strict import load, plain
from dipaco_p2p.topology import Topology

TRUNK = LevelConfig(embedding=True, head=True)
BLOCKS = LevelConfig(modules=2, blocks=1)
PRIVATE = LevelConfig(private=True, blocks=1)
FLAT = LevelConfig(private=True, blocks=2, embedding=True, head=True)
PARTS = (
    RunConfig,
    ModelConfig,
    LevelConfig,
    InnerConfig,
    OuterConfig,
    RoundsConfig,
    LivenessConfig,
    WarmupConfig,
    RoutingConfig,
)


def test_the_defaults_are_valid_and_within_their_own_bounds() -> None:
    for part in PARTS:
        if part is not LevelConfig:  # a level alone holds nothing, and need not
            assert load(part, plain(part()), where="the defaults") == part()


def test_the_grid_of_a_run_is_the_modules_of_its_levels() -> None:
    assert RunConfig().topology == Topology((1, 2, 2))
    assert ModelConfig(levels=(TRUNK, LevelConfig(modules=3, blocks=1))).topology == Topology((1, 3))


def test_total_steps_are_of_one_path_over_warm_up_and_all_rounds() -> None:
    run = RunConfig(warmup=WarmupConfig(rounds=2), rounds=RoundsConfig(rounds=3), inner=InnerConfig(steps=10))
    assert (run.warmup_steps, run.total_steps) == (20, 50)


def test_private_levels_have_a_module_for_each_path() -> None:
    assert ModelConfig(levels=(TRUNK, BLOCKS, PRIVATE, BLOCKS)).topology == Topology(
        (1, 2, 4, 2), (False, False, True, False)
    )
    assert ModelConfig(levels=(FLAT,), paths=3).topology == Topology((3,), (True,))
    with pytest.raises(ConfigError, match="a private level with `modules = 2`"):
        LevelConfig(private=True, modules=2)


def test_the_warm_up_trains_one_path_with_its_own_outer_step_and_rounds() -> None:
    run = RunConfig(
        warmup=WarmupConfig(rounds=5, outer=OuterConfig(lr=1.0)), rounds=RoundsConfig(rounds=3, min_paths=2)
    )
    warmup = run.for_warmup()
    assert warmup.topology == Topology((1, 1, 1)) and warmup.rounds.rounds == 5 and warmup.rounds.min_paths == 1
    assert warmup.outer.lr == 1.0 and run.outer.lr == 0.7


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (RoutingConfig(reshard_rounds=(4, 2)), "`reshard_rounds` is .4, 2., but must rise"),
        (RoutingConfig(reshard_rounds=(17,)), "ends with 17, but the run ends after round 16"),
        (RoutingConfig(overlap=5), "`overlap` is 5, but there are 4 paths"),
    ],
)
def test_routing_that_does_not_fit_the_run_is_refused(routing: RoutingConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(routing=routing)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 65}, "a width of 65 cannot be split over 2 heads of even size"),
        ({"width": 66, "heads": 2}, "a width of 66 cannot be split"),  # 33 is odd: rotary positions need pairs
        ({"width": 64, "heads": 3}, "a width of 64 cannot be split over 3"),
        ({"levels": ()}, "a grid of 0 levels"),
        ({"levels": (LevelConfig(head=True), BLOCKS)}, "0 levels have `embedding = true`"),
        ({"levels": (TRUNK, LevelConfig(embedding=True), BLOCKS)}, "2 levels have `embedding = true`"),
        ({"levels": (LevelConfig(embedding=True), BLOCKS)}, "0 levels have `head = true`"),
        ({"levels": (TRUNK, LevelConfig(head=True), BLOCKS)}, "2 levels have `head = true`"),
        ({"levels": (LevelConfig(embedding=True), BLOCKS, LevelConfig(head=True))}, "`tied = true` needs"),
        ({"levels": (TRUNK, BLOCKS, LevelConfig(modules=2))}, "level 2 of the grid holds nothing"),
        ({"levels": (TRUNK,)}, "no level of the grid has blocks"),
        ({"levels": (FLAT,)}, "every level is private, so nothing says how many paths"),
        ({"levels": (TRUNK, BLOCKS), "paths": 4}, "`paths = 4`, but the levels make 2"),
        ({"levels": (TRUNK, replace(BLOCKS, modules=4096), BLOCKS, PRIVATE)}, "a private level of 8192 modules"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_model_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**change)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("width", "heads", "step"), [(65, 2, 4), (64, 3, 6), (65, 1, 2)])
def test_a_width_that_heads_cannot_share_comes_with_the_widths_that_they_can(width: int, heads: int, step: int) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(width=width, heads=heads)
    assert f"a multiple of {step}," in caught.value.hint
    assert ModelConfig(width=step * 16, heads=heads).width == step * 16


def test_an_untied_head_may_have_a_level_of_its_own() -> None:
    levels = (LevelConfig(embedding=True), BLOCKS, LevelConfig(head=True))
    assert ModelConfig(tied=False, levels=levels).topology == Topology((1, 2, 1))


@pytest.mark.parametrize("name", ["", "-", "a b", "a/b", "a.b", "a\n", "a" * 65, "gr\u00f6\u00dfe", "\u0661"])
def test_a_name_that_no_file_or_ticket_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a run cannot be called"):
        RunConfig(name=name)


@pytest.mark.parametrize("name", ["a", "demo-2x2", "my_run", "a" * 64])
def test_a_plain_name_is_taken(name: str) -> None:
    assert RunConfig(name=name).name == name


def test_a_context_must_leave_something_after_the_routed_prefix() -> None:
    with pytest.raises(ConfigError, match=f"a context of {2 * PREFIX_TOKENS} leaves nothing"):
        RunConfig(model=ModelConfig(context=2 * PREFIX_TOKENS))
    assert RunConfig(model=ModelConfig(context=2 * PREFIX_TOKENS + 1))


def test_a_run_cannot_wait_for_more_paths_than_there_are() -> None:
    assert RunConfig(rounds=RoundsConfig(min_paths=4))
    with pytest.raises(ConfigError, match="`min_paths` is 5, but the grid 1x2x2 has 4 paths"):
        RunConfig(rounds=RoundsConfig(min_paths=5))


def test_no_module_is_shared_by_more_paths_than_a_version_can_count() -> None:
    wide = [
        LevelConfig(modules=1, embedding=True, head=True),
        LevelConfig(modules=21, blocks=1),
        LevelConfig(modules=21, blocks=1),
    ]
    with pytest.raises(ConfigError, match="441 paths go through one module, limit 384"):
        RunConfig(model=ModelConfig(levels=tuple(wide)))
    with pytest.raises(ConfigError, match="4 paths go through one module, limit 1") as refused:
        RunConfig(rounds=RoundsConfig(contributions_max=1))
    assert "contributions_max" in refused.value.hint
    assert "contributions_max" not in plain(RunConfig(rounds=RoundsConfig())), "earlier runs keep their ids"


@pytest.mark.parametrize("part", PARTS)
def test_a_value_just_outside_its_bound_is_refused(part: type[Any]) -> None:
    for field in dataclasses.fields(part):
        for bound, step in (("low", -1), ("high", 1)):
            edge = field.metadata.get(bound)
            if edge is not None:
                outside = [edge + step] if isinstance(field.default, tuple) else type(field.default)(edge + step)
                with pytest.raises(ConfigError, match=f"`{field.name}` in a part is .* but must be"):
                    load(part, {field.name: outside}, where="a part")


def test_every_number_has_a_lower_bound() -> None:
    for part in PARTS:
        for field in dataclasses.fields(part):
            if type(field.default) in (int, float):
                assert field.metadata.get("low") is not None, f"{part.__name__}.{field.name}"


def test_each_value_is_part_of_what_a_run_is() -> None:
    """Two participants that disagree on any value are in different runs."""
    runs = [
        RunConfig(),
        RunConfig(seed=1),
        RunConfig(inner=InnerConfig(lr=1e-3)),
        RunConfig(liveness=LivenessConfig(settle_s=2.0)),
        RunConfig(model=ModelConfig(levels=(TRUNK, BLOCKS))),
    ]
    assert len({canonical_bytes(plain(run)) for run in runs}) == len(runs)


def test_another_protocol_is_refused_in_either_direction_with_what_to_do() -> None:
    check_protocol(7, who="the run", ours=7)
    for said, words in ((8, "newer; upgrade this program: uv tool upgrade"), (6, "older; install the version")):
        with pytest.raises(WrongRun, match=f"protocol {said}, this program .*{__version__}.* speaks 7") as refused:
            check_protocol(said, who="the run", ours=7)
        assert words in refused.value.hint and refused.value.exit_code == 6
