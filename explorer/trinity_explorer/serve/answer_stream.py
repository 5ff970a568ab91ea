"""An answer as the events of an HTTP stream, while it is made."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

from aiohttp import web

from trinity_data.tokenizer import ChatTemplate
from trinity_explorer.chat import Reply
from trinity_explorer.serve.api import AgentRequest, ApiError
from trinity_explorer.serve.streams import AnswerText, Piece


class Asking(Protocol):
    def __call__(
        self, *, heard: Callable[[Piece], None] | None
    ) -> Coroutine[Any, Any, tuple[int, list[Reply]]]:
        """As of `Sessions.ask`."""
        ...


class AnswerStream:
    """Of one request. Its last event, `[DONE]`, is sent once the answer is on record; a client that goes away
    before that does not undo it.
    """

    def __init__(
        self, request: web.Request, body: AgentRequest, session_id: str, template: ChatTemplate
    ) -> None:
        self.request, self.body, self.session_id, self.template = request, body, session_id, template
        self.name = f"{session_id}-{uuid.uuid4().hex[:12]}"
        self._texts = defaultdict[int, AnswerText](lambda: AnswerText(template, body.stops))
        """By the number of the choice."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        self._response = web.StreamResponse(headers=headers)

    async def send(self, ask: Asking, as_answer: Callable[[Exception], ApiError]) -> web.StreamResponse:
        """Raises what `ask` raises before anything is sent; later that is an event, as `as_answer` has it."""
        parts = asyncio.Queue[Piece | asyncio.Task[tuple[int, list[Reply]]]]()
        asking = asyncio.create_task(ask(heard=parts.put_nowait if self.body.comes_in_parts else None))
        asking.add_done_callback(parts.put_nowait)
        while isinstance(part := await parts.get(), Piece):
            await self._send_piece(part)
        try:
            turn, replies = part.result()
        except Exception as error:  # the boundary to agents, as of the endpoint
            if not self._response.prepared:
                raise
            await self._write(as_answer(error).body())
        else:
            await self._send_end(turn, replies)
        if self._response.prepared:
            with suppress(ConnectionError):
                await self._response.write_eof()
        return self._response

    async def _send_piece(self, piece: Piece) -> None:
        text = self._texts[piece.choice]
        is_first = not text.num_given
        if (part := text.add(piece.tokens)) is not None:
            await self._send([self.body.part_of_choice(piece.choice, part, self.template, first=is_first)])

    async def _send_end(self, turn: int, replies: Sequence[Reply]) -> None:
        for i, reply in enumerate(replies):
            text = self._texts[i]
            is_first, name = not text.num_given, f"{self.session_id}_{turn + i}"
            rest = text.rest(reply)
            choices = self.body.rest_of_choice(i, reply, rest, name, self.template, first=is_first)
            for choice in choices:
                await self._send([choice], reply)
        options = self.body.stream_options
        if options is not None and options.include_usage:
            await self._send([], replies[0], usage=self.body.usage(replies))
        await self._write("[DONE]")

    async def _send(
        self, choices: list[dict[str, Any]], reply: Reply | None = None, **more: dict[str, int]
    ) -> None:
        head = self.body.head(self.body.kind_of_event, self.name, self.session_id, reply)
        await self._write(head | {"choices": choices} | more)

    async def _write(self, data: Any) -> None:
        with suppress(ConnectionError):
            if not self._response.prepared:
                await self._response.prepare(self.request)
            text = data if isinstance(data, str) else json.dumps(data)
            await self._response.write(f"data: {text}\n\n".encode())
