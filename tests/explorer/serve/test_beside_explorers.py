"""An endpoint and an explorer of task sets in one run: they share its steps, and the explorer goes on with
what the endpoint has left.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter

from tests.explorer.conftest import Bench, put_tasks
from tests.explorer.serve.conftest import Serve
from tests.explorer.test_two_explorers import explore, joined
from trinity_data.claims import Claims
from trinity_data.config import SynchronizerConfig
from trinity_data.progress import claims_key, explored_key
from trinity_data.query.audit import audit
from trinity_data.store.participants import Participants
from trinity_data.store.types import Place
from trinity_data.synchronizer import Synchronizer
from trinity_explorer.explorer import Explorer
from trinity_explorer.serve.sessions import Sessions

ROLLOUTS = 4


async def of_tasks(bench: Bench, place: Place) -> Explorer:
    """Explores three sums a step."""
    tasks = put_tasks(bench.store, 12)
    far_ahead = Synchronizer(SynchronizerConfig(sync_offset=99))
    return bench.explorer(tasks, name="tasks", synchronizer=far_ahead, place=place)


async def ask_and_reward(serve: Serve, sessions: Sessions, *, task: str) -> None:
    """As many sessions as are a group."""
    async with serve.agent(sessions) as agent:
        for number in range(serve.repeat_times):
            await agent.chat(f"{task}-{number}", task=task, seed=number)
            await agent.reward(f"{task}-{number}", number)


def test_sessions_and_tasks_are_steps_of_one_run(serve: Serve, bench: Bench) -> None:
    participants = Participants(serve.store)

    async def side_by_side() -> None:
        sessions = serve.sessions()
        endpoint = serve.explorer(sessions, place=joined(participants, "explorer"))
        tasks = await of_tasks(bench, joined(participants, "tasks"))
        async with asyncio.TaskGroup() as both:
            both.create_task(explore(endpoint, 6))
            # it has no session, and does not keep the other from its steps
            exploring = asyncio.create_task(explore(tasks, 4))
            while serve.store.progress(explored_key("rl")) != 4:
                await asyncio.sleep(0.01)
            for task in ("one", "two"):
                await ask_and_reward(serve, sessions, task=task)
            await exploring

    asyncio.run(side_by_side())
    assert audit(serve.store.root.parent).problems == []
    rows = Counter((row["step"], row["explorer"]) for row in serve.table("experiences"))
    of_sums = dict.fromkeys(((step, "tasks") for step in range(1, 5)), 3 * ROLLOUTS)
    of_sessions = dict.fromkeys(((step, "explorer") for step in (5, 6)), serve.repeat_times)
    assert rows == of_sums | of_sessions
    assert serve.store.progress(explored_key("rl")) == 6


def test_an_explorer_makes_the_rows_of_a_step_that_an_endpoint_has_left(serve: Serve, bench: Bench) -> None:
    participants = Participants(serve.store)

    async def left() -> None:
        sessions, place = serve.sessions(), joined(participants, "explorer")
        endpoint = serve.explorer(sessions, place=place)

        async def never(*_: object, **__: object) -> None:
            await asyncio.Event().wait()

        sessions.runner.made_elsewhere["served"] = never  # type: ignore[assignment]
        await ask_and_reward(serve, sessions, task="one")
        exploring = asyncio.create_task(explore(endpoint, 2))
        while not serve.store.table("groups"):
            await asyncio.sleep(0.01)
        exploring.cancel()
        await asyncio.gather(exploring, return_exceptions=True)
        participants.leave(place)
        await explore(await of_tasks(bench, joined(participants, "tasks")), 2)

    asyncio.run(left())
    assert audit(serve.store.root.parent).problems == []
    rows = serve.store.table("experiences").sort_by("experience_id").to_pylist()
    rows = [row for row in rows if row["step"] == 1]
    assert [(row["explorer"], row["reward"], row["response_text"]) for row in rows] == [
        ("tasks", 0.0, "seed 0"), ("tasks", 1.0, "seed 1"),
    ]  # fmt: skip
    assert [json.loads(row["info"])["session"] for row in rows] == ["one-0", "one-1"]
    assert {row["explorer"] for row in serve.table("experiences") if row["step"] == 2} == {"tasks"}
    (event,) = [row for row in serve.table("events") if row["kind"] == "handed_on"]
    assert event["message"] == "explorer:explorer had begun it; explorer:tasks goes on with it"

    async def again() -> None:
        """The endpoint begins anew, and has nothing more to do for that step."""
        sessions = serve.sessions()
        await sessions.forget(2)
        assert not sessions.by_id

    asyncio.run(again())
    assert serve.ledger_keys() == ["session/one-0", "session/one-1"]


def test_an_endpoint_leaves_steps_of_task_sets_to_explorers_that_have_them(
    serve: Serve, bench: Bench
) -> None:
    participants = Participants(serve.store)

    async def left() -> None:
        place = joined(participants, "tasks")
        exploring = asyncio.create_task(explore(await of_tasks(bench, place), 1))
        while not serve.store.table("groups"):
            await asyncio.sleep(0)
        exploring.cancel()
        await asyncio.gather(exploring, return_exceptions=True)
        participants.leave(place)
        assert list(Claims.load(serve.store.progress(claims_key("rl"))).open) == [1]
        sessions = serve.sessions()
        await ask_and_reward(serve, sessions, task="one")
        await explore(serve.explorer(sessions, place=joined(participants, "explorer")), 2)
        assert serve.store.progress(explored_key("rl")) == 0
        await explore(bench.explorer([], name="tasks", place=joined(participants, "tasks")), 2)

    asyncio.run(left())
    assert audit(serve.store.root.parent).problems == []
    by_step = {(row["step"], row["explorer"]) for row in serve.table("experiences")}
    assert by_step == {(1, "tasks"), (2, "explorer")}
    assert serve.store.progress(explored_key("rl")) == 2
