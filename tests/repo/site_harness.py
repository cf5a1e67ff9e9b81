"""Builds the site of docs/ into a folder, and sites with pages of a test's own under the same rules."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REPO = Path(__file__).parents[2]
SETTINGS = REPO / "mkdocs.yml"


def build_site(to: Path, *, settings: Path = SETTINGS) -> subprocess.CompletedProcess[str]:
    """What `make site` does, into a folder of the test; what is said is in `stdout`."""
    # Its theme speaks of a successor, in colours, on every build.
    environment = {**os.environ, "PYTHONPATH": str(REPO), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(settings), "--site-dir", str(to)]
    streams: dict[str, int] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, cwd=REPO, env=environment, text=True, timeout=200, check=False, **streams)


def build_pages(folder: Path, pages: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """A site of these pages and no others, with the settings and hooks of the real one."""
    docs, settings = folder / "docs", folder / "mkdocs.yml"
    docs.mkdir()
    for name, text in pages.items():
        (docs / name).write_text(text, encoding="utf-8")
    hooks = REPO / "docs/site/hooks.py"
    settings.write_text(f"INHERIT: {SETTINGS}\ndocs_dir: {docs}\nhooks: ['{hooks}']\n", encoding="utf-8")
    return build_site(folder / "build/site", settings=settings)
