"""What the processes of a swarm hold at one moment, from Linux's /proc; a volunteer counts with its libp2p daemon.

Memory is PSS (proportional set size): shared pages count once over all processes, so that the sum is what the machine
really gives. On disk blobs and everything else are told apart: blobs are pruned, chains and histories are kept. Shards
and inner states do not count: a volunteer keeps them of every path that it comes to, and there are only so many paths.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
SOCKET_FOLDER = Path("/tmp")
KIB = 1024
DIGEST = re.compile(r"[0-9a-f]{64}")

Sample = dict[str, float]
"""Measure, or measure and member as `memory_bytes volunteer-1`, to its value."""


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    with contextlib.suppress(OSError):
        children = (PROC / f"{pid}/task/{pid}/children").read_text().split()
        return [pid, *(found for child in children for found in family(int(child)))]
    return []


def memory_bytes(pid: int) -> int:
    """Its proportional share of memory; 0 for one that has ended."""
    with contextlib.suppress(OSError):
        for line in (PROC / f"{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * KIB
    return 0


def open_files(pid: int) -> tuple[int, int]:
    """How many files it has open, and how many of them are sockets."""
    targets = []
    with contextlib.suppress(OSError):
        for link in (PROC / f"{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                targets.append(str(link.readlink()))
    return len(targets), sum(target.startswith("socket:") for target in targets)


def threads(pid: int) -> int:
    """How many threads it has."""
    with contextlib.suppress(OSError):
        return len(list((PROC / f"{pid}/task").iterdir()))
    return 0


def disk_bytes(folder: Path) -> tuple[int, int]:
    """What the blobs under `folder` take that are not some path's, and all other files."""
    blobs = others = 0
    of_paths = _of_paths(folder)
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it was removed meanwhile
            size = path.stat().st_size if path.is_file() and path.name not in of_paths else 0
            blobs, others = (blobs + size, others) if "blobs" in path.parts else (blobs, others + size)
    return blobs, others


def _of_paths(folder: Path) -> set[str]:
    """The names of the shards and inner states."""
    names: set[str] = set()
    for pattern in ("manifest.json", "state-*.json"):
        for path in folder.rglob(f"documents/{pattern}"):
            with contextlib.suppress(OSError):
                names.update(DIGEST.findall(path.read_text()))
    return names


def take(pids: dict[str, int], homes: dict[str, Path], *, is_alone: bool = True) -> Sample:
    """Everything, by member; and what belongs to the machine, if nobody else on it starts peers."""
    sample: Sample = _of_machine() if is_alone else {}
    for name, pid in pids.items():
        members = family(pid)
        files = [open_files(member) for member in members]
        blobs, others = disk_bytes(homes[name])
        sample |= {
            f"memory_bytes {name}": float(sum(map(memory_bytes, members))),
            f"open_files {name}": float(sum(count for count, _ in files)),
            f"sockets {name}": float(sum(count for _, count in files)),
            f"threads {name}": float(sum(map(threads, members))),
            f"processes {name}": float(len(members)),
            f"blob_bytes {name}": float(blobs),
            f"kept_bytes {name}": float(others),
        }
    return sample


def _of_machine() -> Sample:
    """What nobody owns any more whose maker was killed."""
    return {
        "shared_memory_files": float(_count(SHARED_MEMORY.glob("*"))),
        "daemon_sockets": float(_count(SOCKET_FOLDER.glob("hivemind-*.sock"))),
    }


def _count(paths: Iterable[Path]) -> int:
    return sum(1 for _ in paths)
