"""Operators that ask a model behind an OpenAI-compatible endpoint: many rows at once, and a row without an
answer is an error.

Data-Juicer builds the prompts and reads the answers; it would ask for one row after another, and take a
server that does not answer for a score of 0. Here each row has its own record of its calls.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trinity_data.errors import OperatorError
from trinity_operators.asynchronous import in_operator_loop
from trinity_operators.endpoint import Answer, LanguageModel

_T = TypeVar("_T")

IN_FLIGHT = 64
"""Rows that are asked about at once, unless `num_proc` says otherwise."""
CLIENT = {"max_retries": 5, "timeout": 60.0}
"""Of `openai.OpenAI`, unless `model_params` says otherwise: it waits longer before every try, and as long as
the server asks for. Seconds.
"""
MAX_TOKENS = 512
"""Of an answer of the run's models, unless `sampling_params` says otherwise."""
_UNUSED_ADDRESS = {"base_url": "http://localhost", "api_key": "none"}
"""Without one the client is not made."""
PROBE = [{"role": "user", "content": "Say yes."}]
MAY_FIND_NOTHING = frozenset(
    f"extract_{what}_mapper" for what in ("entity_relation", "event", "keyword", "nickname")
)
"""Operators that take a text in which they find nothing for an answer that they cannot read."""
CANNOT_READ = "cannot read the answer"
_NOTE_OF_INSIGHTS = "JSON parse failed"
_SHOWN = 160
_SETTINGS = "model_params.base_url (or OPENAI_BASE_URL) and OPENAI_API_KEY"


@dataclass
class RowCalls:
    """The calls about one row."""

    requests: int = 0
    tokens: int = 0
    answer: str = ""
    """The last one."""
    error: str = ""
    """Why there is no answer; after that the row asks no more."""
    attempts_left: float = math.inf
    """Of the question at hand."""


@dataclass
class CallCounts:
    """Over rows."""

    requests: int = 0
    tokens: int = 0
    rows_without_answer: int = 0

    def add(self, calls: RowCalls) -> None:
        self.requests += calls.requests
        self.tokens += calls.tokens
        self.rows_without_answer += bool(calls.error)


@dataclass
class AskedRow:
    """What an operator made of a row, and the calls for it."""

    result: Any
    calls: RowCalls = field(default_factory=RowCalls)


class RowError(Exception):
    """The row has no answer; its operator goes on without one."""


class UnusableAnswer(Exception):
    """An operator noted that it could not read the answer."""


class Attempts:
    """`try_num` of an operator, which it gives to `range` for each of its questions.

    There is one attempt more, at which the row has the error that none of the answers could be used.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __index__(self) -> int:
        calls: RowCalls = _at_work.calls
        calls.attempts_left = self.limit
        return self.limit + 1


_at_work = threading.local()


class Endpoint:
    """An API model of Data-Juicer's, one copy for every thread, whose calls are recorded for the row at work.

    It stands in the place of the model's key, as what makes the model.
    """

    def __init__(self, make: functools.partial[Any]) -> None:
        self._make, self._local = make, threading.local()
        self._of_the_run: LanguageModel | None = None

    def asks_model_of(self, names: Collection[str]) -> bool:
        """Whether one of these models of the run has its name, and it was given no address."""
        return not self._make.keywords.get("base_url") and self._make.keywords.get("model") in names

    def connect(self, models: Mapping[str, LanguageModel]) -> None:
        """From now on asks a model of the run, where one has its name and it was given no address."""
        if self.asks_model_of(models):
            self._of_the_run = models[self._make.keywords["model"]]

    def __call__(self, **_: Any) -> Any:
        """The model as the operator wants it: with a processor, where it asked for one."""
        made = self._make() if self._of_the_run is None else self._make(**_UNUSED_ADDRESS)
        self._first = made[0] if isinstance(made, tuple) else made
        if self._of_the_run is not None:
            self._first._client = _RunClient(self._of_the_run)
        return (_Recorded(self), made[1]) if isinstance(made, tuple) else _Recorded(self)

    @property
    def model(self) -> Any:
        if not hasattr(self._local, "model"):
            self._local.model = copy.copy(self._first)
            self._local.model._client = _RecordingClient(self._first._client)
        return self._local.model

    def probe(self) -> None:
        """Asks once. Raises OperatorError where there is no answer."""
        try:
            self()
        # the boundary to the client: the message holds its own words
        except Exception as error:
            raise OperatorError(f"the model cannot be asked: {error}; set {_SETTINGS}") from error
        question: Any = "yes" if self.model.endpoint.endswith(("/embeddings", "/responses")) else PROBE
        asked = asked_about(lambda: _Recorded(self)(question))
        if asked.calls.error:
            where = f"{str(self._first._client.base_url).rstrip('/')}{self.model.endpoint}"
            raise OperatorError(
                f"model {self.model.model!r} at {where} gives no answer: {asked.calls.error}; start it, "
                f"or set {_SETTINGS}"
            )


class _Recorded:
    """The model that the operator calls."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def __call__(self, question: Any, **options: Any) -> Any:
        calls: RowCalls = _at_work.calls
        if not calls.attempts_left:
            calls.error = calls.error or f"{CANNOT_READ} {calls.answer[:80]!r}"
        if calls.error:
            raise RowError(calls.error)
        calls.attempts_left -= 1
        answer = self._endpoint.model(question, **options)
        if not calls.error and not answer:
            calls.error = f"the answer holds nothing at {self._endpoint.model.response_path}"
        if calls.error:
            raise RowError(calls.error)
        calls.answer = answer if isinstance(answer, str) else ""
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint.model, name)


class _RunClient:
    """A model of the run in the place of `openai.OpenAI`."""

    base_url = "the run"

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def post(self, path: str, *, body: Mapping[str, Any], **_: Any) -> _RunReply:
        if "messages" not in body:
            raise OperatorError(f"the models of a run answer messages; {path} needs an endpoint")
        max_tokens, temperature = body.get("max_tokens") or MAX_TOKENS, body.get("temperature") or 0.0
        asked = self._model.ask(body["messages"], max_tokens=max_tokens, temperature=temperature)
        return _RunReply(in_operator_loop(asked).result())


@dataclass(frozen=True)
class _RunReply:
    answer: Answer

    def json(self) -> dict[str, Any]:
        """As a server replies."""
        message = {"role": "assistant", "content": self.answer.text}
        return {"choices": [{"message": message}], "usage": {"total_tokens": self.answer.tokens}}


class _RecordingClient:
    """`openai.OpenAI`, for the row at work."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def post(self, *args: Any, **options: Any) -> Any:
        calls: RowCalls = _at_work.calls
        calls.requests += 1
        try:
            response = self._client.post(*args, **options)
            usage = response.json().get("usage") or {}
        # the boundary to the client, the network and the server: Data-Juicer would go on with an empty answer
        except Exception as error:
            calls.error = f"{type(error).__name__}: {error}"[:_SHOWN]
            raise
        calls.tokens += int(usage.get("total_tokens") or 0)
        return response

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def endpoints_of(op: Any) -> list[Endpoint]:
    """Replaces the API models of an operator and of the operators within it, and returns what stands in
    their place.
    """
    endpoints = []
    for name, value in vars(op).items():
        if isinstance(value, functools.partial) and value.func.__name__ == "prepare_api_model":
            endpoints.append(Endpoint(value))
            setattr(op, name, endpoints[-1])
        elif type(value).__module__.startswith("data_juicer.ops."):
            endpoints += endpoints_of(value)
    if endpoints and op._name not in MAY_FIND_NOTHING and hasattr(op, "try_num"):
        op.try_num = Attempts(op.try_num)
    return endpoints


def refuse_noted_errors(entries: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises UnusableAnswer where one of the entries that an operator wrote, besides those `known`, says that
    it could not read the answer.
    """
    for name, entry in entries.items():
        if name not in known and isinstance(entry, dict):
            note = entry.get("error") or entry.get("audit_notes")
            if "error" in entry or note == _NOTE_OF_INSIGHTS:
                raise UnusableAnswer(note)


def client_arguments(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """`model_params` with what the client needs. A server of one's own often asks for no key."""
    given = CLIENT | dict(params or {})
    has_url = "base_url" in given or os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_URL")
    has_key = os.environ.get("OPENAI_API_KEY") or os.environ.get("DASHSCOPE_API_KEY")
    return {"api_key": "none"} | given if has_url and not has_key else given


def asked_about(work: Callable[[], _T]) -> AskedRow:
    """Runs `work`, whose calls are about one row. An error of the row's calls is not raised."""
    calls = RowCalls()
    _at_work.calls = calls
    try:
        return AskedRow(work(), calls)
    # the boundary to Data-Juicer: some operators fail on an answer that they cannot read
    except Exception as error:
        if not calls.requests:
            raise
        what = f"the answer {calls.answer[:80]!r} cannot be used: {type(error).__name__}: {error}"
        calls.error = calls.error or what[:_SHOWN]
        return AskedRow(None, calls)


def ask_about_each(
    work: Callable[[dict[str, Any]], Any], samples: Sequence[dict[str, Any]], in_flight: int
) -> tuple[list[AskedRow], CallCounts]:
    """`work` on every sample, so many at once, and the sums over them."""
    counts = CallCounts()
    with ThreadPoolExecutor(max_workers=max(1, min(in_flight, len(samples)))) as pool:
        rows = list(pool.map(lambda sample: asked_about(lambda: work(sample)), samples))
    for row in rows:
        counts.add(row.calls)
    return rows, counts
