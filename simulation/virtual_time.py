"""A loop whose time is not the machine's: it jumps to the next timer as soon as nothing is left to do.

Its worker threads are plain calls, so that no order of events depends on the machine. A minute of the protocol takes
a second, and nothing waits for real time.

Many programs run in one loop, each as a `Process`: whatever is started inside `Process.context` belongs to it. A frozen
process gets no turn until it is thawed, a dead one never again: none of its `finally` blocks runs, as after SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVarTuple

BASE_S = 1_000_000.0

Callback = Callable[..., object]
Ts = TypeVarTuple("Ts")


class Process:
    """What stands for one process of the operating system."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_frozen = False
        self.is_dead = False
        self.waiting: list[asyncio.Handle] = []
        """What would have run while it was frozen."""
        self.context = contextvars.copy_context()
        self.context.run(WHO.set, self)
        self._kept: list[Any] = []

    @property
    def is_running(self) -> bool:
        return not (self.is_frozen or self.is_dead)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work`, and all that it starts, as this process."""
        return asyncio.get_running_loop().create_task(work, context=self.context, name=self.name)

    def freeze(self) -> None:
        """As SIGSTOP."""
        self.is_frozen = True

    def thaw(self) -> None:
        """As SIGCONT: what became due meanwhile runs now."""
        self.is_frozen = False
        waiting, self.waiting = self.waiting, []
        for handle in waiting:
            asyncio.get_running_loop().call_soon(self._run_late, handle)

    def _run_late(self, handle: asyncio.Handle) -> None:
        if not self.is_running:
            _park(self, handle)
        elif not handle.cancelled():
            handle._run()

    def kill(self) -> None:
        """As SIGKILL."""
        self.is_dead = True
        self.waiting = []
        # Else the collector would close what is left in the middle, and closing runs the `finally` blocks.
        with contextlib.suppress(RuntimeError):  # no loop is running: all is over
            self._kept = list(asyncio.all_tasks())


WHO: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def waits_in(task: asyncio.Task[Any] | None) -> str:
    """The functions that a task waits in, the innermost last; for people."""
    found: list[str] = []
    awaited: Any = task.get_coro() if task is not None and not task.done() else None
    while awaited is not None and hasattr(awaited, "cr_frame"):
        frame = awaited.cr_frame
        if frame is not None:
            found.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        awaited = awaited.cr_await
    return " > ".join(found)


class _Selector(selectors.DefaultSelector):
    """Where the loop would wait for the machine, time jumps instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "every task waits for something that nothing will bring"
        if timeout <= 0.0:  # no file is watched but the loop's own waker
            return []
        self.loop.skipped_s += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time` moves only when all tasks wait for it."""

    def __init__(self) -> None:
        self.skipped_s = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        self.set_default_executor(_Inline())

    def time(self) -> float:
        return self.skipped_s

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Nothing to wait for: its worker threads are plain calls."""

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        process = WHO.get() if context is None else context.get(WHO)
        if process is None or process.is_running:
            return super().call_soon(callback, *args, context=context)
        return _park(process, asyncio.Handle(callback, args, self, context))

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        process = WHO.get() if context is None else context.get(WHO)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        ring = functools.partial(self._ring, process, callback, args)
        timer = super().call_at(when, ring, context=context)
        ring.keywords["timer"] = timer
        return timer

    def _ring(self, process: Process, callback: Callback, args: tuple[Any, ...], *, timer: asyncio.TimerHandle) -> None:
        """A timer of `process` is due."""
        if process.is_running:
            callback(*args)
        else:

            def late() -> None:
                if not timer.cancelled():
                    callback(*args)

            _park(process, asyncio.Handle(late, (), self, contextvars.copy_context()))


def _park(process: Process, handle: asyncio.Handle) -> asyncio.Handle:
    if not process.is_dead:
        process.waiting.append(handle)
    return handle


class _Inline(ThreadPoolExecutor):
    """Runs what is submitted at once, so that no order of events depends on the machine."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class VirtualClock:
    """The time of the running loop, as a machine sees it whose clock is `skew_s` ahead."""

    def __init__(self, skew_s: float = 0.0) -> None:
        self.skew_s = skew_s

    def now_s(self) -> float:
        return BASE_S + self.skew_s + asyncio.get_running_loop().time()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


def play(scenario: Callable[[], Awaitable[None]], *, limit_s: float = 600.0) -> None:
    """Run `scenario` to its end in virtual time, of which it may take `limit_s`."""

    async def run() -> None:
        async with asyncio.timeout(limit_s):
            await scenario()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


async def eventually(holds: Callable[[], bool], *, limit_s: float = 120.0) -> None:
    """Let time pass until `holds`, in small steps and with a deadline, both in virtual time."""
    end_s = asyncio.get_running_loop().time() + limit_s
    while not holds():
        assert asyncio.get_running_loop().time() < end_s, "it did not come to hold in time"
        await asyncio.sleep(0.05)


async def end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
