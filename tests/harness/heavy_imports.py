"""Which heavy libraries a command of the programs imports; each would cost seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]
HEAVY = (
    *("torch", "hivemind", "numpy", "datasets", "tokenizers", "bitsandbytes", "prometheus_client"),
    *("tensorboardX", "wandb"),
)
# The last line of stderr lists what was imported, whichever way the command line ended.
PROBE = f"""
import atexit, importlib, sys
atexit.register(lambda: print("heavy:", *(name for name in {HEAVY} if name in sys.modules), file=sys.stderr))
sys.argv[0] = "program"
sys.exit(importlib.import_module(sys.argv.pop(1)).main())
"""


def probe(module: str, *arguments: str, path: Path | str = REPO) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run `main` of a module found at `path` with `arguments`; the outcome, and which heavy libraries it imported."""
    environment = {**os.environ, "PYTHONPATH": str(path), "COLUMNS": "120", "NO_COLOR": "1"}
    command = [sys.executable, "-c", PROBE, module, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    last_line = result.stderr.splitlines()[-1]
    assert last_line.startswith("heavy:"), result.stderr
    return result, last_line.split()[1:]
