"""How inner steps are computed on this machine: exactly, in bfloat16, or in bfloat16 and one compiled graph.

The choice is made once in a process, between two rounds, from what a step took and how many are left: compiling costs
10 to 40 s on a CPU, which only a long run repays. Before that, a CPU's steps are exact and a GPU's in bfloat16, which
costs nothing there. The user is told the choice and its reason, and may choose otherwise.
What it gives on a GPU was measured on an H200 (docs/performance.md). What does not depend on the device is tested on a
CPU.

Rule 1: parameters, their gradients and the optimizer's state stay float32; only what lies between is bfloat16.
Rule 2: the fast loss gives other bits than `PathModel.loss`, and other bits again on another machine. A volunteer
contributes whatever it trained; what others have to repeat (an owner's step, a score that is checked) is never made
with it.

On one thread of an Intel Xeon with AMX a step of the default path takes 50 ms of processor time instead of 103 (exact);
the first one takes 30 to 50 s, in later processes a few.
Attention (on a CPU) and the output head with its cross-entropy are single operations. A compiler that is given formulas
makes loops over whole tensors of scores and logits, in float32 and several times over: more than half of a step.
torch's kernels work on blocks that stay in a cache, and never compute most scores of keys that a query may not see.
B batch, T tokens, D width, H heads, K width of a head, V vocabulary; S = B x H sequences, N = B x T positions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import EnvironmentUnfit
from .transformer import IGNORED, PathModel, rope_tables, run_block

T = TypeVar("T")

AUTO, EXACT, BFLOAT16, FAST = "auto", "exact", "bf16", "fast"
ENGINES = (AUTO, EXACT, BFLOAT16, FAST)
ASKED = "as was asked for"

REPAYS = 3.0
"""The time saved must be this many times that of compiling: a volunteer may leave before the run ends."""


@dataclass(frozen=True, slots=True)
class Compiling:
    """What it costs and gives."""

    takes_s: float
    """The first fast step at the most, on the slowest machine that was measured."""
    gain: float
    """How many times quicker a compiled step is at the least than one before the choice."""


COMPILING = {"cpu": Compiling(40.0, 1.8), "cuda": Compiling(40.0, 1.4)}
"""On an H200 a compiled step of 150 million parameters was 1.57 times as quick, and the first ones took 14 to 34 s."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The choice, and in words why."""

    is_fast: bool
    """Whether products are in bfloat16."""
    is_compiled: bool
    why: str
    setup: str = ""
    """The rest of what was chosen on this machine, in words."""

    def __str__(self) -> str:
        precision = "bfloat16" if self.is_fast else "float32"
        compiled = "compiled" if self.is_compiled else "not compiled"
        return f"{precision}, {compiled}{self.setup and ', '}{self.setup}: {self.why}"


def spare_device() -> str:
    """Where to compute what a program does beside its main work: on a GPU, if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def on_device(device: str, work: Callable[[str], T]) -> T:
    """`work` on the device, or on the processor if that refuses: as a GPU does whose memory others have, or for which
    this torch has no kernels. An error of the work itself comes from the processor then."""
    if device != "cpu":
        with contextlib.suppress(RuntimeError, EnvironmentUnfit):
            return work(device)
    return work("cpu")


def at_first(wanted: str, device: str) -> Engine:
    """What the steps are computed with whose time is measured for `choose`."""
    is_fast = wanted != EXACT and _kind(device) == "cuda" and hindrance(device) is None
    return Engine(is_fast, False, "until the choice")


def choose(wanted: str, device: str, *, step_s: float | None, steps_left: int) -> Engine | None:
    """The engine for the rest of a run; None while that needs to know what a step takes (`step_s`) `at_first`."""
    if wanted == EXACT:
        return Engine(False, False, ASKED)
    problem = hindrance(device)
    if problem is not None:
        return Engine(False, False, problem)
    if wanted == BFLOAT16:
        return Engine(True, False, ASKED)
    first, problem = at_first(wanted, device), compile_hindrance(device)
    if problem is not None:
        return Engine(first.is_fast, False, problem)
    if wanted == FAST:
        return Engine(True, True, ASKED)
    if step_s is None:
        return None
    does_pay, why = repays(COMPILING[_kind(device)], step_s=step_s, steps_left=steps_left)
    return Engine(does_pay or first.is_fast, does_pay, why)


def repays(compiling: Compiling, *, step_s: float, steps_left: int) -> tuple[bool, str]:
    """Whether this many steps repay compiling, and why."""
    saved_s = steps_left * step_s * (1 - 1 / compiling.gain)
    left = f"{steps_left} steps of {1000 * step_s:.0f} ms are left"
    if saved_s < REPAYS * compiling.takes_s:
        return False, f"{left}, which does not repay {compiling.takes_s:.0f} s of compiling"
    return True, f"{left}; up to {compiling.takes_s:.0f} s of compiling save about {saved_s / 60:.0f} min"


def compiling_s(device: str) -> float:
    """What compiling takes there at the most."""
    return COMPILING[_kind(device)].takes_s


def hindrance(device: str) -> str | None:
    """Why this machine has no products in bfloat16 that are worth having; None if it has."""
    if _kind(device) not in COMPILING:
        return f"the fast mode is for processors and CUDA, not for {_kind(device)}"
    return None if has_bfloat16(device) else f"this {_noun(device)} has no bfloat16 products"


def compile_hindrance(device: str) -> str | None:
    """Why torch cannot compile for the device here; None if it can."""
    if not compiler():
        return "no C++ compiler (g++) was found"
    if _kind(device) == "cuda" and not has_triton():
        return "triton is not installed"
    return None


def has_bfloat16(device: str = "cpu") -> bool:
    """Whether the device multiplies bfloat16 matrices itself; where it does not, they are slower than float32."""
    if _kind(device) == "cuda":
        return torch.cuda.get_device_capability(torch.device(device)) >= (8, 0)
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(bool(getattr(torch.cpu, name, bool)()) for name in checks)


def has_triton() -> bool:
    """Whether torch could compile for a GPU: it does that through triton."""
    return importlib.util.find_spec("triton") is not None


def _kind(device: str) -> str:
    return torch.device(device).type


def _noun(device: str) -> str:
    return "processor" if _kind(device) == "cpu" else "GPU"


Rope = tuple[Tensor, Tensor]
Loss = Callable[[PathModel, Tensor], Tensor]


def training_loss(*, fast: bool, compiled: bool = True) -> Loss:
    """The loss of a training step: exact, `fast`, or fast but not `compiled`. Without a compiler on this machine what
    was to be compiled is exact, with a warning.

    The mean cross-entropy in nats over the predicted positions of tokens (B, T), as `PathModel.loss`.
    """
    if fast and compiled and not compiler():
        warnings.warn("no C++ compiler (g++) found: training goes on without the fast mode", RuntimeWarning, 2)
        fast = False
    if not fast:
        return PathModel.loss
    return fast_loss if compiled else eager_loss


def attention_of(loss: Loss, device: torch.device) -> str:
    """What `loss` computes attention with, in words."""
    if loss is PathModel.loss:
        return "plain attention"
    return "attention in blocks" if device.type == "cpu" else "SDPA"


def fast_loss(model: PathModel, tokens_BT: Tensor) -> Tensor:
    """`PathModel.loss` to about 1e-3, compiled; float32."""
    return _compiled()(model, tokens_BT, _rope(model, tokens_BT))


def eager_loss(model: PathModel, tokens_BT: Tensor) -> Tensor:
    """The same without compiling: on a CPU slower than that, on a GPU still far ahead of float32."""
    return _loss(model, tokens_BT, _rope(model, tokens_BT))


def compiler() -> str | None:
    """The C++ compiler that torch would call; None without one."""
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    return shutil.which(command[0])


def has_failed() -> bool:
    """Whether compiling failed in this process, which so goes on without."""
    return _compiled.cache_info().currsize > 0 and _compiled().has_failed


def gives_up_compiling(error: Exception) -> bool:
    """Whether `error`, of a backward pass, is one of compiling it, as over a file in the cache of torch that a killed
    process left half-written. If so, this process goes on without, with a warning, and the pass can be repeated."""
    is_ours = _compiled.cache_info().currsize > 0 and isinstance(error, _compiled().failures)
    if is_ours:
        _compiled().give_up(error)
    return is_ours


class _Compiled:
    """`_loss` compiled when it is first called; as it is, with a warning, from when that failed."""

    def __init__(self) -> None:
        from torch._dynamo.exc import TorchDynamoException  # takes seconds to import

        self.has_failed = False
        self.failures = (TorchDynamoException, ImportError)
        self._call = cast(Callable[[PathModel, Tensor, Rope], Tensor], torch.compile(_loss, dynamic=False))

    def __call__(self, model: PathModel, tokens_BT: Tensor, rope: Rope) -> Tensor:
        try:
            return self._call(model, tokens_BT, rope)
        except self.failures as error:  # a toolchain can be broken in more ways than can be looked for
            self.give_up(error)
            return _loss(model, tokens_BT, rope)

    def give_up(self, error: Exception) -> None:
        lines = (str(error).strip() or type(error).__name__).splitlines()
        reason = next((line for line in lines if not line.endswith(":")), lines[0])
        warnings.warn(f"compiling failed, training goes on without: {reason}", RuntimeWarning, 3)
        self.has_failed, self._call = True, _loss


@functools.cache
def _compiled() -> _Compiled:
    """One for the process: parameters are inputs of the graph, so that all paths and methods share it."""
    return _Compiled()


def _rope(model: PathModel, tokens_BT: Tensor) -> Rope:
    # The tables come from outside, so that they are not computed again in every step.
    config = model.config
    return rope_tables(tokens_BT.shape[1], config.width // config.heads, config.rope_theta, tokens_BT.device)


def _loss(model: PathModel, tokens_BT: Tensor, rope: Rope) -> Tensor:
    decoder = model.model
    with torch.autocast(tokens_BT.device.type, torch.bfloat16):
        hidden_BTD = decoder.embed_tokens(tokens_BT)
        for block in decoder.layers:
            through = functools.partial(_through, block)
            hidden_BTD = run_block(through, hidden_BTD, rope, is_checkpointed=decoder.is_checkpointed)
        normed_BTD = decoder.norm(hidden_BTD)
        targets_BT = F.pad(tokens_BT[:, 1:], (0, 1), value=IGNORED)
        return head_loss(normed_BTD.flatten(0, 1).bfloat16(), model.head_weight, targets_BT.flatten())


def _through(block: Any, hidden_BTD: Tensor, rope: Rope) -> Tensor:
    attention, mlp = block.self_attn, block.mlp
    parts = _products(block.input_layernorm(hidden_BTD), attention.q_proj, attention.k_proj, attention.v_proj)
    mixed_BTHK = _causal(*attention.turned(*parts, rope)).transpose(1, 2)
    hidden_BTD = hidden_BTD + attention.o_proj(mixed_BTHK.reshape(hidden_BTD.shape))
    gate, up = _products(block.post_attention_layernorm(hidden_BTD), mlp.gate_proj, mlp.up_proj)
    return cast(Tensor, hidden_BTD + mlp.down_proj(F.silu(gate) * up))


def _products(normed_BTD: Tensor, *layers: Any) -> Sequence[Tensor]:
    """What each layer makes of the same values. On a CPU fused, so that the backward pass is one product as well; on an
    H200 the kernel that joins the gradients again takes more than that saves, 6 % of a step."""
    if normed_BTD.device.type != "cpu":
        return [layer(normed_BTD) for layer in layers]
    joined = F.linear(normed_BTD, torch.cat([layer.weight for layer in layers]))
    return joined.chunk(len(layers), dim=-1)


def _causal(query_BHTK: Tensor, key_BHTK: Tensor, value_BHTK: Tensor) -> Tensor:
    # Rotated in float32, and the fused kernels want one type.
    if query_BHTK.device.type != "cpu":
        query, key = (part.to(value_BHTK.dtype) for part in (query_BHTK, key_BHTK))
        return F.scaled_dot_product_attention(query, key, value_BHTK, is_causal=True)
    query_BHTK = query_BHTK / math.sqrt(query_BHTK.shape[-1])
    parts = (part.to(value_BHTK.dtype).contiguous().flatten(0, 1) for part in (query_BHTK, key_BHTK, value_BHTK))
    return attend(*parts).view(query_BHTK.shape)


QUERIES = 128
"""The least queries at a time: fewer, and calling the kernels costs more than the scores it saves."""
BLOCKS_MAX = 4
LOGITS = 1 << 20
"""Logits at a time on a CPU: 2 MB, which stay in a cache."""
CUDA_LOGITS = 1 << 27
"""On a GPU: 256 MB, and as much again for the probabilities; all logits of 32 x 1024 tokens and 32,000 words would take
2 GB, several times over. Fewer would make products that do not fill a large GPU."""
TINY = torch.finfo(torch.float32).tiny
"""The least probability that counts: no token's loss is above 87 nats."""

# The lowest level of torch.library: its decorator `custom_op` takes 0.1 to 0.3 ms a call, a tenth of the operation.
torch.library.define("dipaco::attend", "(Tensor query, Tensor key, Tensor value) -> Tensor[]")
torch.library.define(
    "dipaco::attend_backward",
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor[] weights) -> (Tensor, Tensor, Tensor)",
)
torch.library.define("dipaco::head", "(Tensor hidden, Tensor weight, Tensor targets) -> (Tensor, Tensor, Tensor)")


def attend(query_STK: Tensor, key_STK: Tensor, value_STK: Tensor) -> Tensor:
    """What every query sees (S, T, K), bfloat16, by the softmax of its products with the keys up to its own."""
    return cast(Tensor, torch.ops.dipaco.attend(query_STK, key_STK, value_STK)[0])


def head_loss(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Mean cross-entropy in nats, float32, of `targets_N` under the logits `hidden_ND @ weight_VD.T`; bfloat16 hidden
    values, and a weight in float32."""
    total = cast(Tensor, torch.ops.dipaco.head(hidden_ND, weight_VD, targets_N)[0])
    return total / (targets_N != IGNORED).sum()


def _attend(query_STK: Tensor, key_STK: Tensor, value_STK: Tensor) -> list[Tensor]:
    """What is seen, and the weights of each block of queries."""
    mixed_STK, weights = torch.empty_like(query_STK), []
    for block in _blocks(query_STK.shape[1]):
        scores = torch.bmm(query_STK[:, block], key_STK[:, : block.stop].mT)
        scores[:, :, block].add_(_future(block.stop - block.start, scores.dtype))
        weights.append(torch.softmax(scores, dim=-1, out=scores))
        mixed_STK[:, block] = torch.bmm(scores, value_STK[:, : block.stop])
    return [mixed_STK, *weights]


def _attend_backward(
    grad_STK: Tensor, query_STK: Tensor, key_STK: Tensor, value_STK: Tensor, weights: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    query_grad, key_grad, value_grad = (torch.empty_like(query_STK) for _ in range(3))
    tokens = query_STK.shape[1]
    for block, weight in reversed(list(zip(_blocks(tokens), weights, strict=True))):
        grad, seen = grad_STK[:, block], slice(0, block.stop)
        score_grad = torch.bmm(grad, value_STK[:, seen].mT)
        torch.ops.aten._softmax_backward_data.out(score_grad, weight, -1, weight.dtype, grad_input=score_grad)
        query_grad[:, block] = torch.bmm(score_grad, key_STK[:, seen])
        for total, left, right in ((value_grad, weight, grad), (key_grad, score_grad, query_STK[:, block])):
            if block.stop == tokens:  # the last block sees all keys, and comes first
                torch.bmm(left.mT, right, out=total)
            else:
                total[:, seen] += torch.bmm(left.mT, right)
    return query_grad, key_grad, value_grad


def _head(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses in nats, and its gradients, which are at hand on the way forward."""
    with torch.autocast(hidden_ND.device.type, enabled=False):  # else a GPU's softmax would give float32
        return _head_in_slices(hidden_ND, weight_VD, targets_N)


def _head_in_slices(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    counted_N1 = (targets_N != IGNORED)[:, None]
    counted_ND, targets_N = hidden_ND * counted_N1, targets_N.clamp(min=0)
    right_N, wrong_N, zeros_N = hidden_ND.new_zeros((3, len(hidden_ND)))
    hidden_grad_ND, weight_grad_VD = torch.empty_like(hidden_ND), torch.zeros_like(weight_VD)
    weight_VD = weight_VD.to(hidden_ND.dtype)
    for rows, places, logits in _slices(hidden_ND, weight_VD, targets_N):
        # Only on a CPU does it pay, and is it known, to put the result where the input is.
        probs = torch.softmax(logits, dim=1, out=logits if logits.device.type == "cpu" else None)
        # `take` and `put_`, because `scatter_` copies all of what it changes.
        right_N[rows] = probs.take(places)
        wrong_N[rows] = probs.put_(places, zeros_N[rows]).sum(dim=1)
        probs.put_(places, -wrong_N[rows])
        torch.mm(probs, weight_VD, out=hidden_grad_ND[rows])
        weight_grad_VD += torch.mm(probs.T, counted_ND[rows])
    # Near 1 the sum of the others says more than a number of 8 bits, of the loss as of its gradient.
    right_N = torch.where(right_N < 0.5, right_N.float(), 1 - wrong_N.float())
    nats_N = -right_N.clamp(min=TINY).log()
    return (nats_N * counted_N1[:, 0]).sum(), hidden_grad_ND.mul_(counted_N1), weight_grad_VD


def _fake_attend(query_STK: Tensor, key_STK: Tensor, value_STK: Tensor) -> list[Tensor]:
    blocks = _blocks(query_STK.shape[1])
    weights = [query_STK.new_empty(len(query_STK), block.stop - block.start, block.stop) for block in blocks]
    return [torch.empty_like(query_STK), *weights]


def _fake_attend_backward(
    grad_STK: Tensor, query_STK: Tensor, key_STK: Tensor, value_STK: Tensor, weights: list[Tensor]
) -> Any:
    return tuple(torch.empty_like(query_STK) for _ in range(3))


def _fake_head(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Any:
    return hidden_ND.new_empty((), dtype=torch.float32), torch.empty_like(hidden_ND), torch.empty_like(weight_VD)


def _keep_attend(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])


def _attend_gradients(ctx: Any, grads: list[Tensor]) -> Any:
    query_STK, key_STK, value_STK, *weights = ctx.saved_tensors
    return torch.ops.dipaco.attend_backward(grads[0].contiguous(), query_STK, key_STK, value_STK, weights)


def _keep_head(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])


def _head_gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
    hidden_grad_ND, weight_grad_VD = ctx.saved_tensors
    return (hidden_grad_ND * grads[0]).to(hidden_grad_ND.dtype), weight_grad_VD * grads[0], None


torch.library.impl("dipaco::attend", "cpu", _attend)
torch.library.impl("dipaco::attend_backward", "cpu", _attend_backward)
torch.library.impl("dipaco::head", "cpu", _head)
torch.library.impl("dipaco::head", "cuda", _head)
torch.library.register_fake("dipaco::attend", _fake_attend)
torch.library.register_fake("dipaco::attend_backward", _fake_attend_backward)
torch.library.register_fake("dipaco::head", _fake_head)
torch.library.register_autograd("dipaco::attend", _attend_gradients, setup_context=_keep_attend)
torch.library.register_autograd("dipaco::head", _head_gradients, setup_context=_keep_head)


def _blocks(tokens: int) -> list[slice]:
    queries = max(QUERIES, math.ceil(tokens / BLOCKS_MAX))
    return [slice(start, min(start + queries, tokens)) for start in range(0, tokens, queries)]


# Kept tables must be ordinary tensors, even if the first to ask is in inference mode.
@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _future(queries: int, dtype: torch.dtype) -> Tensor:
    return torch.full((queries, queries), -math.inf, dtype=dtype).triu(1)


def _slices(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some rows at a time: which, where each one's target is in them, and their logits; the caller may overwrite these.

    Not so few that adding up the weight's gradient takes as long as its products.
    """
    positions, (words, width) = len(hidden_ND), weight_VD.shape
    at_once = LOGITS if hidden_ND.device.type == "cpu" else CUDA_LOGITS
    rows = min(max(at_once // words, 2 * width), positions)
    places_N = targets_N + torch.arange(positions, device=targets_N.device) % rows * words
    logits = hidden_ND.new_empty(rows, words)
    for start in range(0, positions, rows):
        here = slice(start, min(start + rows, positions))
        yield here, places_N[here], torch.mm(hidden_ND[here], weight_VD.T, out=logits[: here.stop - start])
