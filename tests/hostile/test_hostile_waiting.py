"""Attacks that take their time: the last file, so that what began with the first test is over."""

from __future__ import annotations

import pytest
from hostile_harness import Battlefield

from dipaco_p2p.swarm.api import FRAME_TIMEOUT_S

pytestmark = pytest.mark.libp2p


def test_a_byte_a_second_is_cut_off(field: Battlefield) -> None:
    for drip in field.drips:
        reason, after_s = drip.result(60)
        assert reason == "" and FRAME_TIMEOUT_S / 2 < after_s < 2 * FRAME_TIMEOUT_S
    with field.attacked():
        pass
