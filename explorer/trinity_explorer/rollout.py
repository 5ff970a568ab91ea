"""The rollouts of a group, each under a deadline.

Whatever happens, a rollout ends as rows: a failure is a row that says where.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from trinity_data.config import ExplorerConfig, ModelConfig, RolloutArgs, StageConfig
from trinity_data.config.run import SERVED
from trinity_data.dataset.task import Task
from trinity_data.errors import ConfigError, EngineError, RolloutError
from trinity_data.schema import FAILED_TOKENS, experience_id, is_whole_in_row, message_row
from trinity_data.stage_inputs import StageInputs
from trinity_data.tokenizer import ChatTemplate, are_plain
from trinity_explorer.chat import AuxiliaryModels, ChatClient, Reply, RequestBatcher
from trinity_explorer.dynamic_timeout import TimeLimit
from trinity_explorer.engine_model import EngineModel
from trinity_explorer.engines.engine import Sampling
from trinity_explorer.engines.pool import EnginePool
from trinity_explorer.rewards.reward import Reward, as_reward
from trinity_explorer.rollout_deadline import NO_END, RolloutDeadline
from trinity_explorer.slots import EngineSlots
from trinity_explorer.workflows.pool import PooledWorkflow
from trinity_explorer.workflows.process import ProcessLostError, WorkflowError
from trinity_explorer.workflows.workflow import MathWorkflow, Workflow
from trinity_operators import trainable

Row = dict[str, object]

MAX_ERROR = 2_000

GROUP_COLUMNS = ("group_id", "stage", "step", "position", "epoch", "repeat_times")
"""Of a group and of its row in `groups`, under the same names."""


@dataclass(frozen=True)
class Group:
    """The rollouts of one task in one step."""

    group_id: str
    stage: str
    step: int
    position: int
    task: Task
    epoch: int
    refill: int
    """0, or the round of refilling that asked for it."""
    repeat_times: int

    def row(self) -> Row:
        """As a row of `groups`."""
        columns: Row = {name: getattr(self, name) for name in GROUP_COLUMNS}
        return columns | {"task_id": self.task.task_id, "round": self.refill}

    @classmethod
    def from_row(cls, row: Mapping[str, Any], task: Task) -> Group:
        return cls(**{name: row[name] for name in GROUP_COLUMNS}, task=task, refill=row["round"])


def outcome_of(rows: Sequence[Row]) -> tuple[str, float | None, float | None]:
    """The error of a rollout, or "", its reward and its accuracy: its last row holds them."""
    last: Mapping[str, Any] = rows[-1]
    return last["error"], last.get("reward"), dict(last.get("metrics") or []).get("accuracy")


def sampling_of(args: RolloutArgs, model: ModelConfig, *, reports_cuts: bool = False) -> Sampling:
    """How a task set is sampled, but for the seed."""
    return Sampling(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        # the end token counts as one, so 1 asks for nothing and leaves the distribution as it is
        min_tokens=model.min_response_tokens if model.min_response_tokens > 1 else 0,
        max_tokens=args.max_tokens,
        seed=0,
        reports_cuts=reports_cuts,
    )


def train_sampling(stage: StageConfig) -> dict[str, Sampling]:
    """How each task set of a stage is sampled to be trained, by name; but for the seed."""
    model = stage.model
    args = {taskset.name: taskset.rollout_args for taskset in stage.explored_tasksets}
    if stage.serves:
        args[SERVED] = RolloutArgs(
            temperature=model.temperature,
            top_p=model.top_p,
            top_k=model.top_k,
            max_tokens=model.max_response_tokens,
        )
    return {name: sampling_of(each, model, reports_cuts=True) for name, each in args.items()}


def rollout_seed(seed: int, group_id: str, rollout: int, attempt: int) -> int:
    """A seed of 31 bits that is the same after a restart."""
    text = f'[{seed},"{group_id}",{rollout},{attempt}]'
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest()[:4]) & 0x7FFFFFFF


class Outcome(NamedTuple):
    """What came of one attempt of a rollout."""

    model: ChatClient
    """With the replies that came."""
    reward: Reward | None
    error: str = ""
    retry: bool = False
    """Whether another attempt may end better."""
    details: Mapping[str, object] = MappingProxyType({})
    """What is known of the error beyond its text."""


def _failed_info(failed: Sequence[Outcome], *, ended: bool = True) -> dict[str, object]:
    """What failed attempts cost, for the rollout's last row; of one that has not `ended` well, the last
    error is in a column.
    """
    tokens = sum(len(reply.completion.token_ids) for each in failed for reply in each.model.replies)
    retried = [each.error[:MAX_ERROR] for each in (failed if ended else failed[:-1])]
    return ({"retried": retried} if retried else {}) | ({FAILED_TOKENS: tokens} if tokens else {})


class MadeElsewhere(Protocol):
    async def __call__(
        self, group: Group, rollout: int, *, batcher: RequestBatcher, source: Row
    ) -> list[Row]:
        """The rows of one rollout, as of `RolloutRunner.run`."""
        ...


class RolloutRunner:
    """Runs the rollouts of a stage, for its explorer and for its evaluator."""

    def __init__(
        self,
        config: ExplorerConfig,
        engines: EnginePool,
        template: ChatTemplate,
        workflow_for: Callable[[Task], Workflow],
        *,
        seed: int,
        auxiliary_models: Mapping[str, EngineModel] | None = None,
    ) -> None:
        """Workflows may ask the `auxiliary_models` by name."""
        self.engines, self.template, self.workflow_for, self.seed = engines, template, workflow_for, seed
        self.auxiliary_models = auxiliary_models or {}
        self.made_elsewhere: dict[str, MadeElsewhere] = {}
        """By task set, in place of `run`: rollouts that agents outside have made."""
        self.timeout_seconds, self.max_retry_times = config.max_timeout, config.max_retry_times
        self.slots = EngineSlots(engines, config.runner_per_model)

    async def run(
        self,
        group: Group,
        rollout: int,
        *,
        batcher: RequestBatcher,
        sampling: Sampling,
        source: Row,
        seed: int | None = None,
        limit: TimeLimit | None = None,
    ) -> list[Row]:
        """The rows of one rollout: one a reply of the model, or one that holds the error.

        `source` holds the columns that name explorer and engine; `seed` is in place of the stage's, and
        `limit` of `max_timeout`. The caller has one of `slots`.
        EngineError is not caught: without engines there is no run.
        """
        started_at, started = datetime.now(UTC), time.perf_counter()
        limit = limit or TimeLimit(self.timeout_seconds)
        deadline = RolloutDeadline(limit.seconds, self._lost_seconds, why=limit.why)
        failed: list[Outcome] = []
        workflow, base_seed = self.workflow_for(group.task), self.seed if seed is None else seed
        for attempt in range(self.max_retry_times + 1):
            attempt_seed = rollout_seed(base_seed, group.group_id, rollout, attempt)
            seeded = sampling.with_seed(attempt_seed)
            others = AuxiliaryModels(
                (name, each.chat_client(seeded)) for name, each in self.auxiliary_models.items()
            )
            model = ChatClient(batcher, self.template, seeded, others)
            outcome = await _attempt(workflow, group.task, model, deadline)
            if outcome.reward is None:
                failed.append(outcome)
            if not outcome.retry:
                break
        base: Row = {
            **source,
            "attempt": attempt,
            "started_at": started_at,
            "seconds": time.perf_counter() - started,
        }
        return rollout_rows(group, rollout, outcome, failed, base)

    def _lost_seconds(self) -> float:
        """To engines that were started again."""
        lost = self.engines.lost_seconds()
        for model in self.auxiliary_models.values():
            lost += model.engines.lost_seconds()
        return lost


def rollout_rows(
    group: Group, rollout: int, outcome: Outcome, failed: Sequence[Outcome], source: Row
) -> list[Row]:
    """One row a reply, or one that holds the error. `source` has the columns that are not of the group."""
    base: Row = {
        **source,
        "task_id": group.task.task_id,
        "group_id": group.group_id,
        "stage": group.stage,
        "step": group.step,
        "position": group.position,
        "rollout": rollout,
        "preference": "",
    }
    if outcome.reward is None:
        return [base | _failure_columns(group, rollout, outcome, failed)]
    base["reward"] = outcome.reward.total
    base["reward_parts"] = list(outcome.reward.parts.items())
    rows = [_reply_row(base, group, rollout, turn, reply) for turn, reply in enumerate(outcome.model.replies)]
    # every turn has the whole reward, and the metrics count once
    rows[-1]["metrics"] = list(outcome.reward.metrics.items())
    if failed:
        rows[-1]["info"] = json.dumps(json.loads(str(rows[-1]["info"])) | _failed_info(failed))
    return rows


def build_runner(
    stage: StageConfig,
    inputs: StageInputs,
    engines: EnginePool,
    workflow_for: Callable[[Task], Workflow],
    auxiliary_models: Mapping[str, EngineModel],
) -> RolloutRunner:
    """Of a stage whose engines are there."""
    model = stage.model
    template = ChatTemplate(
        inputs.tokenizer,
        model.custom_chat_template,
        max_prompt_tokens=model.max_prompt_tokens,
        truncate=model.enable_prompt_truncation,
    )
    return RolloutRunner(
        stage.explorer,
        engines,
        template,
        workflow_for,
        seed=inputs.seed,
        auxiliary_models=auxiliary_models,
    )


async def _attempt(workflow: Workflow, task: Task, model: ChatClient, deadline: RolloutDeadline) -> Outcome:
    if not isinstance(workflow, PooledWorkflow):
        return await _under_deadline(workflow, task, model, deadline)
    await deadline.leave_out(workflow.ready)
    try:
        return await _under_deadline(workflow, task, model, deadline)
    except ProcessLostError:
        # it may have been the fault of another rollout: this one gets a process and a deadline of its own
        async with workflow.alone() as process:
            deadline.restart()
            model.replies.clear()
            return await _under_deadline(process, task, model, deadline)


# whose reward function, or whose process, has given a reward that was looked at
_CHECKED = (MathWorkflow, PooledWorkflow)


async def _under_deadline(
    workflow: Workflow, task: Task, model: ChatClient, deadline: RolloutDeadline
) -> Outcome:
    try:
        with deadline:
            returned = await workflow.run(task, model)
            reward = returned if isinstance(workflow, _CHECKED) else as_reward(returned, "the workflow")
        for number, reply in enumerate(model.replies):
            check_reply(number, reply)
    except (EngineError, ProcessLostError, ConfigError):
        raise
    except RolloutError as error:
        return Outcome(model, None, str(error))
    except WorkflowError as error:
        return Outcome(model, None, str(error), retry=True, details={"traceback": error.traceback})
    except Exception as error:  # the boundary to users' workflows and rewards
        if deadline.expired and isinstance(error, TimeoutError):
            text = f"{NO_END} {deadline}; {len(model.replies)} replies came"
            return Outcome(model, None, text)
        return Outcome(model, None, f"{type(error).__name__}: {error}", retry=True)
    if not model.replies:
        return Outcome(model, None, "the workflow ended without asking the model")
    return Outcome(model, reward)


def check_reply(number: int, reply: Reply) -> None:
    """Raises RolloutError for a reply that no row can hold or no trainer can train."""
    tokens, logprobs = reply.completion.token_ids, reply.completion.logprobs
    if len(tokens) != len(logprobs):
        raise RolloutError(f"reply {number} has {len(tokens)} tokens and {len(logprobs)} log-probs")
    if not reply.prompt_token_ids:
        raise RolloutError(f"reply {number} has a prompt of no tokens")
    try:
        # as the column holds them: refuses what is no integer, and more than 31 bits
        array("i", tokens)
    except (TypeError, OverflowError) as error:
        raise RolloutError(f"reply {number} has a response with tokens that are no ids: {error}") from error
    if tokens and min(tokens) < 0:
        raise RolloutError(f"reply {number} has a response with the token {min(tokens)}")
    # one that is not finite makes the sum so
    if not math.isfinite(sum(logprobs)):
        value = next(logprob for logprob in logprobs if not math.isfinite(logprob))
        raise RolloutError(f"reply {number} has a log-prob of {value}; the engine cannot have sampled it")


def _reply_row(base: Row, group: Group, rollout: int, turn: int, reply: Reply) -> Row:
    """`base` has the columns that all turns have."""
    completion, sampling, messages = reply.completion, reply.sampling, reply.messages
    spans = completion.version_spans or ((0, completion.model_version),)
    why = why_untrainable(reply)
    notes: Row = {trainable.INFO_KEY: why} if why else {}
    cut = "response" if completion.finish_reason == "length" else ""
    if not are_plain(messages):
        if not all(map(is_whole_in_row, messages)):
            # all of them as they were, where their column cannot hold all of one
            notes["messages"] = list(messages)
        messages = [message_row(message) for message in messages]
    return {
        **base,
        "experience_id": experience_id(group.group_id, rollout, turn),
        "turn": turn,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "model_version": completion.model_version,
        "version_spans": [{"start": start, "version": version} for start, version in spans],
        "prompt_length": len(reply.prompt_token_ids),
        "response_length": len(completion.token_ids),
        "token_ids": reply.prompt_token_ids + completion.token_ids,
        "logprobs": completion.logprobs,
        "action_mask": [not why] * len(completion.token_ids),
        "kept_tokens": completion.kept_tokens,
        "banned_tokens": completion.banned_tokens,
        "response_text": reply.text,
        "truncated": "prompt" if reply.prompt_cut else cut,
        "error": "",
        "metrics": [],
        "tools": json.dumps(reply.tools) if reply.tools else "",
        "messages": messages,
        "info": json.dumps(notes) if notes else "{}",
    }


def why_untrainable(reply: Reply) -> str:
    """Why a row is stored and not trained; empty when it is trained."""
    if reply.prompt_cut:
        kept = len(reply.prompt_token_ids)
        return f"the prompt was longer than model.max_prompt_tokens and was cut to {kept} tokens"
    return "" if reply.completion.token_ids else "the response has no tokens"


def _failure_columns(group: Group, rollout: int, outcome: Outcome, failed: Sequence[Outcome]) -> Row:
    """Keeps what the model had said before the rollout failed."""
    replies = [reply.text for reply in outcome.model.replies]
    return {
        "experience_id": experience_id(group.group_id, rollout),
        "turn": 0,
        "seed": outcome.model.sampling.seed,
        "messages": group.task.messages,
        "tools": "",
        "token_ids": [],
        "logprobs": [],
        "action_mask": [],
        "prompt_length": 0,
        "response_length": 0,
        "response_text": "\n".join(replies),
        "truncated": "",
        "error": outcome.error[:MAX_ERROR],
        "info": json.dumps({"replies": replies} | dict(outcome.details) | _failed_info(failed, ended=False)),
    }
