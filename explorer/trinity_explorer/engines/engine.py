"""What an engine is: token ids in, token ids and the log-probs they were sampled with out.

An engine names the model version that made each completion and takes new weights in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from trinity_data.weights import Weights


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Temperature 0 is greedy, and nothing is cut; `top_k` -1 and `top_p` 1 keep the whole distribution.
    """

    temperature: float
    top_p: float
    top_k: int
    min_tokens: int
    max_tokens: int
    seed: int
    reports_cuts: bool = False
    """Whether completions say which tokens the distribution was cut to, as training wants it."""

    def with_seed(self, seed: int) -> Sampling:
        """The same with another seed. Each try asks for one, and `dataclasses.replace` takes longer."""
        return Sampling(**vars(self) | {"seed": seed})


# a named tuple takes a third of a frozen dataclass's time, and there is one for each rollout
class Request(NamedTuple):
    prompt_token_ids: list[int]
    sampling: Sampling


class Completion(NamedTuple):
    """One answer. `logprobs` are of the distribution that was sampled from, after temperature and top-p/k."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """`stop`, or `length` when `max_tokens` ended it."""
    model_version: int
    """That sampled the first token."""
    kept_tokens: list[list[int] | None] | None = None
    """For each token what top-p and top-k left to sample from, None where they cut nothing."""
    banned_tokens: list[list[int] | None] | None = None
    """For each token without `kept_tokens` what could not come: the end, before `min_tokens`."""
    version_spans: list[tuple[int, int]] | None = None
    """Where weights were loaded during the answer: the first token of each version, and the version, from
    token 0 on. None where `model_version` sampled all.
    """


class Tokens(NamedTuple):
    """A part of an answer that goes on."""

    token_ids: list[int]
    logprobs: list[float]


Heard: TypeAlias = Callable[[Tokens], None]
"""Called with each part of an answer as it is made."""


def spans_of(spans: Sequence[tuple[int, int]], num_tokens: int) -> list[tuple[int, int]] | None:
    """Those that an answer of so many tokens has a token of; None where there is one version."""
    begun = [span for span in spans if span[0] < num_tokens]
    return begun if len(begun) > 1 else None


class CompletionSource(Protocol):
    """An engine, or several."""

    name: str

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order. May be called concurrently."""
        ...


class Engine(CompletionSource, Protocol):
    """Implemented by each file of this folder."""

    async def load_weights(self, weights: Weights, *, during: bool = False) -> None:
        """Completions asked for afterwards come from these weights.

        Waits for those under way. With `during` it does not: their tokens to come are sampled from the new
        weights, with keys and values of all tokens before computed again.
        """
        ...

    async def sleep(self) -> None:
        """Gives the memory of its GPU back; nothing is asked until it is awake."""
        ...

    async def wake(self) -> None:
        """Has its weights again."""
        ...

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """For each sequence the log-prob of each token but the first,
        at temperature 1 and over the whole vocabulary.

        None from an engine without a model.
        """
        ...

    async def close(self) -> None: ...


@runtime_checkable
class StreamingEngine(Protocol):
    """An engine that can say what it answers while it does."""

    async def stream(self, request: Request, heard: Heard) -> Completion:
        """As `generate` of one request."""
        ...


@runtime_checkable
class PingedEngine(Protocol):
    """An engine with processes below its own, which may hang while its own does not."""

    async def ping(self) -> None:
        """Returns when they have answered."""
        ...


@runtime_checkable
class RestartableEngine(Protocol):
    """An engine in a process of its own; its methods raise EngineDiedError when that has ended."""

    async def start(self) -> None:
        """In a new process, with the model it was built with; ends the process before."""
        ...
