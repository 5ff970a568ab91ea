"""The task pipeline of a stage by itself: its rows pass through the operators, and no run is begun."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from trinity_data.config import RunConfig, StageConfig, TasksetConfig
from trinity_data.dataset.in_order import open_in_order
from trinity_data.errors import ConfigError, unknown_name
from trinity_data.launch.inputs import RunInputs, open_inputs
from trinity_data.launch.models import check_model
from trinity_data.launch.preview import Bin, histogram
from trinity_data.launch.task_output import write_output
from trinity_data.schema import values_of
from trinity_data.stage_inputs import StageInputs
from trinity_operators.registry import build_operators
from trinity_operators.stage_arguments import asking_operator, resolved_pipeline
from trinity_operators.task_engines import TaskEngines, connect_engines
from trinity_operators.task_filtering import FilteredTasks, joined, no_whole_set, read_and_filter

EXAMPLES = 2
"""Of what each operator dropped."""
SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class OperatorTrial:
    """What one operator did to the rows of a task set."""

    operator: str
    rows_in: int
    rows_out: int
    seconds: float
    reasons: dict[str, int]
    """Why it dropped rows, and how many."""
    examples: list[dict[str, str]]
    """The first rows it dropped: `task_id`, `prompt`, `reason`."""


@dataclass(frozen=True)
class TaskTrial:
    """A task set behind its task pipeline."""

    stage: str
    taskset: str
    tasks: pa.Table
    """Rows as in the table `tasks`, dropped ones too."""
    operators: list[OperatorTrial]
    histograms: dict[str, list[Bin]]
    """Of each score, over the rows that have it; `chosen` counts kept ones."""

    @property
    def num_kept(self) -> int:
        return sum(values_of(self.tasks["kept"]))

    def as_json(self) -> dict[str, object]:
        """Without the rows."""
        return {
            "stage": self.stage,
            "taskset": self.taskset,
            "rows": self.tasks.num_rows,
            "kept": self.num_kept,
            "operators": [asdict(operator) for operator in self.operators],
            "histograms": {name: [asdict(each) for each in bins] for name, bins in self.histograms.items()},
        }


def try_tasks(
    config: RunConfig, *, stage_name: str | None = None, limit: int | None = None, write: bool = False
) -> list[TaskTrial]:
    """Every task set of a stage: of the named one, or of the first that explores.

    Only the first `limit` rows in the order of reading, where there is one. With `write` the rows are those
    of the stage's `output`, which is written; of one that is there already there is nothing to return.
    Engines are started where an operator asks them.
    """
    stage = _stage_of(config, stage_name)
    if write and (limit is not None or stage.data_processor.task_pipeline.output is None):
        what = f"limit {limit} with write" if limit is not None else "no data_processor.task_pipeline.output"
        raise ConfigError(
            f"stage {stage.stage_name!r}: found {what}; the whole task set is written, to output"
        )
    with tempfile.TemporaryDirectory() as folder:
        resources, asking = RunInputs(config, Path(folder)), asking_operator(stage, config.file.parent)
        inputs = open_inputs(config, [stage], resources, with_models=asking is not None)
        work = partial(_try_stage, stage, inputs, limit=limit, write=write)
        if asking is None:
            return work(None)
        from trinity_data.launch.trial_engines import with_engines  # imports Ray, which takes seconds

        check_model([stage], inputs.model_path, inputs.tokenizer)
        return with_engines(config, stage, inputs, work)


def _stage_of(config: RunConfig, name: str | None) -> StageConfig:
    stages = {stage.stage_name: stage for stage in config.stages if stage.explored_tasksets}
    if not stages:
        raise ConfigError("no stage of this file explores tasks; mode: both does")
    if name is not None and name not in stages:
        raise ConfigError(unknown_name("exploring stage", name, stages))
    return stages[name or next(iter(stages))]


def _try_stage(
    stage: StageConfig,
    inputs: StageInputs,
    engines: TaskEngines | None,
    *,
    limit: int | None,
    write: bool,
) -> list[TaskTrial]:
    if write:
        written = write_output(stage, inputs, engines)
        taskset = stage.buffer.explorer_input.taskset
        return [] if written is None or taskset is None else [_trial_of(stage, taskset, [written])]
    tasksets = [taskset for _, taskset in stage.buffer.explorer_input.train_tasksets()]
    return [_try_taskset(stage, inputs, taskset, engines, limit) for taskset in tasksets]


def _try_taskset(
    stage: StageConfig,
    inputs: StageInputs,
    taskset: TasksetConfig,
    engines: TaskEngines | None,
    limit: int | None,
) -> TaskTrial:
    seed = taskset.task_selector.seed
    source, order = open_in_order(inputs.source_of(taskset), shuffle=taskset.shuffle, seed=seed)
    operators = build_operators(resolved_pipeline(stage, inputs).operators, inputs.base_dir)
    if problem := no_whole_set(taskset, () if limit else operators):
        raise ConfigError(problem)
    connect_engines(operators, engines, taskset)
    parts = read_and_filter(taskset, source, order[:limit], operators, stage=stage.stage_name)
    return _trial_of(stage, taskset, list(parts))


def _trial_of(stage: StageConfig, taskset: TasksetConfig, parts: Sequence[FilteredTasks]) -> TaskTrial:
    filtered = joined(parts)
    tasks, decisions = filtered.tasks, filtered.decisions
    rows = list(_operators(tasks, decisions, filtered.operators))
    return TaskTrial(stage.stage_name, taskset.name, tasks, rows, _histograms(tasks))


def _operators(tasks: pa.Table, decisions: pa.Table, counts: pa.Table) -> Iterator[OperatorTrial]:
    prompts = dict(zip(values_of(tasks["task_id"]), values_of(tasks["prompt"]), strict=True))
    dropped: dict[tuple[str, int | None], list[dict[str, str]]] = {}
    for row in decisions.select(["row_id", "operator", "position", "kept", "reason"]).to_pylist():
        if not row["kept"]:
            shown = prompts.get(row["row_id"], "")[:SHOWN_CHARACTERS]
            example = {"task_id": row["row_id"], "prompt": shown, "reason": row["reason"]}
            dropped.setdefault((row["operator"], row["position"]), []).append(example)
    sums = counts.group_by(["operator", "position"], use_threads=False)
    named = sums.aggregate([("rows_in", "sum"), ("rows_out", "sum"), ("microseconds", "sum")]).to_pylist()
    # rows that cannot be tried are dropped before the first operator, by no operator of the file
    before = [
        {"operator": name, "position": None, "rows_in_sum": tasks.num_rows,
         "rows_out_sum": tasks.num_rows - len(rows), "microseconds_sum": 0.0}
        for (name, position), rows in dropped.items() if position is None
    ]  # fmt: skip
    for each in [*before, *sorted(named, key=lambda row: int(row["position"]))]:
        rows = dropped.get((each["operator"], each["position"]), [])
        yield OperatorTrial(
            each["operator"], each["rows_in_sum"], each["rows_out_sum"], each["microseconds_sum"] / 1e6,
            dict(Counter(row["reason"] for row in rows).most_common()), rows[:EXAMPLES],
        )  # fmt: skip


def _histograms(tasks: pa.Table) -> dict[str, list[Bin]]:
    scores = [dict(row or []) for row in values_of(tasks["scores"])]
    kept = np.flatnonzero(np.array(values_of(tasks["kept"]), dtype=np.bool_))
    return {
        name: histogram(np.array([row.get(name, np.nan) for row in scores], dtype=np.float64), kept)
        for name in dict.fromkeys(name for row in scores for name in row)
    }
