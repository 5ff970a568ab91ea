"""The names that a query may use: a view for each table of a run, the joined ones, and macros.

Of one run they are the views themselves; of several each is the union, with a column `run`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from trinity_data.schema import FINAL
from trinity_data.store.snapshot import Snapshot

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
    "task_probes": "task_probes",
    "model_versions": "model_versions",
    "operators": "operators",
    "events": "events",
    "contracts": "contracts",
    "configurations": "configurations",
    "vocabulary": "vocabulary",
    "state_changes": "state_changes",
}

# `{run}` is the schema of one run. `trained` comes first: a row is moved to it at most once,
# the other moves are few.
_WITH_OUTCOMES = """
SELECT
    r.* REPLACE (
        coalesce(o.reward, r.reward) AS reward, coalesce(o.token_rewards, r.token_rewards) AS token_rewards
    ),
    r.reward AS raw_reward,
    r.token_rewards AS raw_token_rewards,
    o.advantage,
    o.token_advantages,
    o.scores,
    o.kept,
    coalesce(q.contract, o.dropped_by) AS dropped_by,
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
    CASE WHEN t.experience_id IS NULL THEN 0 ELSE 1 + {again} END AS uses
FROM ({rows}) r
LEFT JOIN {run}.outcomes o ON o.experience_id = r.experience_id
LEFT JOIN (SELECT experience_id, step FROM {run}.state_changes WHERE state = 'trained') t
    ON t.experience_id = r.experience_id
LEFT JOIN (
    SELECT experience_id, arg_max(state, sequence) AS state
    FROM {run}.state_changes WHERE state NOT IN ('trained', 'replayed') GROUP BY experience_id
) m ON m.experience_id = r.experience_id
LEFT JOIN (SELECT unnest(dropped_ids) AS experience_id, contract FROM {run}.contracts) q
    ON q.experience_id = r.experience_id
{replays}
"""

# the same columns of rows in files that say what finally became of them
_FINISHED = """
SELECT
    r.* EXCLUDE ({final_columns}) REPLACE (
        r.final_reward AS reward, coalesce(r.final_token_rewards, r.token_rewards) AS token_rewards
    ),
    r.reward AS raw_reward,
    r.token_rewards AS raw_token_rewards,
    final_advantage AS advantage,
    final_token_advantages AS token_advantages,
    final_scores AS scores,
    final_kept AS kept,
    final_dropped_by AS dropped_by,
    final_state AS state,
    final_trained_step AS trained_step,
    CASE WHEN final_trained_step IS NULL THEN 0 ELSE 1 + {again} END AS uses
FROM {files} r
{replays}
{rows}
"""

QUARANTINED = "SELECT unnest(dropped_ids) AS experience_id, contract FROM contracts"
"""Rows that operators had kept, with the contract that dropped them."""

_REPLAYS = """
LEFT JOIN (
    SELECT experience_id, count(*) AS again FROM {run}.state_changes
    WHERE state = 'replayed' GROUP BY experience_id
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
    ref_logprob,
    teacher_logprob,
    in_loss,
    reward,
    coalesce(token_advantage, advantage) AS advantage,
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
        unnest(b.ref_logprobs) AS ref_logprob,
        unnest(b.teacher_logprobs) AS teacher_logprob,
        unnest(coalesce(o.token_rewards, r.token_rewards)) AS reward,
        unnest(o.token_advantages) AS token_advantage,
        unnest(r.action_mask) AS in_loss
    FROM {run}.rollouts r
    LEFT JOIN {run}.outcomes o ON o.experience_id = r.experience_id
    LEFT JOIN (
        SELECT experience_id, logprobs, ref_logprobs, teacher_logprobs FROM {run}.batches ANTI JOIN
            (SELECT experience_id, step FROM {run}.state_changes WHERE state = 'replayed')
            USING (experience_id, step)
    ) b ON b.experience_id = r.experience_id
)
LEFT JOIN {run}.vocabulary v USING (token_id)
WHERE position IS NOT NULL
"""

JOINED = ("experiences", "tokens")

MACROS = (
    # the highest step that was trained
    "CREATE MACRO last_step() AS (SELECT max(step) FROM steps)",
    # share of a task's finished rollouts whose raw reward is above the threshold
    "CREATE MACRO pass_rate(task, "
    "threshold := 0.5) AS (SELECT avg(CASE WHEN reward > threshold THEN 1.0 ELSE 0.0 END) FROM rollouts "
    "WHERE task_id = task AND coalesce(error, '') = '')",
    # the chance that one of k rollouts is right, of n of which c are (arXiv:2107.03374, equation 1)
    "CREATE MACRO pass_at(k, n, c) AS (CASE WHEN k > n THEN NULL WHEN n - c < k THEN 1.0 "
    "WHEN c = 0 THEN 0.0 ELSE 1.0 - list_product([1.0 - k / i FOR i IN range(n - c + 1, n + 1)]) END)",
)
_FINAL_COLUMNS = ", ".join(FINAL.names)


def stored_rows(snapshot: Snapshot, table: str, hot: str) -> str:
    """The rows of one table, sealed ones and those in `hot`."""
    files = snapshot.sealed[table]
    shown = f"* EXCLUDE ({_FINAL_COLUMNS})" if table == "experiences" else "*"
    parts = list(_sealed_rows(snapshot, files, shown))
    if snapshot.hot[table].num_rows or not parts:
        parts.append(f"SELECT * FROM {hot}")
    return _union(parts)


def experiences(run: str, snapshot: Snapshot, hot: str, *, replayed: bool) -> str:
    """What became of every rollout: joined with outcomes and state changes, unless a sealed file says it."""
    replays = {
        "again": "coalesce(u.again, 0)" if replayed else "0",
        "replays": _REPLAYS.format(run=run) if replayed else "",
    }
    parts = [
        _FINISHED.format(final_columns=_FINAL_COLUMNS, files=finished, rows=rows, **replays)
        for finished, rows in _finished(snapshot)
    ]
    # all other rollouts
    shown = f"* EXCLUDE ({_FINAL_COLUMNS})"
    files = [file for file in snapshot.sealed["experiences"] if file not in snapshot.final]
    open_rows = list(_sealed_rows(snapshot, files, shown))
    if partly := _final_files(snapshot, complete=False):
        open_rows.append(f"SELECT {shown} FROM {_parquet(partly)} WHERE final_state IS NULL")
    if snapshot.hot["experiences"].num_rows or not snapshot.sealed["experiences"]:
        open_rows.append(f"SELECT * FROM {hot}")
    if open_rows:
        parts.append(_WITH_OUTCOMES.format(run=run, rows=_union(open_rows), **replays))
    return _union(parts)


def tokens(run: str) -> str:
    """One row for each sampled token."""
    return _TOKENS.format(run=run)


def finished_rows(snapshot: Snapshot) -> str:
    """Rows in sealed files that say what finally became of them, with those columns.

    Empty when there is none.
    """
    return _union([f"SELECT * FROM {files} {rows}" for files, rows in _finished(snapshot)])


def _finished(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Files, and which of their rows."""
    if complete := _final_files(snapshot, complete=True):
        yield _parquet(complete), ""
    if partly := _final_files(snapshot, complete=False):
        yield _parquet(partly), "WHERE final_state IS NOT NULL"


def _final_files(snapshot: Snapshot, *, complete: bool) -> list[Path]:
    return [file for file in snapshot.sealed["experiences"] if snapshot.final.get(file) is complete]


def _sealed_rows(snapshot: Snapshot, files: Sequence[Path], shown: str) -> Iterator[str]:
    """Queries that read Parquet files, and only the rows of them that count."""
    if uncut := [file for file in files if file not in snapshot.cut]:
        yield f"SELECT {shown} FROM {_parquet(uncut)}"
    for file in files:
        if file in snapshot.cut:
            numbered = f"read_parquet({quoted(str(file))}, file_row_number = true)"
            yield (
                f"SELECT * EXCLUDE (file_row_number) FROM (SELECT {shown} FROM {numbered}) "
                f"WHERE file_row_number < {snapshot.cut[file]}"
            )


def _parquet(files: Sequence[Path]) -> str:
    return f"read_parquet([{', '.join(quoted(str(file)) for file in files)}])"


def _union(parts: Sequence[str]) -> str:
    return " UNION ALL BY NAME ".join(parts)


def quoted(text: str) -> str:
    """As a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"
