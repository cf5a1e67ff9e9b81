"""Collects what a machine with a GPU may lack, as wheels: `python -m benchmarks.gpu.collect`.

For Linux on x86-64, and a Python that has torch, numpy, tokenizers, safetensors, scipy and typer already, and no way to
fetch anything. All versions are those of constraints.txt. hivemind's wheel brings its daemon p2pd. Of bitsandbytes only
the library for one CUDA version stays, and the one for processors: the whole wheel is 41 MiB. `datasets` is not
among them: text that is found on a machine, or brought along as `data.npz`, does not need it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

MIB = 2**20
SIZE_MAX = 40 * MIB
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
SWARM = (
    "hivemind",
    "base58",
    "blake3",
    "cffi",
    "ConfigArgParse",
    "cryptography",
    "mmh3",
    "morphys",
    "netaddr",
    "prefetch_generator",
    "py-cid",
    "py-multibase",
    "py-multicodec",
    "py-multihash",
    "pycparser",
    "python-baseconv",
    "varint",
    "annotated-types",
    "pydantic",
    "pydantic_core",
    "typing-inspection",
    "typing_extensions",
)
"""hivemind and what its import needs beyond what torch brings; whole rounds need `cryptography`, too."""
PROGRAMS = ("platformdirs", "rich", "starlette", "uvicorn")
OPTIMIZER = "bitsandbytes"
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 5, 31, 34)) + ("manylinux2014_x86_64",)
"""In the order of preference: what was built for an older C library runs with a newer one."""
LIBRARY = re.compile(r"bitsandbytes/libbitsandbytes_(\w+)\.so")


def main(
    out: Annotated[Path, typer.Option(help="A folder for the wheels.")] = Path(".whl"),
    cuda: Annotated[str, typer.Option(help="CUDA of the torch there: 130 is 13.0.")] = "130",
    python: Annotated[str, typer.Option(help="The Python there.")] = "3.12",
    text: Annotated[
        list[str] | None, typer.Option(help="Also make data.npz of this text, as `corpus.source`; may be repeated.")
    ] = None,
    text_mb: Annotated[int, typer.Option(min=1, help="At most so many MB of text: data.npz takes about as much.")] = 20,
) -> None:
    """Collect wheels, and text if asked to."""
    from dipaco_p2p.errors import DipacoError, EnvironmentUnfit
    from dipaco_p2p.program.console import print_error

    try:
        out.mkdir(parents=True, exist_ok=True)
        for pin in pins((*SWARM, *PROGRAMS, OPTIMIZER)):
            fetch(pin, out, python=python)
        cut(next(out.glob(f"{OPTIMIZER}-*.whl")), keep=(f"cuda{cuda}", "cpu"))
        size = sum(wheel.stat().st_size for wheel in out.glob("*.whl"))
        print(f"{out}: {len(list(out.glob('*.whl')))} wheels, {size / MIB:.1f} MiB")
        if size > SIZE_MAX:
            raise EnvironmentUnfit(f"the wheels take {size / MIB:.1f} MiB, more than {SIZE_MAX / MIB:.0f}")
        if text:
            _prepare(text, out / "data.npz", bytes_max=text_mb * 1_000_000)
    except DipacoError as error:
        print_error(error)
        raise typer.Exit(error.exit_code) from None
    print(f"there: python3 -m pip install --no-index --no-deps --target /tmp/site {out}/*.whl")
    print("       export PYTHONPATH=/tmp/site")


def pins(names: Sequence[str]) -> Iterator[str]:
    """`name==version` of each, as constraints.txt has it."""
    found = dict(re.findall(r"^([\w.-]+)==([\w.+]+)", CONSTRAINTS.read_text("utf-8"), re.M))
    known = {_plain(name): (name, version) for name, version in found.items()}
    for name in names:
        yield "==".join(known[_plain(name)])


def fetch(pin: str, out: Path, *, python: str) -> None:
    """The wheel of one library; made here if there is only a source of it, which must be pure Python."""
    if any(_plain(wheel.name.split("-")[0]) == _plain(pin.split("==")[0]) for wheel in out.glob("*.whl")):
        return
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    wanted = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    found = subprocess.run(
        [*pip, "download", "--no-deps", *wanted, "-d", str(out), pin], capture_output=True, check=False
    )
    if found.returncode:
        _run([*pip, "wheel", "--no-deps", "-w", str(out), pin])


def cut(wheel: Path, *, keep: Sequence[str]) -> None:
    """Leave out of the wheel of bitsandbytes all libraries but these."""
    partial = wheel.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as less:
        for item in whole.infolist():
            if (library := LIBRARY.fullmatch(item.filename)) and library[1] not in keep:
                continue
            data = whole.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                data = b"".join(line for line in data.splitlines(keepends=True) if _stays(line.decode(), keep))
            less.writestr(item, data)
    partial.replace(wheel)


def _stays(line: str, keep: Sequence[str]) -> bool:
    library = LIBRARY.match(line)
    return library is None or library[1] in keep


def _prepare(sources: Sequence[str], file: Path, *, bytes_max: int) -> None:
    from benchmarks.methods.data import prepare_data
    from benchmarks.methods.jobs import SIZES

    prepare_data(sources, bytes_max=bytes_max, size=SIZES["20M"]).save(file)
    print(f"{file}: {file.stat().st_size / MIB:.1f} MiB; it belongs into `method/` of the folder there")


def _run(command: Sequence[str]) -> None:
    from dipaco_p2p.errors import EnvironmentUnfit

    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise EnvironmentUnfit(f"`{' '.join(command[2:])}` failed: {last}", hint="is there a package index?")


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
