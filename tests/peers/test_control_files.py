"""What the commands do with a home, whether a volunteer runs there or not: its key, its log, its files, a report."""

from __future__ import annotations

import base64
import json
import logging
import os
import platform
import pwd
import stat
import tarfile
from itertools import islice
from pathlib import Path

import pytest

from dipaco_p2p.clock import ManualClock
from dipaco_p2p.errors import ConfigError, EnvironmentUnfit, IntegrityError
from dipaco_p2p.program.console import TEXT_FORMAT, JsonLines
from dipaco_p2p.program.files import folder_lock
from dipaco_p2p.program.history import History
from dipaco_p2p.protocol.signing import Signer
from dipaco_p2p.swarm import identity
from peers.control import home as at_home
from peers.control.bugreport import Redactor, collect, redacted, write_report
from peers.control.logs import follow, last_told

START_S = 1_800_000_000.0

PEER = Signer(bytes([9]) * 32).peer


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A volunteer's folder, with a key and a log."""
    folder = tmp_path / "volunteer"
    identity.write(folder / "identity.key", bytes(range(32)))
    run = folder / "runs" / "0123456789abcdef"
    run.mkdir(parents=True)
    (run / "peer.log").write_text("".join(f"line {number}\n" for number in range(20_000)) + "half a li")
    (run / "history.jsonl").write_text('{"ev":"joined","t":1.0}\n')
    return folder


# -- the identity


def test_an_identity_goes_to_another_home_and_is_the_same_there(home: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "my.key", tmp_path / "other"
    peer = at_home.export_to(home, copy, is_forced=False)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600 and copy.read_bytes() == (home / "identity.key").read_bytes()
    assert (
        at_home.import_from(copy, other, is_forced=False)
        == peer
        == at_home.peer_of(other)
        == at_home.plain_identity(other)["peer"]
    )
    assert stat.S_IMODE((other / "identity.key").stat().st_mode) == 0o600


def test_nothing_is_replaced_unless_that_is_asked_for_and_then_the_old_key_is_kept(home: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "my.key", tmp_path / "other"
    copy.write_text("my diary")
    with pytest.raises(ConfigError, match="already exists") as refused:
        at_home.export_to(home, copy, is_forced=False)
    assert copy.read_text() == "my diary" and "--force" in refused.value.hint
    at_home.export_to(home, copy, is_forced=True)
    before = identity.write(other / "identity.key", bytes([7]) * 32).peer
    with pytest.raises(ConfigError, match="already exists"):
        at_home.import_from(copy, other, is_forced=False)
    assert at_home.peer_of(other) == before
    peer = at_home.import_from(copy, other, is_forced=True)
    assert at_home.peer_of(other) == peer != before
    assert identity.load_or_create(other / "identity-before-1.key").peer == before
    assert not list(other.glob(".*")) and not list(tmp_path.glob(".*"))


def test_a_key_that_others_may_read_or_that_is_none_is_not_taken(home: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "my.key", tmp_path / "other"
    at_home.export_to(home, copy, is_forced=False)
    copy.chmod(0o640)
    with pytest.raises(EnvironmentUnfit, match="can be read or written by others"):
        at_home.import_from(copy, other, is_forced=False)
    copy.chmod(0o600)
    copy.write_bytes(b"hello")
    with pytest.raises(IntegrityError):
        at_home.import_from(copy, other, is_forced=False)
    with pytest.raises(ConfigError, match="there is no file"):
        at_home.import_from(tmp_path / "nothing", other, is_forced=False)
    assert not other.exists()
    with pytest.raises(ConfigError, match="no identity"):
        at_home.peer_of(other)
    assert not other.exists(), "to look makes no identity"


def test_no_identity_is_changed_under_a_volunteer_that_runs(home: Path, tmp_path: Path) -> None:
    copy = tmp_path / "my.key"
    at_home.export_to(home, copy, is_forced=False)
    with folder_lock(home, hint=""), pytest.raises(EnvironmentUnfit, match="in use") as refused:
        at_home.import_from(copy, home, is_forced=True)
    assert "dipaco-peer stop" in refused.value.hint


# -- the log


@pytest.mark.parametrize("count", [0, 1, 50, 19_999, 20_000, 30_000])
def test_the_last_lines_of_a_log_are_its_last_whole_ones(home: Path, count: int) -> None:
    lines, place = at_home.last_lines(at_home.newest_log(home), count)
    assert lines == [f"line {number}" for number in range(max(0, 20_000 - count), 20_000)]
    assert place == at_home.newest_log(home).stat().st_size - len("half a li")


def test_what_comes_is_followed_into_a_cut_log_and_into_the_next_stage(home: Path) -> None:
    path = at_home.newest_log(home)

    def later() -> None:
        following = home / "runs" / "fedcba9876543210" / "peer.log"
        following.parent.mkdir()
        following.write_text("grid\n")
        following.with_name("history.jsonl").touch()
        os.utime(path.with_name("history.jsonl"), (1, 1))

    def more() -> None:
        with path.open("a") as file:
            file.write("ne\nnext\n")

    steps = iter((more, lambda: path.write_text("anew\n"), later))
    _, tails = last_told(home, 0)
    found = follow(home, tails, sleep=lambda duration_s: next(steps)() and None)
    assert list(islice(found, 4)) == ["half a line", "next", "anew", "grid"]


@pytest.mark.parametrize("is_json", [False, True])
def test_rounds_and_receipts_stand_in_the_log_in_the_order_of_time(tmp_path: Path, is_json: bool) -> None:
    folder = tmp_path / "runs" / "0123456789abcdef"
    folder.mkdir(parents=True)
    at = [History(folder / "history.jsonl", ManualClock(START_S + number)) for number in range(4)]
    at[0].add("receipt", module="L0.M0", base=7, id="abcdef0123", work="w", holders=[], path="P0-1")
    at[1].add("appraised", gain=1.0)
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"ev":"receipt","t":5}\n{"ev":"rou')  # of another version; cut by a crash
    at[2].add("round", path="P0-1", round=7, loss=3.25, seconds=5.0, is_cut=False)
    record = logging.LogRecord("peers", logging.ERROR, "", 0, "between\x1b[2J", None, None)
    record.created, record.msecs = START_S + 1.5, 500.0
    formatter = JsonLines() if is_json else logging.Formatter(TEXT_FORMAT)
    (folder / "peer.log").write_text(f"{formatter.format(record)}\n" + ("" if is_json else "  its traceback\n"))
    told, tails = last_told(tmp_path, 50)
    assert [line[20:] for line in (told[0], told[-1])] == [
        "receipt for L0.M0 from version 7: abcdef01",
        "round 7 of P0-1 done: loss 3.250, 5.0 s",
    ]
    assert "between" in told[1] and "\x1b" not in told[1] and told[2:-1] == ([] if is_json else ["  its traceback"])
    assert last_told(tmp_path, 1)[0] == told[-1:]

    def more() -> None:
        at[3].add("left", complete=True, stage="grid")

    steps = iter((more,))
    assert next(follow(tmp_path, tails, sleep=lambda duration_s: next(steps)())).endswith(" left: the run is complete")


def test_the_history_says_which_stage_is_the_newest(tmp_path: Path) -> None:
    for name, written_s in (("warmup", 10), ("grid", 20)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "history.jsonl").touch()
        os.utime(tmp_path / "runs" / name / "history.jsonl", (written_s, written_s))
        (tmp_path / "runs" / name / "peer.log").touch()
    os.utime(tmp_path / "runs" / "grid" / "peer.log", (15, 15))
    assert at_home.newest_log(tmp_path).parent.name == "grid"


def test_a_log_moves_no_cursor_and_a_missing_one_is_said(tmp_path: Path) -> None:
    assert at_home.clean("a\tb\x1b[2Jc\r\u202ed") == "a    b?[2Jc??d"
    with pytest.raises(ConfigError, match="left a log"):
        at_home.newest_log(tmp_path)


# -- the files


def test_every_file_of_a_home_is_in_a_place_that_is_listed(home: Path) -> None:
    for name in ("lock", "acquaintances.json", "address.json"):
        (home / name).write_text("{}")
    listed = [each.path for each in at_home.places(home)]
    files = [path for path in home.rglob("*") if path.is_file()]
    assert files and all(any(path == place or place in path.parents for place in listed[1:]) for path in files)
    document = at_home.plain_places(home)
    assert document["schema"] == "dipaco.paths/1" and set(document) == {"schema", "home", "places"}
    assert all(set(entry) == {"what", "path", "is_there", "bytes"} for entry in document["places"])
    log = next(entry for entry in document["places"] if entry["what"].endswith(": log"))
    assert log["is_there"] and log["bytes"] == at_home.newest_log(home).stat().st_size


# -- the report


MACHINE = "alices-laptop"
USER = pwd.getpwuid(os.getuid()).pw_name
PLANTED = {
    "the home": "{home}/runs",
    "a user's folder": "/ho" + "me/alice/secret.txt and '/Us" + "ers/bob/x'",
    "an address": "dialled /ip4/203.0.113.77/tcp/31337/p2p/" + PEER,
    "an address with a port": "from 198.51.100.4:31337, and 198.51.100.5.",
    "a new address": "/ip6/2001:db8::5:1/tcp/1, [2001:db8:0:1:2:3:4:5]:80 and fe80::1%eth0",
    "a public name": "at /dns4/volunteer.example.org/tcp/31337 and https://bob:word@other.example.org:80/x",
    "a mail": "write to alice.b@example.org",
    "a peer": f"{PEER} said no",
    "a token": "HF_TOKEN=hf_abcdefghijklmnop and AKIAABCDEFGHIJKLMNOP",
    "a key in hexadecimal": bytes(range(32)).hex(),
    "a key in base64": base64.b64encode(bytes(range(32))).decode(),
    "the key file": base64.b64encode(b"\x08\x01\x12\x40" + bytes(range(32))).decode()[:40],
    "the user": f"by {USER} on {MACHINE}",
}
SECRET = (
    "203.0.113",
    "198.51.100",
    "2001:db8",
    "fe80::",
    "example.org",
    "alice",
    "/bob",
    "bob:",
    "hf_abc",
    "AKIA",
    "12D3Koo",
    MACHINE,
    bytes(range(32)).hex(),
    base64.b64encode(bytes(range(32))).decode()[:40],
    base64.b64encode(bytes(range(30))).decode()[2:38],
)


@pytest.fixture
def careless(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with everything in its log that a report must not hold."""
    monkeypatch.setattr(platform, "node", lambda: MACHINE)
    lines = [f"2026-11-22 04:44:01,123 INFO peers: {text.format(home=home)}" for text in PLANTED.values()]
    at_home.newest_log(home).write_text("\n".join(lines) + "\n")
    events = [json.dumps({"ev": "failed", "t": 1.5, "detail": text.format(home=home)}) for text in PLANTED.values()]
    (at_home.newest_log(home).with_name("history.jsonl")).write_text("\n".join(events) + "\n")
    return home


def test_a_report_holds_nothing_that_was_planted_and_is_for_its_owner_only(careless: Path, tmp_path: Path) -> None:
    before = collect(careless)
    assert all(secret in before["peer.log"] for secret in SECRET[:-3])
    target = tmp_path / "report.tar.gz"
    names = write_report(careless, target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    with tarfile.open(target) as archive:
        members = archive.getmembers()
        texts = {member.name: archive.extractfile(member).read().decode() for member in members}  # type: ignore[union-attr]
    assert {name.removeprefix("dipaco-bugreport/") for name in texts} == set(names)
    assert all((member.uname, member.gname, member.uid, member.gid) == ("", "", 0, 0) for member in members)
    whole = "\n".join(texts.values())
    found = [secret for secret in (*SECRET, str(careless)) if secret in whole]
    assert found == [], [line for line in whole.splitlines() if any(secret in line for secret in found)]
    assert f"by {USER} " not in whole
    assert "04:44:01,123 INFO peers" in whole and "said no" in whole and PEER[-6:] in whole, "too much was taken out"


def test_the_names_in_the_settings_are_taken_out_everywhere(careless: Path) -> None:
    with at_home.newest_log(careless).open("a") as file:
        file.write("Zaphod-B. trains\n")
    texts = collect(careless) | {"config.json": json.dumps({"public_name": "Zaphod-B.", "device": "cpu"})}
    clean = redacted(careless, texts)
    assert "Zaphod" not in "".join(clean.values()) and json.loads(clean["config.json"])["device"] == "cpu"


def test_which_games_are_played_is_taken_out(home: Path) -> None:
    settings = json.dumps({"when": {"gpu_programs": ["blender", "Doom.exe"]}})
    log = "pause: yielding the GPU to eldenring.exe\nno more: yielding the GPU to another program\nlimits: doom.exe\n"
    texts = redacted(home, {"config.json": settings, "peer.log": log, "history.jsonl": json.dumps({"detail": log})})
    assert not any(word in text.lower() for text in texts.values() for word in ("eldenring", "blender", "doom"))
    assert "to [program]\nno more: yielding the GPU to another program\n" in texts["peer.log"]


def test_where_curves_go_is_taken_out(home: Path) -> None:
    settings = json.dumps({"log": ["wandb:my-secret", "csv:/mnt/thesis/curves.csv"]})
    log = "curves to csv:/mnt/thesis/curves.csv have stopped: No space left on device: /mnt/thesis/curves.csv\n"
    texts = redacted(home, {"config.json": settings, "peer.log": log})
    assert not any(word in text for text in texts.values() for word in ("thesis", "my-secret"))
    assert "have stopped: No space left" in texts["peer.log"]


def test_a_report_says_what_it_is_made_of_and_replaces_nothing(home: Path, tmp_path: Path) -> None:
    texts = redacted(home, collect(home))
    about = json.loads(texts["about.json"])
    assert about["schema"] == "dipaco.bugreport/1" and {"python", "libraries", "system", "cores"} <= set(about)
    assert about["libraries"]["hivemind"].count(".") == 2, "a version is no address"
    assert "no volunteer runs" in json.loads(texts["status.json"])["unknown"]
    assert texts["peer.log"].splitlines()[-1] == "line 19999" and len(texts["peer.log"].splitlines()) == 500
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError, match="already exists"):
        write_report(home, tmp_path / "taken")


@pytest.mark.parametrize(
    "text", ["04:44:01,123 INFO", "torch 2.13.0+cpu", "L0.M0 round 3: 0.7", "12:30", "std::string", "P0-1-0"]
)
def test_what_only_looks_like_an_address_stays(tmp_path: Path, text: str) -> None:
    assert Redactor(tmp_path)(text) == text
