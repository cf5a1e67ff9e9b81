"""Installs a wheel into an environment made for it alone and tries what is in it: `make smoke`.

    python tests/packaging/smoke.py --wheel dist/X.whl --constraints constraints.txt     libraries from the index
    python tests/packaging/smoke.py --wheel dist/X.whl --borrow SITE_PACKAGES            those of an environment

Everything runs outside the repository and without its path, so what works here works from the wheel. Needs no library.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("dipaco-peer", "dipaco-bootstrap")
WAIT_S = 1800.0

IMPORT_ALL = """
import importlib, pathlib, sys
folder = pathlib.Path(sys.argv[1])
names = sys.argv[2].split(",")
for name in names:
    file = pathlib.Path(importlib.import_module(name).__file__)
    assert file.is_relative_to(folder), f"{name} comes from {file}, not from the wheel"
print(len(names), "modules imported")
"""
RUN_FILES = """
import pathlib, sys, bootstrap
from bootstrap.runfile import load_run_file
ready = sorted((pathlib.Path(bootstrap.__file__).parent / "runs").glob("*.toml"))
assert len(ready) >= 7, ready
for path in [pathlib.Path(sys.argv[1]), *ready]:
    print(path.name, load_run_file(path).run.topology)
"""


class Failed(Exception):
    """A command did not do what it must."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--constraints", type=Path, help="install the libraries too, in these versions")
    parser.add_argument("--borrow", type=Path, help="take the libraries from this folder of another environment")
    given = parser.parse_args(arguments)
    if (given.constraints is None) == (given.borrow is None):
        parser.error("one of --constraints and --borrow must be given")
    with tempfile.TemporaryDirectory() as folder:
        try:
            for line in smoke(given.wheel.resolve(), Path(folder), constraints=given.constraints, borrow=given.borrow):
                print(f"ok: {line}", flush=True)
        except Failed as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
    return 0


def smoke(wheel: Path, folder: Path, *, constraints: Path | None, borrow: Path | None) -> Iterator[str]:
    """Each thing that was tried, in a word; raises Failed at the first that does not work."""
    packages = install(wheel, folder / "venv", constraints=constraints, borrow=borrow)
    yield f"installed {wheel.name}"
    python, version = folder / "venv/bin/python", wheel.name.split("-")[1]
    for program in PROGRAMS:
        said = run(folder, folder / "venv/bin" / program, "--version").strip()
        if said != version:
            raise Failed(f"{program} --version says {said}, the wheel is {version}")
        run(folder, folder / "venv/bin" / program, "--help")
        yield f"{program} {said}, --help"
    run(folder, folder / "venv/bin/dipaco-bootstrap", "init", "run.toml")
    run(folder, python, "-I", "-c", RUN_FILES, "run.toml")
    yield "init, and all run files can be read"
    tops = ",".join(sorted({name.split("/")[0] for name in contents(wheel) if name.endswith(".py")}))
    run(folder, python, "-I", "-m", "compileall", "-q", *(str(packages / name) for name in tops.split(",")))
    yield f"compiled {tops}"
    yield run(folder, python, "-I", "-c", IMPORT_ALL, str(packages), ",".join(modules(wheel))).strip()


def install(wheel: Path, target: Path, *, constraints: Path | None, borrow: Path | None) -> Path:
    """A new environment with the wheel in it; the folder where its packages are."""
    venv.create(target, with_pip=False, symlinks=True)
    [packages] = target.glob("lib/python*/site-packages")
    how = ["--constraint", str(constraints.resolve())] if constraints else ["--no-deps", "--no-index"]
    if borrow:
        (packages / "borrowed.pth").write_text(f"{borrow.resolve()}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(target / "bin/python")]
    run(target, *pip, "install", "--quiet", "--no-compile", *how, str(wheel))
    return packages


def run(folder: Path, *command: str | Path) -> str:
    """What a command prints, run in `folder` with nothing of this one's surroundings but its path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DIPACO"))}
    environment = {**kept, "HOME": str(folder), "NO_COLOR": "1"} if "pip" not in command else kept
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    if done.returncode:
        raise Failed(f"{' '.join(words)[:200]} left with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def contents(wheel: Path) -> list[str]:
    """The files in a wheel, without what describes it."""
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if ".dist-info/" not in name]


def modules(wheel: Path) -> list[str]:
    """The names of all modules in a wheel; `__main__` would start something."""
    files = [name.removesuffix(".py") for name in contents(wheel) if name.endswith(".py")]
    names = {name.removesuffix("/__init__").replace("/", ".") for name in files}
    return sorted(name for name in names if not name.endswith("__main__"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
