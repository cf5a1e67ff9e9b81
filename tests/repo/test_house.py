"""The counts of `benchmarks.house`, on a tree that is small enough to count by hand."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.house import circles, report, sources

TREE = {
    "dipaco_p2p/errors.py": "class Refused(Exception):\n    pass\n",
    "dipaco_p2p/swarm/api.py": "from ..errors import Refused\n\n\ndef call() -> Refused:\n    return Refused()\n",
    "peers/one.py": "from dipaco_p2p.swarm import api\nfrom . import two\n",
    "peers/two.py": "def later() -> None:\n    import peers.three\n",
    "peers/three.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .one import api\n",
    "tests/test_one.py": "from dipaco_p2p import errors\n",
    "peers/untracked.py": "",
}


def test_a_planted_tree_is_counted(tmp_path: Path) -> None:
    for path, text in TREE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    tracked = [path for path in TREE if path != "peers/untracked.py"]
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", *tracked], cwd=tmp_path, check=True)
    found = sources(tmp_path)
    assert [one.path for one in found] == sorted(tracked)
    heading, *lines = report(found)
    rows = {line[:26].strip(): [int(value) for value in line[26:].split()] for line in lines if "circle" not in line}
    assert heading.split()[:5] == ["files", "lines", "functions", "median", "classes"]
    # files, lines, functions, their median length, classes, files with one importer, short ones of these, long files
    assert rows["dipaco_p2p/swarm"] == [1, 5, 1, 2, 0, 1, 1, 0]
    assert rows["peers"] == [3, 7, 1, 2, 0, 3, 3, 0]
    assert rows["dipaco_p2p"] == [1, 2, 0, 0, 1, 1, 1, 0]  # a test is no importer
    assert rows["outside tests"] == rows["outside tests, benchmarks"] == [5, 14, 2, 2, 1, 5, 5, 0]
    assert [line for line in lines if "circle" in line] == ["circle of files: peers/one.py peers/three.py peers/two.py"]


def test_circles_are_told_apart() -> None:
    graph = {"a": ["b"], "b": ["a", "c"], "c": ["d"], "d": ["c", "e"], "e": [], "f": ["f"]}
    assert circles(graph) == [["a", "b"], ["c", "d"]]
