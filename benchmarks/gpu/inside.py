"""Where the time of a step goes, by torch's profiler: what the device did, kernel by kernel, and what it waited for.

A kernel belongs to the operation of the head if that called it, else to the first of `KINDS` that is in its name.
On a CPU, for trying, operations stand for kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from dipaco_p2p.core.model.inner import StepReport

from .utilisation import Bare

HEAD = "head and loss"
KINDS: Mapping[str, str] = {
    "attention": r"flash|fmha|attention|attend|sdpa",
    "optimizer": r"adam|multi_tensor|foreach",
    "copies": r"memcpy|memset",
    "products": r"gemm|gemv|nvjet|cutlass|xmma|wgmma|splitk|cublas|aten::(add)?b?mm$",
    "embedding": r"embedding|indexing_backward|index_put|radix_sort|sort",
}
REST = "norms, rotary, SwiGLU, casts and the like"
GAPS = "gaps"
HEAD_OPERATION = "dipaco::head"
LONGEST = 8


def inside(bare: Bare, device: str, *, steps: int) -> dict[str, object]:
    """Milliseconds of a step by kind, and the kernels that take the most."""
    is_cuda = torch.device(device).type == "cuda"
    profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])])
    between(bare, device, steps=steps, begin=profiler.start, end=profiler.stop)
    events = list(profiler.events() or ())  # type: ignore[no-untyped-call]
    kernels = list(_kernels(events)) if is_cuda else list(_operations(events))
    of_head = sum(_of_head(events, is_cuda=is_cuda), start=list[tuple[str, float]]())
    spent = _by_kind((name, end - start) for name, start, end in kernels)
    for name, us in of_head:  # counted there already, by their names
        spent[kind_of(name)] -= us
    spent[HEAD] = sum(us for _, us in of_head)
    spent[GAPS] = idle_us((start, end) for _, start, end in kernels)
    return {
        "ms": {kind: us / 1000 / steps for kind, us in spent.items()},
        "longest": _longest(kernels, steps),
        "kernels": round(len(kernels) / steps),
    }


def between(bare: Bare, device: str, *, steps: int, begin: Callable[[], object], end: Callable[[], object]) -> None:
    """Call `begin` and `end` around so many whole steps, with nothing of what goes on before and after them."""
    reports = 0

    def on_step(report: StepReport) -> bool:
        nonlocal reports
        reports += 1
        if reports in (1, steps + 1):
            if torch.device(device).type == "cuda":  # on a GPU a report comes when the next step is under way
                torch.cuda.synchronize(device)
            (begin if reports == 1 else end)()
        return True

    bare.take(steps + 3, on_step)


def kind_of(name: str) -> str:
    """What a kernel of this name is for."""
    return next((kind for kind, words in KINDS.items() if re.search(words, name, re.I)), REST)


def idle_us(spans: Iterable[tuple[float, float]]) -> float:
    """Microseconds between the first beginning and the last end in which nothing ran."""
    idle, until = 0.0, float("inf")
    for start, end in sorted(spans):
        idle += max(0.0, start - until)
        until = end if until == float("inf") else max(until, end)
    return idle


def _kernels(events: Iterable[Any]) -> Iterator[tuple[str, float, float]]:
    """Name, beginning and end in microseconds of all that ran on the GPU."""
    for event in events:
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            yield event.name, event.time_range.start, event.time_range.end


def _operations(events: Iterable[Any]) -> Iterator[tuple[str, float, float]]:
    """The same of operations, without those that they call."""
    for event in events:
        if event.device_type == DeviceType.CPU:
            yield event.name, event.time_range.start, event.time_range.start + event.self_cpu_time_total


def _of_head(events: Iterable[Any], *, is_cuda: bool) -> Iterator[list[tuple[str, float]]]:
    for event in events:
        if event.name == HEAD_OPERATION and event.device_type == DeviceType.CPU and not _is_within_itself(event):
            yield list(_called(event, is_cuda=is_cuda))


def _is_within_itself(event: Any) -> bool:
    """Autograd's call and the one below it have the same name."""
    parent = event.cpu_parent
    return parent is not None and (parent.name == HEAD_OPERATION or _is_within_itself(parent))


def _called(event: Any, *, is_cuda: bool) -> Iterator[tuple[str, float]]:
    """Name and microseconds of the kernels that an operation, or one that it calls, has started."""
    if is_cuda:
        yield from ((kernel.name, kernel.duration) for kernel in event.kernels)
    else:
        yield event.name, event.self_cpu_time_total
    for child in event.cpu_children:
        yield from _called(child, is_cuda=is_cuda)


def _by_kind(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    spent = dict.fromkeys((*KINDS, REST), 0.0)
    for name, us in kernels:
        spent[kind_of(name)] += us
    return spent


def _longest(kernels: Iterable[tuple[str, float, float]], steps: int) -> dict[str, float]:
    """Milliseconds of a step by kernel, of those that take the most."""
    total: dict[str, float] = {}
    for name, start, end in kernels:
        total[name[:80]] = total.get(name[:80], 0.0) + (end - start) / 1000 / steps
    return dict(sorted(total.items(), key=lambda item: -item[1])[:LONGEST])
