"""Answers as OpenAI's API writes them: a text in pieces or whole, with the chances of its tokens, and who wrote it."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dipaco_p2p.protocol.documents import ModuleVersion
from dipaco_p2p.use.tokenizer import Pieces, Tokenizer

from .engine import Asked, Turn, Written

SCORES_MAX = 16
"""Of the router, in an answer: those of the best paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of one text."""

    index: int
    """Of the text, where one request asks for several."""
    text: str = ""
    written: Written | None = None
    turn: Turn | None = None
    at: int = 0
    """Tokens written before the turn."""
    reason: str | None = None
    """Why the text ends here."""


class Text:
    """Tokens as text that can be shown: what may be the beginning of a stop waits."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], *, is_stripped: bool) -> None:
        self._pieces = Pieces(tokenizer)
        self._stops = stops
        self._held = ""
        self._is_blank = is_stripped
        """Whether white space is left out still, since nothing else came yet."""
        self.is_stopped = False

    def add(self, written: Written) -> str:
        """What can be shown now."""
        piece = self._pieces.add(written.token)
        return piece if written.is_prompt else self._show(piece)

    def rest(self) -> str:
        """What is left at the end."""
        text = "" if self.is_stopped else self._show(self._pieces.rest())
        return text if self.is_stopped else text + self._begun(self._held)

    def _show(self, piece: str) -> str:
        self._held += piece
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            return self._begun(self._held[: min(found)])
        shown = len(self._held) - max((_overlap(self._held, stop) for stop in self._stops), default=0)
        text, self._held = self._held[:shown], self._held[shown:]
        return self._begun(text)

    def _begun(self, text: str) -> str:
        if self._is_blank:
            text = text.lstrip()
            self._is_blank = not text
        return text


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    return next((size for size in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:size])), 0)


class Answer:
    """What one request gets; the two kinds differ in how a choice is written."""

    PREFIX = OBJECT = CHUNK = ""
    IS_STRIPPED = False

    def __init__(self, tokenizer: Tokenizer, asked: Sequence[Asked], stops: tuple[str, ...]) -> None:
        self.asked = asked
        self._tokenizer = tokenizer
        self._stops = stops
        self._name = f"{self.PREFIX}-{secrets.token_hex(12)}"
        self._made_s = int(time.time())
        self._model = ""
        self._written = 0
        self._chars: Counter[int] = Counter()
        """Of the tokens of each text that were told of."""

    def text(self) -> Text:
        """For one of the texts."""
        return Text(self._tokenizer, self._stops, is_stripped=self.IS_STRIPPED)

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """A piece, as the body of one event."""
        turns = self._note([delta])
        choice = self.choice(delta.index, delta.text, self._told([delta]), is_chunk=True)
        return self._body(self.CHUNK, [choice | {"finish_reason": delta.reason}], turns)

    def last(self) -> dict[str, Any]:
        """The event after all others, with the numbers of tokens."""
        return self._body(self.CHUNK, [], []) | self._usage()

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """All texts at once."""
        turns, choices = self._note(deltas), []
        for index in range(len(self.asked)):
            own = [delta for delta in deltas if delta.index == index]
            text = "".join(delta.text for delta in own)
            choices.append(
                self.choice(index, text, self._told(own), is_chunk=False) | {"finish_reason": own[-1].reason}
            )
        return self._body(self.OBJECT, choices, turns) | self._usage()

    def choice(self, index: int, text: str, told: list[Written], *, is_chunk: bool) -> dict[str, Any]:
        """One text, or a piece of it, with the tokens whose chances were asked for."""
        raise NotImplementedError

    def token_name(self, token: int) -> str:
        """A token as text; half a character as its bytes."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_bytes(self, token: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token))

    def offsets(self, index: int, names: Iterable[str]) -> list[int]:
        """Where the next tokens of a text begin, in characters."""
        found = []
        for name in names:
            found.append(self._chars[index])
            self._chars[index] += len(name)
        return found

    def _told(self, deltas: Sequence[Delta]) -> list[Written]:
        return [one.written for one in deltas if one.written and self.asked[one.index].top is not None]

    def _note(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        """Count what was written, and say who wrote."""
        self._written += sum(delta.written is not None and not delta.written.is_prompt for delta in deltas)
        turns = [_turn(delta, delta.turn) for delta in deltas if delta.turn is not None]
        self._model = self._model or (turns[0]["path"] if turns else "")
        return turns

    def _body(self, kind: str, choices: list[dict[str, Any]], turns: list[dict[str, Any]]) -> dict[str, Any]:
        body = {"id": self._name, "object": kind, "created": self._made_s, "model": self._model, "choices": choices}
        return body | ({"dipaco": {"turns": turns}} if turns else {})

    def _usage(self) -> dict[str, Any]:
        read = sum(len(asked.tokens) for asked in self.asked)
        counts = {"prompt_tokens": read, "completion_tokens": self._written, "total_tokens": read + self._written}
        return {"usage": counts}


class Completion(Answer):
    """Of /v1/completions."""

    PREFIX, OBJECT, CHUNK = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, text: str, told: list[Written], *, is_chunk: bool) -> dict[str, Any]:
        names = [self.token_name(one.token) for one in told]
        chances = {
            "tokens": names,
            "token_logprobs": [one.chance for one in told],
            "top_logprobs": [self._top(one) for one in told],
            "text_offset": self.offsets(index, names),
        }
        return {"index": index, "text": text, "logprobs": chances if told else None}

    def _top(self, one: Written) -> dict[str, float] | None:
        """The likeliest tokens, and the one that is there."""
        if one.chance is None:
            return None
        return {self.token_name(token): chance for token, chance in (*one.top, (one.token, one.chance))}


class ChatCompletion(Answer):
    """Of /v1/chat/completions."""

    PREFIX, OBJECT, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"
    IS_STRIPPED = True

    def choice(self, index: int, text: str, told: list[Written], *, is_chunk: bool) -> dict[str, Any]:
        entries = [
            self._entry(one.token, one.chance) | {"top_logprobs": [self._entry(*other) for other in one.top]}
            for one in told
        ]
        message = {"role": "assistant", "content": text}
        chances = {"content": entries} if entries else None
        return {"index": index, "delta" if is_chunk else "message": message, "logprobs": chances}

    def _entry(self, token: int, chance: float | None) -> dict[str, Any]:
        return {"token": self.token_name(token), "logprob": chance, "bytes": self.token_bytes(token)}


def versions_of(versions: Iterable[ModuleVersion]) -> dict[str, int]:
    """What a path is made of."""
    return {str(version.module): version.version for version in versions}


def _turn(delta: Delta, turn: Turn) -> dict[str, Any]:
    scores = {str(path): score for path, score in turn.scores[:SCORES_MAX]}
    place = {"index": delta.index, "at": delta.at, "path": str(turn.path)}
    return place | {"versions": versions_of(turn.versions), "scores": scores}
