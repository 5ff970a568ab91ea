"""The view `task_stats`: what became of each kept task, and what a choice of tasks may see of it."""

from __future__ import annotations

from collections.abc import Mapping

from trinity_data.store.views import quoted

PASS_REWARD = 0.5
"""A rollout whose raw reward is above it has passed, as in the macro `pass_rate`."""

# `{run}` is the schema of one run; what was made of tasks is joined first, since most often few were tried
_TASK_STATS = f"""
SELECT
    stage, taskset, task_id, position, scores,
    coalesce(groups, 0) AS groups,
    coalesce(rollouts, 0) AS rollouts,
    coalesce(failed, 0) AS failed,
    mean_reward,
    pass_rate,
    last_step,
    last_version,
    coalesce(response_tokens, 0) AS response_tokens,
    mean_abs_advantage,
    coalesce(times_trained, 0) AS times_trained
FROM (SELECT stage, taskset, task_id, position, scores FROM {{run}}.tasks WHERE kept)
LEFT JOIN (
  FROM (
    SELECT stage, task_id, count(*) AS groups, max(step) AS last_step FROM {{run}}.groups GROUP BY ALL
  )
  FULL JOIN (
    SELECT
        stage,
        task_id,
        count(*) FILTER (NOT has_failed) AS rollouts,
        count(*) FILTER (has_failed) AS failed,
        avg(reward) FILTER (NOT has_failed) AS mean_reward,
        avg((reward > {PASS_REWARD})::INTEGER) FILTER (NOT has_failed) AS pass_rate,
        max(version) AS last_version,
        sum(tokens)::BIGINT AS response_tokens
    FROM (
        SELECT
            stage,
            task_id,
            group_id,
            rollout,
            max(reward) AS reward,
            bool_or(coalesce(error, '') <> '') AS has_failed,
            max(model_version) AS version,
            sum(response_length) AS tokens
        FROM {{run}}.rollouts GROUP BY ALL
    ) GROUP BY ALL
  ) USING (stage, task_id)
  FULL JOIN (
    SELECT r.stage, r.task_id, avg(abs(o.advantage)) AS mean_abs_advantage
    FROM {{run}}.outcomes o JOIN {{run}}.rollouts r USING (experience_id) WHERE o.kept GROUP BY ALL
  ) USING (stage, task_id)
  FULL JOIN (
    SELECT r.stage, r.task_id, count(DISTINCT b.step) AS times_trained
    FROM {{run}}.batches b JOIN {{run}}.rollouts r USING (experience_id) GROUP BY ALL
  ) USING (stage, task_id)
) USING (stage, task_id)
"""


def task_stats(run: str) -> str:
    """One row for each kept task of each stage; `run` is the schema of one run."""
    return _TASK_STATS.format(run=run)


def before_step(step: int, *, stage: str, taskset: str, explorer: str, trained: int) -> Mapping[str, str]:
    """Which rows a choice of tasks for `step` may see, by view: the tasks of the set, what this explorer
    made for earlier steps, and what training up to step `trained` brought.

    A view that is not named may not be seen: what it holds depends on when it is asked.
    """
    name = quoted(f"{explorer}/")
    made = f"step < {step} AND starts_with(experience_id, {name})"
    return {
        "tasks": f"stage = {quoted(stage)} AND taskset = {quoted(taskset)}",
        "groups": f"step < {step} AND starts_with(group_id, {name})",
        "rollouts": made,
        "outcomes": made,
        "decisions": f"step < {step} AND starts_with(row_id, {name})",
        "batches": f"step <= {trained}",
        "steps": f"step <= {trained}",
        "evals": f"model_version <= {trained}",
    }
