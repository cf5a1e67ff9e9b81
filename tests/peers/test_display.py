"""What a volunteer's screen says: events in words, and how it ends."""

from __future__ import annotations

import pytest

from peers.display import closing, words_for
from peers.status import Status


@pytest.mark.parametrize(
    ("stage", "words"),
    [("warmup", "left: the warm-up is complete"), ("grid", "left: the run is complete")],
)
def test_the_end_of_the_warm_up_is_not_told_as_that_of_the_run(stage: str, words: str) -> None:
    assert words_for({"ev": "left", "complete": True, "stage": stage, "receipts": 2}) == words
    assert words_for({"ev": "left", "complete": False, "stage": stage, "receipts": 2}) == "left"
    told = closing(Status(receipts=2, is_complete=True, is_last_stage=stage == "grid"))
    assert ("The run is complete" in told) is (stage == "grid") and ("Thank you" in told) is (stage == "grid")


def test_of_a_program_that_did_not_say_which_stage_ended_no_more_is_told_than_that() -> None:
    assert words_for({"ev": "left", "complete": True}) == "left: the stage is complete"


def test_who_leaves_before_the_end_is_told_how_to_go_on() -> None:
    for is_last_stage in (True, False):
        said = closing(Status(receipts=2, is_last_stage=is_last_stage))
        assert "Thank you: 2 receipts." in said and "goes on where this one stopped" in said
