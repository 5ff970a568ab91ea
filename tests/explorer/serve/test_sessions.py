"""Sessions become rows; what was answered or recorded outlives the process."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.explorer.serve.conftest import QUESTION, Serve
from tests.noting_store import NotingStore
from trinity_data.query.audit import audit
from trinity_data.query.lineage import Lineage
from trinity_data.schema import group_id
from trinity_data.store.store import Store
from trinity_data.store.types import State
from trinity_explorer.chat import ChatClient, RequestBatcher
from trinity_explorer.rewards.reward import Reward
from trinity_explorer.rollout import Group, Outcome, rollout_rows
from trinity_explorer.serve.question import Question
from trinity_explorer.serve.session import dump_reply, load_reply

OF_A_ROW = (
    "turn", "model_version", "prompt_length", "response_length", "token_ids", "logprobs", "action_mask",
    "messages", "response_text", "reward", "reward_parts", "metrics", "seed", "temperature", "max_tokens",
    "truncated", "error", "tools",
)  # fmt: skip


def test_a_session_of_two_turns_becomes_the_rows_of_a_workflow_that_asks_the_same(serve: Serve) -> None:
    serve.repeat_times = 1
    following = [QUESTION, {"role": "assistant", "content": "seed 3"}, {"role": "user", "content": "Sure?"}]

    async def run() -> list[dict[str, Any]]:
        sessions = serve.sessions()
        async with serve.agent(sessions) as agent:
            await agent.chat("one", seed=3, max_tokens=20)
            await agent.chat("one", *following, seed=4)
            await agent.post(
                "/v1/feedback", {"session_id": "one", "reward": {"a": 0.5, "b": 0.25}, "metrics": {"m": 2}}
            )
            await serve.explored(sessions, first=1, last=1)
        model = ChatClient(RequestBatcher(sessions.runner.engines), serve.template, sessions.sampling)
        await model.chat([QUESTION], seed=3, max_tokens=20)
        await model.chat(following, seed=4)
        task = next(iter(sessions.by_id.values())).task
        group = Group(group_id("explorer", "rl", 1, 0), "rl", 1, 0, task, 0, 0, 1)
        reward = Reward(0.75, {"a": 0.5, "b": 0.25}, {"m": 2.0})
        return [dict(row) for row in rollout_rows(group, 0, Outcome(model, reward), (), {})]

    expected = asyncio.run(run())
    rows = serve.table("experiences")
    assert [row["experience_id"] for row in rows] == [
        f"explorer/rl/0000001/00000/000/0{turn}" for turn in (0, 1)
    ]
    for row, other in zip(rows, expected, strict=True):
        for name in OF_A_ROW:
            value = [tuple(each) for each in row[name]] if name in ("reward_parts", "metrics") else row[name]
            if name == "messages":
                value = [
                    {key: each for key, each in message.items() if each is not None} for message in value
                ]
            assert value == other[name], name
        assert json.loads(row["info"]) == {"session": "one"}
    (task,) = serve.table("tasks")
    assert (task["taskset"], task["prompt"], json.loads(task["columns"])) == (
        "served", "What is 3 + 4?", {"session": "one"},
    )  # fmt: skip
    assert serve.store.counts(stage="rl")[State.PENDING] == 2


def test_the_chain_of_a_session_says_that_agents_brought_its_task(serve: Serve) -> None:
    serve.repeat_times = 1

    async def run() -> None:
        sessions = serve.sessions()
        async with serve.agent(sessions) as agent:
            await agent.chat("one", seed=3)
            await agent.reward("one", 1.0)
            await serve.explored(sessions, first=1, last=1)

    asyncio.run(run())
    with Lineage(serve.store.root.parent) as lineage:
        origin = lineage.experience("explorer/rl/0000001/00000/000/00").origin
    assert (origin.taskset, origin.source, origin.task_position) == ("served", "agents outside", None)
    assert origin.prompt == "What is 3 + 4?"


def test_a_reply_is_the_same_after_the_ledger(serve: Serve) -> None:
    async def run() -> None:
        sessions = serve.sessions()
        question = Question([QUESTION], [{"type": "function"}])
        _, (reply,) = await sessions.ask("one", "", [question], changes={})
        assert load_reply(json.loads(json.dumps(dump_reply(reply)))) == reply

    asyncio.run(run())


def test_sessions_of_a_task_are_one_group_and_later_ones_the_next(serve: Serve) -> None:
    async def run() -> None:
        sessions = serve.sessions()
        async with serve.agent(sessions) as agent:
            for session in ("a", "b", "c", "d"):
                await agent.chat(session, task="sum")
            # the second group is whole before the first
            for session in ("d", "c", "b", "a"):
                await agent.reward(session, ord(session))
            await serve.explored(sessions, first=1, last=2)

    asyncio.run(run())
    groups = [(row["step"], row["epoch"], row["repeat_times"]) for row in serve.table("groups")]
    assert groups == [(1, 1, 2), (2, 0, 2)]
    rewards = {row["experience_id"][-6:-3]: row["reward"] for row in serve.table("experiences")[:2]}
    assert rewards == {"000": ord("c"), "001": ord("d")}
    advantages = {row["experience_id"]: round(row["advantage"], 3) for row in serve.table("outcomes")}
    # of 99 and 100: half off the mean, by a deviation of 0.707
    assert list(advantages.values())[:2] == [-0.707, 0.707]
    assert len(serve.table("tasks")) == 1


def test_what_was_answered_before_a_crash_is_rewarded_after_it(serve: Serve, tmp_path: Path) -> None:
    async def before() -> None:
        sessions = serve.sessions()
        async with serve.agent(sessions) as agent:
            await agent.chat("a", task="sum", seed=1)
            await agent.chat("b", task="sum", seed=2)
            assert (await agent.reward("a", 1.0))[1]["is_new"]

    asyncio.run(before())
    # as a process that was killed leaves them
    shutil.copytree(serve.store.root, tmp_path / "left")
    left = serve.store
    serve.store = Store.create_or_open(tmp_path / "left")

    async def after() -> Any:
        sessions = serve.sessions()
        async with serve.agent(sessions) as agent:
            again = await agent.reward("a", 1.0)
            other = await agent.reward("a", 2.0)
            ended = await agent.chat("a", task="sum")
            await agent.reward("b", 0.0)
            await agent.chat("c", task="sum")
            await serve.explored(sessions, first=1, last=1)
            return again, other[0], ended[0]

    try:
        (status, body), other, ended = asyncio.run(after())
        assert (status, body["is_new"], other, ended) == (200, False, 409, 409)
        texts = [(row["response_text"], row["reward"]) for row in serve.table("experiences")]
        assert texts == [("seed 1", 1.0), ("seed 2", 0.0)]
        assert serve.store.progress("served/rl/explorer/session/c")["epoch"] == 1
        assert audit(serve.store.root).ok
    finally:
        serve.store.close()
        serve.store = left


@pytest.mark.parametrize("after_groups", [False, True])
def test_a_step_that_a_crash_has_cut_is_made_of_the_same_sessions(serve: Serve, after_groups: bool) -> None:
    """Before the groups are recorded, and after it."""

    async def before() -> None:
        sessions = serve.sessions()
        async with serve.agent(sessions) as agent:
            for session in ("a", "b"):
                await agent.chat(session, task="sum")
                await agent.reward(session, 1.0)
        if after_groups:
            explorer = serve.explorer(sessions)
            await explorer._new_groups(1, 1, first=0, refill=0)

    async def after() -> None:
        await serve.explored(serve.sessions(), first=1, last=1)

    asyncio.run(before())
    asyncio.run(after())
    assert [row["step"] for row in serve.table("groups")] == [1]
    assert [row["reward"] for row in serve.table("experiences")] == [1.0, 1.0]


def test_replies_leave_the_ledger_when_their_rows_are_stored(serve: Serve) -> None:
    async def run() -> Any:
        sessions = serve.sessions()
        async with serve.agent(sessions) as agent:
            for session in ("a", "b", "c", "d"):
                await agent.chat(session, task="sum")
                await agent.reward(session, 1.0)
            await serve.explored(sessions, first=1, last=2)
            return await agent.get("/sessions/a")

    status, record = asyncio.run(run())
    # of the first step; those of the last one go when the next one begins
    assert [key for key in serve.ledger_keys() if key.startswith("reply/")] == [
        "reply/c/000000",
        "reply/d/000000",
    ]
    assert (status, record["end"]["reward"]["total"]) == (200, 1.0)


def test_groups_that_no_step_has_taken_are_handed_out_again_and_stay_on_record(serve: Serve) -> None:
    async def run() -> Any:
        sessions = serve.sessions()
        sampler = serve.explorer(sessions).tasks
        async with serve.agent(sessions) as agent:
            await agent.chat("one")
            await agent.reward("one", 1.0)
            taken = await sampler.take(1, step=1, refill=0)
            sampler.give_back(taken)
            await sessions.forget(through_step=1)
            return taken, await sampler.take(1, step=2, refill=0)

    first, second = asyncio.run(run())
    assert first == second
    assert serve.ledger_keys() == ["reply/one/000000", "session/one"]


def test_a_session_without_a_reward_fails_and_its_group_closes(serve: Serve) -> None:
    serve.session_timeout = 0.01

    async def run() -> Any:
        sessions = serve.sessions()
        async with serve.agent(sessions) as agent:
            await agent.chat("lost")
            await agent.chat("a", task="sum")
            await agent.reward("a", 1.0)
            await serve.explored(sessions, first=1, last=1)
            return await agent.reward("lost", 1.0)

    status, body = asyncio.run(run())
    rows = {json.loads(row["info"])["session"]: row for row in serve.table("experiences")}
    assert rows["lost"]["error"].startswith("no reward came in 0.01 s")
    assert (rows["a"]["reward"], rows["a"]["error"]) == (1.0, "")
    assert sorted(row["repeat_times"] for row in serve.table("groups")) == [1, 1]
    (event,) = [row for row in serve.table("events") if row["kind"] == "session_expired"]
    assert event["message"].startswith("lost: no reward came")
    assert status == 409 and "no reward came" in body["error"]["message"]
    counts = serve.store.counts(stage="rl")
    assert (counts[State.FAILED], counts[State.PENDING]) == (1, 1)


def test_an_agent_may_say_that_its_session_has_failed(serve: Serve) -> None:
    serve.repeat_times = 1

    async def run() -> None:
        sessions = serve.sessions()
        async with serve.agent(sessions) as agent:
            await agent.chat("broken")
            await agent.post("/v1/feedback", {"session_id": "broken", "error": "the browser crashed"})
            await agent.chat("whole")
            await agent.reward("whole", 1.0)
            await serve.explored(sessions, first=1, last=1)

    asyncio.run(run())
    assert [row["error"] for row in serve.table("experiences")] == ["the browser crashed", ""]


def test_64_sessions_at_a_time_are_64_groups_and_none_is_mixed_up(serve: Serve) -> None:
    serve.batch_size, serve.repeat_times = 64, 1

    async def run() -> None:
        sessions = serve.sessions()
        async with serve.agent(sessions) as agent:

            async def session(number: int) -> None:
                _, body = await agent.chat(f"s{number}", seed=number)
                answer = body["choices"][0]["message"]
                await agent.chat(f"s{number}", QUESTION, answer, QUESTION, seed=1000 + number)
                await agent.reward(f"s{number}", number)

            await asyncio.gather(*map(session, range(64)))
            await serve.explored(sessions, first=1, last=1)

    asyncio.run(run())
    rows = serve.table("experiences")
    assert len(rows) == 128
    for row in rows:
        expected = 1000 * row["turn"] + int(row["reward"])
        assert (row["response_text"], json.loads(row["info"])["session"]) == (
            f"seed {expected}", f"s{int(row['reward'])}",
        )  # fmt: skip


def test_a_session_with_a_request_under_way_takes_no_reward(serve: Serve) -> None:
    async def run() -> Any:
        sessions = serve.sessions()
        async with serve.agent(sessions) as agent:
            await agent.chat("one")
            sessions.runner.engines.engines[0].engine.delay_seconds = 0.5
            asking = asyncio.create_task(agent.chat("one"))
            while not sessions.by_id["one"].num_running:
                await asyncio.sleep(0.01)
            early, (answered, _) = await agent.reward("one", 1.0), await asking
            return early, answered, await agent.reward("one", 1.0)

    (status, body), answered, late = asyncio.run(run())
    assert status == 409 and "under way" in body["error"]["message"]
    assert (answered, late[0]) == (200, 200)


def test_a_session_keeps_its_task(serve: Serve) -> None:
    async def run() -> Any:
        async with serve.agent(serve.sessions()) as agent:
            await agent.chat("one", task="sum")
            return await agent.chat("one", task="product"), await agent.chat("one")

    (status, body), plain = asyncio.run(run())
    assert status == 409 and "has the task 'sum'; found 'product'" in body["error"]["message"]
    assert plain[0] == 200


def test_the_run_ends_with_what_keeps_it_from_recording(serve: Serve) -> None:
    async def run() -> Any:
        sessions = serve.sessions()
        serve.store._writing_ledger.execute("UPDATE writer SET epoch = epoch + 1")
        async with serve.agent(sessions) as agent:
            status, body = await agent.chat("one")
            with pytest.raises(OSError, match="another process has become the writer"):
                await sessions.until_failed()
        return status, body

    status, body = asyncio.run(run())
    assert status == 500 and "another process" in body["error"]["message"]


def test_requests_of_new_and_unknown_sessions_read_no_ledger_on_the_event_loop(
    serve: Serve, tmp_path: Path
) -> None:
    store = serve.store = NotingStore.open(tmp_path / "noted")

    async def run() -> None:
        sessions = serve.sessions()
        store.readers.clear()
        async with serve.agent(sessions) as agent:
            assert (await agent.chat("one"))[0] == 200
            assert (await agent.reward("one", 1.0))[0] == 200
            assert (await agent.reward("nobody", 1.0))[0] == 404
            assert (await agent.get("/sessions/one"))[0] == 200

    asyncio.run(run())
    assert store.readers and threading.main_thread() not in store.readers


def test_first_requests_of_one_session_at_the_same_time_make_one_session(serve: Serve) -> None:
    async def run() -> None:
        sessions = serve.sessions()
        async with serve.agent(sessions) as agent:
            answers = await asyncio.gather(*(agent.chat("one", seed=seed) for seed in range(4)))
            assert [status for status, _ in answers] == [200] * 4
        assert sessions.counts["sessions"] == 1
        assert len(sessions.by_id["one"].replies) == 4

    asyncio.run(run())
    assert len(serve.table("tasks")) == 1
