"""The programs of this project on a swarm in memory, in virtual time and under faults: `python -m simulation`."""

from __future__ import annotations

import os
import sys


def with_fixed_hashes(module: str) -> None:
    """Start `python -m module` again unless hashes are fixed: else the order of a set of names differs from run to
    run, and no run repeats itself."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], environment)
