"""Which engine this volunteer trains with: measured on its first steps, chosen once for all paths."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from dipaco_p2p.core.engine import AUTO, Engine, at_first, choose
from dipaco_p2p.core.inner import StepReport

STEPS_MIN = 8
"""Before these nothing is known: the first steps of a process are slow."""

OnStep = Callable[[StepReport], bool]


class Engines:
    """The choice of one process."""

    def __init__(self, device: str, *, wanted: str = AUTO, on_choice: Callable[[Engine], None]) -> None:
        """`on_choice` is told the choice once, when a step was taken with it: then all that belongs to it is known."""
        self._device = device
        self._wanted = wanted
        self._on_choice = on_choice
        self._steps_s: list[float] = []
        self._chosen: Engine | None = None
        self._is_told = False

    def engine(self, *, steps_left: int) -> Engine:
        """What to train the next round with; at first what is measured."""
        if self._chosen is None:
            known = len(self._steps_s) >= STEPS_MIN
            step_s = statistics.median(self._steps_s) if known else None
            self._chosen = choose(self._wanted, self._device, step_s=step_s, steps_left=steps_left)
        return self._chosen or at_first(self._wanted, self._device)

    def watched(self, on_step: OnStep, *, taken: Callable[[], None]) -> OnStep:
        """`on_step`; before the choice with what the steps take noted, right after it with one call of `taken`."""
        if self._chosen is None:
            return self._timed(on_step)
        return on_step if self._is_told else self._telling(on_step, taken)

    def tell(self, setup: str) -> None:
        """Pass the choice on, with what else was chosen on this machine."""
        assert self._chosen is not None
        self._on_choice(replace(self._chosen, setup=setup))

    def _telling(self, on_step: OnStep, taken: Callable[[], None]) -> OnStep:
        def telling(report: StepReport) -> bool:
            if not self._is_told:
                self._is_told = True
                taken()
            return on_step(report)

        return telling

    def _timed(self, on_step: OnStep) -> OnStep:
        last_s = time.perf_counter()

        def noted(report: StepReport) -> bool:
            nonlocal last_s
            now_s = time.perf_counter()
            self._steps_s.append(now_s - last_s)
            goes_on = on_step(report)
            last_s = time.perf_counter()
            return goes_on

        return noted
