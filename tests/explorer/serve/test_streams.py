"""Answers that are sent while they are made: the parts are the whole, and their end comes once they are on
record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI

from tests.explorer.serve.conftest import MODEL, QUESTION, TOKEN, Agent, Serve
from trinity_data.errors import EngineDiedError
from trinity_data.tokenizer import ChatTemplate
from trinity_explorer.engines.engine import Completion, Heard, Request, Tokens
from trinity_explorer.engines.fake import ByteTokenizer, FakeEngine
from trinity_explorer.serve.streams import AnswerText

TEXT = "Grüße, 世界: three and four are seven"


def talked(serve: Serve, work: Any, *, tokens: int = 3, engine: FakeEngine | None = None) -> Any:
    """What `work(client)` returns, for the session `one` of the official client; the engine pauses after so
    many tokens.
    """

    async def run() -> Any:
        sessions = serve.sessions()
        sessions.sampling = replace(sessions.sampling, max_tokens=100)
        (pooled,) = sessions.runner.engines.engines
        pooled.engine = engine or FakeEngine(serve.tokenizer, script=serve.script, tokens_per_turn=tokens)
        async with serve.agent(sessions) as agent:
            url = str(agent.http.make_url("/sessions/one/v1"))
            async with AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client:
                return await work(client)

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_parts_of_an_answer_are_its_text_and_its_tokens(size: int) -> None:
    tokenizer = ByteTokenizer()
    tokens = [*tokenizer.encode(TEXT), tokenizer.eos_token_id]
    answer, parts = AnswerText(ChatTemplate(tokenizer, None), ()), []
    for start in range(0, len(tokens), size):
        cut = tokens[start : start + size]
        parts.append(answer.add(Tokens(cut, [-1.0] * len(cut))))
    given = [part for part in parts if part is not None]
    assert "".join(part.text for part in given) == TEXT
    assert all("\ufffd" not in part.text for part in given)
    assert [token for part in given for token in part.token_ids] == tokens[: answer.num_given]
    assert size == 100 or len(given) > 5


@pytest.mark.parametrize("size", [1, 4, 100])
def test_nothing_behind_a_stop_is_given_out(size: int) -> None:
    tokens = ByteTokenizer().encode(TEXT)
    answer, text = AnswerText(ChatTemplate(ByteTokenizer(), None), ["and", "never"]), ""
    for start in range(0, len(tokens), size):
        cut = tokens[start : start + size]
        part = answer.add(Tokens(cut, [-1.0] * len(cut)))
        text += "" if part is None else part.text
    assert text == "Grüße, 世界: three and"


def test_the_official_client_reads_an_answer_while_it_is_made(serve: Serve) -> None:
    serve.script = lambda prompt, seed: f"{seed} and some more words"

    async def work(client: AsyncOpenAI) -> Any:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[QUESTION], seed=5, n=2, stream=True, logprobs=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks, before = [], None
        async for chunk in stream:
            chunks.append(chunk)
            before = len(serve.ledger_keys()) if before is None else before
        return chunks, before

    chunks, on_record_at_first = talked(serve, work)
    assert on_record_at_first == 0
    assert serve.ledger_keys() == ["reply/one/000000", "reply/one/000001", "session/one"]
    replies = serve.store.progress_below("served/rl/explorer/reply/")
    for number, (reply, seed) in enumerate(zip(replies.values(), (5, 6), strict=True)):
        mine = [each for chunk in chunks for each in chunk.choices if each.index == number]
        assert "".join(choice.delta.content or "" for choice in mine) == f"{seed} and some more words"
        assert len(mine) > 3 and mine[0].delta.role == "assistant" and mine[-1].finish_reason == "stop"
        logprobs = [each.logprob for choice in mine if choice.logprobs for each in choice.logprobs.content]
        assert logprobs == reply["completion"]["logprobs"]
    assert chunks[-2].system_fingerprint == "version-0" and len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage.completion_tokens == sum(
        len(reply["completion"]["token_ids"]) for reply in replies.values()
    )


def test_an_answer_with_tools_comes_when_it_is_whole(serve: Serve) -> None:
    call = '<tool_call>{"name": "add"}</tool_call>'
    serve.script = lambda prompt, seed: call

    async def work(client: AsyncOpenAI) -> Any:
        tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
        stream = await client.chat.completions.create(
            model=MODEL, messages=[QUESTION], tools=[tool], stream=True
        )
        return [chunk.choices[0] async for chunk in stream]

    first, last = talked(serve, work)
    assert first.delta.tool_calls[0].function.name == "add" and first.delta.content is None
    assert last.finish_reason == "tool_calls"


class DyingEngine(FakeEngine):
    """Ends in the middle of an answer, or before it."""

    after = 4

    async def stream(self, request: Request, heard: Heard) -> Completion:
        (completion,) = await self.generate([request])
        if self.after:
            heard(Tokens(completion.token_ids[: self.after], completion.logprobs[: self.after]))
        raise EngineDiedError("it died")


def test_an_answer_that_breaks_off_is_an_error_and_not_on_record(serve: Serve) -> None:

    async def work(client: AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model=MODEL, messages=[QUESTION], stream=True)
        with pytest.raises(APIError, match="the engine died after 4 tokens of the answer; ask again"):
            async for _ in stream:
                pass
        return "refused"

    dying = DyingEngine(serve.tokenizer, script=serve.script)
    assert talked(serve, work, engine=dying) == "refused"
    assert serve.ledger_keys() == []


def test_what_cannot_be_asked_is_refused_before_the_stream_begins(serve: Serve) -> None:
    async def asks(agent: Agent) -> Any:
        return await agent.chat("one", {"role": "user", "content": "x" * 5000}, stream=True)

    async def run() -> Any:
        async with serve.agent(serve.sessions()) as agent:
            return await asks(agent)

    status, body = asyncio.run(run())
    assert status == 400 and "model.max_prompt_tokens is 128" in body["error"]["message"]


def test_an_answer_is_on_record_though_its_client_has_gone(serve: Serve) -> None:
    serve.script = lambda prompt, seed: "a long answer, word by word"
    script = serve.script
    engine = FakeEngine(serve.tokenizer, script=script, tokens_per_turn=1, delay_seconds=0.01)

    async def work(client: AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(model=MODEL, messages=[QUESTION], stream=True)
        async for _ in stream:
            break
        await stream.close()
        while "reply/one/000000" not in serve.ledger_keys():
            await asyncio.sleep(0.01)

    talked(serve, work, engine=engine)
    (reply,) = serve.store.progress_below("served/rl/explorer/reply/").values()
    assert reply["text"] == "a long answer, word by word"


def texts_of(choices: Sequence[Any]) -> list[str]:
    return [choice.text for choice in choices]


def test_text_is_completed_without_a_template_and_becomes_rows(serve: Serve) -> None:
    serve.repeat_times, asked = 1, list[str]()

    def script(prompt: str, seed: int) -> str:
        asked.append(prompt)
        return f"{seed} ends. here"

    serve.script = script

    async def work(client: AsyncOpenAI) -> Any:
        several = await client.completions.create(
            model=MODEL, prompt=["3 + 4 =", "2 + 2 ="], n=2, seed=5, stop="ends.", logprobs=1, max_tokens=20
        )
        tokens = serve.tokenizer.encode("1 + 1 =")
        echoed = await client.completions.create(model=MODEL, prompt=tokens, echo=True, seed=9)
        parts = await client.completions.create(model=MODEL, prompt="1 + 1 =", seed=9, stream=True)
        streamed = [choice async for part in parts for choice in part.choices]
        await client.post("/feedback", cast_to=object, body={"reward": 1.0})
        return several, echoed, streamed

    several, echoed, streamed = talked(serve, work, tokens=2)
    assert set(asked) == {"3 + 4 =", "2 + 2 =", "1 + 1 ="}
    assert texts_of(several.choices) == [f"{seed} ends." for seed in (5, 6, 7, 8)]
    logprobs = several.choices[0].logprobs
    assert "".join(logprobs.tokens) == "5 ends." and set(logprobs.token_logprobs) == {-0.5}
    assert logprobs.text_offset[:2] == [0, len(logprobs.tokens[0])]
    assert several.usage.prompt_tokens == 2 * len(serve.tokenizer.encode("3 + 4 ="))
    assert texts_of(echoed.choices) == ["1 + 1 =9 ends. here"] and echoed.id == "cmpl-one-4"
    assert "".join(texts_of(streamed)) == "9 ends. here" and len(streamed) > 3
    assert streamed[-1].finish_reason == "stop"
    asyncio.run(explored(serve))
    rows = serve.table("experiences")
    assert [row["turn"] for row in rows] == [0, 1, 2, 3, 4, 5]
    row = rows[4]
    prompt = row["token_ids"][: row["prompt_length"]]
    assert prompt == serve.tokenizer.encode("1 + 1 =") and row["messages"][0]["content"] == "1 + 1 ="


async def explored(serve: Serve) -> None:
    await serve.explored(serve.sessions(), first=1, last=1)


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"prompt": []}, "prompt: 1 to 64 prompts"),
        ({"prompt": [1, 10**7]}, "prompt: found the token 10000000"),
        ({"prompt": ["a", ""]}, "prompt: 1 to 64 prompts"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "logprobs: those of an echoed prompt"),
        ({"prompt": "a", "logprobs": 5}, "logprobs: Input should be 0 or 1; found 5"),
        ({"prompt": "a", "best_of": 3}, "best_of: "),
        ({"prompt": {"a": 1}}, "prompt: "),
        ({"prompt": "a " * 500}, "model.max_prompt_tokens is 128"),
    ],
)
def test_completions_that_cannot_be_served_are_refused_by_their_key(
    serve: Serve, more: Any, found: str
) -> None:
    async def run() -> Any:
        async with serve.agent(serve.sessions()) as agent:
            return await agent.post("/v1/completions", {"model": MODEL, **more})

    status, body = asyncio.run(run())
    assert status == 400 and found in body["error"]["message"]
    assert serve.ledger_keys() == []
