"""The endpoint: OpenAI's completions for agents outside, and their rewards.

Every path but `/health` wants the token. What an answer says is on record before it is sent.
"""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web
from pydantic import BaseModel, ConfigDict, model_validator

from trinity_data.errors import (
    BrokenAnswerError,
    RolloutError,
    SessionError,
    TrinityError,
    UnknownSessionError,
)
from trinity_explorer.rewards.reward import Reward, as_reward
from trinity_explorer.serve.answer_stream import AnswerStream
from trinity_explorer.serve.api import AgentRequest, ApiError, read_body
from trinity_explorer.serve.chat_api import ChatRequest
from trinity_explorer.serve.completions_api import CompletionRequest
from trinity_explorer.serve.session import End
from trinity_explorer.serve.sessions import Sessions

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 << 20
PREFIXES = ("", "/sessions/{session}", "/tasks/{task}/sessions/{session}")
"""Before `/v1`: without a session each request opens one of its own."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@=-]{0,127}")
"""Of a session and of a task."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Feedback(BaseModel):
    """The body of `POST /v1/feedback`: what a session has earned, or why it has earned nothing."""

    model_config = ConfigDict(extra="forbid")

    session_id: str = ""
    """Not needed where the path names the session."""
    reward: float | dict[str, float] | None = None
    metrics: dict[str, float] = {}
    error: str | None = None

    @model_validator(mode="after")
    def _has_one_of_the_two(self) -> Feedback:
        if (self.reward is None) == (not self.error):
            raise ValueError("write a reward, a number or its parts by name, or an error")
        return self

    def end(self) -> End:
        """Raises ApiError for a reward that is not finite."""
        if self.reward is None:
            return End(None, f"{self.error}"[:2000])
        try:
            reward = as_reward(self.reward, "the agent")
            metrics = as_reward(Reward(0.0, metrics=self.metrics), "the agent").metrics
        except RolloutError as error:
            raise ApiError(400, str(error), "invalid_value", "reward") from error
        return End(Reward(reward.total, dict(reward.parts), dict(metrics)))


class Endpoint:
    """The handlers of one explorer's sessions."""

    def __init__(self, sessions: Sessions, *, model: str, token: str) -> None:
        """`model` is the name that requests give."""
        self.sessions, self.model, self.token = sessions, model, token

    def app(self) -> web.Application:
        """The server's application."""
        app = web.Application(middlewares=[self._answer], client_max_size=MAX_BODY_BYTES)
        for prefix in PREFIXES:
            app.router.add_post(f"{prefix}/v1/chat/completions", self.chat)
            app.router.add_post(f"{prefix}/v1/completions", self.complete)
            app.router.add_post(f"{prefix}/v1/feedback", self.feedback)
            app.router.add_get(f"{prefix}/v1/models", self.models)
        app.router.add_get("/sessions/{session}", self.session)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        return app

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets errors be answers in OpenAI's shape, and nobody in without the token."""
        try:
            if request.path != "/health":
                self._check_token(request)
            return await handler(request)
        except Exception as error:  # the boundary to agents: what one of them asks does not end the run
            answer = self._as_answer(request, error)
            return web.json_response(answer.body(), status=answer.status)

    def _as_answer(self, request: web.Request, error: Exception) -> ApiError:
        match error:
            case ApiError():
                return error
            case web.HTTPException():
                return ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
            case SessionError():
                return ApiError(409, str(error), "session")
            case BrokenAnswerError():
                return ApiError(503, str(error), "broken_answer")
            case RolloutError():
                return ApiError(400, str(error), "invalid_value", "messages")
            case TrinityError():
                # the store's or an engine's: the run ends with it
                self.sessions.fail(error)
                return ApiError(500, str(error))
        log.error("%s %s", request.method, request.path, exc_info=error)
        return ApiError(500, "the endpoint has failed; the files under log/ in the job's folder say how")

    def _check_token(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            text = "no token, or a wrong one; send the header `Authorization: Bearer TOKEN`"
            raise ApiError(401, f"{text} with the token of serve.json in the job's folder", "invalid_api_key")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._ask(request, read_body(ChatRequest, await request.read()))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        return await self._ask(request, read_body(CompletionRequest, await request.read()))

    async def _ask(self, request: web.Request, body: AgentRequest) -> web.StreamResponse:
        if body.model != self.model:
            text = f"model: found {body.model!r}; this endpoint serves {self.model!r}"
            raise ApiError(404, text, "model_not_found", "model")
        self._check_ready()
        sessions = self.sessions
        session, template = _named(request, "session") or uuid.uuid4().hex, sessions.runner.template
        asking = partial(
            sessions.ask,
            session,
            _named(request, "task"),
            body.questions(template),
            number=body.n,
            stops=body.stops,
            changes=body.changes(sessions.sampling.max_tokens),
        )
        if body.stream:
            return await AnswerStream(request, body, session, template).send(
                asking, lambda error: self._as_answer(request, error)
            )
        return web.json_response(body.body(session, *await asking(), template))

    async def feedback(self, request: web.Request) -> web.Response:
        body = read_body(Feedback, await request.read())
        self._check_ready()
        session = _named(request, "session") or body.session_id
        if not session or body.session_id not in ("", session):
            raise ApiError(
                400, "session_id: name one session, in the path or here", "invalid_value", "session_id"
            )
        try:
            is_new = await self.sessions.end(session, body.end())
        except UnknownSessionError as error:
            raise ApiError(404, str(error), "session", "session_id") from error
        except SessionError as error:
            raise ApiError(409, str(error), "session", "session_id") from error
        return web.json_response({"session_id": session, "recorded": True, "is_new": is_new})

    async def session(self, request: web.Request) -> web.Response:
        """What is on record of one."""
        self._check_ready()
        record = await self.sessions.record_of(session_id := request.match_info["session"])
        if record is None:
            raise ApiError(404, f"there is no session {session_id!r}", "session")
        return web.json_response({"session_id": session_id, **record})

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "trinity-data"}
        return web.json_response({"object": "list", "data": [model]})

    async def health(self, request: web.Request) -> web.Response:
        is_ready = self.sessions.can_answer
        status = "ok" if is_ready else "waiting for weights"
        return web.json_response({"status": status}, status=200 if is_ready else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """As Prometheus reads them."""
        lines = []
        for name, value in self.sessions.metrics().items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE trinity_serve_{name} {kind}", f"trinity_serve_{name} {value}"]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    def _check_ready(self) -> None:
        if not self.sessions.can_answer:
            raise ApiError(503, "the engines have no weights yet; ask again in a few seconds", "not_ready")


def _named(request: web.Request, what: str) -> str:
    """The session or task in the path; empty where it names none."""
    name: str = request.match_info.get(what, "")
    if name and not _NAME.fullmatch(name):
        text = f"{what}: found {name!r}; letters, digits and . _ : @ = - are allowed, 128 at most, "
        raise ApiError(400, f"{text}the first a letter or a digit", "invalid_value", what)
    return name
