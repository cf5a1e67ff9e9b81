"""The answers of a coordinator for people: the rows of its status, and the columns of its lists."""

from __future__ import annotations

from dipaco_p2p.program.control.show import UNKNOWN, Column, Report, Screen, ago, short_name
from dipaco_p2p.program.text import duration, size


def rows(report: Report) -> list[tuple[str, str]]:
    """Names and values, in the order in which somebody asks for them."""
    return [
        ("state", str(report["state"])),
        ("run", f"{report['run']}, {report['stage']}" if report["run"] else "being prepared"),
        ("round", _round(report)),
        ("perplexity", _judged(report)),
        ("volunteers", f"{report['volunteers_alive']} alive, {report['volunteers_training']} train"),
        ("paths", f"{report['paths_covered']} of {report['paths']} have a volunteer"),
        ("modules", f"{report['modules_led']} of {report['modules']} have a leader"),
        ("speed", f"{report['tokens_per_s']:,.0f} tokens/s"),
        ("counted", f"{report['contributions_counted']} contributions in {report['versions_archived']} versions"),
        ("line", f"{size(report['bytes_up'])} up, {size(report['bytes_down'])} down since the start"),
        ("disk", f"{size(report['disk_used_bytes'])} used, {size(report['disk_free_bytes'])} free"),
        ("program", f"version {report['version']}, process {report['pid']}, for {duration(report['running_s'])}"),
        ("folder", report["folder"]),
    ]


SCREEN = Screen(title="dipaco-bootstrap", rows=rows)


def _round(report: Report) -> str:
    if report["round"] is None:
        return UNKNOWN
    return f"{report['round']} of {report['rounds']}, for {duration(report['round_age_s'])}"


def _judged(report: Report) -> str:
    if report["judged_perplexity"] is None:
        return UNKNOWN
    return f"{report['judged_perplexity']:.1f} after round {report['judged_round']}"


# -- lists


PEERS = (
    Column(head="peer", cell=lambda row: short_name(row["peer"])),
    Column(head="role", cell=lambda row: row["role"]),
    Column(head="path", cell=lambda row: row["path"] or UNKNOWN),
    Column(head="round", cell=lambda row: str(row["round"]), is_number=True),
    Column(head="doing", cell=lambda row: row["doing"]),
    Column(head="tokens/s", cell=lambda row: f"{row['tokens_per_s']:,.0f}", is_number=True),
    Column(head="heard", cell=lambda row: ago(row["heartbeat_age_s"]), is_number=True),
    Column(head="reachable", cell=lambda row: "yes" if row["is_reachable"] else "no"),
    Column(head="leads", cell=lambda row: ", ".join(row["leads"]) or UNKNOWN),
)
PATHS = (
    Column(head="path", cell=lambda row: row["path"]),
    Column(head="covered", cell=lambda row: "yes" if row["is_covered"] else "NO"),
    Column(head="round", cell=lambda row: str(row["round"]), is_number=True),
    Column(head="loss", cell=lambda row: UNKNOWN if row["judged_loss"] is None else f"{row['judged_loss']:.4f}"),
    Column(head="claimants", cell=lambda row: _claimants(row)),
)
MODULES = (
    Column(head="module", cell=lambda row: row["module"]),
    Column(head="newest", cell=lambda row: str(row["newest"]), is_number=True),
    Column(head="final", cell=lambda row: str(row["final"]), is_number=True),
    Column(head="behind", cell=lambda row: str(row["behind"]), is_number=True),
    Column(head="leader", cell=lambda row: _leader(row)),
    Column(head="term", cell=lambda row: str(row["term"]), is_number=True),
    Column(head="mirrors", cell=lambda row: ", ".join(map(short_name, row["mirrors"])) or UNKNOWN),
)


def _claimants(row: Report) -> str:
    words = [short_name(each["peer"]) + ("" if each["is_alive"] else " (silent)") for each in row["claimants"]]
    return ", ".join(words + ([f"and {row['claimants_left_out']} more"] if row["claimants_left_out"] else [])) or "none"


def _leader(row: Report) -> str:
    return f"none for {duration(row['leaderless_s'])}" if row["leader"] is None else short_name(row["leader"])
