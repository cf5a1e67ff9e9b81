"""When the GPU is left to others, and when it is free again: rules over what NVML says, without a clock of their own.

a program counts        by name: as soon as it has anything on the card
                        by use (`any`): when it computes for 10 % of a second, or takes 1 GiB of memory in 10 s
what does not           this program, other volunteers, and whoever sits on the card without doing much there:
                        desktops, browsers, a model that is loaded and not asked
where nobody says       which process uses what: the growth of what is in use besides our own counts, and while
                        we rest, the use of the whole card
it is free again        when nothing counted for 30 s; after heat, when it was 5 degrees cooler for as long
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from ..preferences.keys import When
from .nvml import Reading

QUIET_S = 30.0
"""A game that loads, or stands in its menu, is not over."""
USE_PERCENT = 10.0
"""A desktop takes a few percent, a game more than this even where its menu stands still."""
GROWTH_BYTES = 1 << 30
GROWTH_S = 10.0
COOLER_C = 5.0
REST_S = 3.0
"""So long after our last step the card's use may still be our own: NVML looks back for up to a second."""
ANOTHER = "another program"


class Programs(Protocol):
    """Who processes are: machine.py; a test has its own."""

    def ours(self) -> frozenset[int]: ...

    def name_of(self, pid: int) -> str: ...

    def is_named(self, pid: int, names: frozenset[str]) -> bool: ...

    def is_volunteer(self, pid: int) -> bool: ...


class Yielding:
    """One card's, for one volunteer."""

    def __init__(self, when: When, *, who: Programs) -> None:
        self._when = when
        self._who = who
        self._names = frozenset(name.lower() for name in when.gpu_programs)
        self._others, self._heat = _Lasting(), _Lasting()
        self._name = ""
        """To whom the card is left."""
        self._memory: dict[int | None, _Growth] = {}
        """By process; None is all that is not ours."""
        self._is_blind = False
        """Whether processes are not those that we know: we hold memory, and are not among them."""
        self._rests_since_s: float | None = None
        self._saw_all = False
        """Whether the last reading had all processes: then one that was not there has come since."""

    def told(self, reading: Reading, *, now_s: float, is_resting: bool) -> tuple[str, ...]:
        """Why to pause now, in words. `is_resting`: we take no step, and have given back the card's memory."""
        ours = self._who.ours()
        if reading.own_bytes:
            self._is_blind = reading.memory is None or not ours & reading.memory.keys()
        if not is_resting:
            self._rests_since_s = None
        elif self._rests_since_s is None:
            self._rests_since_s = now_s
        found = [] if self._when.gpu_yield == "off" else list(self._found(reading, ours, now_s))
        self._saw_all = reading.memory is not None and not self._is_blind
        if found and self._name not in found:
            self._name = found[0]
        is_unseen = not found and self._is_hidden(reading, now_s)
        reasons = []
        if self._others.told(bool(found) or (self._others.holds and is_unseen), now_s):
            reasons.append(f"yielding the GPU to {self._name}")
        if self._heat.told(self._is_hot(reading), now_s):
            reasons.append(f"cooling the GPU, above {self._when.gpu_temperature_c:g} °C")
        return tuple(reasons)

    def _found(self, reading: Reading, ours: frozenset[int], now_s: float) -> Iterator[str]:
        """The names of those that count, the surest first."""
        others = {} if self._is_blind else {p: b for p, b in (reading.memory or {}).items() if p not in ours}
        use = {} if self._is_blind else {p: u for p, u in (reading.use or {}).items() if p not in ours}
        if self._names:
            listed = [pid for pid in {**others, **use} if self._who.is_named(pid, self._names)]
            yield from map(self._who.name_of, listed)
        if self._when.gpu_yield != "any":
            return
        busy = sorted((pid for pid in use if use[pid] >= USE_PERCENT), key=lambda pid: -use[pid])
        for pid in [*busy, *self._grown(reading, others, now_s)]:
            if pid is None:
                yield ANOTHER
            elif not self._who.is_volunteer(pid):
                yield self._who.name_of(pid)
        if not self._sees_use(reading) and self._has_rested(now_s) and (reading.card_use or 0.0) >= USE_PERCENT:
            yield ANOTHER

    def _grown(self, reading: Reading, others: dict[int, int | None], now_s: float) -> list[int | None]:
        """Who has taken much memory just now."""
        held: dict[int | None, int] = {pid: held for pid, held in others.items() if held is not None}
        if not held and reading.used_bytes is not None and (self._is_blind or not reading.memory or others):
            held = {None: max(0, reading.used_bytes - reading.own_bytes)}
        known, self._memory = self._memory, {}
        for pid, now_bytes in held.items():
            is_new = self._saw_all and pid is not None
            self._memory[pid] = known.get(pid) or _Growth(0 if is_new else now_bytes, now_s)
            self._memory[pid].told(now_bytes, now_s)
        return [pid for pid, growth in self._memory.items() if growth.bytes >= GROWTH_BYTES]

    def _is_hidden(self, reading: Reading, now_s: float) -> bool:
        """Whether others may use the card without our seeing it: only in a rest is the use of all that of others."""
        return self._when.gpu_yield == "any" and not self._sees_use(reading) and not self._has_rested(now_s)

    def _sees_use(self, reading: Reading) -> bool:
        return reading.use is not None and bool(reading.memory) and not self._is_blind

    def _has_rested(self, now_s: float) -> bool:
        return self._rests_since_s is not None and abs(now_s - self._rests_since_s) >= REST_S

    def _is_hot(self, reading: Reading) -> bool:
        limit, celsius = self._when.gpu_temperature_c, reading.celsius
        if limit is None or celsius is None:
            return False
        return celsius >= limit or (self._heat.holds and celsius > limit - COOLER_C)


class _Lasting:
    """Holds from when it is seen until it was not seen for QUIET_S."""

    def __init__(self) -> None:
        self._seen_s: float | None = None

    @property
    def holds(self) -> bool:
        return self._seen_s is not None

    def told(self, is_seen: bool, now_s: float) -> bool:
        """Whether it holds; a clock that is set back ends it early rather than never."""
        if is_seen:
            self._seen_s = now_s
        elif self._seen_s is not None and abs(now_s - self._seen_s) >= QUIET_S:
            self._seen_s = None
        return self.holds


class _Growth:
    """How much more something is now than at its least within GROWTH_S."""

    def __init__(self, first: int, now_s: float) -> None:
        self._seen: deque[tuple[float, int]] = deque([(now_s, first)])

    def told(self, now_bytes: int, now_s: float) -> None:
        self._seen.append((now_s, now_bytes))
        while abs(now_s - self._seen[0][0]) > GROWTH_S:
            self._seen.popleft()

    @property
    def bytes(self) -> int:
        return self._seen[-1][1] - min(held for _, held in self._seen)
