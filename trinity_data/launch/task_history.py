"""What became of a task: dropped, waiting, tried, or never read, and why.

Each answer rests on rows of the run; a task that was never read is searched for in the file of its task set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.compute as pc

from trinity_data.config import RunConfig, StageConfig, TasksetConfig
from trinity_data.config.run import recorded_run
from trinity_data.errors import StoreError, TrinityError
from trinity_data.launch.inputs import eval_tasksets
from trinity_data.progress import TasksProgress, stage_done_key, tasks_key
from trinity_data.query.lineage import ORIGINS, Decision, Lineage, Origin
from trinity_data.synthetic import MODEL_URI, TASKSET_URI
from trinity_operators.registry import build_operators
from trinity_operators.stage_arguments import stage_values, with_stage_values
from trinity_operators.task_engines import stage_models
from trinity_operators.task_filtering import for_evaluation, read_and_filter

TaskState = Literal["trained", "dropped", "tried", "waiting", "unread", "evaluated"]

_ID_DIGITS = 32

_FIND = f"""
SELECT t.*, k.kept, k.dropped_by FROM ({ORIGINS}) t JOIN asked ON starts_with(t.task_id, asked.id)
JOIN (SELECT stage, task_id, bool_or(kept) AS kept, max(dropped_by) AS dropped_by FROM tasks GROUP BY ALL) k
    USING (stage, task_id)
ORDER BY t.stage, t.task_id
"""
_ROLLOUTS = """
SELECT g.group_id, g.step, g.epoch, g.repeat_times, coalesce(e.state, 'unfinished') AS state,
    coalesce(nullif(d.operator, ''), e.dropped_by, '') AS operator, coalesce(d.reason, e.error, '') AS reason,
    count(DISTINCT e.rollout) AS num_rollouts, list(DISTINCT e.trained_step)
    FILTER (e.trained_step IS NOT NULL) AS trained_steps
FROM (
    SELECT group_id, stage, task_id, step, epoch, repeat_times FROM groups
    UNION ALL
    SELECT group_id, stage, task_id, step, 0, count(*) FROM rollouts r ANTI JOIN groups USING (group_id)
    GROUP BY ALL
) g JOIN asked a ON g.task_id = a.id AND g.stage = a.stage
LEFT JOIN experiences e ON e.group_id = g.group_id
LEFT JOIN decisions d ON d.row_kind = 'experience' AND d.row_id = e.experience_id AND NOT d.kept
GROUP BY ALL ORDER BY g.step, g.group_id, state
"""
_AHEAD = """
SELECT count(*) FILTER (tried.task_id IS NULL AND t.position < mine.position) AS ahead,
    count(*) FILTER (tried.task_id IS NOT NULL) AS tried
FROM (SELECT t.position, t.stage, t.taskset FROM tasks t JOIN asked a ON t.task_id = a.id
    AND t.stage = a.stage LIMIT 1) mine
JOIN tasks t ON t.stage = mine.stage AND t.taskset = mine.taskset AND t.kept
LEFT JOIN (SELECT DISTINCT stage, task_id FROM groups) tried ON tried.stage = t.stage
    AND tried.task_id = t.task_id
"""
# training data and rows from elsewhere belong to no task set
_WITHOUT_TASK = """
SELECT DISTINCT stage, task_id FROM rollouts JOIN asked ON starts_with(task_id, asked.id) ORDER BY ALL
"""
# a row that an expander made has a parent
_READ = """
SELECT source_row FROM tasks t JOIN asked a ON t.stage = a.stage AND t.taskset = a.id AND t.parent IS NULL
ORDER BY t.position
"""
_EVALUATED = "SELECT DISTINCT task_id, stage, taskset FROM evals JOIN asked ON starts_with(task_id, asked.id)"


@dataclass(frozen=True)
class TaskRollouts:
    """Rollouts of one group in the same state; one whose turns ended in different states is in several."""

    group_id: str
    step: int
    epoch: int
    repeat_times: int
    state: str
    operator: str
    """The one that dropped them."""
    reason: str
    """Its reason, or the error of failed rollouts."""
    num_rollouts: int
    trained_steps: list[int] | None


@dataclass(frozen=True)
class TaskHistory:
    """What became of a task in one stage."""

    task_id: str
    state: TaskState
    stage: str
    taskset: str
    origin: Origin | None = None
    decisions: list[Decision] = field(default_factory=list)
    rollouts: list[TaskRollouts] = field(default_factory=list)
    ahead: int = 0
    """Of a waiting task: how many tasks were to be tried before it."""
    rows_read: int = 0
    """Of a task that was not read: the number of rows read of its set."""
    num_rows: int | None = None
    """Of a task that was not read: the number of rows of its set; None for a stream, which has no number."""
    stage_ended_at: int | None = None
    """The last step of the stage, once it has ended."""


def why_not(run: Path, task: str) -> list[TaskHistory]:
    """What became of a task, once for each stage that had it. `task` may be the beginning of its id.

    Raises StoreError for an unknown task, and for one whose beginning fits several ids.
    """
    with Lineage(run) as lineage:
        for query in (_FIND, _WITHOUT_TASK):
            rows = lineage.rows(query, id=task)
            ids = sorted({row["task_id"] for row in rows})
            if len(ids) > 1:
                listed = ", ".join(ids[:5])
                raise StoreError(f"{task!r} begins the ids of {len(ids)} tasks: {listed}; give more digits")
            if rows:
                return [_history(lineage, row) for row in rows]
        if rows := lineage.rows(_EVALUATED, id=task):
            return [TaskHistory(row["task_id"], "evaluated", row["stage"], row["taskset"]) for row in rows]
        return _unread(lineage, task)


def _history(lineage: Lineage, row: dict[str, Any]) -> TaskHistory:
    """Of a row of `tasks`, or of rollouts without one: made from training data, or imported."""
    task_id, stage = row["task_id"], row["stage"]
    rollouts = [TaskRollouts(**each) for each in lineage.rows(_ROLLOUTS, id=task_id, stage=stage)]
    if any(each.trained_steps for each in rollouts):
        state: TaskState = "trained"
    elif rollouts:
        state = "tried"
    else:
        state = "waiting" if row.get("kept", True) else "dropped"
    if "taskset" not in row:
        return TaskHistory(task_id, state, stage, "", rollouts=rollouts)
    return TaskHistory(
        task_id,
        state,
        stage,
        row["taskset"],
        _origin(row),
        lineage.decisions("task", task_id, stage),
        rollouts,
        ahead=lineage.rows(_AHEAD, id=task_id, stage=stage)[0]["ahead"] if state == "waiting" else 0,
        stage_ended_at=lineage.progress.get(stage_done_key(stage)),
    )


def _origin(row: dict[str, Any]) -> Origin:
    """Of a row of `tasks`."""
    names = ("stage", "task_id", "taskset", "split", "source", "source_row", "prompt", "answer")
    return Origin(task_position=row["position"], **{name: row[name] for name in names})


def _unread(lineage: Lineage, task: str) -> list[TaskHistory]:
    """Looks for the task in the files of the run's task sets."""
    unseen = f"{task!r} is no task that the run has read"
    try:
        config = recorded_run(lineage.run)
    except StoreError as error:
        raise StoreError(f"{unseen}, and its task sets are not known: {error}") from error
    searched = []
    for stage in config.stages:
        # the rows of a queue are read as soon as they are pushed
        for taskset in (each for each in stage.explored_tasksets if each.storage_type != "queue"):
            searched.append(f"{taskset.name} ({stage.stage_name})")
            for origin, num_rows in _search(config, lineage, stage, taskset, task):
                progress = TasksProgress.load(lineage.progress.get(tasks_key(stage.stage_name, taskset.name)))
                ended_at = lineage.progress.get(stage_done_key(origin.stage))
                unread = TaskHistory(origin.task_id, "unread", origin.stage, taskset.name, origin)
                read = progress.rows_read
                return [replace(unread, rows_read=read, num_rows=num_rows, stage_ended_at=ended_at)]
    hint = f"; an id has {_ID_DIGITS} digits, see `select task_id, prompt from tasks`"
    hint = "" if len(task) == _ID_DIGITS else hint
    raise StoreError(f"{unseen}, nor is it in its task sets: {', '.join(searched) or 'it has none'}{hint}")


def _search(
    config: RunConfig, lineage: Lineage, stage: StageConfig, taskset: TasksetConfig, task: str
) -> Iterator[tuple[Origin, int | None]]:
    """The task as the mappers would have left it, and how many rows its set has."""
    from trinity_data.dataset.in_order import open_in_order
    from trinity_data.dataset.reader import dataset_spec

    run, model_path = lineage.run, config.stages[0].model.model_path
    rows = lineage.rows(_READ, id=taskset.name, stage=stage.stage_name)
    read = np.array([row["source_row"] for row in rows], np.int64)
    try:
        spec = dataset_spec(taskset, _data_path(run, taskset))
        source, order = open_in_order(
            spec, shuffle=taskset.shuffle, seed=taskset.task_selector.seed, read=read
        )
        values = stage_values(
            stage,
            model_path=str(run / "synthetic" / "model") if model_path == MODEL_URI else model_path,
            run_folder=run,
            eval_tasksets=eval_tasksets(config, lambda each: _data_path(run, each)),
        )
        specs = with_stage_values(stage.data_processor.task_pipeline.operators, values, Path())
        # where the pipeline file lay is not stored; its own operators are looked for in the working directory
        operators = for_evaluation(build_operators(specs, Path()), stage_models(stage.explorer))
    except (OSError, ValueError, TrinityError) as error:
        raise StoreError(
            f"{task!r} was not read, and task set {taskset.name!r} cannot be searched: {error}"
        ) from error
    num_rows = None if spec.streaming else len(order)
    for filtered in read_and_filter(
        taskset, source, order, operators, stage=stage.stage_name, first_row=len(read)
    ):
        named = pc.starts_with(filtered.tasks["task_id"], pattern=task)
        for row in filtered.tasks.filter(named).to_pylist():
            yield _origin(row), num_rows


def _data_path(run: Path, taskset: TasksetConfig) -> str:
    """Where the rows lie: those that the run made are in its folder."""
    return str(run / "synthetic" / "taskset") if taskset.path == TASKSET_URI else taskset.path
