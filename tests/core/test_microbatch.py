"""How much of a batch goes through at once: what is tried, what stays, and the same gradient whatever it is."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from models_harness import path_model, small

from dipaco_p2p.config import LevelConfig
from dipaco_p2p.core.model.microbatch import (
    Fit,
    MicroBatch,
    Need,
    OutOfMemory,
    accumulate,
    ladder,
    measure,
    within_memory,
)
from dipaco_p2p.core.model.transformer import PathModel
from dipaco_p2p.errors import EnvironmentUnfit

MODEL = small(LevelConfig(blocks=2))
TOKENS = torch.from_numpy(np.random.default_rng(0).integers(0, 258, (6, 64)))


class FakeLoop:
    """Runs out of memory above so many sequences; checkpointed, above so many others."""

    def __init__(self, plain: int, checkpointed: int = 0) -> None:
        self.limits = {False: plain, True: checkpointed}
        self.tried: list[Fit] = []

    def attempt(self, fit: Fit) -> str:
        self.tried.append(fit)
        if fit.size > self.limits[fit.is_checkpointed]:
            raise OutOfMemory("CUDA out of memory. Tried to allocate 2 GiB.")
        return "done"


def gradients(model: PathModel, *, size: int, is_checkpointed: bool = False) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    model.model.is_checkpointed = is_checkpointed
    loss = accumulate(TOKENS, size, model.loss)
    return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


# -- what is tried


def test_the_whole_batch_is_tried_then_halves_then_checkpointing() -> None:
    assert ladder(8) == [Fit(8), Fit(4), Fit(2), Fit(1), Fit(1, True)]
    assert [fit.size for fit in ladder(6, checkpoint=False)] == [6, 3, 2, 1]


def test_what_the_user_says_is_not_tried_otherwise() -> None:
    assert ladder(8, size=3) == [Fit(3), Fit(3, True)]
    assert ladder(8, size=3, checkpoint=False) == [Fit(3)]
    assert ladder(4, checkpoint=True) == [Fit(4, True), Fit(2, True), Fit(1, True)]
    assert ladder(2, size=64, checkpoint=True) == [Fit(2, True)], "no more than the batch has"


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8])
def test_the_first_size_that_fits_is_taken_and_stays(limit: int) -> None:
    loop, micro = FakeLoop(limit), MicroBatch()
    assert micro.fitted(8, loop.attempt) == "done"
    found = loop.tried[-1]
    assert found.size <= limit < 2 * found.size and not found.is_checkpointed
    again = FakeLoop(limit)
    micro.fitted(8, again.attempt)
    assert again.tried == [found], "nothing is tried twice in a process"
    assert f"micro-batch {found.size}" in micro.described()


def test_a_batch_that_was_stopped_on_its_way_has_not_shown_that_it_fits() -> None:
    micro = MicroBatch()
    assert micro.fitted(8, lambda fit: None) is None and not micro.is_found
    micro.fitted(8, FakeLoop(8).attempt)
    assert micro.is_found and micro.fitted(8, lambda fit: None) is None and micro.is_found


def test_checkpointing_comes_when_not_even_one_sequence_fits() -> None:
    loop, micro = FakeLoop(0, checkpointed=1), MicroBatch()
    micro.fitted(4, loop.attempt)
    assert loop.tried[-1] == Fit(1, True) and len(loop.tried) == len(ladder(4))
    assert "1 did not fit" in micro.described()


def test_memory_that_shrinks_later_is_met_too() -> None:
    loop, micro = FakeLoop(8), MicroBatch()
    micro.fitted(8, loop.attempt)
    loop.limits[False] = 2
    micro.fitted(8, loop.attempt)
    assert loop.tried[-1] == Fit(2)


def test_parts_get_shorter_down_to_one_sequence_and_not_by_checkpointing() -> None:
    micro = MicroBatch()
    assert micro.fit(5) == Fit(5)
    assert micro.shorten() and micro.fit(5) == Fit(3)
    assert "5 took too long at once" in micro.described()
    assert micro.shorten() and micro.shorten() and not micro.shorten()
    assert micro.fit(5) == Fit(1)
    chosen = MicroBatch(size=4)
    assert chosen.fit(8) == Fit(4) and not chosen.shorten(), "its user has said so"


@pytest.mark.parametrize("parts", [0, 1, 2])
def test_a_batch_that_is_not_wanted_any_more_ends_before_its_next_part(parts: int) -> None:
    model, asked = path_model(MODEL), []

    def goes_on() -> bool:
        asked.append(model)
        return len(asked) <= parts

    assert accumulate(TOKENS, 2, model.loss, goes_on=goes_on) is None
    assert len(asked) == parts + 1 and any(p.grad is not None for p in model.parameters()) == bool(parts)
    assert accumulate(TOKENS, 2, model.loss, goes_on=lambda: True) is not None


@pytest.mark.parametrize(("size", "checkpoint"), [(0, None), (2, None), (0, False), (2, True)])
def test_where_nothing_fits_the_user_learns_what_to_do(size: int, checkpoint: bool | None) -> None:
    loop, micro = FakeLoop(0), MicroBatch(size=size, checkpoint=checkpoint)
    with pytest.raises(EnvironmentUnfit, match="does not fit .* CUDA out of memory") as caught, within_memory():
        micro.fitted(8, loop.attempt)
    assert loop.tried == ladder(8, size=size, checkpoint=checkpoint)
    assert "--micro-batch" in caught.value.hint


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    def broken(fit: Fit) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"), within_memory():
        MicroBatch().fitted(8, broken)


# -- a budget, where memory that runs out ends the process


@pytest.mark.parametrize(
    ("free", "fit"),
    [(1800, Fit(8)), (1799, Fit(4)), (600, Fit(2)), (400, Fit(1)), (300, Fit(1, True)), (1, Fit(1, True))],
)
def test_the_largest_fit_within_half_of_what_is_free_is_chosen(free: int, fit: Fit) -> None:
    micro = MicroBatch(memory_bytes=free)
    assert micro.is_open
    micro.choose(8, Need(fixed=100, sequence=100, checkpointed=30))
    assert not micro.is_open and micro.fit(8) == fit


def test_without_a_budget_nothing_is_measured_and_the_whole_batch_goes_through() -> None:
    micro = MicroBatch()
    assert not micro.is_open and micro.described() == ""
    assert micro.fit(8) == Fit(8) and "the whole batch fits" in micro.described()


def test_what_a_sequence_keeps_is_counted_once_and_parameters_are_not() -> None:
    layers = torch.nn.Sequential(
        torch.nn.Linear(8, 8, bias=False), torch.nn.Sigmoid(), torch.nn.Linear(8, 8, bias=False)
    )
    need = measure(layers, lambda inputs: layers(inputs).sum(), torch.ones(1, 5, 8), blocks=4)
    # The first layer keeps its input; the sigmoid its output, which is the second layer's input.
    assert need.sequence == 2 * 5 * 8 * 4
    assert need.checkpointed == need.sequence // 2
    assert need.fixed > 4 * 4 * sum(p.numel() for p in layers.parameters()), "values, gradients and two moments"


def test_two_sequences_of_a_path_keep_about_twice_as_much_as_one() -> None:
    model = path_model(MODEL)
    one, two = (measure(model, model.loss, TOKENS[:count], blocks=2).sequence for count in (1, 2))
    assert 1.8 * one < two <= 2 * one
    assert all(p.grad is None for p in model.parameters()), "measuring leaves no gradient"


# -- the same gradient


@pytest.mark.parametrize("size", [1, 2, 4, 5])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_accumulated_gradients_are_those_of_the_whole_batch(size: int, is_checkpointed: bool) -> None:
    """Also where the last part is smaller than the others."""
    model = path_model(MODEL)
    loss, whole = gradients(model, size=len(TOKENS))
    other_loss, parts = gradients(model, size=size, is_checkpointed=is_checkpointed)
    assert other_loss == pytest.approx(loss, abs=1e-6)
    assert max((one - other).abs().max().item() for one, other in zip(whole, parts, strict=True)) < 1e-6


def test_checkpointing_alone_changes_no_bit() -> None:
    model = path_model(MODEL)
    plain = gradients(model, size=len(TOKENS))
    again = gradients(model, size=len(TOKENS), is_checkpointed=True)
    assert plain[0] == again[0] and all(map(torch.equal, plain[1], again[1]))


def test_checkpointed_blocks_keep_less() -> None:
    model = path_model(MODEL)
    kept: dict[bool, int] = {}

    def count(total: list[int], tensor: torch.Tensor) -> torch.Tensor:
        total.append(tensor.nbytes)
        return tensor.detach()

    for is_checkpointed in (False, True):
        total: list[int] = []
        model.model.is_checkpointed = is_checkpointed
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(count, total), lambda tensor: tensor):
            model.loss(TOKENS)
        kept[is_checkpointed] = sum(total)
    assert kept[True] < kept[False] / 2
