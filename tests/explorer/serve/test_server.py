"""What an agent gets over HTTP: completions in OpenAI's shape, and errors too."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI, ConflictError

from tests.explorer.serve.conftest import MODEL, QUESTION, TOKEN, Agent, Serve
from trinity_data.tokenizer import ChatTemplate

WITH_TOOLS = (
    "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% for message in messages %}"
    "{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls %}{{ call.function.arguments.a }}{% endfor %} {% endfor %}assistant: "
)


def served(serve: Serve, asks: Any) -> Any:
    """What `asks(agent)` returns."""

    async def run() -> Any:
        async with serve.agent(serve.sessions()) as agent:
            return await asks(agent)

    return asyncio.run(run())


def test_the_official_client_talks_to_a_session_and_hears_of_its_version(serve: Serve) -> None:
    async def asks(agent: Agent) -> Any:
        url = str(agent.http.make_url("/sessions/one/v1"))
        async with AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client:
            (model,) = (await client.models.list()).data
            whole = await client.chat.completions.create(model=model.id, messages=[QUESTION], seed=5)
            stream = await client.chat.completions.create(
                model=model.id,
                messages=[QUESTION],
                seed=5,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            await agent.reward("one", 1.0)
            with pytest.raises(ConflictError):
                await client.chat.completions.create(model=model.id, messages=[QUESTION])
        return whole, chunks

    whole, chunks = served(serve, asks)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("seed 5", "stop")
    assert (whole.system_fingerprint, whole.id) == ("version-0", "chatcmpl-one-0")
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == "seed 5" and chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == len(serve.template.encode_answer("seed 5"))


def test_several_answers_differ_and_stop_ends_them_where_it_stands(serve: Serve) -> None:
    serve.script = lambda prompt, seed: f"{seed} is the seed"

    async def asks(agent: Agent) -> Any:
        return await agent.chat("one", n=3, seed=7, stop=["the", "never"], logprobs=True)

    _, body = served(serve, asks)
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert texts == ["7 is the", "8 is the", "9 is the"]
    lengths = [len(serve.tokenizer.encode(text)) for text in texts]
    assert [len(choice["logprobs"]["content"]) for choice in body["choices"]] == lengths
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
    rows = serve.store.progress_below("served/rl/explorer/reply/")
    assert [len(row["completion"]["logprobs"]) for row in rows.values()] == lengths


def test_the_file_says_how_tokens_are_drawn_and_how_many_there_may_be(serve: Serve) -> None:
    serve.script = lambda prompt, seed: "x" * 100

    async def asks(agent: Agent) -> Any:
        few = await agent.chat("few", max_tokens=4, temperature=0.1, top_p=0.5)
        many = await agent.chat("many", max_completion_tokens=1000)
        return [body["choices"][0]["message"]["content"] for _, body in (few, many)]

    assert served(serve, asks) == ["xxxx", "x" * 32]
    replies = serve.store.progress_below("served/rl/explorer/reply/few").values()
    assert [(each["sampling"]["temperature"], each["sampling"]["top_p"]) for each in replies] == [(1.0, 1.0)]


@pytest.mark.parametrize(
    ("more", "param", "found"),
    [
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "text"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "0.5"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_its_key(serve: Serve, more: Any, param: str, found: str) -> None:
    async def asks(agent: Agent) -> Any:
        return await agent.post("/v1/chat/completions", {"model": MODEL, "messages": [QUESTION]} | more)

    status, body = served(serve, asks)
    assert status == 400
    error = body["error"]
    assert error["param"].startswith(param) and found in error["message"]
    assert error["type"] == "invalid_request_error"
    assert serve.ledger_keys() == []


def test_nothing_but_health_is_answered_without_the_token(serve: Serve) -> None:
    async def asks(agent: Agent) -> Any:
        body = {"model": MODEL, "messages": [QUESTION]}
        statuses = [(await agent.post("/v1/chat/completions", body, token=wrong))[0] for wrong in ("", "x")]
        for path in ("/v1/models", "/metrics", "/sessions/one", "/health", "/nowhere"):
            async with agent.http.get(path) as response:
                statuses.append(response.status)
        return statuses

    assert served(serve, asks) == [401, 401, 401, 401, 401, 200, 401]
    assert serve.ledger_keys() == []


def test_errors_have_the_shape_that_clients_of_openai_read(serve: Serve) -> None:
    async def asks(agent: Agent) -> Any:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        path = "/sessions/one/v1/chat/completions"
        answers = []
        for data in (b"{", json.dumps({"model": MODEL, "messages": ["x" * (9 << 20)]}).encode()):
            async with agent.http.post(path, data=data, headers=headers) as response:
                answers.append((response.status, await response.json()))
        long = {"role": "user", "content": "x" * 4000}
        answers.append(await agent.get("/nowhere"))
        answers.append(await agent.post(path, {"model": "gpt", "messages": [QUESTION]}))
        answers.append(await agent.chat("a%20b"))
        answers.append(await agent.reward("nobody", 1.0))
        answers.append(await agent.post("/v1/feedback", {"session_id": "one"}))
        answers.append(await agent.chat("long", long))
        return answers

    serve.template.truncate = False
    answers = served(serve, asks)
    assert [status for status, _ in answers] == [400, 413, 404, 404, 400, 404, 400, 400]
    assert all(set(body["error"]) == {"message", "type", "param", "code"} for _, body in answers)
    assert "max_prompt_tokens is 128" in answers[-1][1]["error"]["message"]
    assert answers[3][1]["error"]["code"] == "model_not_found"


def test_before_the_first_weights_nobody_is_answered(serve: Serve) -> None:
    async def run() -> Any:
        sessions = serve.sessions()
        sessions.runner.engines.model_version = -1
        async with serve.agent(sessions) as agent:
            return [
                (await each)[0] for each in (agent.get("/health"), agent.chat("one"), agent.reward("a", 1))
            ]

    assert asyncio.run(run()) == [503, 503, 503]


def test_tools_go_into_the_prompt_and_calls_come_out_of_the_text(serve: Serve) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
    serve.template = ChatTemplate(serve.tokenizer, WITH_TOOLS)
    serve.script = lambda prompt, seed: f"Let me see. {call}"[-32 - len(call) :]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

    async def run() -> Any:
        sessions = serve.sessions()
        sessions.sampling = sessions.sampling.__class__(**vars(sessions.sampling) | {"max_tokens": 100})
        async with serve.agent(sessions) as agent:
            _, body = await agent.chat("one", tools=[tool])
            answer = body["choices"][0]["message"]
            result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "7"}
            status = await agent.chat("one", QUESTION, answer, result, tools=[tool])
            return body["choices"][0], status, sessions.by_id["one"].replies

    choice, status, replies = asyncio.run(run())
    (called,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Let me see.")
    assert (called["function"]["name"], json.loads(called["function"]["arguments"])) == ("add", {"a": 3})
    assert status[0] == 200, status[1]
    # a chat template takes the arguments as an object
    assert replies[1].messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 3}
    prompt = serve.tokenizer.decode(replies[1].prompt_token_ids)
    assert prompt == f"add user: {QUESTION['content']} assistant: Let me see.3 tool: 7 assistant: "


def test_metrics_count_sessions_requests_and_tokens(serve: Serve) -> None:
    async def asks(agent: Agent) -> Any:
        for session in ("one", "two"):
            await agent.chat(session, seed=5)
        await agent.reward("one", 1.0)
        return await agent.get("/metrics")

    status, text = served(serve, asks)
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert status == 200
    assert {name.removeprefix("trinity_serve_"): int(value) for name, value in lines.items()} == {
        "sessions_total": 2, "requests_total": 2, "rewarded_total": 1, "failed_total": 0,
        "prompt_tokens_total": 2 * len(serve.template.encode([QUESTION]).token_ids),
        "completion_tokens_total": 2 * len(serve.template.encode_answer("seed 5")),
        "open_sessions": 1, "waiting_groups": 1, "model_version": 0,
    }  # fmt: skip
