"""Rewards computed again from stored responses.

The built-in workflows ask once and reward the reply: they run as in the run, in the same processes and under
the same deadline, with the stored response in the place of the policy's reply.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trinity_data.dataset.task import Task
from trinity_data.errors import RolloutError
from trinity_data.schema import group_of
from trinity_data.store.protocol import ReadableStore
from trinity_data.tokenizer import Messages, Tools
from trinity_explorer.chat import AuxiliaryModels, Reply
from trinity_explorer.engines.engine import Completion, Sampling
from trinity_explorer.rewards.reward import Reward, as_reward
from trinity_explorer.rollout_deadline import RolloutDeadline
from trinity_explorer.workflows.pool import PooledWorkflow
from trinity_explorer.workflows.process import WorkflowError
from trinity_explorer.workflows.workflow import Workflow
from trinity_operators.contracts.step_contracts import RecomputedRewards

TOLERANCE = 1e-9
"""Relative and absolute: sums of float64 may differ in their last digits between machines."""
COLUMNS = ("reward", "response_text", "token_ids", "prompt_length", "model_version", "truncated")
"""Of a row whose reward is computed again."""
# no reward function reads how its response was sampled
_ANY_SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_tokens=0, max_tokens=1, seed=0)


@dataclass(frozen=True)
class Recomputed:
    """What a reward function gives again."""

    value: float | None
    """None where it gives none."""
    error: str = ""
    """Then why."""

    def equals(self, stored: float | None) -> bool:
        if self.value is None or stored is None:
            return False
        return math.isclose(self.value, stored, rel_tol=TOLERANCE, abs_tol=TOLERANCE)

    def __str__(self) -> str:
        return self.error if self.value is None else f"{self.value:g}"


async def recompute(workflow: Workflow, task: Task, row: Mapping[str, Any], seconds: float) -> Recomputed:
    """The reward of a stored row, which has `COLUMNS`; `seconds` is the deadline of a rollout."""
    try:
        return Recomputed((await _run(workflow, task, _reply(row, task), seconds)).total)
    except (RolloutError, WorkflowError, TimeoutError) as error:
        return Recomputed(None, str(error) or f"no end after {seconds:g} s")


class StepRecomputation:
    """Rewards of rollouts of a step that goes on, by the workflows and processes of its stage."""

    def __init__(
        self, store: ReadableStore, workflow_for: Callable[[Task], Workflow], *, seconds: float
    ) -> None:
        self.store, self.workflow_for, self.seconds = store, workflow_for, seconds

    async def __call__(self, tasks: Mapping[str, Task], ids: Sequence[str]) -> RecomputedRewards:
        rows = self.store.read(ids, columns=COLUMNS).to_pylist()
        skipped, again = Counter[str](), dict[str, Awaitable[Recomputed]]()
        for row_id, row in zip(ids, rows, strict=True):
            task = tasks[group_of(row_id)]
            workflow = self.workflow_for(task)
            reason = why_not(workflow.spec.workflow) if isinstance(workflow, PooledWorkflow) else ""
            if reason:
                skipped[reason] += 1
            else:
                again[row_id] = recompute(workflow, task, row, self.seconds)
        recomputed = dict(zip(again, await asyncio.gather(*again.values()), strict=True))
        stored = dict(zip(ids, (row["reward"] for row in rows), strict=True))
        differences = {
            row_id: f"stored {stored[row_id]:g}, now {each}"
            for row_id, each in recomputed.items()
            if not each.equals(stored[row_id])
        }
        return RecomputedRewards(len(recomputed), differences, skipped)


def why_not(workflow: str) -> str:
    """Why a reward of this workflow cannot be computed from a stored row; empty where it can."""
    if ":" not in workflow:
        return ""
    return f"workflow {workflow!r}: it may ask several times or use an environment"


async def _run(workflow: Workflow, task: Task, reply: Reply, seconds: float) -> Reward:
    """One rollout with the stored reply, where users' code runs in a process of its own."""
    if not isinstance(workflow, PooledWorkflow):
        with RolloutDeadline(seconds):
            return as_reward(await workflow.run(task, _StoredReply(reply)), "the workflow")
    async with workflow.alone() as process:
        with RolloutDeadline(seconds):
            return as_reward(await process.run(task, _StoredReply(reply)), "the workflow")


class _StoredReply:
    """A policy that says what was stored."""

    def __init__(self, reply: Reply) -> None:
        self.replies: list[Reply] = []
        self.auxiliary_models = AuxiliaryModels()
        self._reply = reply

    async def chat(self, messages: Messages, *, tools: Tools = (), **changes: Any) -> Reply:
        self.replies.append(self._reply)
        return self._reply


def _reply(row: Mapping[str, Any], task: Task) -> Reply:
    length, token_ids = row["prompt_length"] or 0, row["token_ids"] or []
    ended_by = "length" if row["truncated"] == "response" else "stop"
    completion = Completion(token_ids[length:], [], ended_by, row["model_version"] or 0)
    is_cut = row["truncated"] == "prompt"
    return Reply(row["response_text"], token_ids[:length], completion, _ANY_SAMPLING, is_cut, task.messages)
