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
import heapq
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVarTuple

BASE_S = 1_000_000.0

Callback = Callable[..., object]
Ts = TypeVarTuple("Ts")


class Process:
    """What stands for one process of the operating system."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_frozen = self.is_dead = False
        self.is_running = True
        """Whether it gets turns: it is neither frozen nor dead."""
        self._waiting: list[asyncio.Handle] = []
        """What would have run while it was frozen."""
        self.context = contextvars.copy_context()
        self.context.run(WHO.set, self)
        self._kept: list[Any] = []

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work`, and all that it starts, as this process."""
        return asyncio.get_running_loop().create_task(work, context=self.context, name=self.name)

    def freeze(self) -> None:
        """As SIGSTOP."""
        self.is_frozen, self.is_running = True, False

    def thaw(self) -> None:
        """As SIGCONT: what became due meanwhile runs now."""
        self.is_frozen, self.is_running = False, not self.is_dead
        waiting, self._waiting = self._waiting, []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.resume(waiting)

    def park(self, handle: asyncio.Handle) -> None:
        """Keep what is due until it is thawed; for one that is dead it never runs."""
        if not self.is_dead:
            self._waiting.append(handle)

    def end(self) -> None:
        """It came to its end by itself."""
        self.is_dead, self.is_running = True, False

    def kill(self) -> None:
        """As SIGKILL."""
        self.end()
        self._waiting = []
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


class _NoSelector(selectors.DefaultSelector):
    """No file is watched but the loop's own waker, and what would write to it comes from other threads, of which there
    are none."""

    def select(self, timeout: float | None = None) -> list[Any]:
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time` moves only when all tasks wait for it."""

    def __init__(self) -> None:
        self.skipped_s = 0.0
        super().__init__(_NoSelector())
        self._soon: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        """A heap, by time and then by the order in which they were set."""
        self._count = 0

    def time(self) -> float:
        return self.skipped_s

    def close(self) -> None:
        super().close()
        self._timers.clear()

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Nothing to wait for: its worker threads are plain calls."""

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], Any], *args: *Ts) -> asyncio.Future[Any]:
        """Runs it at once, so that no order of events depends on the machine; whoever waits for it hears of it later,
        as from a thread."""
        done = self.create_future()
        try:
            result = func(*args)
        except BaseException as error:
            self._soon.append(_Turn(_fail, (done, error), self, None))
        else:
            self._soon.append(_Turn(_succeed, (done, result), self, None))
        return done

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = _Turn(callback, args, self, context)
        self._soon.append(handle)
        return handle

    def resume(self, handles: Iterable[asyncio.Handle]) -> None:
        """Let run soon what was parked."""
        self._soon.extend(handles)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.skipped_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, timer))
        return timer

    def _run_once(self) -> None:
        """A turn for all that is ready, after a jump to the next timer if nothing is."""
        soon, timers = self._soon, self._timers
        if not soon and not self._stopping:  # type: ignore[attr-defined]
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            assert timers, "every task waits for something that nothing will bring"
            self.skipped_s = max(self.skipped_s, timers[0][0])
        while timers and timers[0][0] <= self.skipped_s:
            soon.append(heapq.heappop(timers)[2])
        for _ in range(len(soon)):
            handle: Any = soon.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(WHO)
            if process is not None and not process.is_running:
                process.park(handle)
                continue
            try:
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"{handle!r} failed", "exception": error, "handle": handle})


class _Turn(asyncio.Handle):
    """As its parent, without what it does for debugging: a run makes a hundred thousand."""

    def __init__(
        self, callback: Callback, args: Sequence[Any], loop: VirtualLoop, context: contextvars.Context | None
    ) -> None:
        self._callback, self._args, self._loop = callback, args, loop
        self._context = contextvars.copy_context() if context is None else context
        self._cancelled, self._repr = False, None


def _succeed(done: asyncio.Future[Any], result: Any) -> None:
    if not done.cancelled():
        done.set_result(result)


def _fail(done: asyncio.Future[Any], error: BaseException) -> None:
    if not done.cancelled():
        done.set_exception(error)


class VirtualClock:
    """The time of the running loop, as a machine sees it whose clock is `skew_s` ahead."""

    def __init__(self, skew_s: float = 0.0) -> None:
        self.skew_s = skew_s

    def now_s(self) -> float:
        return BASE_S + self.skew_s + asyncio.get_running_loop().time()

    def sleep(self, duration_s: float) -> Coroutine[Any, Any, None]:
        return asyncio.sleep(duration_s)
