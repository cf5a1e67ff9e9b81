"""The documentation says what the code does: parts are made from it, and nothing that a user can meet is missing."""

from __future__ import annotations

import functools
import importlib
import re
import sys
import typing
from enum import StrEnum
from pathlib import Path

import pytest

from dipaco_p2p.config import PROTOCOL_VERSION
from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.calls import CALLS
from dipaco_p2p.protocol.documents import Document
from dipaco_p2p.protocol.reasons import Reason

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "docs/site"))
generated = importlib.import_module("generated")

METHOD = re.compile(r"(run|blob|module|mirror|archive)\.[a-z]+")
METHOD_ROW = re.compile(r"^\| `([a-z]+\.[a-z]+)` \|", re.MULTILINE)
LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)")


def read(name: str) -> str:
    return (REPO / name).read_text(encoding="utf-8")


PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]


# -- the parts that the site makes from the code


def test_every_part_has_a_place_and_none_is_committed() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert {found[1] for text in texts for found in generated.MARK.finditer(text)} == set(generated.PARTS)
    assert [page for page, text in zip(PAGES, texts, strict=True) if "<!-- end -->" in text] == []


def test_a_part_takes_the_place_of_its_mark_and_of_the_note_below_it() -> None:
    page = "a\n<!-- generated: exit-codes -->\n*Made from the code: somewhere.*\n\nb `<!-- generated: odd -->`\n"
    filled = generated.fill(page)
    assert filled.startswith("a\n| code | meaning |") and filled.endswith(" |\n\nb `<!-- generated: odd -->`\n")
    with pytest.raises(KeyError, match="odd"):
        generated.fill("<!-- generated: odd -->\n")


# -- nothing that a user or a second implementation can meet is missing


def test_every_reason_of_admission_is_in_the_reference() -> None:
    table = generated.reasons()
    assert [reason for reason in Reason if f"| `{reason}` |" not in table] == []


def test_the_calls_in_the_reference_are_those_in_the_code() -> None:
    assert set(METHOD_ROW.findall(generated.calls())) == set(CALLS)


def test_the_protocol_can_be_read_in_one_go() -> None:
    assert len(read("docs/protocol.md").splitlines()) <= 600


def test_the_protocol_says_which_version_it_is() -> None:
    assert f"This is protocol version **{PROTOCOL_VERSION}**" in read("docs/protocol.md")


def test_every_kind_of_signature_is_in_the_protocol() -> None:
    [told] = re.findall(r"The kinds are (.*?), so that", read("docs/protocol.md"), flags=re.DOTALL)
    kinds = {kind.KIND for kind in typing.get_args(Document)}
    assert "grant" in kinds
    assert set(re.findall(r"`(\w+)`", told)) == kinds | {"record", "cosignature", "custody", "draw", "vote"}


def test_the_readme_is_short_and_shows_small_pictures() -> None:
    text = read("README.md")
    pictures = [REPO / target for target in LINK.findall(text) if target.startswith("docs/pictures/")]
    assert len(text.splitlines()) <= 200
    assert len(pictures) >= 2 and [path.name for path in pictures if path.stat().st_size > 200 * 1024] == []


def test_the_map_of_folders_in_the_readme_is_the_tree() -> None:
    [block] = re.findall(r"```text\n(dipaco_p2p/ .*?)```", read("README.md"), flags=re.DOTALL)
    named = re.findall(r"^(  )?([a-z_0-9]+)/ ", block, flags=re.MULTILINE)
    missing = [name for inner, name in named if not (REPO / ("dipaco_p2p" if inner else "") / name).is_dir()]
    assert {name for inner, name in named if not inner} >= {"dipaco_p2p", "peers", "bootstrap", "tests", "docs"}
    assert not missing


def test_every_row_of_the_log_has_a_date_a_command_and_a_result() -> None:
    rows = [line for line in read("docs/log.md").splitlines() if line.startswith("|")][2:]
    entry = re.compile(r"\| \d{4}-\d\d-\d\d \| (.*`[^`]+`.*|the same run) \| \S.* \| \S.* \|")
    assert rows and [row for row in rows if not entry.fullmatch(row)] == []


def test_every_exit_code_is_in_the_reference() -> None:
    kinds = [DipacoError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    table = generated.exit_codes()
    assert [kind.__name__ for kind in kinds if f"| {kind.exit_code} |" not in table] == []


@pytest.mark.parametrize("page", [path.relative_to(REPO).as_posix() for path in PAGES])
def test_links_inside_the_repository_lead_somewhere(page: str) -> None:
    broken = []
    for target in LINK.findall(read(page)):
        file, _, anchor = target.partition("#")
        path = (REPO / page).parent / file if file else REPO / page
        if "://" not in target and (not path.exists() or (anchor and anchor not in anchors(path))):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", [path.relative_to(REPO).as_posix() for path in PAGES if path.name != "log.md"])
def test_every_file_of_the_code_that_a_page_names_is_there(page: str) -> None:
    """By the end of its path, as people write it: `swarm/frames.py`. The log speaks of its day's files."""
    named = set(re.findall(r"`([\w/]+/\w+\.py)`", read(page)))
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in files_of_the_code())] == []


@functools.cache
def files_of_the_code() -> list[str]:
    """All Python files but those of installed libraries, which are a hundred times as many."""
    tops = [path for path in REPO.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return [path.as_posix() for top in tops for path in top.rglob("*.py")]


def anchors(path: Path) -> set[str]:
    """The names that headings get on the usual forges."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# -- the pieces


class Light(StrEnum):
    """The lights of a crossing."""

    RED = "red"
    """Stop."""
    GREEN = "green"


def test_a_machine_starts_in_the_state_of_its_first_transition_and_shows_all() -> None:
    lines = generated.machine({(Light.RED, Light.GREEN): Light.GREEN, (Light.GREEN, Light.RED): Light.RED}).splitlines()
    assert lines[2:] == ["| `RED` | green | `GREEN` |", "| `GREEN` | red | `RED` |"]


def test_a_text_below_a_member_is_found_and_a_cell_stays_one_cell() -> None:
    assert generated.texts_of(Light) == {"RED": "Stop.", "GREEN": ""}
    assert generated.table(("a", "b"), [("x | y", "1\n2")]).splitlines()[2] == "| x \\| y | 1 2 |"


def test_every_reason_says_whether_another_try_helps() -> None:
    rows = {line.split("`")[1]: line.split("|")[2].strip() for line in generated.reasons().splitlines()[2:]}
    assert (rows["busy"], rows["norm"]) == ("yes", "")


def test_a_limit_is_shown_with_its_value_and_the_text_below_it(tmp_path: Path) -> None:
    (tmp_path / "swarm").mkdir(parents=True)
    (tmp_path / "swarm/new.py").write_text(
        "C_MAX = 2 * B_MAX\nA_BYTES_MAX = 4 * 1024\n"
        'B_MAX = 2**40\n"""Why."""\nWAIT_S = 0.5\n_HIDDEN_MAX = 3\nNAME = "text"\nMADE = float(3)\n'
    )
    assert generated.limits(tmp_path).splitlines()[2:] == [
        "| `C_MAX` | 2^41 | swarm/new.py |  |",
        "| `A_BYTES_MAX` | 4 KiB | swarm/new.py |  |",
        "| `B_MAX` | 2^40 | swarm/new.py | Why. |",
        "| `WAIT_S` | 0.5 s | swarm/new.py |  |",
    ]
