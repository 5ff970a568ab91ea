from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from trinity_data.config import ExplorerConfig
from trinity_data.dataset.task import Task
from trinity_data.errors import EngineError, RolloutError
from trinity_data.schema import message_from_row, rows_to_table
from trinity_data.tokenizer import ChatTemplate
from trinity_data.weights import Weights
from trinity_explorer.chat import ChatClient, RequestBatcher
from trinity_explorer.engines.engine import Sampling
from trinity_explorer.engines.fake import FakeEngine
from trinity_explorer.engines.pool import EnginePool
from trinity_explorer.rewards.reward import Reward
from trinity_explorer.rollout import Group, RolloutRunner, Row, rollout_seed
from trinity_explorer.workflows.workflow import Workflow
from trinity_operators.staleness import StalenessFilter

Run = Callable[..., list[Row]]
GROUP = "explorer/rl/0000001/00000"
DONE = Reward(1.0, {"accuracy": 1.0}, {"accuracy": 1.0})


@pytest.fixture
def run(task: Task, tokenizer: Any, template: ChatTemplate, sampling: Sampling) -> Run:
    """Runs one rollout of a workflow on the fake engine, which answers with its seed."""

    def run(
        workflow: Workflow, *, timeout: float = 5.0, retries: int = 2, rollout: int = 0, delay: float = 0.0
    ) -> list[Row]:
        async def go() -> list[Row]:
            engine = FakeEngine(tokenizer, script=lambda prompt, seed: f"{seed}", delay_seconds=delay)
            engines = EnginePool([engine])
            config = ExplorerConfig(max_timeout=timeout, max_retry_times=retries)
            return await RolloutRunner(config, engines, template, lambda task: workflow, seed=11).run(
                Group(GROUP, "rl", 1, 0, task, epoch=0, refill=0, repeat_times=4),
                rollout,
                batcher=RequestBatcher(engines),
                sampling=sampling,
                source={"explorer": "explorer", "engine": "fake"},
            )

        return asyncio.run(go())

    return run


class Chat:
    """Asks as often as it is told, fails as often as it is told."""

    def __init__(self, *, turns: int = 1, fail: list[Exception] | None = None, hang: float = 0.0) -> None:
        self.turns, self.fail, self.hang, self.runs = turns, fail or [], hang, 0

    async def run(self, task: Task, model: ChatClient) -> Reward:
        self.runs += 1
        for _ in range(self.turns):
            await model.chat(task.messages)
        if self.hang:
            await asyncio.sleep(self.hang)
        if self.fail:
            raise self.fail.pop(0)
        return DONE


def test_a_reply_is_a_row_of_the_schema(run: Run, tokenizer: Any, template: ChatTemplate, task: Task) -> None:
    rows = run(Chat(), rollout=2)
    table = rows_to_table("experiences", rows).to_pylist()[0]
    seed = rollout_seed(11, GROUP, 2, 0)
    prompt = template.encode(task.messages).token_ids
    answer = [*tokenizer.encode(f"{seed}", add_special_tokens=False), tokenizer.eos_token_id]
    assert table["experience_id"] == f"{GROUP}/002/00"
    assert table["token_ids"] == prompt + answer
    assert table["prompt_length"] == len(prompt)
    assert table["logprobs"] == [-0.5] * len(answer)
    assert table["action_mask"] == [True] * len(answer)
    assert (table["response_text"], table["seed"], table["reward"]) == (f"{seed}", seed, 1.0)
    assert table["metrics"] == [("accuracy", 1.0)]
    assert (table["error"], table["truncated"], table["attempt"]) == ("", "", 0)


def test_a_deadline_leaves_a_row_that_says_so_and_keeps_what_was_said(run: Run) -> None:
    workflow = Chat(turns=2, hang=10)
    (row,) = run(workflow, timeout=0.5)
    assert row["error"] == "no end after 0.5 s; 2 replies came"
    seed = rollout_seed(11, GROUP, 0, 0)
    assert row["response_text"] == f"{seed}\n{seed}"
    assert row["token_ids"] == [] and row.get("reward") is None
    assert workflow.runs == 1


def test_an_engine_that_hangs_meets_the_same_deadline(run: Run) -> None:
    (row,) = run(Chat(), timeout=0.05, delay=10)
    assert row["error"] == "no end after 0.05 s; 0 replies came"


def test_the_deadline_is_of_the_rollout_with_all_its_retries(run: Run) -> None:
    workflow = Chat(hang=0.4, fail=[ValueError("x") for _ in range(9)])
    (row,) = run(workflow, timeout=1.0, retries=8)
    assert str(row["error"]).startswith("no end after 1 s")
    # a deadline of each attempt would let all nine come to their end; a busy machine makes fewer than three
    assert workflow.runs <= 3


def test_a_workflow_that_raises_is_tried_again_with_another_seed(run: Run) -> None:
    workflow = Chat(fail=[ValueError("first"), TimeoutError("its own clock")])
    (row,) = run(workflow)
    assert (row["error"], row["attempt"], workflow.runs) == ("", 2, 3)
    assert row["seed"] == rollout_seed(11, GROUP, 0, 2)


def test_after_the_last_retry_the_row_holds_the_error(run: Run) -> None:
    workflow = Chat(fail=[ValueError(f"number {i}") for i in range(5)])
    (row,) = run(workflow, retries=2)
    assert (row["error"], row["attempt"], workflow.runs) == ("ValueError: number 2", 2, 3)


def test_what_failed_attempts_said_is_counted_in_the_last_row(run: Run, tokenizer: Any) -> None:
    def tokens(attempt: int) -> int:
        answer = tokenizer.encode(f"{rollout_seed(11, GROUP, 0, attempt)}", add_special_tokens=False)
        return len(answer) + 1

    rows = run(Chat(turns=2, fail=[ValueError("first")]))
    assert rows[0]["info"] == "{}"
    said = {"retried": ["ValueError: first"], "failed_tokens": 2 * tokens(0)}
    assert json.loads(str(rows[1]["info"])) == said
    (row,) = run(Chat(fail=[ValueError("first"), ValueError("last")]), retries=1)
    info = json.loads(str(row["info"]))
    assert (info["retried"], info["failed_tokens"]) == (["ValueError: first"], tokens(0) + tokens(1))
    assert row["error"] == "ValueError: last"


def test_a_rollout_error_is_not_retried(run: Run) -> None:
    workflow = Chat(fail=[RolloutError("the site is down")])
    (row,) = run(workflow)
    assert (row["error"], workflow.runs) == ("the site is down", 1)


def test_a_dead_engine_ends_the_run(run: Run) -> None:
    with pytest.raises(EngineError, match="gone"):
        run(Chat(fail=[EngineError("gone")]))


def test_a_workflow_that_never_asks_is_a_row_with_an_error(run: Run) -> None:
    (row,) = run(Chat(turns=0))
    assert row["error"] == "the workflow ended without asking the model"


def test_a_prompt_that_is_too_long_is_a_row(run: Run, template: ChatTemplate, task: Task) -> None:
    length = len(template.encode(task.messages).token_ids)
    template.max_prompt_tokens = length - 1
    (row,) = run(Chat())
    assert row["error"] == f"the prompt has {length} tokens, model.max_prompt_tokens is {length - 1}"


def test_a_prompt_that_was_cut_says_so(run: Run, template: ChatTemplate, task: Task) -> None:
    template.max_prompt_tokens, template.truncate = len(template.encode(task.messages).token_ids) - 1, True
    (row,) = run(Chat())
    assert (row["truncated"], row["prompt_length"], row["error"]) == (
        "prompt",
        template.max_prompt_tokens,
        "",
    )
    # stored, and never trained
    assert row["action_mask"] == [False] * int(str(row["response_length"]))
    why = f"the prompt was longer than model.max_prompt_tokens and was cut to {row['prompt_length']} tokens"
    assert json.loads(str(row["info"])) == {"untrainable": why}


def test_an_empty_response_is_stored_and_says_that_it_is_not_trained(run: Run) -> None:
    class Silent(Chat):
        async def run(self, task: Task, model: ChatClient) -> Reward:
            reward = await super().run(task, model)
            model.replies[0].completion.token_ids.clear()
            model.replies[0].completion.logprobs.clear()
            return reward

    (row,) = run(Silent())
    assert (row["error"], row["action_mask"]) == ("", [])
    assert json.loads(str(row["info"])) == {"untrainable": "the response has no tokens"}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda c: c.token_ids.append(1), r"reply 0 has \d+ tokens and \d+ log-probs"),
        (
            lambda c: c.token_ids.__setitem__(0, "x"),
            "reply 0 has a response with tokens that are no ids",
        ),
        (
            lambda c: c.token_ids.__setitem__(0, -1),
            "reply 0 has a response with the token -1",
        ),
        (lambda c: c.logprobs.__setitem__(0, float("nan")), "reply 0 has a log-prob of nan"),
    ],
)
def test_a_reply_that_no_row_can_hold_is_a_failed_rollout(
    run: Run, change: Callable[[Any], None], error: str
) -> None:
    class Changes(Chat):
        async def run(self, task: Task, model: ChatClient) -> Reward:
            reward = await super().run(task, model)
            change(model.replies[0].completion)
            return reward

    (row,) = run(Changes())
    assert re.match(error, str(row["error"])) and row["token_ids"] == []


def test_a_later_turn_holds_the_messages_that_it_saw(run: Run) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "add"}}]}

    class Two(Chat):
        async def run(self, task: Task, model: ChatClient) -> Reward:
            first = await model.chat(task.messages)
            said = {"role": "assistant", "content": first.text}
            await model.chat([*task.messages, said, {"role": "user", "content": "Sure?"}])
            await model.chat([*task.messages, call, {"role": "user", "content": "Sure?"}])
            return DONE

    first, second, third = run(Two())
    assert [len(list(row["messages"])) for row in (first, second, third)] == [1, 3, 3]  # type: ignore[call-overload]
    assert list(second["messages"])[1]["content"] == first["response_text"]  # type: ignore[call-overload]
    assert message_from_row(list(third["messages"])[1]) == call  # type: ignore[call-overload]
    assert first["info"] == second["info"] == third["info"] == "{}"


def test_messages_that_the_column_cannot_hold_stand_whole_in_info(run: Run) -> None:
    parts = {"role": "user", "content": "Sure?", "reasoning": "none"}

    class Parts(Chat):
        async def run(self, task: Task, model: ChatClient) -> Reward:
            await model.chat([*task.messages, parts])
            return DONE

    (row,) = run(Parts())
    assert json.loads(str(row["info"]))["messages"][-1] == parts


def test_every_reply_of_a_longer_talk_is_a_row_with_the_reward(run: Run) -> None:
    rows = run(Chat(turns=3))
    assert [row["experience_id"] for row in rows] == [f"{GROUP}/000/{turn:02d}" for turn in range(3)]
    assert [row["turn"] for row in rows] == [0, 1, 2]
    assert [row["reward"] for row in rows] == [1.0, 1.0, 1.0]
    # once, so that a mean over rows counts a try once
    assert [row["metrics"] for row in rows] == [[], [], [("accuracy", 1.0)]]


def test_a_row_says_which_token_came_from_which_version(
    task: Task, tokenizer: Any, template: ChatTemplate, sampling: Sampling
) -> None:
    """Each token of the fake engine's answer takes a turn of the loop, and the load takes two."""

    async def go() -> list[Row]:
        engine = FakeEngine(tokenizer, script=lambda prompt, seed: "123456", tokens_per_turn=1)
        engines = EnginePool([engine])
        await engines.load_weights(Weights(3, "nowhere"))
        runner = RolloutRunner(ExplorerConfig(), engines, template, lambda task: Chat(), seed=11)
        group = Group(GROUP, "rl", 1, 0, task, epoch=0, refill=0, repeat_times=4)
        rollout = asyncio.create_task(
            runner.run(group, 0, batcher=RequestBatcher(engines), sampling=sampling, source={})
        )
        while engine._is_idle.is_set():
            await asyncio.sleep(0)
        await engines.load_weights(Weights(4, "nowhere"), during=True)
        # waits for the answer's end, as a load does that is not asked for during answers
        await engines.load_weights(Weights(5, "nowhere"))
        return await rollout

    (row,) = asyncio.run(go())
    assert (row["model_version"], row["version_spans"]) == (
        3,
        [{"start": 0, "version": 3}, {"start": 2, "version": 4}],
    )
    assert StalenessFilter(1).apply(rows_to_table("experiences", [row | {"step": 5}])).keep.tolist() == [True]
    assert StalenessFilter(0).apply(rows_to_table("experiences", [row | {"step": 5}])).keep.tolist() == [
        False
    ]


def test_seeds_are_the_same_after_a_restart_and_different_between_rollouts() -> None:
    assert rollout_seed(11, GROUP, 0, 0) == rollout_seed(11, GROUP, 0, 0)
    seeds = {
        rollout_seed(seed, group, rollout, attempt)
        for seed in (0, 1)
        for group in (GROUP, f"{GROUP}x")
        for rollout in range(50)
        for attempt in range(3)
    }
    assert len(seeds) == 2 * 2 * 50 * 3
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_group_comes_back_from_its_row(task: Task) -> None:
    group = Group(GROUP, "rl", 1, 3, task, epoch=2, refill=1, repeat_times=4)
    row = rows_to_table("groups", [group.row()]).to_pylist()[0]
    assert (row["task_id"], row["round"]) == ("t", 1)
    assert Group.from_row(row, task) == group
