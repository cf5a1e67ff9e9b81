"""What is handed out: the sdist makes the wheel, and that has all that the programs need, nothing else, and works.

The quick form of `make smoke`: the libraries are those of this environment, the project comes from its wheel alone.
"""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import smoke  # noqa: E402

REPO = HERE.parents[1]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
TOPS = [name for name in PACKAGES if "." not in name]
MAKE = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("packaging")]


def make(kind: str, folder: Path, to: Path) -> Path:
    """Have setuptools build a `wheel` or an `sdist` from the sources in `folder`."""
    command = [sys.executable, "-c", MAKE, f"build_{kind}", str(to)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return to / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the whole repository, with what lies about in one."""
    copy = tmp_path_factory.mktemp("copy") / "repository"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "results")
    shutil.copytree(REPO, copy, ignore=ignored)
    return make("sdist", copy, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist alone."""
    folder = tmp_path_factory.mktemp("unpacked")
    # By the program: what `tarfile` wants to be told of a filter, the first releases of Python 3.11 do not know.
    subprocess.run(["tar", "-xzf", sdist, "-C", folder], check=True)
    return make("wheel", folder / sdist.name.removesuffix(".tar.gz"), sdist.parent)


def expected() -> set[str]:
    """Every file of the packages that a program may read."""
    paths = (path for top in TOPS for path in (REPO / top).rglob("*") if path.is_file())
    return {path.relative_to(REPO).as_posix() for path in paths if "__pycache__" not in path.parts}


def test_the_wheel_has_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    assert set(smoke.contents(wheel)) == expected()
    assert {f"{top}/py.typed" for top in TOPS} <= expected()
    wanted = ("bootstrap/runs/", "leaderboard/web/static/", "leaderboard/web/templates/")
    assert [part for part in wanted if not any(name.startswith(part) for name in expected())] == []


def test_the_sdist_has_the_packages_what_builds_them_and_no_tests(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = {name for name in names if name}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"} <= files
    assert expected() <= files
    strange = ("tests", "benchmarks", "docs", "simulation")
    assert [name for name in files if name.startswith(strange) or "__pycache__" in name] == []


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        said = email.message_from_bytes(archive.read(name))
        licences = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
    assert (said["Name"], said["License-Expression"], len(licences)) == ("dipaco-p2p", "Apache-2.0", 1)
    assert said["Requires-Python"] == ">=3.11" and "Typing :: Typed" in said.get_all("Classifier")
    assert "Train one large" in said.get_payload()


def test_everything_in_the_wheel_works_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    borrow = Path(sysconfig.get_path("purelib"))
    lines = list(smoke.smoke(wheel, tmp_path, constraints=None, borrow=borrow))
    assert "modules imported" in lines[-1]


def test_whoever_imports_the_wheel_sees_its_types(wheel: Path, tmp_path: Path) -> None:
    packages = smoke.install(wheel, tmp_path / "venv", constraints=None, borrow=None)
    (tmp_path / "consumer.py").write_text(
        "from dipaco_p2p.topology import ModuleId\n"
        "from leaderboard.places import DEFAULT_PORT\n"
        "reveal_type(DEFAULT_PORT)\n"
        "wrong: str = ModuleId.parse('L1.M0')\n"
    )
    python = packages.parents[2] / "bin/python"
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "--python-executable", str(python)]
    done = subprocess.run([*command, "consumer.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert re.search(r'Revealed type is "(builtins\.)?int"', done.stdout)
    assert 'expression has type "ModuleId", variable has type "str"' in done.stdout
    assert "missing library stubs" not in done.stdout


def test_a_wheel_with_a_module_that_cannot_be_imported_is_noticed(wheel: Path, tmp_path: Path) -> None:
    bad = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(bad, "w") as new:
        for item in old.infolist():
            is_broken = item.filename == "leaderboard/places.py"
            new.writestr(item, "import no_such_library\n" if is_broken else old.read(item))
    with pytest.raises(smoke.Failed, match="no_such_library"):
        list(smoke.smoke(bad, tmp_path, constraints=None, borrow=Path(sysconfig.get_path("purelib"))))
