"""A language model behind an OpenAI-compatible address, asked many questions at the same time.

The key comes from the environment and goes into the header of the requests, and nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from trinity_data.errors import OperatorError, unknown_name
from trinity_operators.row_answer import add_totals

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

Messages: TypeAlias = Sequence[Mapping[str, str]]

ROLLOUT_MODEL = "rollout_model"
"""The name of the run's own engine, with the weights that it has then."""
URL_VARIABLE, KEY_VARIABLE = "OPENAI_BASE_URL", "OPENAI_API_KEY"
REPEATED = frozenset({408, 409, 425, 429})
"""Status codes, besides those from 500 on, after which the same question may be answered."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 20.0
_SHOWN = 200
_NOT_COMPATIBLE = "the reply is not one of an OpenAI-compatible server"
_T = TypeVar("_T")


class EndpointError(Exception):
    """A question got no answer; a message for people."""

    def __init__(self, message: str, *, status: int = 0, pause_seconds: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        """Of HTTP; 0 where there was no reply."""
        self.pause_seconds = pause_seconds
        """What the server asks for."""


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: int
    """Of prompt and answer, as the server counts them; 0 where it does not."""


class LanguageModel(Protocol):
    """Something that answers messages."""

    async def start(self) -> None:
        """Opens connections and asks once. Raises OperatorError where there is no answer."""

    async def ask(self, messages: Messages, *, max_tokens: int, temperature: float) -> Answer:
        """Adds `requests` and `tokens` to the totals. Raises EndpointError where there is no answer."""
        ...

    async def stop(self) -> None: ...


class Endpoint:
    """One model of one server."""

    def __init__(
        self, model: str, base_url: str, *, max_in_flight: int, max_retries: int, timeout: float
    ) -> None:
        """`timeout` in seconds for each request."""
        self.model, self.base_url = model, base_url.rstrip("/")
        self.max_in_flight, self.max_retries, self.timeout = max_in_flight, max_retries, timeout
        self._session: ClientSession | None = None

    async def start(self) -> None:
        question = [{"role": "user", "content": "Say yes."}]
        await self.probe(self._ask_once(question, max_tokens=8, temperature=0.0))

    async def probe(self, asked: Coroutine[Any, Any, Any]) -> None:
        """Waits for a first request. Raises OperatorError, which says what to do, where it gets no answer."""
        try:
            await asked
        except EndpointError as error:
            hint = await self._hint(error.status)
            await self.stop()  # nothing that was not prepared is closed
            raise OperatorError(
                f"model {self.model!r} at {self.base_url} gives no answer: {error}; {hint}"
            ) from error

    async def ask(self, messages: Messages, *, max_tokens: int, temperature: float) -> Answer:
        return await self._repeated(
            lambda: self._ask_once(messages, max_tokens=max_tokens, temperature=temperature)
        )

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """A vector for each text, all of the same length. Raises EndpointError where there is no answer."""
        return await self._repeated(lambda: self.embed_once(texts))

    async def embed_once(self, texts: Sequence[str]) -> list[list[float]]:
        """As `embed`, by one request."""
        reply = await self._post("embeddings", {"model": self.model, "input": list(texts)})
        try:
            rows = sorted(reply["data"], key=lambda row: int(row.get("index", 0)))
            vectors = [[float(value) for value in row["embedding"]] for row in rows]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EndpointError(_NOT_COMPATIBLE, status=200) from error
        if len(vectors) != len(texts) or len(set(map(len, vectors))) != 1:
            message = f"found {len(vectors)} embeddings of {len(texts)} texts, or of several lengths"
            raise EndpointError(message, status=200)
        return vectors

    async def _repeated(self, request: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        for number in range(self.max_retries + 1):
            try:
                return await request()
            except EndpointError as error:
                pause = error.pause_seconds
                is_repeated = error.status == 0 or error.status >= 500 or error.status in REPEATED
                if not is_repeated or number == self.max_retries:
                    attempts = f" ({number + 1} attempts)" if number else ""
                    raise EndpointError(f"{error}{attempts}", status=error.status) from error
            if pause is None:
                # not all that failed together ask again together
                pause = FIRST_PAUSE_SECONDS * 2**number * random.uniform(0.5, 1.0)
            await asyncio.sleep(min(pause, LONGEST_PAUSE_SECONDS))
        raise AssertionError("the last attempt returns or raises")

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask_once(self, messages: Messages, *, max_tokens: int, temperature: float) -> Answer:
        question = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        reply = await self._post("chat/completions", question)
        try:
            text = reply["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise EndpointError(_NOT_COMPATIBLE, status=200) from error
        if not isinstance(text, str) or not text.strip():
            raise EndpointError("the answer is empty", status=200)
        return Answer(text, _tokens(reply))

    async def _post(self, path: str, question: Mapping[str, Any]) -> Any:
        """The reply, a JSON object; adds the request and its tokens to the totals."""
        import aiohttp

        session = self._opened()
        url = f"{self.base_url}/{path}"
        add_totals(requests=1)
        try:
            async with session.post(url, data=json.dumps(question).encode()) as response:
                reply = await _read(response)
        except TimeoutError as error:
            raise EndpointError(f"no answer within {self.timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EndpointError(f"{type(error).__name__}: {error}") from error
        add_totals(tokens=_tokens(reply))
        return reply

    def _opened(self) -> ClientSession:
        import aiohttp

        if self._session is None:
            key = os.environ.get(KEY_VARIABLE, "")
            headers = {"Content-Type": "application/json"}
            self._session = aiohttp.ClientSession(
                headers=headers | ({"Authorization": f"Bearer {key}"} if key else {}),
                connector=aiohttp.TCPConnector(limit=self.max_in_flight),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=self.timeout),
            )
        return self._session

    async def _hint(self, status: int) -> str:
        """What to do where the model does not answer."""
        if status in (401, 403):
            return f"set {KEY_VARIABLE} in the environment"
        if status in (400, 404, 422) and (models := await self._models()):
            return unknown_name("model", self.model, models)
        return "start it, or change base_url"

    async def _models(self) -> list[str]:
        """The names that the server offers; none where it does not say."""
        import aiohttp

        try:
            async with self._opened().get(f"{self.base_url}/models") as response:
                offered = (await response.json(content_type=None))["data"]
                return sorted(str(each["id"]) for each in offered)
        # the boundary to the server: the list is only for a better message
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError):
            return []


def _pause(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait for; None where it does not, or names a date."""
    for name, seconds in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        if headers.get(name, "").isdigit():
            return int(headers[name]) * seconds
    return None


def _tokens(reply: Mapping[str, Any]) -> int:
    usage = reply.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else 0


async def _read(response: ClientResponse) -> Mapping[str, Any]:
    """A JSON object."""
    if response.status >= 400:
        text = " ".join((await response.text(errors="replace")).split())
        message = f"status {response.status}: {text[:_SHOWN]}"
        raise EndpointError(message, status=response.status, pause_seconds=_pause(response.headers))
    try:
        reply = json.loads(await response.read())
    except ValueError as error:
        raise EndpointError(_NOT_COMPATIBLE, status=200) from error
    if not isinstance(reply, dict):
        raise EndpointError(_NOT_COMPATIBLE, status=200)
    return reply
