"""How quick a 150M path trains: tokens a second and the share of the chip's peak, what they are made of, and what else
could be done.

Every step is one of a volunteer's inner loop (utilisation.py), but for the plain loop it is held
against and for single operations that are timed alone.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.trainer.loops import PLAIN, PLAIN_COMPILED, loops
from dipaco_p2p.config import ADAMW, MUON, InnerConfig, LevelConfig, ModelConfig
from dipaco_p2p.core.model.engine import head_loss, hindrance
from dipaco_p2p.core.model.optimizer import make_optimizer
from dipaco_p2p.core.model.transformer import PathModel

from . import inside
from .case import Bench, Case, Figures, Found, Part, number, table, verdict
from .utilisation import (
    BATCH,
    PATH,
    Bare,
    Utilisation,
    Way,
    device_name,
    flops_per_token,
    memory_bytes,
    nominal_flops,
    peak_flops,
)

GOAL_TOKENS_PER_S = 390_000
"""On an H200: 40 % of its nominal peak."""
ROUNDS_MIN = 0.97
ROUND_STEPS = 100
STEPS = 20
REPEATS = 20
GIB = 2**30
COPY_BYTES = 4 * GIB


@functools.cache
def path_of(is_small: bool) -> ModelConfig:
    """The 150M path; or one that a CPU trains in no time."""
    if not is_small:
        return PATH
    levels = (LevelConfig(embedding=True, head=True), LevelConfig(blocks=1))
    return replace(PATH, vocab_size=300, width=32, heads=2, ffn_width=48, context=72, levels=levels)


def way_of(
    bench: Bench, *, batch: int = BATCH, is_compiled: bool = False, is_exact: bool = False, optimizer: str = ADAMW
) -> Way:
    """As a volunteer trains, smaller if that is wanted; nothing is compiled then."""
    size, is_compiled = (2, False) if bench.is_small else (batch, is_compiled)
    return Way(batch=size, is_compiled=is_compiled, is_exact=is_exact, optimizer=optimizer)


def speed(bench: Bench, bare: Bare, way: Way) -> Figures:
    """Tokens a second and so on of some steps."""
    model, step_s, name = path_of(bench.is_small), bare.step_s(bench.steps(STEPS)), device_name(bench.device)
    own = Utilisation(
        device=name,
        setup=bare.loop.described(),
        parameters=sum(flat.size for flat in bare.flats),
        step_s=step_s,
        tokens_per_s=way.batch * model.context / step_s,
        flops_per_token=flops_per_token(model),
        peak=math.nan,
        nominal=nominal_flops(name),
        memory_bytes=memory_bytes(bench.device),
    )
    return {
        "tokens_per_s": own.tokens_per_s,
        "step_ms": 1000 * step_s,
        "of_nominal": own.of_nominal,
        "memory_gib": own.memory_bytes / GIB,
        "batch": way.batch,
        "setup": own.setup,
        "parameters": own.parameters,
        "flops_per_token": own.flops_per_token,
    }


def wait(device: str) -> None:
    """Until a GPU has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(call: Callable[[], object], device: str, *, repeats: int) -> float:
    """Of some calls, after two that do not count."""
    found: list[float] = []
    for _ in range(2 + repeats):
        wait(device)
        began_s = time.perf_counter()
        call()
        wait(device)
        found.append(time.perf_counter() - began_s)
    return 1000 * statistics.median(found[2:])


def _ceilings(bench: Bench) -> Figures:
    """What the device does at best: products in bfloat16, and copies."""
    count = 1 << 20 if bench.is_small else COPY_BYTES // 4
    values = torch.randn(count, device=bench.device)
    copy_ms = median_ms(values.clone, bench.device, repeats=bench.steps(REPEATS))
    name = device_name(bench.device)
    return {
        "device": name,
        "torch": torch.__version__,
        "peak_tflops": peak_flops(bench.device, size=64 if bench.is_small else 8192) / 1e12,
        "nominal_tflops": (nominal_flops(name) or math.nan) / 1e12 if nominal_flops(name) else None,
        "copy_gb_s": 2 * 4 * count / copy_ms / 1e6,
    }


def _volunteer(bench: Bench) -> Figures:
    """The steps of a long run: speed, whether anything waits for the device, and the parts of a step."""
    way, began_s = way_of(bench, is_compiled=True), time.perf_counter()
    bare = Bare(bench.device, way, model=path_of(bench.is_small))
    figures = {"first_steps_s": time.perf_counter() - began_s} | speed(bench, bare, way)
    figures["waits"] = waits(bare, bench.device, steps=bench.steps(5))
    figures["inside"] = inside.inside(bare, bench.device, steps=bench.steps(5))
    quick = bench.is_small or number(figures, "tokens_per_s") >= GOAL_TOKENS_PER_S
    return figures | {"ok": quick and figures["waits"] is None}


def waits(bare: Bare, device: str, *, steps: int) -> str | None:
    """The first operation of a step that waits for the GPU, and where; None: there is none."""
    if torch.device(device).type != "cuda":
        return None
    set_mode = torch.cuda.set_sync_debug_mode
    try:
        inside.between(bare, device, steps=steps, begin=lambda: set_mode("error"), end=lambda: set_mode("default"))
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = next((frame for frame in reversed(frames) if "dipaco_p2p" in frame.filename), frames[-1])
        return f"{str(error).splitlines()[0]} ({ours.filename}:{ours.lineno})"
    finally:
        set_mode("default")
    return None


def _steps(
    bench: Bench, *, batch: int = BATCH, is_compiled: bool = False, is_exact: bool = False, optimizer: str = ADAMW
) -> Figures:
    way = way_of(bench, batch=batch, is_compiled=is_compiled, is_exact=is_exact, optimizer=optimizer)
    return speed(bench, Bare(bench.device, way, model=path_of(bench.is_small)), way)


def _half_residual(bench: Bench) -> Figures:
    """The stream between the blocks in bfloat16, which a volunteer keeps in float32."""
    if problem := hindrance(bench.device):
        return {"cannot": problem}
    way = way_of(bench, is_compiled=True)

    def halve(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output.bfloat16()

    bare = Bare(bench.device, way, model=path_of(bench.is_small), prepare=lambda path: path.model.embed_tokens
                .register_forward_hook(halve))  # fmt: skip
    return speed(bench, bare, way)


def _autotuned(bench: Bench) -> Figures:
    """With every product's kernel tried out, which takes minutes."""
    import torch._inductor.config as inductor

    with inductor.patch(max_autotune=True):
        return _steps(bench, is_compiled=True)


def _plain(bench: Bench) -> Figures:
    """The best loop that anybody would write for the same model: bfloat16, compiled, torch's AdamW."""
    model, way = path_of(bench.is_small), way_of(bench)
    found = loops(model, InnerConfig(batch=way.batch), is_quick=bench.is_small, device=bench.device)
    loop, steps = found[PLAIN if bench.is_small else PLAIN_COMPILED], bench.steps(STEPS)
    loop(0, 5)
    wait(bench.device)
    began_s = time.perf_counter()
    loop(5, steps)  # every step's loss is read, so that none is under way at the end
    step_s = (time.perf_counter() - began_s) / steps
    return {"tokens_per_s": way.batch * model.context / step_s, "step_ms": 1000 * step_s}


def _rounds(bench: Bench) -> Figures:
    """Whole rounds of a volunteer beside its bare steps."""
    from benchmarks.trainer.rounds import whole_rounds  # signs a manifest: that needs a library more

    path = path_of(bench.is_small)
    found = whole_rounds(
        rounds=1,
        runs=1,
        device=bench.device,
        fast=not bench.is_small,
        steps=bench.steps(ROUND_STEPS),
        model=path,
        batch=way_of(bench).batch,
    )
    share = found["median"]
    assert isinstance(share, float)
    return found | {"ok": bench.is_small or share >= ROUNDS_MIN}


def _attention(bench: Bench) -> Figures:
    """Milliseconds forward and back of one block's attention, by torch's kernel for it."""
    model, batch = path_of(bench.is_small), way_of(bench).batch
    shape = (batch, model.heads, model.context, model.width // model.heads)
    query, key, value = parts = tuple(
        torch.randn(shape, device=bench.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    grad = torch.randn(shape, device=bench.device, dtype=torch.bfloat16)

    def both_ways() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(query, key, value, is_causal=True), parts, grad)

    found: Figures = {"as torch chooses": median_ms(both_ways, bench.device, repeats=bench.steps(REPEATS))}
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                found[name] = median_ms(both_ways, bench.device, repeats=bench.steps(REPEATS))
        except (RuntimeError, TypeError) as error:
            found[name] = str(error).splitlines()[0]
    return found


def _heads(bench: Bench) -> Figures:
    """Milliseconds and memory forward and back of the head with its loss: ours, and on all logits."""
    model, positions = path_of(bench.is_small), way_of(bench).batch * path_of(bench.is_small).context
    device = bench.device
    hidden = torch.randn(positions, model.width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(model.vocab_size, model.width, device=device).mul_(0.02).requires_grad_()
    targets = torch.randint(model.vocab_size, (positions,), device=device)

    def on_all(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight.bfloat16()).float(), targets)

    ways = {"a volunteer's": head_loss, "all logits": on_all}
    if not bench.is_small:
        ways["all logits, compiled"] = torch.compile(on_all, dynamic=False)
    found: Figures = {}
    for name, way in ways.items():

        def both_ways(way: Callable[..., torch.Tensor] = way) -> None:
            torch.autograd.grad(way(hidden, weight, targets), (hidden, weight))

        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        ms = median_ms(both_ways, device, repeats=bench.steps(REPEATS))
        found[name] = {
            "ms": ms,
            "memory_gib": memory_bytes(device) / GIB,
            "loss": float(way(hidden, weight, targets).detach()),
        }
    return found


def _optimizers(bench: Bench) -> Figures:
    """Milliseconds of one step of an optimizer on the whole path."""
    found: Figures = {}
    for name, optimizer, eight_bit in (("fused", ADAMW, False), ("8-bit", ADAMW, True), ("Muon", MUON, False)):
        path = PathModel(path_of(bench.is_small)).to(bench.device)
        for parameter in path.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
            parameter.grad = torch.randn_like(parameter)
        try:
            own = make_optimizer(path, InnerConfig(optimizer=optimizer), eight_bit=eight_bit)
            found[name] = median_ms(own.step, bench.device, repeats=bench.steps(REPEATS))
        except (ImportError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return found


def _said(own: Figures) -> str:
    share = own.get("of_nominal")
    share_said = "" if share is None else f", {number(own, 'of_nominal'):.1%} of the nominal peak"
    return f"{number(own, 'tokens_per_s'):,.0f} tokens/s{share_said}, {number(own, 'memory_gib'):.1f} GiB"


def _rows(found: Found) -> list[str]:
    lines: list[str] = []
    if own := found.get("ceilings"):
        nominal = f", nominal {own['nominal_tflops']:.0f}" if own.get("nominal_tflops") else ""
        lines += [
            f"{own['device']}, torch {own['torch']}: products of 8192 x 8192 matrices in bfloat16 run at "
            f"{number(own, 'peak_tflops'):.0f} TFLOP/s{nominal}, copies at {number(own, 'copy_gb_s'):,.0f} GB/s, bytes "
            "read and written.",
            "",
        ]
    rows: list[tuple[object, ...]] = [("way", "speed and memory", "trained with")]
    rows += [(name, _said(own), own.get("setup", "")) for name, own in found.items() if "memory_gib" in own]
    rows += [(name, "not measured", own["cannot"]) for name, own in found.items() if "cannot" in own]
    if own := found.get("plain loop, compiled"):
        rows.append(("plain loop, compiled", f"{number(own, 'tokens_per_s'):,.0f} tokens/s", "torch's AdamW"))
    lines += table(*rows)
    if own := found.get("volunteer"):
        goal = f"wanted {GOAL_TOKENS_PER_S:,}, and no waiting: {verdict(own)}"
        lines += [f"The volunteer's first steps took {number(own, 'first_steps_s'):.0f} s, with compiling; {goal}.", ""]
        lines += [f"What waits for the GPU within a step: {own['waits'] or 'nothing'}.", "", *_inside(own)]
    if own := found.get("whole rounds"):
        wanted = f"wanted {ROUNDS_MIN}: {verdict(own)}"
        share = f"{number(own, 'median'):.3f} of the bare steps' speed"
        lines += [f"Whole rounds of {own['steps_a_round']} steps: {share}; {wanted}.", ""]
    for name in ("attention", "optimizer"):
        if own := found.get(name):
            said = ", ".join(f"{key} {value:.2f}" if isinstance(value, float) else f"{key}: {value}"
                             for key, value in own.items())  # fmt: skip
            lines += [f"Milliseconds of the {name}: {said}.", ""]
    if own := found.get("head"):
        said = "; ".join(f"{key} {value['ms']:.1f} ms, {value['memory_gib']:.1f} GiB" for key, value in own.items()
                         if isinstance(value, dict))  # fmt: skip
        lines += [f"The head with its loss: {said}.", ""]
    return lines


def _inside(own: Figures) -> list[str]:
    parts = own["inside"]
    assert isinstance(parts, dict)
    spent = sorted(parts["ms"].items(), key=lambda item: -item[1])
    lines = table(("part of a step", "ms"), *((kind, f"{ms:.2f}") for kind, ms in spent))
    return lines + table(("longest kernels", "ms"), *((f"`{k}`", f"{ms:.2f}") for k, ms in parts["longest"].items()))


CASES = (
    Case(name="ceilings", limit_s=60, ask=_ceilings),
    Case(name="volunteer", limit_s=240, ask=_volunteer),
    Case(name="eager", limit_s=60, ask=_steps),
    Case(name="attention", limit_s=60, ask=_attention),
    Case(name="optimizer", limit_s=60, ask=_optimizers),
    Case(name="plain loop, compiled", limit_s=180, ask=_plain),
    *(
        Case(name=f"eager, batch {size}", limit_s=60, ask=functools.partial(_steps, batch=size))
        for size in (8, 64, 128)
    ),
    Case(name="head", limit_s=120, ask=_heads),
    Case(name="whole rounds", limit_s=180, ask=_rounds),
    Case(name="compiled, Muon", limit_s=180, ask=functools.partial(_steps, is_compiled=True, optimizer=MUON)),
    Case(name="compiled, batch 64", limit_s=180, ask=functools.partial(_steps, batch=64, is_compiled=True)),
    Case(name="compiled, bfloat16 between blocks", limit_s=180, ask=_half_residual),
    Case(name="compiled, batch 16", limit_s=180, ask=functools.partial(_steps, batch=16, is_compiled=True)),
    Case(name="exact", limit_s=120, ask=functools.partial(_steps, is_exact=True)),
    Case(name="compiled, autotuned", limit_s=400, ask=_autotuned, is_small_too=False),
)
PART = Part(name="fast", about="How quick is a path of 150M parameters?", cases=CASES, rows=_rows)
