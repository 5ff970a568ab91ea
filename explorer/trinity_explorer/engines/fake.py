"""An engine that answers from a script at once: for tests, for dry runs,
and to measure everything around it.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from trinity_data.errors import ConfigError
from trinity_data.weights import Weights
from trinity_explorer.engines.engine import Completion, Heard, Request, Tokens, spans_of

Script = Callable[[str, int], str]
"""Prompt text and seed to response text."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is needed here."""

    eos_token_id: int

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """The UTF-8 bytes of a text as its token ids, where no model's tokenizer is needed."""

    eos_token_id = 256
    chat_template = "a line `role: content` for each message"

    def __len__(self) -> int:
        return self.eos_token_id + 1

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token for token in token_ids if token < self.eos_token_id).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> str:
        lines = [f"{message['role']}: {message.get('content') or ''}\n" for message in messages]
        return "".join(lines) + "assistant: "


class FakeEngine:
    """Answers from `script`, which gets the text of the prompt and the seed of the request.

    Every token has log-prob -0.5. The same prompt and seed give the same answer. Without a tokenizer, a
    token is a byte and the prompt has a line `role: content` for each message. With `tokens_per_turn` it
    waits for `delay_seconds` after so many tokens, and weights may be loaded meanwhile.
    """

    name = "fake"

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        script: Script,
        delay_seconds: float = 0.0,
        tokens_per_turn: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer or ByteTokenizer()
        self.script = script
        self.delay_seconds, self.tokens_per_turn = delay_seconds, tokens_per_turn
        self.model_version = 0
        self._prompts: dict[tuple[int, ...], str] = {}
        self._answers: dict[str, list[int]] = {}
        self.is_asleep = False
        self._num_running = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        assert not self.is_asleep, "nothing is asked of an engine that sleeps"
        if self.tokens_per_turn is not None:
            return await self._in_turns(self._completions(requests), self.tokens_per_turn)
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)
        return self._completions(requests)

    def _completions(self, requests: Sequence[Request]) -> list[Completion]:
        completions = []
        for request in requests:
            prompt = tuple(request.prompt_token_ids)
            if prompt not in self._prompts:
                self._prompts[prompt] = self.tokenizer.decode(request.prompt_token_ids)
            text = self.script(self._prompts[prompt], request.sampling.seed)
            if text not in self._answers:
                tokens = self.tokenizer.encode(text, add_special_tokens=False)
                self._answers[text] = [*tokens, self.tokenizer.eos_token_id]
            answer = self._answers[text]
            cut = answer[: request.sampling.max_tokens]
            reason = "stop" if len(cut) == len(answer) else "length"
            completions.append(Completion(cut, [-0.5] * len(cut), reason, self.model_version))
        return completions

    async def stream(self, request: Request, heard: Heard) -> Completion:
        """As `generate`; with `tokens_per_turn`, what a turn makes is heard before the next one."""
        (completion,) = self._completions([request])
        tokens = self.tokens_per_turn or len(completion.token_ids)

        def hear(start: int) -> None:
            part = slice(start, start + tokens)
            heard(Tokens(completion.token_ids[part], completion.logprobs[part]))

        (completion,) = await self._in_turns([completion], tokens, hear)
        return completion

    async def _in_turns(
        self,
        completions: Sequence[Completion],
        tokens: int,
        heard: Callable[[int], None] = lambda start: None,
    ) -> list[Completion]:
        """`heard` gets the number of the first token of each turn."""
        self._num_running += 1
        self._is_idle.clear()
        spans = [(0, self.model_version)]
        try:
            heard(0)
            for start in range(tokens, max(len(each.token_ids) for each in completions), tokens):
                await asyncio.sleep(self.delay_seconds)
                if self.model_version != spans[-1][1]:
                    spans.append((start, self.model_version))
                heard(start)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._is_idle.set()
        return [each._replace(version_spans=spans_of(spans, len(each.token_ids))) for each in completions]

    async def load_weights(self, weights: Weights, *, during: bool = False) -> None:
        if not during:
            await self._is_idle.wait()
        self.model_version = weights.version

    async def sleep(self) -> None:
        self.is_asleep = True

    async def wake(self) -> None:
        self.is_asleep = False

    async def score(self, sequences: Sequence[Sequence[int]]) -> None:
        return None

    async def close(self) -> None:
        self._prompts.clear()
        self._answers.clear()


def guess_arithmetic(prompt: str, seed: int) -> str:
    """The sum or the difference of the first two numbers of the prompt, as the seed has it; often right."""
    numbers = _first_numbers(prompt)
    total = (sum(numbers), numbers[0] - sum(numbers[1:]), numbers[0])[seed % 3]
    return f"The answer is {total}.\n#### {total}"


@lru_cache(maxsize=1024)
def _first_numbers(prompt: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", prompt)[:2]] or [0]


def script_from_file(path: Path) -> Script:
    """A JSON object of prompt fragments and their responses, one of which the seed picks.

    `""` matches every prompt.
    """
    try:
        answers: dict[str, list[str]] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"explorer.rollout_model.script: {path} cannot be read as JSON: {error}") from error
    if not isinstance(answers, dict) or not all(
        texts and isinstance(texts, list) for texts in answers.values()
    ):
        raise ConfigError(
            f"explorer.rollout_model.script: {path} must map prompt fragments to lists of answers"
        )

    @lru_cache(maxsize=1024)
    def fitting(prompt: str) -> list[str]:
        return next((texts for fragment, texts in answers.items() if fragment in prompt), [""])

    def script(prompt: str, seed: int) -> str:
        return random.Random(seed).choice(fitting(prompt))

    return script
