"""The documentation says what the code does: generated parts are fresh, and nothing that a user can meet is missing."""

from __future__ import annotations

import importlib
import re
import sys
import typing
from enum import StrEnum
from pathlib import Path

import pytest

from dipaco_p2p.errors import DipacoError
from dipaco_p2p.node.calls import CALLS
from dipaco_p2p.protocol.documents import Document
from dipaco_p2p.protocol.reasons import Reason

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "docs"))
build = importlib.import_module("build")
parts = importlib.import_module("parts")

METHOD = re.compile(r"(run|blob|module|mirror|archive)\.[a-z]+")
METHOD_ROW = re.compile(r"^\| `([a-z]+\.[a-z]+)` \|", re.MULTILINE)
LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)")


def read(name: str) -> str:
    return (REPO / name).read_text(encoding="utf-8")


def block(text: str, name: str) -> str:
    """The generated part of that name."""
    return next(found[0] for found in build.BLOCK.finditer(text) if found[2] == name)


# -- the generated parts are fresh


def test_no_generated_part_is_stale(capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["--check"]) == 0, capsys.readouterr().out


def test_every_generated_part_has_a_place() -> None:
    placed = [found[2] for page in build.pages() for found in build.BLOCK.finditer(page.read_text(encoding="utf-8"))]
    assert set(placed) == set(build.BLOCKS)


def test_a_part_that_somebody_edited_is_named_and_made_anew() -> None:
    text = "before\n<!-- generated: one -->\nedited\n<!-- end -->\nafter <!-- generated: two -->\n<!-- end -->"
    blocks = {"one": lambda: "made", "two": lambda: "also"}
    assert build.stale(text, blocks) == ["one", "two"]
    filled = build.fill(text, blocks)
    assert build.stale(filled, blocks) == []
    assert filled.startswith("before\n<!-- generated: one -->\nmade\n<!-- end -->\nafter ")


def test_a_part_that_nobody_makes_is_an_error() -> None:
    with pytest.raises(KeyError, match="odd"):
        build.fill("<!-- generated: odd -->\n<!-- end -->", {})


def test_check_fails_and_changes_nothing_when_a_part_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: exit-codes -->\n<!-- end -->\n")
    monkeypatch.setattr(build, "REPO", tmp_path)
    monkeypatch.setattr(build, "pages", lambda: [page])
    assert build.main(["--check"]) == 1
    assert "page.md: `exit-codes` is stale" in capsys.readouterr().out
    assert page.read_text() == "<!-- generated: exit-codes -->\n<!-- end -->\n"
    assert (build.main([]), build.main(["--check"])) == (0, 0)


# -- nothing that a user or a second implementation can meet is missing


def test_every_reason_of_admission_is_in_the_protocol() -> None:
    table = block(read("docs/protocol.md"), "refusals")
    assert [reason for reason in Reason if f"| `{reason}` |" not in table] == []


def test_the_methods_in_the_protocol_are_those_in_the_code() -> None:
    assert set(METHOD_ROW.findall(read("docs/protocol.md"))) == set(CALLS)


def test_every_kind_of_signature_is_in_the_protocol() -> None:
    [told] = re.findall(r"The kinds are (.*?), so that", read("docs/protocol.md"), flags=re.DOTALL)
    kinds = {kind.KIND for kind in typing.get_args(Document)}
    assert "grant" in kinds
    assert set(re.findall(r"`(\w+)`", told)) == kinds | {"record", "cosignature"}


def test_every_page_and_benchmark_is_in_the_list_of_files() -> None:
    tree = block(read("README.md"), "file-tree")
    files = [*(REPO / "docs").glob("*.md"), *(REPO / "benchmarks").glob("[a-z]*.py")]
    assert [path.name for path in files if not re.search(rf"^  {path.name} +\S", tree, flags=re.MULTILINE)] == []


def test_every_row_of_the_log_has_a_date_a_command_and_a_result() -> None:
    rows = [line for line in read("docs/log.md").splitlines() if line.startswith("|")][2:]
    entry = re.compile(r"\| \d{4}-\d\d-\d\d \| (.*`[^`]+`.*|the same run) \| \S.* \| \S.* \|")
    assert rows and [row for row in rows if not entry.fullmatch(row)] == []


def test_every_exit_code_is_in_the_reference() -> None:
    kinds = [DipacoError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    table = block(read("docs/reference.md"), "exit-codes")
    assert [kind.__name__ for kind in kinds if f"| {kind.exit_code} |" not in table] == []


@pytest.mark.parametrize("page", [path.relative_to(REPO).as_posix() for path in build.pages()])
def test_links_inside_the_repository_lead_somewhere(page: str) -> None:
    broken = []
    for target in LINK.findall(read(page)):
        file, _, anchor = target.partition("#")
        path = (REPO / page).parent / file if file else REPO / page
        if "://" not in target and (not path.exists() or (anchor and anchor not in anchors(path))):
            broken.append(target)
    assert not broken


def anchors(path: Path) -> set[str]:
    """The names that headings get on the usual forges."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# -- the pieces


class Light(StrEnum):
    RED = "red"
    GREEN = "green"


def test_a_machine_starts_in_the_state_of_its_first_transition_and_shows_all() -> None:
    lines = parts.machine({(Light.RED, Light.GREEN): Light.GREEN, (Light.GREEN, Light.RED): Light.RED}).splitlines()
    assert lines[2:-1] == ["    [*] --> RED", "    RED --> GREEN: green", "    GREEN --> RED: red"]


def test_a_cell_with_a_bar_or_a_line_break_stays_one_cell() -> None:
    assert parts.table(("a", "b"), [("x | y", "1\n2")]).splitlines() == [
        "| a | b |",
        "| --- | --- |",
        "| x \\| y | 1 2 |",
    ]


def test_a_refusal_is_found_with_its_words_whichever_way_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "dipaco_p2p/protocol").mkdir(parents=True)
    (tmp_path / "dipaco_p2p/protocol/reasons.py").write_text("PASSING = {'odd'}\n")
    (tmp_path / "dipaco_p2p/new.py").write_text(
        "def one(n):\n    raise Refused(f'{n} is too many', reason='odd')\n"
        "def two(n):\n    detail = f'bad {n}'\n    reason = Reason.NORM if n else Reason.STALE_BASE\n"
        "    return Verdict(reason, detail)\n"
    )
    lines = parts.refusals(tmp_path).splitlines()
    assert "| `odd` | yes | … is too many | new.py |" in lines
    assert "| `norm` |  | bad … | new.py |" in lines
    assert "| `stale-base` |  | bad … | new.py |" in lines


def test_a_limit_is_shown_with_its_value_and_the_text_below_it(tmp_path: Path) -> None:
    (tmp_path / "dipaco_p2p/swarm").mkdir(parents=True)
    (tmp_path / "dipaco_p2p/swarm/new.py").write_text(
        'A_BYTES_MAX = 4 * 1024\nB_MAX = 2**40\n"""Why."""\nWAIT_S = 0.5\n_HIDDEN_MAX = 3\nNAME = "text"\n'
    )
    assert parts.limits(tmp_path).splitlines()[2:] == [
        "| `A_BYTES_MAX` | 4 KiB | swarm/new.py |  |",
        "| `B_MAX` | 2^40 | swarm/new.py | Why. |",
        "| `WAIT_S` | 0.5 s | swarm/new.py |  |",
    ]


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("One thing. And another.", "One thing"),
        ("What `a.b` is\nand does.\n\nMore.", "What `a.b` is and does"),
        ("A sentence of enough words in it, and a part beyond the line", "A sentence of enough words in it"),
        ("A sentence that has no comma at all and goes on", "A sentence that has no comma at all and …"),
    ],
)
def test_a_file_is_described_by_its_first_sentence_cut_where_it_divides(docstring: str, expected: str) -> None:
    assert build.sentence(docstring, chars_max=45) == expected
