"""The metrics of a running coordinator: their text, what serves them, the dashboard and the alerts made of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from view_harness import beat, seen_with

from bootstrap.cli import app
from bootstrap.control.view import View, metrics_served, metrics_text
from bootstrap.runfile import Place, load_run_file, read_place
from dipaco_p2p.clock import ManualClock
from dipaco_p2p.errors import ConfigError, EnvironmentUnfit
from dipaco_p2p.program import web
from dipaco_p2p.program.metrics import counter, exposition, gauge

DEPLOY = Path(__file__).parents[2] / "deploy" / "grafana"
SAMPLE = re.compile(r'(dipaco_[a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*)\})? (\S+)')


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a coordinator with a volunteer that trains a path and leads a module."""
    folder = tmp_path_factory.mktemp("run")
    seen = seen_with(folder, beat())
    view = View(folder, ManualClock())
    view.stage = lambda: seen
    return asyncio.run(view.metrics())


def samples(text: str) -> dict[tuple[str, str], float]:
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert (match[1], match[2] or "") not in found, line
            found[match[1], match[2] or ""] = float(match[3])
    return found


def names(text: str) -> set[str]:
    return {name for name, _ in samples(text)}


# -- what is told


def test_the_metrics_say_what_status_and_modules_say(text: str) -> None:
    found = samples(text)
    expected = {
        "volunteers_alive": 1, "volunteers_training": 1, "seeds_alive": 1, "paths": 4, "paths_covered": 1, "round": 1,
        "rounds": 2, "round_age_seconds": 61.0, "judged_perplexity": 90.017, "judged_loss_nats": 4.5, "modules": 5,
        "modules_leaderless": 4, "contributions_counted_total": 0, "sent_bytes_total": 1_234_567,
        "received_bytes_total": 89, "tokens_per_second": 1234.6, "uptime_seconds": 0,
    }  # fmt: skip
    assert {name: found[f"dipaco_coordinator_{name}", ""] for name in expected} == expected
    assert found["dipaco_coordinator_disk_free_bytes", ""] > 0
    assert found["dipaco_coordinator_module_newest_version", 'module="L1.M0"'] == 2
    assert found["dipaco_coordinator_module_behind_versions", 'module="L0.M0"'] == 2
    assert found["dipaco_coordinator_module_leaderless_seconds", 'module="L0.M0"'] == 2
    [info] = [labels for name, labels in found if name.endswith("_info")]
    assert 'stage="grid"' in info and 'state="training"' in info


def test_each_metric_has_its_help_and_type_and_counters_end_with_total(text: str) -> None:
    helps = re.findall(r"^# HELP (\S+) (.+)$", text, re.M)
    types = re.findall(r"^# TYPE (\S+) (gauge|counter)$", text, re.M)
    assert [name for name, _ in helps] == [name for name, _ in types] and {name for name, _ in types} == names(text)
    assert all(about.endswith(".") for _, about in helps)
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in types)


def test_before_a_stage_is_open_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    early = asyncio.run(View(tmp_path, ManualClock()).metrics())
    assert "dipaco_coordinator_disk_free_bytes" in names(early)
    assert not {"dipaco_coordinator_round", "dipaco_coordinator_judged_perplexity"} & names(early)
    check(early)


def test_promtool_finds_nothing_to_say_about_the_metrics(text: str) -> None:
    check(text)


def check(text: str) -> None:
    done = promtool("check", "metrics", text=text)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def promtool(*words: str, text: str = "") -> subprocess.CompletedProcess[bytes]:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed; on Debian: apt-get install prometheus")
    return subprocess.run([found, *words], input=text.encode(), capture_output=True, check=False)


def test_labels_are_escaped_and_one_series_stands_once() -> None:
    said = exposition([gauge("x", "Of x.", [(1, {"a": 'b"\\\n'}), (2, {"a": "c"}), (3, {"a": "c"})])])
    head = "# HELP dipaco_x Of x.\n# TYPE dipaco_x gauge\n"
    assert said == head + 'dipaco_x{a="b\\"\\\\\\n"} 1.0\ndipaco_x{a="c"} 5.0\n'


def test_a_counter_keeps_its_name_and_what_has_no_value_is_left_out() -> None:
    said = exposition([counter("x_total", "Of x.", [(1.5e9, {})]), gauge("y", "Of y.", [])])
    assert said == "# HELP dipaco_x_total Of x.\n# TYPE dipaco_x_total counter\ndipaco_x_total 1.5e+09\n"


# -- the dashboard


def queries(value: Any) -> Iterator[str]:
    """Every query in a dashboard."""
    if isinstance(value, dict):
        yield from (each for key, each in value.items() if key in ("expr", "definition") and isinstance(each, str))
        yield from (query for each in value.values() for query in queries(each))
    elif isinstance(value, list):
        yield from (query for each in value for query in queries(each))


def asked_for(text: str) -> set[str]:
    return set(re.findall(r"dipaco_[a-z_]+", text))


def test_the_dashboard_asks_for_metrics_that_there_are_and_shows_nearly_all(text: str) -> None:
    board = json.loads((DEPLOY / "dipaco.json").read_text())
    asked = asked_for("\n".join(queries(board)))
    assert asked <= names(text)
    assert {name.removeprefix("dipaco_coordinator_") for name in names(text) - asked} == {
        "seeds_alive", "modules", "judged_loss_nats", "versions_archived", "volunteers_direct", "volunteers_relayed",
        "relay_slots", "relay_circuits", "relayed_bytes_total",
    }  # fmt: skip
    assert len({each["id"] for each in board["panels"]}) == len(board["panels"]) > 10
    for panel in board["panels"]:
        assert panel["targets"] and panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert all('instance="$instance"' in each["expr"] for each in panel["targets"])


def test_a_dashboard_that_asks_for_something_else_would_be_noticed(text: str) -> None:
    board = {"panels": [{"targets": [{"expr": "dipaco_coordinator_rounds_per_hour"}]}]}
    assert not asked_for("\n".join(queries(board))) <= names(text)


def test_the_alerts_ask_for_metrics_that_there_are_and_promtool_reads_them(text: str) -> None:
    path = DEPLOY / "alerts.yml"
    found = asked_for("\n".join(line for line in path.read_text().splitlines() if "expr:" in line))
    assert found and found <= names(text)
    done = promtool("check", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


# -- over HTTP


def served(scene: Callable[[str, int], Awaitable[None]]) -> None:
    async def told() -> str:
        return "# HELP dipaco_x X.\n"

    async def main() -> None:
        async with metrics_served(Place("127.0.0.1", 0), told) as address:
            await scene(address, int(address.rpartition(":")[2].partition("/")[0]))

    asyncio.run(main())


async def said(port: int, data: bytes, *, is_ended: bool = False) -> str:
    """What comes back until it hangs up; nothing, too, when it does so in the middle of what we say."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if is_ended:
            writer.write_eof()
        return (await asyncio.wait_for(reader.read(), 20)).decode()
    except ConnectionResetError:
        return ""
    finally:
        writer.close()


def test_a_scraper_gets_the_text_and_any_other_request_its_refusal() -> None:
    async def scene(address: str, port: int) -> None:
        assert address == f"http://127.0.0.1:{port}/metrics"
        head, _, body = (await said(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")).partition("\r\n\r\n")
        assert head.startswith("HTTP/1.1 200") and body == "# HELP dipaco_x X.\n"
        assert "text/plain; version=0.0.4" in head and f"content-length: {len(body)}" in head
        short = await said(port, b"HEAD /metrics?x=1 HTTP/1.0\r\n\r\n")
        assert short.startswith("HTTP/1.1 200") and short.endswith("\r\n\r\n")
        for request, status in (
            (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 404),
            (b"GET /metrics/ HTTP/1.0\r\n\r\n", 404),
            (b"GET /metrics/../x HTTP/1.0\r\n\r\n", 404),
            (b"POST /metrics HTTP/1.0\r\n\r\n", 405),
            (b"hello\r\n\r\n", 400),
            (b"\xff\x00 \xff HTTP/9\r\n\r\n", 400),
        ):
            assert (await said(port, request)).startswith(f"HTTP/1.1 {status} "), request
        assert await said(port, b"GET /metr", is_ended=True) == ""
        long = await said(port, b"GET /metrics HTTP/1.1\r\nX: " + b"x" * web.PAGE_HEAD_BYTES_MAX)
        assert long == "" or long.startswith("HTTP/1.1 400 ")

    served(scene)


def test_a_scraper_is_answered_beside_silent_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "PAGE_CLIENTS_MAX", 2)

    async def scene(address: str, port: int) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert (await said(port, b"GET /metrics HTTP/1.0\r\n\r\n")).startswith("HTTP/1.1 200 ")
        for _, writer in silent:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    served(scene)


def test_a_client_that_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "PAGE_CLIENT_S", 0.01)

    async def scene(address: str, port: int) -> None:
        assert await said(port, b"GET") == ""

    served(scene)


def test_a_taken_port_is_one_line_with_a_hint() -> None:
    async def nothing() -> str:
        return ""

    async def scene(address: str, port: int) -> None:
        with pytest.raises(EnvironmentUnfit, match=f"cannot serve metrics at 127.0.0.1:{port}") as taken:
            async with metrics_served(Place("127.0.0.1", port), nothing):
                pass
        assert "9464" in taken.value.hint

    served(scene)


@pytest.mark.parametrize(
    ("text_", "place"),
    [
        ("", None),
        ("9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        ("[::1]:0", ("::1", 0)),
        ("monitor.local:80", ("monitor.local", 80)),
    ],
)
def test_a_place_is_this_machine_alone_unless_an_address_is_named(text_: str, place: Any) -> None:
    assert read_place(text_) == place


@pytest.mark.parametrize("text_", ["x", "host:", ":9464", "70000", "::1:9464", "a b:1", "1.2.3.4:5:6", "-1", "9464\n"])
def test_what_is_no_place_is_refused_by_flag_and_file_before_anything_starts(text_: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not an address for metrics"):
        read_place(text_)
    file = tmp_path / "run.toml"
    file.write_text(f"[node]\nmetrics = {json.dumps(text_)}\n")
    with pytest.raises(ConfigError, match="is not an address for metrics"):
        load_run_file(file)
    file.write_text("")
    found = CliRunner().invoke(app, ["start", str(file), "--dir", str(tmp_path / "run"), f"--metrics={text_}"])
    assert found.exit_code == 2 and "is not an address for metrics" in found.output and not (tmp_path / "run").exists()


def test_metrics_are_text_of_plain_documents() -> None:
    """So that what is scraped cannot say anything else than what is asked for."""
    with pytest.raises(KeyError):
        metrics_text({}, [])
