"""The stored rewards of a run, computed again.

What needs more than a stored row is left out with its reason.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from trinity_data.config import StageConfig
from trinity_data.config.run import SERVED, recorded_run
from trinity_data.config.secrets import MASK
from trinity_data.dataset.task import Task, tasks_from_table
from trinity_data.errors import ConfigError
from trinity_data.launch.workflows import process_settings, workflow_spec
from trinity_data.store.sql import SqlSession, open_sql
from trinity_explorer.recomputation import recompute, why_not
from trinity_explorer.workflows.pool import WorkflowPool
from trinity_explorer.workflows.registry import WorkflowSpec, has_async_reward

ROWS_A_QUERY = 2_000

# a hash puts the rollouts in an order that is the same at each call and spreads a sample over all steps
_IDS = """
SELECT experience_id FROM rollouts WHERE reward IS NOT NULL AND coalesce(error, '') = '' AND turn = 0
ORDER BY md5(experience_id)
"""
_ROWS = """
SELECT e.experience_id, e.stage, e.step, e.reward, e.response_text, e.token_ids, e.prompt_length,
    e.model_version, e.truncated, e.task_id, t.taskset, t.prompt, t.messages, t.answer, t.workflow,
    t.reward_fn, t.columns
FROM (FROM rollouts SEMI JOIN asked USING (experience_id)) e
LEFT JOIN (SELECT DISTINCT ON (stage, task_id) * FROM tasks ORDER BY stage, task_id, position) t
    ON t.stage = e.stage AND t.task_id = e.task_id
ORDER BY e.experience_id
"""
_CONFIGURATIONS = 'SELECT first_step, config FROM configurations ORDER BY "at"'


@dataclass(frozen=True)
class Difference:
    """A stored reward that is not what its function gives now."""

    experience_id: str
    task_id: str
    reward_fn: str
    stored: float
    recomputed: float | None
    """None where the function gives none."""
    error: str = ""
    """Then why."""


@dataclass
class Verification:
    """What came of each reward."""

    num_equal: int = 0
    differences: list[Difference] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    """How many were not computed again, by the reason."""


@dataclass(frozen=True)
class _Skipped:
    reason: str


def verify_rewards(run: Path, *, sample: int | None = None) -> Verification:
    """Compares the raw rewards of a job folder; it may be in use. `sample` is a number of rollouts.

    Reward functions in files (`./file.py:name`) are looked for in the working directory. Raises ConfigError
    for one that cannot be loaded.
    """
    with open_sql([run], timeout_seconds=None) as session:
        return asyncio.run(_verify(session, RecordedStages(session, run), sample))


async def _verify(session: SqlSession, stages: RecordedStages, sample: int | None) -> Verification:
    found = Verification()
    ids = session.query(_IDS if sample is None else f"{_IDS} LIMIT {sample}")
    async with AsyncExitStack() as stack:
        rewards = _Rewards(stages, stack)
        for start in range(0, ids.num_rows, ROWS_A_QUERY):
            session.register("asked", ids.slice(start, ROWS_A_QUERY))
            table = session.query(_ROWS)
            rows = zip(table.to_pylist(), tasks_from_table(table), strict=True)
            for outcome in await asyncio.gather(*(rewards.compare(row, task) for row, task in rows)):
                if isinstance(outcome, Difference):
                    found.differences.append(outcome)
                elif isinstance(outcome, _Skipped):
                    found.skipped[outcome.reason] += 1
                else:
                    found.num_equal += 1
    return found


class RecordedStages:
    """The stages of a run as they were configured at each step."""

    def __init__(self, session: SqlSession, run: Path) -> None:
        rows = session.query(_CONFIGURATIONS).to_pylist()
        self._configured = [(row["first_step"], json.loads(row["config"])["stages"]) for row in rows]
        if not rows:
            self._configured = [(0, [stage.model_dump(mode="json") for stage in recorded_run(run).stages])]
        self.at = cache(self._at)

    def latest(self, stage: str) -> StageConfig | None:
        """As it was configured last."""
        return self._at(stage, self._configured[-1][0])

    def _at(self, stage: str, step: int) -> StageConfig | None:
        in_force = [stages for first, stages in self._configured if first <= step]
        stages = in_force[-1] if in_force else self._configured[0][1]
        return next((StageConfig.model_validate(s) for s in stages if s["stage_name"] == stage), None)


class _Rewards:
    """Computes rewards again; `stack` ends the processes that it starts."""

    def __init__(self, stages: RecordedStages, stack: AsyncExitStack) -> None:
        self._stages, self._stack = stages, stack
        self._pools: dict[str, WorkflowPool] = {}
        self._reasons: dict[str, str] = {}

    async def compare(self, row: Mapping[str, Any], task: Task) -> Difference | _Skipped | None:
        """None where the stored reward is what its function gives."""
        stage = self._stages.at(row["stage"], row["step"])
        sets = {each.name: each for _, each in stage.buffer.explorer_input.all_tasksets()} if stage else {}
        if row["taskset"] is None:
            return _Skipped("rows without a task of a task set")
        if task.taskset == SERVED:
            return _Skipped("rewards that agents outside have posted")
        if stage is None or task.taskset not in sets:
            return _Skipped(f"task set {task.taskset!r}: the run's configuration does not have it")
        if row["response_text"] is None:
            return _Skipped("rows whose responses were removed (`trinity-data retain`)")
        spec = workflow_spec(sets[task.taskset], task.workflow, task.reward_fn, Path())
        if reason := self._reason(spec):
            return _Skipped(reason)
        workflow = (await self._pool(stage)).get(spec)
        again = await recompute(workflow, task, row, stage.explorer.max_timeout)
        if again.equals(row["reward"]):
            return None
        return Difference(
            row["experience_id"], task.task_id, spec.reward_name, row["reward"], again.value, again.error
        )

    def _reason(self, spec: WorkflowSpec) -> str:
        """Why the reward cannot be computed from a stored row; empty where it can."""
        key = json.dumps(vars(spec), sort_keys=True, default=str)
        if key not in self._reasons:
            self._reasons[key] = _why_not(spec)
        return self._reasons[key]

    async def _pool(self, stage: StageConfig) -> WorkflowPool:
        settings = process_settings(stage)
        # a masked value would hide that of this process's environment
        env = {name: value for name, value in settings.env.items() if MASK not in value}
        settings = replace(settings, env=env)
        key = repr(settings)
        if key not in self._pools:
            # entered without waiting, so no other row makes it a second time
            self._pools[key] = WorkflowPool(settings)
            await self._stack.enter_async_context(self._pools[key])
        return self._pools[key]


def _why_not(spec: WorkflowSpec) -> str:
    if reason := why_not(spec.workflow):
        return reason
    if MASK in json.dumps([spec.workflow_args, spec.reward_fn_args], default=str):
        return f"reward function {spec.reward_name!r}: one of its arguments is a secret, which is not stored"
    try:
        waits = has_async_reward(spec)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; ./file.py is looked for in the working directory, {Path.cwd()}"
        ) from error
    return (
        f"reward function {spec.reward_name!r}: it is async, as one that asks a reward model is"
        if waits
        else ""
    )
