"""The views `operator_yield` and `step_yield`: what operators and rollouts cost, and their part in training.

The signal of a trained row is |advantage| × response tokens × (1 − clipped share): its weight in the loss
without the tokens whose ratio is clipped. It is a measure of this project, and not taken from a paper.
"""

from __future__ import annotations

from trinity_data.schema import FAILED_TOKENS

# a row that several batches took counts as often in the signal
_TRAINED = """
SELECT
    experience_id,
    count(*) AS uses,
    avg(abs(advantage)) AS abs_advantage,
    avg(clipped) AS clipped,
    sum(abs(loss_share)) AS loss_share,
    sum(abs(advantage) * (1 - coalesce(clipped, 0))) AS weight
FROM {run}.batches GROUP BY experience_id
"""

# tokens of attempts that failed, of a row of `rollouts`
_RETRIED = (
    f"CASE WHEN contains(r.info, '{FAILED_TOKENS}') AND json_valid(r.info) "
    f"THEN coalesce(TRY_CAST(r.info::JSON ->> '{FAILED_TOKENS}' AS BIGINT), 0) ELSE 0 END"
)

# `{run}` is the schema of one run
_OPERATOR_YIELD = f"""
WITH
trained AS ({_TRAINED}),
counted AS (
    SELECT
        stage, step, pipeline, position, operator,
        sum(rows_in)::BIGINT AS rows_in,
        sum(rows_out)::BIGINT AS rows_out,
        sum(microseconds) / 1e6 AS seconds,
        sum(coalesce(metrics['tokens'], 0)) AS tokens_spent,
        sum(coalesce(metrics['requests'], 0)) AS requests_spent
    FROM {{run}}.operators GROUP BY ALL
),
decided AS (
    SELECT d.stage, d.step, d.row_kind AS pipeline, d.position, d.operator, d.kept, r.experience_id,
        r.response_length
    FROM {{run}}.decisions d JOIN {{run}}.rollouts r ON r.experience_id = d.row_id
    WHERE d.row_kind = 'experience' AND d.position IS NOT NULL
    UNION ALL
    SELECT d.stage, d.step, d.row_kind, d.position, d.operator, d.kept, r.experience_id, r.response_length
    FROM {{run}}.decisions d JOIN {{run}}.rollouts r ON r.task_id = d.row_id AND r.stage = d.stage
    WHERE d.row_kind = 'task' AND d.position IS NOT NULL
),
passed AS (
    SELECT
        stage, step, pipeline, position, operator,
        sum(response_length)::BIGINT AS rollout_tokens,
        coalesce(sum(response_length) FILTER (NOT kept), 0)::BIGINT AS dropped_tokens,
        count(abs_advantage) FILTER (kept) AS trained_rows,
        avg(abs_advantage) FILTER (kept) AS mean_abs_advantage,
        avg(clipped) FILTER (kept) AS clipped,
        sum(loss_share) FILTER (kept) AS loss_share,
        sum(weight * response_length) FILTER (kept) AS signal
    FROM decided LEFT JOIN trained USING (experience_id) GROUP BY ALL
),
reasons AS (
    SELECT stage, step, pipeline, position, operator,
        map_from_entries(list((reason, n) ORDER BY n DESC, reason)) AS reasons
    FROM (
        SELECT stage, step, row_kind AS pipeline, position, operator, reason, count(*) AS n
        FROM {{run}}.decisions WHERE NOT kept AND position IS NOT NULL GROUP BY ALL
    ) GROUP BY ALL
)
SELECT
    c.*,
    r.reasons,
    coalesce(p.rollout_tokens, 0) AS rollout_tokens,
    coalesce(p.dropped_tokens, 0) AS dropped_tokens,
    coalesce(p.trained_rows, 0) AS trained_rows,
    p.mean_abs_advantage,
    p.clipped,
    p.loss_share,
    coalesce(p.signal, 0) AS signal
FROM counted c
LEFT JOIN passed p ON p.stage = c.stage AND p.step IS NOT DISTINCT FROM c.step AND p.pipeline = c.pipeline
    AND p.position = c.position AND p.operator = c.operator
LEFT JOIN reasons r ON r.stage = c.stage AND r.step IS NOT DISTINCT FROM c.step AND r.pipeline = c.pipeline
    AND r.position = c.position AND r.operator = c.operator
"""

_STEP_YIELD = f"""
WITH
trained AS ({_TRAINED}),
asked AS (
    SELECT
        stage, step,
        sum(microseconds) / 1e6 AS operator_seconds,
        sum(coalesce(metrics['tokens'], 0)) AS tokens_spent,
        sum(coalesce(metrics['requests'], 0)) AS requests_spent
    FROM {{run}}.operators WHERE pipeline = 'experience' GROUP BY ALL
),
made AS (
    SELECT
        r.stage, r.step,
        count(*) AS rows,
        sum(coalesce(r.response_length, 0) + {_RETRIED})::BIGINT AS rollout_tokens,
        coalesce(sum(r.response_length) FILTER (NOT o.kept), 0)::BIGINT AS dropped_tokens,
        (coalesce(sum(r.response_length) FILTER (coalesce(r.error, '') <> ''), 0) + sum({_RETRIED}))::BIGINT
            AS failed_tokens,
        count(t.experience_id) AS trained_rows,
        coalesce(sum(r.response_length) FILTER (t.experience_id IS NOT NULL), 0)::BIGINT AS trained_tokens,
        avg(t.abs_advantage) AS mean_abs_advantage,
        avg(t.clipped) AS clipped,
        coalesce(sum(t.weight * r.response_length), 0) AS signal
    FROM {{run}}.rollouts r
    LEFT JOIN {{run}}.outcomes o ON o.experience_id = r.experience_id
    LEFT JOIN trained t ON t.experience_id = r.experience_id
    GROUP BY ALL
)
SELECT
    made.*,
    rollout_tokens / nullif(signal, 0) AS tokens_per_signal,
    coalesce(a.operator_seconds, 0) AS operator_seconds,
    coalesce(a.tokens_spent, 0) AS tokens_spent,
    coalesce(a.requests_spent, 0) AS requests_spent
FROM made LEFT JOIN asked a ON a.stage = made.stage AND a.step = made.step
"""


def operator_yield(run: str) -> str:
    """One row for each operator and step; `run` is the schema of one run."""
    return _OPERATOR_YIELD.format(run=run)


def step_yield(run: str) -> str:
    """One row for each step that was explored; `run` is the schema of one run."""
    return _STEP_YIELD.format(run=run)
