"""The documentation, typed: every command line of its main pages, into a shell, against one live run.

Only what cannot be known beforehand is put in place of the example: the ticket, ids, ports. A page may not show a
command line that is neither typed here nor listed in `ELSEWHERE` with its reason.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from e2e_harness import ENTRIES, PLAIN, REPO, eventually, free_port

pytestmark = [pytest.mark.libp2p, pytest.mark.slow, pytest.mark.xdist_group("walk"), pytest.mark.timeout(600)]

PAGES = ["README.md", *(f"docs/{name}.md" for name in "join volunteer swarm coordinator decrees leaderboard".split())]
ELSEWHERE = {
    "dipaco-peer join dipaco1... --log wandb:my-project": "sends to a stranger's service; a fake one: test_curves.py",
    "dipaco-peer service install TICKET": "needs systemd: test_service.py",
    "dipaco-peer service status": "the same",
    "dipaco-peer service uninstall": "the same",
    "dipaco-bootstrap invite my-run 12D3KooW...": "needs a run by invitation: test_inviting.py",
    "dipaco-peer join dipaco1... --invitation invite1...": "the same",
    "dipaco-peer invite 12D3KooW...": "the same",
    "dipaco-bootstrap appoint ...4c9QpX my-run": "needs a second seed node: test_outages.py",
}
"""Lines that this walk does not type, and why."""
WAIT_S = 240.0
TICKET = "dipaco1qyqqzhx72ma..."
"""The example of a page."""
RUN = """
[run]
name = "my-run"
[warmup]
rounds = 1
[routing]
reshard_rounds = [2]
[model]
vocab_size = 300
width = 16
ffn_width = 16
context = 72
[[model.levels]]
embedding = true
head = true
[[model.levels]]
modules = 2
blocks = 1
[[model.levels]]
blocks = 1
[inner]
steps = 2
batch = 4
warmup_steps = 1
[rounds]
rounds = 100000
deadline_s = 3.0
grace_s = 0.3
[liveness]
heartbeat_ttl_s = 3.0
settle_s = 0.3
[corpus]
source = "{corpus}"
[archive]
rounds = 0
[leaderboard]
port = 0
[node]
port = {port}
"""


def documented() -> dict[str, str]:
    """Each command line that a page shows in a block, without its comment, and the first page that shows it."""
    found: dict[str, str] = {}
    for page in PAGES:
        text = (REPO / page).read_text(encoding="utf-8")
        for block in re.findall(r"^```(?:console|sh)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                line = re.sub(r"\s+# .*", "", line.removeprefix("$ ")).strip()
                if line.split(" ")[0] in ENTRIES:
                    found.setdefault(line, page)
    return found


@dataclass(slots=True)
class Typed:
    """One command in its shell."""

    line: str
    process: subprocess.Popen[bytes]
    out: Path

    @property
    def said(self) -> str:
        return self.out.read_text(errors="replace")

    def until(self, *words: str) -> Typed:
        """Wait for these words; it goes on."""

        def look() -> bool:
            assert self.process.poll() is None or all(word in self.said for word in words), f"{self.line}\n{self.said}"
            return all(word in self.said for word in words)

        eventually(look, within_s=WAIT_S, what=lambda: f"{self.line}\n{self.said[-3000:]}")
        return self

    def end(self, *, code: int = 0, by: signal.Signals = signal.SIGINT) -> str:
        """As Ctrl-C does; what it said."""
        if self.process.poll() is None:
            self.process.send_signal(by)
        return self.wait(code=code)

    def wait(self, *, code: int = 0) -> str:
        assert self.process.wait(WAIT_S) == code, f"{self.line}\n{self.said[-3000:]}"
        assert "Traceback" not in self.said
        return self.said


@dataclass(slots=True)
class Shell:
    """A user's terminal in an empty folder."""

    folder: Path
    names: dict[str, str] = field(default_factory=dict)
    """What stands in place of a part of an example."""
    typed: list[Typed] = field(default_factory=list)
    walked: int = 0
    """Tests of the walk that came to their end."""

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.folder / "my-run"

    def begin(self, line: str) -> Typed:
        """Type a line that a page shows."""
        put = line
        for part, real in self.names.items():
            put = put.replace(part, real)
        out = self.folder / f"{len(self.typed)}.txt"
        env = os.environ | PLAIN | {"HOME": str(self.folder), "PATH": f"{self.folder}:{os.environ['PATH']}"}
        env = {name: value for name, value in env.items() if not name.startswith(("DIPACO_", "XDG_"))}
        with out.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {put}"],
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_hears_ctrl_c,
            )
        self.typed.append(Typed(line, process, out))
        return self.typed[-1]

    def done(self, line: str, *, code: int = 0) -> str:
        """Type it, and wait for its end; what it said."""
        return self.begin(line).wait(code=code)

    def close(self) -> None:
        """End what is left, the youngest first."""
        for one in reversed(self.typed):
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGTERM)
                one.process.wait(WAIT_S)


def _hears_ctrl_c() -> None:
    """As in a terminal, also where the tests were started in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("walk")
    for program, entry in ENTRIES.items():
        script = folder / program
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "from {entry} import main; main()" "$@"\n')
        script.chmod(0o755)
    made = Shell(folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def coordinator(shell: Shell, corpus: Path) -> Typed:
    """As docs/swarm.md begins; it stays."""
    shell.done("dipaco-bootstrap init run.toml --name my-run")
    (shell.folder / "run.toml").write_text(RUN.format(corpus=corpus, port=free_port()))
    assert "8,464 parameters" in shell.done("dipaco-bootstrap plan run.toml --up-mbit 5")
    shell.done("dipaco-bootstrap check run.toml")
    found = shell.begin("dipaco-bootstrap start run.toml --dir my-run").until("dipaco-peer join dipaco1")
    plate = json.loads((shell.run / "address.json").read_text())
    shell.names |= {name: plate["ticket"] for name in (TICKET, "dipaco1...", "TICKET")}
    shell.names["/ip4/.../tcp/.../p2p/..."] = plate["address"]
    return found


@pytest.fixture(scope="module")
def volunteer(shell: Shell, coordinator: Typed) -> Typed:
    """One that stays; the last ones to be asked for are others."""
    return shell.begin(f"dipaco-peer join {TICKET}").until("receipt for")


def test_a_volunteer_looks_around_and_joins_in_each_way_of_a_page(shell: Shell, coordinator: Typed) -> None:
    assert "ok   clock" in shell.done(f"dipaco-peer doctor {TICKET}")
    assert "would be claimed" in shell.done(f"dipaco-peer join {TICKET} --dry-run")
    shell.done("dipaco-peer --version")
    for line in ("init", "check", "show"):
        shell.done(f"dipaco-peer config {line}")
    assert "dipaco-peer join" in shell.done("dipaco-peer service show TICKET")
    for line in (
        'dipaco-peer join TICKET --name Ada --team "The Analysts"',
        "dipaco-peer join dipaco1... --log tensorboard:curves --log csv:curves.csv",
        "dipaco-peer join dipaco1... --log-format json",
        "dipaco-peer join TICKET",
    ):
        assert "leaving" in shell.begin(line).until("receipt for", "done: loss").end()
    assert "loss/P0-" in (shell.folder / "curves.csv").read_text()
    shell.walked += 1


def test_a_run_is_looked_at_and_used_while_it_goes_on(shell: Shell, coordinator: Typed, volunteer: Typed) -> None:
    for what in ("status", "peers", "paths", "modules"):
        assert shell.done(f"dipaco-bootstrap {what} my-run")
    shell.begin("dipaco-bootstrap status my-run --watch").until("my-run").end(code=130)
    assert "standing" in shell.done("dipaco-peer me")
    assert "credit" in shell.done("dipaco-peer me /ip4/.../tcp/.../p2p/...")
    eventually(lambda: len(judged(shell.run)) > 7, within_s=WAIT_S, what=lambda: coordinator.said)
    assert "agree" in shell.done("dipaco-peer evaluate /ip4/.../tcp/.../p2p/... --round 7")
    shell.done('dipaco-bootstrap generate my-run "It was a dark and stormy night" --every 64')
    shell.done("dipaco-bootstrap export my-run --path P0-1-0 --to my-path --best")
    shell.done("dipaco-bootstrap verify my-run")
    shell.begin("dipaco-bootstrap leaderboard serve /ip4/.../tcp/.../p2p/...").until("leaderboard: http://").end()
    shell.names |= {"SOURCE DIR": "my-run pages", "FOLDER NEW.sqlite": "my-run new.sqlite"}
    assert "index.html" in shell.done("dipaco-bootstrap leaderboard export SOURCE DIR")
    shell.done("dipaco-bootstrap leaderboard rebuild FOLDER NEW.sqlite")
    shell.walked += 1


def test_the_coordinator_decrees_and_whoever_is_banned_ends(shell: Shell, coordinator: Typed, volunteer: Typed) -> None:
    second = shell.begin(f"dipaco-peer join {TICKET} --home second").until("takes part")
    peer = re.findall(r"volunteer +\.\.\.(\w{6}) in second", second.said)[0]
    shell.names["...8VhWqZ"] = f"...{peer}"
    eventually(lambda: len(judged(shell.run)) > 13, within_s=WAIT_S, what=lambda: coordinator.said)
    eventually(lambda: peer in shell.done("dipaco-bootstrap peers my-run"), within_s=WAIT_S)
    for line in (
        'freeze my-run --reason "a bad shard"',
        "unfreeze my-run",
        'rollback L1.M0 12 my-run --reason "diverged"',
        'hide-name ...8VhWqZ my-run --reason "an insult"',
        'ban ...8VhWqZ my-run --reason "contributions of noise"',
    ):
        assert "decree " in shell.done(f"dipaco-bootstrap {line}")
    assert "contributions of noise" in second.wait(code=7)
    shell.done("dipaco-bootstrap admit ...8VhWqZ my-run")
    log = shell.done("dipaco-bootstrap decrees my-run")
    assert all(word in log for word in ("freeze", "unfreeze", "rollback", "hide-name", "ban", "admit"))
    assert "leaving" in volunteer.end()
    shell.walked += 1


def test_the_coordinator_starts_in_each_way_of_a_page(shell: Shell, coordinator: Typed) -> None:
    coordinator.end()
    shell.names["9464"] = str(free_port())
    for line in (
        "dipaco-bootstrap start run.toml --dir my-run --metrics 9464",
        "dipaco-bootstrap start run.toml --dir my-run --log tensorboard:curves --log csv:curves.csv",
        "dipaco-bootstrap start run.toml --dir my-run --log-format json",
        "dipaco-bootstrap start run.toml",
    ):
        assert "volunteers join with this line" in shell.begin(line).until("dipaco-peer join dipaco1").end()
    (shell.folder / "run.toml").unlink()
    shell.done("dipaco-bootstrap init")
    assert "[leaderboard]" in (shell.folder / "run.toml").read_text()
    shell.walked += 1


def test_no_page_shows_a_line_that_was_not_typed(shell: Shell) -> None:
    assert ELSEWHERE.keys() <= documented().keys()
    if shell.walked < 4:
        pytest.skip("only the whole walk can tell")
    missing = set(documented()) - {one.line for one in shell.typed} - ELSEWHERE.keys()
    assert not missing, "\n".join(f"{documented()[line]}: {line}" for line in sorted(missing))


def judged(run: Path) -> list[str]:
    path = run / "grid" / "evaluations.jsonl"
    return path.read_text().splitlines() if path.exists() else []
