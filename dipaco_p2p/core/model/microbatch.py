"""How many sequences of a batch go through the model at once: as many as memory holds, found by trying.

Rule 1: the whole batch first, then half of it, a quarter and so on; when not even one sequence fits, one with the
activations of every block computed again on the way back (checkpointing). What was found stays for the process.
Rule 2: a GPU says when its memory is used up, and the step is tried again, smaller. A CPU's process would be killed
instead: there, what one sequence keeps is measured, and a budget decides before the first step.
Rule 3: a batch's loss is the mean over its predicted positions, and every sequence has as many of them: a part counts
by its share of the sequences.
Rule 4: whoever needs the device at once waits for no whole batch: before each part it is asked whether to go on. A GPU
is given work ahead, but never more than one part of it, so that two parts are all that follows a no.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from ...errors import EnvironmentUnfit

OutOfMemory = torch.cuda.OutOfMemoryError
REFUSALS = ("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What torch's RuntimeError says when the system gives a CPU's process no more, as under a limit of its own; and when a
GPU gives none to CUDA itself or to its libraries, as beside a game that has just started."""
BUDGET_SHARE = 0.5
"""Of the free memory: the rest is for what a step needs for moments only, and for other programs."""
FIXED_BYTES = 28
"""For each parameter: itself, its gradient, two moments, and the module before, after and on its way, in float32."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fit:
    """One way to take a batch through the model."""

    size: int
    """Sequences at once."""
    is_checkpointed: bool = False

    def __str__(self) -> str:
        return f"micro-batch {self.size}, {'' if self.is_checkpointed else 'no '}checkpointing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What training takes of memory, in bytes."""

    fixed: int
    """Whatever the batch."""
    sequence: int
    """Kept of one sequence on the way forward."""
    checkpointed: int
    """The same with checkpointing, and the block that is computed again."""

    def of(self, fit: Fit) -> int:
        """All of it together."""
        return self.fixed + fit.size * (self.checkpointed if fit.is_checkpointed else self.sequence)


def ladder(batch: int, *, size: int = 0, checkpoint: bool | None = None) -> list[Fit]:
    """What is tried one after the other; `size` (0: any) and `checkpoint` (None: if need be) are the user's."""
    sizes = [min(size or batch, batch)]
    while not size and sizes[-1] > 1:
        sizes.append((sizes[-1] + 1) // 2)
    if checkpoint is not None:
        return [Fit(each, checkpoint) for each in sizes]
    return [*(Fit(each) for each in sizes), Fit(sizes[-1], is_checkpointed=True)]


class MicroBatch:
    """The choice of one process, shared by the loops of all its paths."""

    def __init__(self, *, size: int = 0, checkpoint: bool | None = None, memory_bytes: int | None = None) -> None:
        """`memory_bytes` is what a CPU has free; None: as much as it takes. `size` and `checkpoint` as in `ladder`."""
        self._size = size
        self._checkpoint = checkpoint
        self._memory_bytes = memory_bytes
        self._ladder: list[Fit] = []
        self._why = ""
        self._is_found = False

    @property
    def is_open(self) -> bool:
        """Whether a budget waits for `choose`."""
        return self._memory_bytes is not None and not self._ladder

    @property
    def is_found(self) -> bool:
        """Whether a batch has gone through."""
        return self._is_found

    def choose(self, batch: int, need: Need) -> None:
        """The first that fits into the budget, or else the smallest."""
        assert self._memory_bytes is not None
        self._ladder = ladder(batch, size=self._size, checkpoint=self._checkpoint)
        while len(self._ladder) > 1 and need.of(self._ladder[0]) > BUDGET_SHARE * self._memory_bytes:
            self._drop(f"would take over half of the {self._memory_bytes / 2**20:,.0f} MiB that are free")

    def fit(self, batch: int) -> Fit:
        """How to take `batch` sequences through the model."""
        if not self._ladder:
            self._ladder = ladder(batch, size=self._size, checkpoint=self._checkpoint)
        return self._ladder[0]

    def fitted(self, batch: int, attempt: Callable[[Fit], T]) -> T:
        """What `attempt` gives with the first fit that does not run out of memory; raises OutOfMemory if none does."""
        while True:
            fit = self.fit(batch)
            try:
                done = attempt(fit)
                self._is_found = self._is_found or done is not None  # None: it was stopped on the way
                return done
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or len(self._ladder) == 1:
                    raise
            # Out here the failed attempt's tensors are free: its traceback held them.
            self._drop("did not fit")

    def shrink(self) -> bool:
        """From the next step on the next smaller fit; whether there is one."""
        if len(self._ladder) < 2:
            return False
        self._drop("was too much")
        return True

    def shorten(self) -> bool:
        """From the next step on smaller parts, which take less time each; whether there are any."""
        if len(self._ladder) < 2 or self._ladder[1].size == self._ladder[0].size:  # checkpointing takes more time
            return False
        self._drop("took too long at once")
        return True

    def described(self) -> str:
        """The fit and why it was chosen; empty before the first step."""
        why = self._why or ("as was asked for" if self._size else "the whole batch fits")
        return f"{self._ladder[0]} ({why})" if self._ladder else ""

    def _drop(self, problem: str) -> None:
        torch.cuda.empty_cache()  # blocks of the larger fit's sizes; nothing where CUDA was never used
        self._why = f"{self._ladder.pop(0).size} {problem}"


def accumulate(
    tokens_BT: Tensor, size: int, loss_of: Callable[[Tensor], Tensor], *, goes_on: Callable[[], bool] | None = None
) -> Tensor | None:
    """The mean loss of a batch, `size` sequences at a time; adds its gradient to those of the parameters. None, and a
    gradient of no use, if `goes_on`, which is asked before each part, says no."""
    total: Tensor | None = None
    under_way: deque[torch.cuda.Event] = deque()
    for part in torch.split(tokens_BT, size):
        if len(under_way) > 1:
            under_way.popleft().synchronize()
        if goes_on is not None and not goes_on():
            return None
        loss = loss_of(part)
        if len(part) < len(tokens_BT):
            loss = loss * (len(part) / len(tokens_BT))
        loss.backward()  # type: ignore[no-untyped-call]
        total = loss.detach() if total is None else total + loss.detach()
        if tokens_BT.is_cuda:
            under_way.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            under_way[-1].record()
    assert total is not None
    return total


def measure(model: nn.Module, loss_of: Callable[[Tensor], Tensor], tokens_1T: Tensor, *, blocks: int) -> Need:
    """What one sequence keeps between the ways forward and back, counted while it goes forward."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would be a cycle

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss_of(tokens_1T)
    sequence, parameters = sum(kept.values()), sum(p.numel() for p in model.parameters())
    return Need(fixed=FIXED_BYTES * parameters, sequence=sequence, checkpointed=min(2 * sequence // blocks, sequence))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the system, had no memory left to give."""
    return isinstance(error, (OutOfMemory, MemoryError)) or any(words in str(error) for words in REFUSALS)


@contextlib.contextmanager
def within_memory() -> Iterator[None]:
    """Raises EnvironmentUnfit when the block runs out of the device's memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise EnvironmentUnfit(
            f"a training step does not fit into the memory of this device: {str(error).partition('. ')[0]}",
            hint="leave out --micro-batch and --no-checkpoint, close other programs on the device, or try --device cpu",
        ) from None
