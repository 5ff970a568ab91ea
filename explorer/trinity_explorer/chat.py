"""What a workflow talks to: chat in, text and tokens out.

Requests that a group makes in the same turn of the event loop go to the engine in one call. Imports nothing
heavy: the processes of workflows load it too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from trinity_data.errors import RolloutError, TemplateError, unknown_name
from trinity_data.kept_tokens import MOST_KEPT_TOKENS, names_what_it_kept
from trinity_data.tokenizer import ChatTemplate, Messages, Prompt, Tools
from trinity_explorer.engines.engine import Completion, CompletionSource, Request, Sampling
from trinity_explorer.engines.fake import FakeEngine

MAX_REQUESTS_PER_CALL = 64


class Reply(NamedTuple):
    """One answer of the policy, with the prompt it was given."""

    text: str
    prompt_token_ids: list[int]
    completion: Completion
    sampling: Sampling
    prompt_cut: bool = False
    """Whether the prompt was cut because it was too long."""
    messages: Messages = ()
    """What was asked."""
    tools: Tools = ()
    """The tools that the chat template was given."""


class ChatModel(Protocol):
    """The policy, for one rollout."""

    replies: list[Reply]
    """What it said so far."""
    auxiliary_models: AuxiliaryModels

    async def chat(self, messages: Messages, *, tools: Tools = (), **changes: Any) -> Reply:
        """The policy's next message.

        `changes` replace fields of the rollout's sampling, such as `max_tokens`.
        """
        ...


class AuxiliaryModels(dict[str, ChatModel]):
    """The stage's other models by their names, for one rollout. What they say is not trained."""

    def __missing__(self, name: str) -> ChatModel:
        raise RolloutError(
            f"explorer.auxiliary_models: {unknown_name('auxiliary model', name, self)}"
            if self
            else f"there is no auxiliary model {name!r}: explorer.auxiliary_models has none"
        )


class RequestBatcher:
    """Collects requests for one turn of the event loop, then sends them to the engines in
    as few calls as can be.

    One a group: its requests travel together and no other group waits for them.
    """

    def __init__(self, engines: CompletionSource) -> None:
        self.engines = engines
        self.requests = self.tokens = 0
        """That were answered, and the tokens of their prompts and answers."""
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def generate(self, request: Request) -> Completion:
        if not self._waiting:
            self._begin_call()
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        return await future

    def _begin_call(self) -> None:
        call = asyncio.get_running_loop().create_task(self._call())
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _call(self) -> None:
        waiting = self._waiting[:MAX_REQUESTS_PER_CALL]
        self._waiting = self._waiting[MAX_REQUESTS_PER_CALL:]
        if self._waiting:
            self._begin_call()
        try:
            completions = await self.engines.generate([request for request, _ in waiting])
        except Exception as error:  # the boundary to engines: every waiting rollout hears of it
            for _, future in waiting:
                if not future.done():
                    future.set_exception(error)
            return
        self.requests += len(waiting)
        for (request, future), completion in zip(waiting, completions, strict=True):
            self.tokens += len(request.prompt_token_ids) + len(completion.token_ids)
            if not future.done():
                future.set_result(completion)


class ChatClient:
    """The policy, for one rollout.

    Remembers the replies it gave, so that a workflow need not collect them.
    """

    def __init__(
        self,
        batcher: RequestBatcher,
        template: ChatTemplate,
        sampling: Sampling,
        auxiliary_models: AuxiliaryModels | None = None,
    ) -> None:
        self.batcher, self.template, self.sampling = batcher, template, sampling
        self.replies: list[Reply] = []
        self.auxiliary_models = AuxiliaryModels() if auxiliary_models is None else auxiliary_models

    @classmethod
    def of_fake_engine(cls, engine: FakeEngine, *, max_tokens: int = 4096) -> ChatClient:
        """The client that a workflow gets, without a run: for unit tests of workflows."""
        template = ChatTemplate(engine.tokenizer, None, max_prompt_tokens=None, truncate=False)
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_tokens=0, max_tokens=max_tokens, seed=0)
        return cls(RequestBatcher(engine), template, sampling)

    async def chat(self, messages: Messages, *, tools: Tools = (), **changes: Any) -> Reply:
        """The policy's next message.

        `changes` replace fields of the rollout's sampling, such as `max_tokens`.
        """
        check_messages(messages)
        sampling = self._sampling(changes)
        try:
            prompt = self.template.encode(messages, tools)
        except TemplateError as error:
            raise RolloutError(str(error)) from error
        return await self._answer(prompt, sampling, messages, tools)

    async def complete(self, token_ids: list[int], messages: Messages, **changes: Any) -> Reply:
        """How the policy goes on behind these tokens, which `messages` are the text of."""
        sampling = self._sampling(changes)
        try:
            prompt = self.template.fitted(token_ids)
        except TemplateError as error:
            raise RolloutError(str(error)) from error
        return await self._answer(prompt, sampling, messages, ())

    def _sampling(self, changes: Mapping[str, Any]) -> Sampling:
        if not changes:
            return self.sampling
        sampling = changed_sampling(self.sampling, changes)
        check_cuts(sampling, self.batcher.engines.name)
        return sampling

    async def _answer(self, prompt: Prompt, sampling: Sampling, messages: Messages, tools: Tools) -> Reply:
        completion = await self.batcher.generate(Request(prompt.token_ids, sampling))
        text = self.template.decode(completion.token_ids)
        reply = Reply(text, prompt.token_ids, completion, sampling, prompt.truncated, messages, tools)
        self.replies.append(reply)
        return reply


def check_messages(messages: Messages) -> None:
    """Raises RolloutError for what no chat template can read."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RolloutError(f"model.chat takes a list of messages, found {messages!r:.80}")
    for number, message in enumerate(messages):
        if type(message) is dict and type(message.get("role")) is str and "content" in message:
            continue  # as nearly all are, and what follows costs more
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RolloutError(
                f"messages[{number}] is {message!r:.80}; a dict with 'role' and 'content' is allowed"
            )
        if "content" not in message and "tool_calls" not in message:
            raise RolloutError(f"messages[{number}] has no 'content'; it has {', '.join(map(str, message))}")


def changed_sampling(sampling: Sampling, changes: Mapping[str, Any]) -> Sampling:
    """Raises RolloutError for a field that there is not, and for values that cannot be sampled with."""
    for name, value in changes.items():
        if name not in _FITS:
            raise RolloutError(f"model.chat: {unknown_name('sampling argument', name, _FITS)}")
        kinds, fits, allowed = _FITS[name]
        if isinstance(value, bool) or not isinstance(value, kinds) or not fits(value, sampling):
            limit = allowed.format(sampling=sampling)
            raise RolloutError(f"model.chat: {name} is {value!r:.80}; allowed is {limit}")
    return replace(sampling, **changes)


def check_cuts(sampling: Sampling, engine: str) -> None:
    """Raises RolloutError for a sampling to train on of which the engine cannot name the tokens it kept."""
    named = names_what_it_kept(
        engine, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k
    )
    if sampling.reports_cuts and not named:
        raise RolloutError(
            f"model.chat: found top_p {sampling.top_p:g} with top_k {sampling.top_k}; {engine} names at most "
            f"{MOST_KEPT_TOKENS} of the tokens that a rollout was sampled from; "
            f"give top_k from 1 to {MOST_KEPT_TOKENS}"
        )


_FITS: Mapping[str, tuple[tuple[type, ...], Callable[[Any, Sampling], bool], str]] = {
    "temperature": ((int, float), lambda v, _: math.isfinite(v) and v >= 0, "a number from 0"),
    "top_p": ((int, float), lambda v, _: 0 < v <= 1, "a number above 0 and up to 1"),
    "top_k": ((int,), lambda v, _: v == -1 or 1 <= v < 2**31, "-1 or a count from 1"),
    "min_tokens": ((int,), lambda v, s: 0 <= v <= s.max_tokens, "a count up to {sampling.max_tokens}"),
    "max_tokens": (
        (int,),
        lambda v, s: 1 <= v <= s.max_tokens,
        "a count from 1 to {sampling.max_tokens}, the task set's rollout_args.max_tokens",
    ),
    "seed": ((int,), lambda v, _: 0 <= v < 2**31, "a count below 2**31"),
}
"""Of each field that a call may change: its types, what fits, and that in words."""
