"""Answers that are sent while they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trinity_data.tokenizer import ChatTemplate
from trinity_explorer.chat import Reply
from trinity_explorer.engines.engine import Completion, Heard, Request, Tokens
from trinity_explorer.serve.api import Part
from trinity_explorer.serve.session import num_up_to_stop
from trinity_explorer.slots import ChosenEngine

_UNFINISHED = "\ufffd"
"""What a character is decoded as of which tokens are still to come."""


class Piece(NamedTuple):
    """What was heard of one of a request's answers."""

    choice: int
    tokens: Tokens


class HeardEngine:
    """An engine whose answer to one request is heard while it is made."""

    def __init__(self, engine: ChosenEngine, heard: Heard) -> None:
        self.engine, self.heard, self.name = engine, heard, engine.name

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [await self.engine.stream(request, self.heard) for request in requests]


class AnswerText:
    """The text of one answer, part by part: together they are the text of the whole."""

    def __init__(self, template: ChatTemplate, stops: Sequence[str]) -> None:
        self.template, self.stops = template, stops
        self.text = ""
        """That was given out."""
        self.num_given = 0
        """Tokens of which it is."""
        self._tokens = Tokens([], [])
        self._begins = 0
        """The token from which on text is decoded: it depends on what is before it."""
        self._is_over = False

    def add(self, tokens: Tokens) -> Part | None:
        """None while they make no text by themselves, or are behind a stop."""
        if self._is_over:
            return None
        token_ids, logprobs = self._tokens
        token_ids += tokens.token_ids
        logprobs += tokens.logprobs
        before = self.template.decode(token_ids[self._begins : self.num_given])
        if (length := self._up_to_stop()) is not None:
            del token_ids[length:], logprobs[length:]
            self._is_over = True
        text = self.template.decode(token_ids[self._begins :])
        if text.endswith(_UNFINISHED) or not text.startswith(before) or len(text) == len(before):
            return None
        self._begins = self.num_given
        return self._given(text[len(before) :], len(token_ids))

    def _up_to_stop(self) -> int | None:
        """How many tokens there are up to the first stop."""
        token_ids = self._tokens.token_ids
        if not self.stops or not any(stop in self.template.decode(token_ids) for stop in self.stops):
            return None
        return num_up_to_stop(token_ids, self.stops, self.template)

    def rest(self, reply: Reply) -> Part:
        """What is left when the answer is whole."""
        self._tokens = Tokens(reply.completion.token_ids, reply.completion.logprobs)
        return self._given(reply.text[len(self.text) :], len(reply.completion.token_ids))

    def _given(self, text: str, num_tokens: int) -> Part:
        since = slice(self.num_given, num_tokens)
        self.text, self.num_given = self.text + text, num_tokens
        return Part(text, self._tokens.token_ids[since], self._tokens.logprobs[since])
