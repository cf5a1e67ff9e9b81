"""What makes the pages of docs/ into a site: their order, the parts made from the code, the footer, and the links.

mkdocs.yml names this file. Nothing is fetched: links to other sites are checked for their form, and listed beside
the site; a dead link inside it is found by mkdocs, and fails the build.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

FOLDER = Path(__file__).resolve().parent
REPO = FOLDER.parents[1]
sys.path[:0] = [str(FOLDER), str(REPO)]

from generated import fill  # noqa: E402

from dipaco_p2p import __version__  # noqa: E402

log = logging.getLogger("mkdocs.hooks.site")  # a warning below `mkdocs` fails a strict build

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Start": ("index.md", "join.md", "swarm.md", "define.md", "serve.md", "export.md"),
    "Volunteers": ("volunteer.md", "routers.md", "trust.md"),
    "Coordinators": (
        "coordinator.md",
        "deploy.md",
        "recover.md",
        "keepers.md",
        "decrees.md",
        "grow.md",
        "leaderboard.md",
    ),
    "How it works": ("concepts.md", "glossary.md", "design.md", "tour.md", "protocol.md", "judging.md", "security.md"),
    "Reference": (
        "reference.md",
        "reference/calls.md",
        "reference/records.md",
        "reference/documents.md",
        "reference/reasons.md",
        "reference/limits.md",
        "changelog.md",
        "contributing.md",
    ),
    "Measured": (
        "performance.md",
        "experiment.md",
        "churn.md",
        "scale.md",
        "lost_work.md",
        "simulation.md",
        "log.md",
    ),
}
"""The pages in their order. One that is not there is left out; one that is there and not here fails a test."""

BROUGHT = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages that stand at the top of the repository."""

LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])+)\]\(<?([^)\s>]+)>?\)")
TARGET = re.compile(r'(?:href|src)="([a-z]+://[^"]*)"')
SEARCH = 'data-md-component="search" role="dialog" aria-label="Search"'
LINKS_FILE = "site-links.txt"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in what a YAML file cannot say."""
    config.nav = navigation(Path(config.docs_dir))
    config.copyright = footer(__version__, commit(REPO))
    config.mdx_configs.setdefault("toc", {}).update(slugify=slugify(case="lower"))
    return config


def navigation(docs: Path) -> list[dict[str, list[str]]]:
    """The sections with the pages that are there."""
    there = {
        title: [page for page in pages if page in BROUGHT or (docs / page).exists()]
        for title, pages in SECTIONS.items()
    }
    return [{title: pages} for title, pages in there.items() if pages]


def footer(version: str, commit: str) -> str:
    return " · ".join(filter(None, [f"dipaco-p2p {version}", commit and f"commit {commit}", "Apache 2.0"]))


def commit(root: Path) -> str:
    """The commit that is built, with its day; empty where there is no repository."""
    command = ["git", "-C", str(root), "log", "-1", "--format=%h of %cs"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Bring the pages that do not stand in docs/."""
    for name, source in BROUGHT.items():
        text = (REPO / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=LINK.sub(_from_the_top, text)))
    return files


def _from_the_top(link: re.Match[str]) -> str:
    """A link of a page at the top of the repository, as seen from docs/."""
    text, target = link[1], link[2]
    moved = {source: name for name, source in BROUGHT.items()}
    inside = moved.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else "")
    return f"[{text}]({target if '://' in target or target.startswith('#') else inside or '../' + target})"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the parts that come from the code. Links into the code lead nowhere on a site: only what they say stays."""
    try:
        return fill(LINK.sub(partial(_inside, depth=page.file.src_uri.count("/")), markdown))
    except KeyError as error:
        log.warning("%s: no part is called %s", page.file.src_uri, error)
        return markdown


def _inside(link: re.Match[str], *, depth: int = 0) -> str:
    text, target = link[1], link[2]
    top, brought = "../" * (depth + 1), {source: name for name, source in BROUGHT.items()}
    if not target.startswith(top):
        return link[0]
    name = brought.get(target.removeprefix(top))
    return f"[{text}]({'../' * depth}{name})" if name else text


_outside: dict[str, str] = {}
"""Links to other sites, each with the first page that has it."""


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    for target in TARGET.findall(html):
        _outside.setdefault(target, page.file.src_uri)
        if problem := problem_of(target):
            log.warning("%s links to %s: %s", page.file.src_uri, target, problem)
    return html


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """The theme's search is a dialog without a name, which readers of screens need."""
    return output.replace('data-md-component="search" role="dialog"', SEARCH, 1)


def problem_of(target: str) -> str:
    """What is wrong with the form of an address of another site; empty if nothing is."""
    try:
        parts = urllib.parse.urlsplit(target)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme != "https":
        return f"`{parts.scheme}` is not https"
    return "" if re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", host) else f"`{host}` is no name of a host"


def on_post_build(config: MkDocsConfig) -> None:
    """List the links to other sites beside the site; nothing was asked of them."""
    lines = list(_listed(_outside))
    (Path(config.site_dir).parent / LINKS_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    log.info("%d links to other sites, not followed: %s", len(lines), LINKS_FILE)
    _outside.clear()


def _listed(links: Mapping[str, str]) -> Iterator[str]:
    return (f"{target}  {page}" for target, page in sorted(links.items()))
