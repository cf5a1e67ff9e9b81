"""Shell completion: both programs print it for each shell, and in a real bash it completes commands and options."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PROGRAMS = {"dipaco-peer": "peers.cli", "dipaco-bootstrap": "bootstrap.cli"}
ASK = """
. "$HOME/.bashrc"
complete_words() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    "$(complete -p "$1" | sed -E 's/.*-F ([^ ]+).*/\\1/')" "$1"
    echo "${COMPREPLY[@]}"
}
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A home of its own, and both programs on the path as an installation puts them there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for program, module in PROGRAMS.items():
        (folder / program).write_text(f"#!{sys.executable}\nfrom {module} import main\nmain()\n")
        (folder / program).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "HOME": str(tmp_path), "PATH": path, "PYTHONPATH": str(REPO)}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("shell", "word"), [("bash", "complete -o"), ("zsh", "#compdef"), ("fish", "complete --command")]
)
def test_the_script_for_a_shell_is_printed(environment: dict[str, str], program: str, shell: str, word: str) -> None:
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    done = subprocess.run(
        [program], env={**environment, variable: f"source_{shell}"}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert word in done.stdout and program in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_installed_completion_completes_commands_groups_and_options_in_bash(environment: dict[str, str]) -> None:
    def bash(script: str) -> str:
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    for program in PROGRAMS:
        assert "completion installed" in bash(f"{program} --install-completion; exit $?")  # bash must stay the parent
    assert bash(f"{ASK} complete_words dipaco-peer jo") == "join"
    assert bash(f"{ASK} complete_words dipaco-bootstrap leaderboard re") == "rebuild"
    assert bash(f"{ASK} complete_words dipaco-bootstrap init --na") == "--name"
