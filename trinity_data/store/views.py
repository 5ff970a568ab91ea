"""The names that a query may use: a view for each table of a run, the joined ones, and macros.

Within a run the views are built on each other; over several runs each is the union, with a column `run`.
"""

from __future__ import annotations

# stored tables that are shown as they are, by the name of their view
PLAIN = {
    "tasks": "tasks",
    "groups": "groups",
    "rollouts": "experiences",
    "outcomes": "outcomes",
    "decisions": "decisions",
    "batches": "batches",
    "steps": "steps",
    "evals": "evals",
    "model_versions": "model_versions",
    "operators": "operators",
    "events": "events",
    "vocabulary": "vocabulary",
    "moves": "moves",
}

# `{run}` is the schema of one run. `trained` comes first: a row is moved to it at most once, the other moves are few.
_EXPERIENCES = """
SELECT
    r.* REPLACE (coalesce(o.reward, r.reward) AS reward),
    r.reward AS raw_reward,
    o.advantage,
    o.scores,
    o.kept,
    o.dropped_by,
    CASE
        WHEN t.experience_id IS NOT NULL THEN 'trained'
        WHEN m.state IN ('stale', 'dropped', 'failed') THEN m.state
        WHEN o.kept THEN 'pending'
        WHEN NOT o.kept THEN CASE WHEN m.state IS NULL AND r.error <> '' THEN 'failed' ELSE 'dropped' END
        WHEN m.state IS NOT NULL THEN m.state
        WHEN r.error <> '' THEN 'failed'
        ELSE 'raw'
    END AS state,
    t.step AS trained_step,
    CASE WHEN t.experience_id IS NULL THEN 0 ELSE 1 + coalesce(u.again, 0) END AS uses
FROM {run}.rollouts r
LEFT JOIN {run}.outcomes o ON o.experience_id = r.experience_id
LEFT JOIN (SELECT experience_id, step FROM {run}.moves WHERE state = 'trained') t
    ON t.experience_id = r.experience_id
LEFT JOIN (
    SELECT experience_id, arg_max(state, sequence) AS state
    FROM {run}.moves WHERE state NOT IN ('trained', 'replayed') GROUP BY experience_id
) m ON m.experience_id = r.experience_id
LEFT JOIN (
    SELECT experience_id, count(*) AS again FROM {run}.moves WHERE state = 'replayed' GROUP BY experience_id
) u ON u.experience_id = r.experience_id
"""

_TOKENS = """
SELECT
    experience_id,
    stage,
    step,
    position,
    token_id,
    v.text,
    logprob,
    recomputed_logprob,
    in_loss,
    advantage,
    CASE
        WHEN len(version_spans) > 1
        THEN list_filter(version_spans, lambda span: span.start <= position)[-1].version
        ELSE model_version
    END AS model_version
FROM (
    SELECT
        r.experience_id,
        r.stage,
        r.step,
        r.model_version,
        r.version_spans,
        o.advantage,
        unnest(range(CASE WHEN r.token_ids IS NOT NULL THEN r.response_length END)) AS position,
        unnest(r.token_ids[r.prompt_length + 1:]) AS token_id,
        unnest(r.logprobs) AS logprob,
        unnest(b.logprobs) AS recomputed_logprob,
        unnest(r.action_mask) AS in_loss
    FROM {run}.rollouts r
    LEFT JOIN {run}.outcomes o ON o.experience_id = r.experience_id
    LEFT JOIN (
        SELECT experience_id, logprobs FROM {run}.batches ANTI JOIN
            (SELECT experience_id, step FROM {run}.moves WHERE state = 'replayed') USING (experience_id, step)
    ) b ON b.experience_id = r.experience_id
)
LEFT JOIN {run}.vocabulary v USING (token_id)
WHERE position IS NOT NULL
"""

JOINED = {"experiences": _EXPERIENCES, "tokens": _TOKENS}

MACROS = (
    # the highest step that was trained
    "CREATE MACRO last_step() AS (SELECT max(step) FROM steps)",
    # share of a task's finished rollouts whose raw reward is above the threshold
    "CREATE MACRO pass_rate(task, threshold := 0.5) AS (SELECT avg(CASE WHEN reward > threshold THEN 1.0 ELSE 0.0 END) "
    "FROM rollouts WHERE task_id = task AND coalesce(error, '') = '')",
)
