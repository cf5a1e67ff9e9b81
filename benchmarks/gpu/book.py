"""What is known so far, in a folder: results.jsonl has one line a case, results.json and page.md are made of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dipaco_p2p.errors import ConfigError

from .case import Case, Figures, Part
from .page import page


@dataclass(slots=True)
class Book:
    """What is known, in the folder."""

    folder: Path
    found: dict[str, dict[str, Figures]] = field(default_factory=dict)
    """By part and case."""
    failed: dict[str, dict[str, str]] = field(default_factory=dict)
    """Why cases have given nothing, by part and case; those that have since are not among them."""

    @property
    def lines(self) -> Path:
        return self.folder / "results.jsonl"

    def open(self, *, is_small: bool) -> None:
        """Make the folder, or go on with one; raises ConfigError for one of the other size."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path, settings = self.folder / "settings.json", {"small": is_small}
        if path.exists() and json.loads(path.read_text("utf-8")) != settings:
            size = "of full" if is_small else "of small"
            raise ConfigError(f"`{self.folder}` holds results {size} size", hint="choose another folder with --out")
        path.write_text(json.dumps(settings) + "\n", "utf-8")
        self.read()

    def read(self) -> None:
        """What the cases have written; a last line that a kill has cut off does not count."""
        self.found, self.failed = {}, {}
        text = self.lines.read_text("utf-8") if self.lines.exists() else ""
        for line in text[: text.rfind("\n") + 1].splitlines():
            own = json.loads(line)
            part, name = own["part"], own["case"]
            if "figures" in own:
                self.found.setdefault(part, {})[name] = own["figures"]
                self.failed.get(part, {}).pop(name, None)
            elif name not in self.found.get(part, {}):
                self.failed.setdefault(part, {})[name] = own["error"]

    def add(self, part: str, name: str, *, figures: Figures | None = None, error: str = "") -> None:
        """Write down what a case has found, or why it has found nothing."""
        own = {"error": error} if figures is None else {"figures": figures}
        line = json.dumps({"part": part, "case": name, **own, "when": time.strftime("%Y-%m-%d", time.gmtime())})
        text = self.lines.read_bytes() if self.lines.exists() else b""
        with self.lines.open("r+b" if text else "wb") as file:
            file.truncate(text.rfind(b"\n") + 1)  # a line that a kill has cut off would spoil this one
            file.seek(0, 2)
            file.write(line.encode() + b"\n")

    def has(self, part: Part, case: Case) -> bool:
        return case.name in self.found.get(part.name, {})

    def write(self, parts: Sequence[Part], *, is_small: bool) -> None:
        """The two files for people and for programs."""
        whole = {part.name: {"found": self.found.get(part.name, {}), "failed": self.failed.get(part.name, {})}
                 for part in parts}  # fmt: skip
        _replace(self.folder / "results.json", json.dumps(whole, indent=1) + "\n")
        _replace(self.folder / "page.md", page(parts, self.found, self.failed, is_small=is_small))


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f"partial-{path.name}")
    partial.write_text(text, "utf-8")
    partial.replace(path)
