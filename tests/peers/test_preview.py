"""What joining takes is said before it is taken, and the figures hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dipaco_p2p.core.model.microbatch import measure
from dipaco_p2p.core.model.transformer import PathModel, load_modules
from dipaco_p2p.core.outer.compress import compress, encode_compressed
from dipaco_p2p.node.run import Run
from dipaco_p2p.node.sizes import memory_of, needs_of
from dipaco_p2p.node.store import Store
from dipaco_p2p.program.files import existing
from dipaco_p2p.program.text import in_bytes
from dipaco_p2p.protocol.decrees import Decreed
from dipaco_p2p.protocol.signing import PeerId
from dipaco_p2p.topology import PathId
from peers.joining.preview import Machine, Preview

PATH = PathId((0, 0, 0))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    from tiny_run import make_run, tiny_config

    return make_run(Store(tmp_path), tiny_config())


def preview(run: Run, **changes: object) -> Preview:
    machine = Machine(device="cpu with 2 of 2 threads", is_cpu=True, memory_bytes=2**33, disk_bytes=2**33)
    made = Preview(
        run=run,
        peer="12D3KooWabcdef",
        home=Path("/data"),
        reach="can be reached from outside",
        machine=machine,
        needs=needs_of(run, PATH),
        up_mbit=15.0,
        down_mbit=None,
        path=PATH,
        is_asked=True,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_name_is_shown_before_it_is_given(run: Run) -> None:
    assert not [line for line in preview(run).lines() if line.startswith("  name ")]
    [line] = [line for line in preview(run, name="Ada", team="Analysts").lines() if line.startswith("  name ")]
    assert line.split() == "name Ada, team Analysts: shown to everybody beside your id".split()
    hidden = Decreed(nameless={PeerId("12D3KooWabcdef"): "an insult"})
    assert "  name       Ada: the coordinator hides it: an insult" in preview(run, name="Ada", decreed=hidden).lines()


def test_a_rounds_bytes_hold_what_is_sent_and_not_much_more(run: Run) -> None:
    sizes = [run.layout(module).size for module in PATH.modules()]
    sent = sum(len(encode_compressed(compress(np.ones(size, dtype=np.float32))[0])) for size in sizes)
    needs = needs_of(run, PATH)
    assert sum(sizes) == needs.parameters and sent <= needs.round_up < sent + 3 * 8192


def test_the_estimate_of_memory_is_within_a_half_of_what_is_measured(run: Run) -> None:
    model = replace(run.config.model, width=64, ffn_width=192, heads=4, context=128)
    torch.manual_seed(0)
    network = PathModel(model)
    from dipaco_p2p.core.model.layout import module_layout

    flats = [np.full(module_layout(model, level).size, 0.01, dtype=np.float32) for level in range(len(model.levels))]
    load_modules(network, flats)
    blocks = sum(level.blocks for level in model.levels)
    measured = measure(network, network.loss, torch.zeros(1, model.context, dtype=torch.long), blocks=blocks)
    estimate = memory_of(model, sum(p.numel() for p in network.parameters()))
    assert estimate.fixed == measured.fixed
    assert 0.67 < estimate.sequence / measured.sequence < 1.5, (estimate, measured)


def test_the_lines_name_device_memory_disk_line_and_path(run: Run) -> None:
    text = "\n".join(preview(run).lines())
    for word in ("cpu with 2 of 2", "memory", "free", "up 15 Mbit/s at most", "down no limit", f"{PATH} would be"):
        assert word in text
    assert "DOES NOT FIT" not in text


def test_what_does_not_fit_is_said(run: Run) -> None:
    small = Machine(device="cpu", is_cpu=True, memory_bytes=10, disk_bytes=10)
    lines = preview(run, machine=small).lines()
    assert [line.split()[0] for line in lines if "DOES NOT FIT" in line] == ["memory", "disk"]


def test_before_the_start_the_path_is_left_to_the_claim(run: Run) -> None:
    assert "claimed" not in "\n".join(preview(run, is_asked=False, path=None).lines())
    assert "all paths are finished" in "\n".join(preview(run, path=None).lines())


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (20 * 2**20, "20 MiB")])
def test_bytes_are_written_for_people(count: int, text: str) -> None:
    assert in_bytes(count) == text


def test_a_folder_that_is_not_there_is_where_it_would_be_made(tmp_path: Path) -> None:
    assert existing(tmp_path / "a" / "b") == tmp_path
