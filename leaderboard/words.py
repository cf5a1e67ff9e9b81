"""What a coordinator says on its own page beside signed records: what its run is for, and what the model writes.

Its program keeps both in a file beside the tables, and whoever shows the page from that folder reads it. Nobody signs
it, so no other leaderboard has it. Both are bounded here, and cleaned and escaped like the words of any stranger where
they are shown: those who train a model decide what it writes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dipaco_p2p import strict
from dipaco_p2p.errors import ConfigError
from dipaco_p2p.program.files import write_atomically
from dipaco_p2p.strict import bounded

FILE = "words.json"
BYTES_MAX = 1024 * 1024
ABOUT_CHARS_MAX = 300
PROMPTS_MAX = 4
PROMPT_CHARS_MAX = 200
TEXT_CHARS_MAX = 400
"""Of what the model wrote: all that is kept, and shown."""
ROUNDS_KEPT = 32
"""Rounds whose texts stay: the first, the newest, and others in between."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the model wrote after one round."""

    stage: str
    """The stage's id."""
    round: int = bounded(low=0)
    path: str
    """Which path wrote it: the router chose it by the prompt."""
    prompt: str
    text: str
    """What follows the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """All of it."""

    about: str = ""
    """What the run is for, in a sentence."""
    samples: tuple[Sample, ...] = bounded((), items=ROUNDS_KEPT * PROMPTS_MAX)
    """The oldest first."""


def check_words(about: str, prompts: Sequence[str]) -> None:
    """Raise ConfigError for what a run file must not say."""
    _check_line("about", about, ABOUT_CHARS_MAX)
    if len(prompts) > PROMPTS_MAX:
        raise ConfigError(f"`prompts` has {len(prompts)} texts, more than {PROMPTS_MAX}")
    if "" in prompts or len(set(prompts)) < len(prompts):
        raise ConfigError("`prompts` has an empty text, or one twice", hint="prompts = [] shows no text at all")
    for prompt in prompts:
        _check_line("prompts", prompt, PROMPT_CHARS_MAX)


def _check_line(key: str, text: str, chars_max: int) -> None:
    if len(text) > chars_max:
        raise ConfigError(f"`{key}` has a text of {len(text)} characters, more than {chars_max}")
    if not text.isprintable() or text != text.strip():
        raise ConfigError(f"`{key}` must be one line of printable text, without spaces around it")


def with_round(samples: Sequence[Sample], more: Sequence[Sample]) -> tuple[Sample, ...]:
    """`samples` and those of one more round. When there are too many rounds, every other one between the first and the
    newest goes."""
    rounds = dict.fromkeys((each.stage, each.round) for each in (*samples, *more))
    if len(rounds) > ROUNDS_KEPT:
        first, *between, newest = rounds
        rounds = dict.fromkeys([first, *between[1::2], newest])
    return tuple(each for each in (*samples, *more) if (each.stage, each.round) in rounds)


def side_by_side(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """By prompt: what was written at first, half of the kept rounds later, and last."""
    found: dict[str, list[Sample]] = {}
    for each in samples:
        found.setdefault(each.prompt, []).append(each)
    places = {prompt: sorted({0, len(of) // 2, len(of) - 1}) for prompt, of in found.items()}
    return {prompt: [of[place] for place in places[prompt]] for prompt, of in found.items()}


def read_words(folder: Path) -> Words:
    """What the file in `folder` says; nothing without one, or if it is damaged: a page does without."""
    try:
        data = (folder / FILE).read_bytes()[: BYTES_MAX + 1]
        if len(data) > BYTES_MAX:
            raise ConfigError(f"more than {BYTES_MAX} bytes")
        return strict.load(Words, json.loads(data), where=FILE)
    except FileNotFoundError:
        return Words()
    except (OSError, ValueError, RecursionError, ConfigError) as error:
        log.warning("%s is not shown: %s", folder / FILE, error)
        return Words()


def write_words(folder: Path, words: Words) -> None:
    """Keep `words` for whoever shows the page. Raises EnvironmentUnfit for a full disk."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / FILE, json.dumps(strict.plain(words)).encode())
