"""The command for a machine with a GPU: all of it at small size, how it goes on, and what it needs to be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu import inside, method, runner
from benchmarks.gpu.__main__ import chosen
from benchmarks.gpu.book import Book
from benchmarks.gpu.case import Bench, Case, Figures, Part, verdict
from benchmarks.gpu.collect import OPTIMIZER, PROGRAMS, SWARM, cut, pins
from benchmarks.gpu.games import WINDOW_S, own_after_s
from benchmarks.gpu.page import page
from benchmarks.gpu.parts import NAMES, part
from benchmarks.gpu.right import off
from benchmarks.gpu.swarm import config
from bootstrap.demo import require_sense, run_text
from bootstrap.runfile import load_run_file
from dipaco_p2p.core.model.layout import module_layout
from dipaco_p2p.errors import ConfigError

REPO = Path(__file__).parents[2]
LACKING = ("hivemind", "bitsandbytes", "datasets", "platformdirs", "cryptography", "starlette", "uvicorn", "pydantic")
"""What the machine that this is prepared for has not."""


def unasked(bench: Bench) -> Figures:
    raise AssertionError("only its process asks a case")


def fake(*names: str, limit_s: float = 10.0) -> Part:
    cases = tuple(Case(name=name, limit_s=limit_s, ask=unasked) for name in names)
    return Part(name="fake", about="Is it fake?", cases=cases, rows=lambda found: [f"- {name}" for name in found])


class Asked:
    """In place of the processes of cases: each gives its name, but for those that fail, and those that say nothing."""

    def __init__(self, patch: pytest.MonkeyPatch, *, failing: Sequence[str] = (), mute: Sequence[str] = ()) -> None:
        self.names: list[list[str]] = []
        self.failing, self.mute = failing, mute
        patch.setattr(runner, "_ask", self._ask)

    def _ask(self, bench: Bench, own: Part, cases: Sequence[Case], *, limit_s: float) -> str:
        self.names.append([case.name for case in cases])
        book = Book(bench.folder)
        for case in cases:
            if case.name in self.failing:
                book.add(own.name, case.name, error="ValueError: too odd")
            elif case.name not in self.mute:
                book.add(own.name, case.name, figures={"name": case.name})
        return f"it was not done after {limit_s:.0f} s" if set(self.mute) & set(self.names[-1]) else ""


def run(folder: Path, own: Part, *, minutes: float = 8.0, is_small: bool = False) -> bool:
    bench = Bench(folder=folder, device="cpu", is_small=is_small)
    return runner.run(bench, [own], every=[own], minutes=minutes, say=lambda text: None)


# -- all of it


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_that_it_asks_a_gpu_can_be_asked_a_cpu_at_small_size(tmp_path: Path) -> None:
    """But for a whole swarm: that is the demo, which tests/e2e/test_demo.py plays."""
    asked = [name for name in NAMES if name != "swarm"]
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--minutes", "9", "--out", str(tmp_path)]
    command += ["--parts", ",".join(asked)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    for name in asked:
        cases = [case.name for case in part(name).cases if case.is_small_too]
        assert sorted(found[name]["found"]) == sorted(cases) and not found[name]["failed"]
    assert all(figures["ok"] for figures in found["right"]["found"].values() if "ok" in figures)
    text = (tmp_path / "page.md").read_text()
    assert all(part(name).about in text for name in NAMES) and "Small sizes" in text
    assert text.count("Not asked yet") == 1
    again = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 0 and "done in" not in again.stdout, "what is known is not asked again"


def test_nothing_that_the_machine_lacks_is_imported_before_a_case_needs_it() -> None:
    code = f"""
import sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {LACKING!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Lacking())
from benchmarks.gpu import child, runner
from benchmarks.gpu.parts import NAMES, part
from peers.config import torch_device
for name in NAMES:
    part(name)
torch_device("cpu")
"""
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# -- the runner


def test_a_case_that_fails_costs_itself_only_and_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, asked = fake("a", "b", "c", "d"), Asked(monkeypatch, failing=["b"], mute=["c"])
    assert not run(tmp_path, own)
    assert asked.names == [["a"], ["b"], ["c"], ["d"]], "each in a process of its own"
    text = (tmp_path / "page.md").read_text()
    assert "- a\n- d\n" in text and "b failed: ValueError: too odd" in text and "c failed: it was not done" in text
    again = Asked(monkeypatch)
    assert run(tmp_path, own) and again.names == [["b"], ["c"]]
    assert "failed" not in (tmp_path / "page.md").read_text()
    assert json.loads((tmp_path / "results.json").read_text())["fake"]["found"].keys() == {"a", "b", "c", "d"}


def test_at_small_size_a_part_is_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    assert run(tmp_path, fake("a", "b"), is_small=True) and asked.names == [["a", "b"]]
    with pytest.raises(ConfigError, match="of small size"):
        run(tmp_path, fake("a", "b"))


def test_what_there_is_no_time_for_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    assert not run(tmp_path, fake("long", limit_s=120.0), minutes=0.5) and not asked.names
    assert "Not asked yet: long" in (tmp_path / "page.md").read_text()
    assert not run(tmp_path / "other", fake("long", "short", limit_s=30.0), minutes=0.1) and not asked.names


def test_a_line_that_a_kill_cut_off_does_not_count(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.add("fake", "a", figures={"x": 1})
    with book.lines.open("a") as file:
        file.write('{"part": "fake", "ca')
    book.read()
    assert book.found == {"fake": {"a": {"x": 1}}}
    book.add("fake", "b", figures={"x": 2})
    book.read()
    assert book.found["fake"].keys() == {"a", "b"}


def test_a_process_that_takes_too_long_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{stuck}"\n')
    script.chmod(0o755)
    monkeypatch.setattr(runner.sys, "executable", str(script))
    monkeypatch.setattr(runner, "END_S", 0.5)
    bench, own = Bench(folder=tmp_path, device="cpu", is_small=True), fake("a")
    assert runner._ask(bench, own, own.cases, limit_s=1.0) == "it was not done after 1 s"


def test_parts_are_chosen_by_name_in_their_order() -> None:
    assert chosen("", NAMES) == list(NAMES) and chosen("swarm, right", NAMES) == ["right", "swarm"]
    with pytest.raises(ConfigError, match="`games` is no part"):
        chosen("games", NAMES)


def test_a_page_without_anything_says_what_is_missing() -> None:
    text = page([fake("a", "b")], {}, {}, is_small=False)
    assert "### Is it fake?" in text and "Not asked yet: a, b." in text
    assert verdict({"ok": False}) == "**NO**" and verdict({}) == ""


# -- the cases


def test_kernels_are_told_apart_by_their_names() -> None:
    named = {
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": "products",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "products",
        "void at::native::multi_tensor_apply_kernel<...FusedAdamMathFunctor<float, 4>...>": "optimizer",
        "Memcpy HtoD (Pinned -> Device)": "copies",
        "void at::native::embedding_backward_feature_kernel<...>": "embedding",
        "triton_red_fused__fused_rms_norm_add_3": inside.REST,
    }
    assert {name: inside.kind_of(name) for name in named} == named


def test_gaps_are_what_no_kernel_covers() -> None:
    assert inside.idle_us([(0, 10), (5, 8), (12, 20), (30, 31)]) == 2 + 10
    assert inside.idle_us([]) == 0


def test_a_game_has_the_card_from_when_it_stays_at_its_best() -> None:
    assert own_after_s([5, 6, 10, 5, 9.5, 10, 9.1]) == 4 * WINDOW_S
    assert own_after_s([10, 9.5]) == 0


def test_a_difference_is_held_against_the_whole_length() -> None:
    parts = [np.arange(1, 9, dtype=np.float32), np.ones(3, dtype=np.float32)]
    assert off(parts, parts) == 0
    assert off([values * np.float32(1.1) for values in parts], parts) == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize("paths", [4, 8])
@pytest.mark.parametrize("name", method.METHODS)
def test_every_method_trains_as_many_workers_on_paths_of_one_size(name: str, paths: int) -> None:
    bench = Bench(folder=Path(), device="cpu", is_small=False)
    job = method.job_of(bench, name, paths=paths, is_tuning=False, inner_lr=0.5)
    one = sum(module_layout(job.one_path, level).size for level in range(len(job.one_path.levels)))
    assert 19.5e6 < one < 20.5e6 and job.inner_lr == 0.5
    assert (job.batch, job.model.context) == (128, 512)
    workers = job.replicas * job.model.path_count
    assert workers == (1 if name.startswith("dense") else paths)
    tuned = method.job_of(bench, name, paths=4, is_tuning=True)
    assert tuned.model.vocab_size == job.model.vocab_size and tuned.model.context == job.model.context


@pytest.mark.parametrize(("is_small", "paths", "millions"), [(True, 2, 0), (False, 4, 20)])
def test_the_swarm_is_a_demo_with_paths_of_20_million_parameters(
    tmp_path: Path, is_small: bool, paths: int, millions: int
) -> None:
    asked, run_file = config(Bench(folder=tmp_path, device="cuda", is_small=is_small)), tmp_path / "run.toml"
    require_sense(asked)
    run_file.write_text(run_text(asked))
    model = load_run_file(run_file).run.model
    assert model.path_count == paths
    assert round(sum(module_layout(model, level).size for level in range(len(model.levels))) / 1e6) == millions


# -- what is brought along


def test_all_that_is_brought_along_is_pinned() -> None:
    found = list(pins((*SWARM, *PROGRAMS, OPTIMIZER)))
    assert len(found) == len(SWARM) + len(PROGRAMS) + 1 and all("==" in pin for pin in found)


def test_of_bitsandbytes_one_library_for_gpus_stays(tmp_path: Path) -> None:
    wheel, kept = tmp_path / "bitsandbytes-1-py3-none-any.whl", "bitsandbytes/libbitsandbytes_cuda130.so"
    names = [kept, "bitsandbytes/libbitsandbytes_cuda121.so", "bitsandbytes/libbitsandbytes_rocm64.so",
             "bitsandbytes/libbitsandbytes_cpu.so", "bitsandbytes/__init__.py"]  # fmt: skip
    record = "bitsandbytes-1.dist-info/RECORD"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, name)
        archive.writestr(record, "".join(f"{name},sha256=x,1\n" for name in names))
    cut(wheel, keep=("cuda130", "cpu"))
    with zipfile.ZipFile(wheel) as archive:
        assert sorted(archive.namelist()) == sorted([kept, *names[3:], record])
        listed = archive.read(record).decode()
        assert archive.read(kept).decode() == kept
    assert kept in listed and "cuda121" not in listed and "rocm" not in listed and "__init__" in listed
