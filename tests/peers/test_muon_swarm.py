"""A run whose inner steps are Muon's: its state travels with the path, and auditors come to the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runtime_harness import World, digests_of
from tiny_run import tiny_config
from virtual_time import eventually

from dipaco_p2p.config import MUON, JudgingConfig, RunConfig
from dipaco_p2p.core.model.optimizer import BUFFER
from dipaco_p2p.core.tensor_file import decode, encode_parts
from dipaco_p2p.protocol.reasons import Reason
from dipaco_p2p.topology import ModuleId
from peers.path.repeating import farthest
from peers.path.trainer import OuterGradient, Parts, PathTrainer

ROUNDS = 4
CHEAT = 9


def muon_config(*, min_paths: int = 4, audited: int = 0, rounds: int = ROUNDS) -> RunConfig:
    config = tiny_config(rounds=rounds, min_paths=min_paths)
    judging = JudgingConfig(judges=2 if audited else 0, sequences=8, audited=audited)
    return replace(config, inner=replace(config.inner, optimizer=MUON), judging=judging)


@pytest.fixture(scope="module")
def digests_of_four(tmp_path_factory: pytest.TempPathFactory) -> dict[ModuleId, str]:
    """With a volunteer for every path, where no state changes hands."""
    return digests_of(tmp_path_factory.mktemp("four"), muon_config())


async def test_two_volunteers_over_four_paths_give_the_same_bytes(
    tmp_path: Path, digests_of_four: dict[ModuleId, str]
) -> None:
    async with World(tmp_path, config=muon_config(min_paths=2)) as world:
        world.join(1)
        world.join(2)
        await world.finish()
        assert world.digests() == digests_of_four
        sources = {event["source"] for volunteer in world.volunteers for event in volunteer.said("state")}
        assert sources - {"start"}, "states were taken up again"


async def test_honest_work_is_repeated_and_comes_out_the_same(tmp_path: Path) -> None:
    async with World(tmp_path, config=muon_config(min_paths=1, audited=100)) as world:
        world.join_all()
        await world.done()
        audits = [event for volunteer in world.volunteers for event in volunteer.said("audited")]
        assert len(audits) >= 4
        assert all(one["cosine"] > 0.999 and abs(one["ratio"] - 1) < 0.01 for one in audits)
        assert {round(one["moments"], 6) for one in audits} == {1.0}
        refused = [event["reason"] for volunteer in world.volunteers for event in volunteer.said("expired")]
        assert Reason.NOT_REPEATED not in refused


class Stubborn(PathTrainer):
    """Honest steps, and a state whose momentum is a thousand times too long: its path would go on that way for long."""

    def state_parts(self, sent: Sequence[OuterGradient] = ()) -> Parts:
        values, _ = decode(b"".join(super().state_parts(sent)))
        longer = {key: value + np.uint16(10 << 7) if key.endswith(BUFFER) else value for key, value in values.items()}
        return encode_parts(longer)


async def test_a_momentum_that_is_too_long_is_found_in_an_audit(tmp_path: Path) -> None:
    async with World(tmp_path, config=muon_config(min_paths=1, audited=100, rounds=8)) as world:
        world.join_all(range(1, 7))
        cheat = world.join(CHEAT, make_trainer=Stubborn)

        def caught() -> bool:
            audits = [event for volunteer in world.volunteers for event in volunteer.said("audited")]
            return sum(one["of"] == cheat.peer and one["moments"] > 2 for one in audits) >= 2

        await eventually(caught, limit_s=600.0)


def test_the_norm_that_is_farthest_off_counts() -> None:
    assert farthest((1.0, 8.0), (1.0, 2.0)) == 4 and farthest((0.1, 4.0), (1.0, 2.0)) == pytest.approx(0.1)
    assert farthest((0.0,), (0.0,)) == 1 and farthest((1.0,), (1.0, 1.0)) > 1000
