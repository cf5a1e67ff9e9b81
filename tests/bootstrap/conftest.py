from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
# The harnesses here, the tiny run of tiny_run.py and its peers of runtime_harness.py, the corpus of e2e_harness.py
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("runtime", "e2e"))]

from pace import rounds_take_time  # noqa: E402

__all__ = ["rounds_take_time"]
