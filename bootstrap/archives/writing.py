"""What the coordinator's own page says besides figures: a sentence about the run, and what the model writes after a
round, from the prompts of the run file. `generate --path PATH --version ROUND --max-tokens 48` writes the same.
"""

from __future__ import annotations

from pathlib import Path

from dipaco_p2p.core.model.engine import on_device
from dipaco_p2p.core.model.generate import Sampler, generate, prompt_features
from dipaco_p2p.core.model.transformer import path_model
from dipaco_p2p.node.measuring import assign
from dipaco_p2p.topology import PathId
from dipaco_p2p.use.tokenizer import END_ID, Tokenizer
from leaderboard.places import IN_RUN_FOLDER
from leaderboard.words import TEXT_CHARS_MAX, Sample, Words, read_words, with_round, write_words

from ..runfile import LeaderboardConfig
from .evaluator import Evaluator, RoundEvaluation

TOKENS = 48
"""Written after each prompt."""


class PageWords:
    """The words of one page, kept in the folder of its run."""

    def __init__(self, config: LeaderboardConfig, folder: Path) -> None:
        """From now on the page shows what `config` says, and of earlier texts only those of its prompts. Raises
        EnvironmentUnfit for a full disk."""
        self._prompts = config.prompts if config.serve else ()
        self._folder = folder / IN_RUN_FOLDER
        kept = tuple(each for each in read_words(self._folder).samples if each.prompt in self._prompts)
        self._words = Words(about=config.about, samples=kept)
        write_words(self._folder, self._words)

    def add(self, evaluator: Evaluator, judged: RoundEvaluation) -> None:
        """Let the model of a round that was judged write. Raises IntegrityError, EnvironmentUnfit."""
        if not self._prompts:
            return
        tokenizer = Tokenizer(evaluator.blob(evaluator.run.manifest.tokenizer.digest))
        made = [self._sample(evaluator, judged, tokenizer, prompt) for prompt in self._prompts]
        self._words = Words(about=self._words.about, samples=with_round(self._words.samples, made))
        write_words(self._folder, self._words)

    def _sample(self, evaluator: Evaluator, judged: RoundEvaluation, tokenizer: Tokenizer, prompt: str) -> Sample:
        path, text = write_on(evaluator, judged, tokenizer, prompt)
        stage = evaluator.run.id
        return Sample(stage=stage, round=judged.version, path=str(path), prompt=prompt, text=text[:TEXT_CHARS_MAX])


def write_on(evaluator: Evaluator, judged: RoundEvaluation, tokenizer: Tokenizer, prompt: str) -> tuple[PathId, str]:
    """The path that the prompt is routed to after a round, and what it writes. Raises IntegrityError."""
    run, tokens = evaluator.run, tokenizer.encode(prompt)
    path = route(evaluator, judged, tokens)
    flats = evaluator.flats(path, judged.version)

    def work(device: str) -> list[int]:
        model = path_model(run.config.model, flats).to(device)
        return list(generate(model, tokens, count=TOKENS, sampler=Sampler(), end=END_ID))

    return path, tokenizer.decode([token for token in on_device(evaluator.device, work) if token != END_ID])


def route(evaluator: Evaluator, judged: RoundEvaluation, tokens: list[int]) -> PathId:
    """Where a text that begins with `tokens` belongs, by the router that the round was judged with."""
    run = evaluator.run
    if run.manifest.router is None:
        return run.topology.path(0)
    found = prompt_features(evaluator.frozen(), tokens, has_counts=run.config.routing.has_counts)
    number = assign(evaluator.router(judged.sharding), found, evaluator.usable(judged.version))[0]
    return run.topology.path(int(number))
