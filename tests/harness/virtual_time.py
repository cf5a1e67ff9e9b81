"""Virtual time, as all tests know it; it lives where the simulator does."""

from __future__ import annotations

from simulation.virtual_time import BASE_S, VirtualClock, VirtualLoop, end, eventually, play

__all__ = ["BASE_S", "VirtualClock", "VirtualLoop", "end", "eventually", "play"]
