"""What another experience pipeline would have made of the rollouts a run has stored.

The pipeline is that of a live run, over the same rows in the same groups: the operators that ran give what
happened. For runs of many rollouts, ranges of steps are spread over the workers of Ray Data.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.config import RunConfig, StageConfig
from trinity_data.errors import ConfigError, OperatorError, StoreError, TrinityError, unknown_name
from trinity_data.launch.pipelines import experience_operators
from trinity_data.progress import explored_key
from trinity_data.schema import EXPERIENCES, values_of
from trinity_data.store.branch import Branch, branch_run
from trinity_data.store.reader import StoreReader
from trinity_data.store.snapshot import before_operators, store_folder
from trinity_data.store.sql import open_sql
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_operators.base import Operator
from trinity_operators.checks import check_columns
from trinity_operators.compare import Comparison, compare
from trinity_operators.experience_pipeline import ExperiencePipeline

Bounds: TypeAlias = tuple[int | None, int | None]
"""First and last step, both included; None is no bound."""

# in one piece of work: enough to make up for opening the store
STEPS_A_RANGE = 16
_TABLES = ("outcomes", "decisions", "operators")


@dataclass(frozen=True)
class RerunStep:
    """One step under the other pipeline, in the tables a live run would have written."""

    step: int
    outcomes: pa.Table
    decisions: pa.Table
    operators: pa.Table


def stage_to_rerun(config: RunConfig, run: Path, name: str | None) -> StageConfig:
    """The stage of the pipeline file whose rows are in the run.

    It must be said which, where there are several.
    """
    stages = {stage.stage_name: stage for stage in config.stages if stage.mode == "both"}
    if name is not None:
        if name not in stages:
            raise ConfigError(f"--stage: {unknown_name('exploring stage', name, stages)}")
        return stages[name]
    with open_sql([run]) as session:
        rows = session.query("SELECT DISTINCT stage FROM groups ORDER BY stage")
        stored: list[Any] = rows["stage"].to_pylist()
    both = [stage for stage in stages if stage in stored]
    if len(both) != 1:
        what = f"several stages fit: {', '.join(both)}" if both else "no exploring stage of the file has rows"
        raise ConfigError(
            f"{what}; the file has {', '.join(stages) or 'none'}, the run has {', '.join(stored) or 'none'}; "
            "name one with --stage"
        )
    return stages[both[0]]


def operators_of(stage: StageConfig, base_dir: Path, *, allowed: Collection[str] = ()) -> list[Operator]:
    """The stage's experience operators and its advantage.

    Refuses those whose answer may differ from one run to the next.
    """
    operators = experience_operators(stage, base_dir)
    if not operators:
        raise ConfigError(f"stage {stage.stage_name!r} has neither experience operators nor an advantage")
    check_columns(operators, EXPERIENCES.names)
    for operator in operators:
        reason = "" if operator.pure else "is not pure"
        reason = "keeps state" if operator.keeps_state else reason
        reason = "calls a model" if operator.calls_model or operator.model else reason
        if reason and operator.label not in allowed:
            raise OperatorError(
                f"{operator.label!r} {reason}, so its answer now says little about then; "
                f"run it all the same with --allow {operator.label}"
            )
    labels = [operator.label for operator in operators]
    if unknown := [name for name in allowed if name not in labels]:
        raise ConfigError(f"--allow: {unknown_name('operator', unknown[0], labels)}")
    return operators


def rerun_operators(
    run: Path, operators: Sequence[Operator], stage: str, bounds: Bounds = (None, None)
) -> Iterator[RerunStep]:
    """Runs the operators over the stored rollouts, one step after the other.

    Groups stay whole; with an operator that needs whole steps, groups go together that went together in the
    run. Failed rollouts are left out as they were.
    """
    pipeline = ExperiencePipeline(operators, stage)
    with closing(StoreReader(store_folder(run))) as reader, closing(pipeline):
        rounds = reader.table("groups", columns=["group_id", "round", "stage", "step"], stage=stage)
        for step in _steps_within(reader, stage, bounds):
            ids = [row_id for row_id, _ in reader.group_progress(stage, step)]
            rows = reader.read(ids).select(EXPERIENCES.names)
            # rows that a batch took from an auxiliary buffer passed through no pipeline
            rows = rows.filter(pc.is_in(rows["group_id"], rounds["group_id"]))
            parts = _by_round(rows, rounds) if pipeline.whole_steps else [rows]
            if results := [tables for part in parts if (tables := pipeline.apply(part))]:
                outcomes = pa.concat_tables([tables["outcomes"] for tables in results])
                decisions = pa.concat_tables([tables["decisions"] for tables in results])
                yield RerunStep(step, outcomes, decisions, pipeline.counts_table(step))


def rerun_spread(
    run: Path, stage: StageConfig, base_dir: Path, steps: list[int], *, allowed: Collection[str] = ()
) -> Iterator[RerunStep]:
    """The same as `rerun_operators`, in the order of the steps. Ray must be running."""
    import ray.data

    stateful = [each.label for each in operators_of(stage, base_dir, allowed=allowed) if each.keeps_state]
    if stateful:
        raise OperatorError(f"{stateful[0]!r} keeps state, so the steps cannot run beside each other")
    ranges = [steps[start : start + STEPS_A_RANGE] for start in range(0, len(steps), STEPS_A_RANGE)]
    items = [{"first": each[0], "last": each[-1]} for each in ranges]
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    work = ray.data.from_items(items, override_num_blocks=len(items))
    rows = work.map(_StepRange(run, stage, base_dir, tuple(allowed))).take_all()
    for row in sorted(rows, key=lambda row: int(row["first"])):
        if row["error"]:
            raise StoreError(row["error"])
        for step in row["steps"]:
            tables = (pa.ipc.open_stream(step[name]).read_all() for name in _TABLES)
            yield RerunStep(int(step["step"]), *tables)


class _StepRange:
    """What runs in a worker: it opens the store itself, so that only outcomes travel.

    An error travels as data, since Ray would bury it in its own.
    """

    def __init__(self, run: Path, stage: StageConfig, base_dir: Path, allowed: Collection[str]) -> None:
        self.run, self.stage, self.base_dir, self.allowed = run, stage, base_dir, allowed

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        operators = operators_of(self.stage, self.base_dir, allowed=self.allowed)
        bounds = (row["first"], row["last"])
        try:
            steps = list(rerun_operators(self.run, operators, self.stage.stage_name, bounds))
        except TrinityError as error:
            return row | {"error": str(error), "steps": []}
        packed = [
            {"step": one.step} | {name: _to_bytes(getattr(one, name)) for name in _TABLES} for one in steps
        ]
        return row | {"error": "", "steps": packed}


def compare_with_run(run: Path, stage: str, steps: Sequence[RerunStep]) -> Comparison:
    """The other pipeline's outcomes against the stored ones."""
    with closing(StoreReader(store_folder(run))) as reader:
        before = reader.table("outcomes", stage=stage)
    return compare(before, pa.concat_tables([step.outcomes for step in steps]))


def save(run: Path, name: str, stage: str, steps: Sequence[RerunStep]) -> Branch:
    """A branch as of the step before, whose rollouts of these steps wait for training with their new
    outcomes.
    """
    branch = branch_run(run, name, before_operators(store_folder(run), steps[0].step, steps[-1].step))
    with closing(Store.create_or_open(branch.folder / "store")) as store:
        for step in steps:
            # what a contract of the run dropped stays dropped
            waiting = pa.array(store.raw(stage), pa.string())
            tables = {name: getattr(step, name) for name in _TABLES}
            for name, column in (("outcomes", "experience_id"), ("decisions", "row_id")):
                tables[name] = tables[name].filter(pc.is_in(tables[name][column], waiting))
            store.commit(Commit(tables=tables, progress={explored_key(stage): step.step}))
        store.seal()
    return branch


def stored_steps(run: Path, stage: str, bounds: Bounds) -> tuple[list[int], int]:
    """The steps with rollouts that lie within the bounds, and how many experiences they have, failed ones
    included.
    """
    with closing(StoreReader(store_folder(run))) as reader:
        num_rows = _steps_within(reader, stage, bounds)
    return list(num_rows), sum(num_rows.values())


def _steps_within(reader: StoreReader, stage: str, bounds: Bounds) -> dict[int, int]:
    """How many experiences each step has."""
    rows = reader.table("experiences", columns=["step"], stage=stage)
    num_rows = Counter(values_of(rows["step"]))
    stored, (first, last) = sorted(num_rows), bounds
    steps = [s for s in stored if (first is None or s >= first) and (last is None or s <= last)]
    if not steps:
        listed = f"{stored[0]} to {stored[-1]}" if stored else "none"
        raise StoreError(f"stage {stage!r} has no rollouts in those steps; steps with some: {listed}")
    return {step: num_rows[step] for step in steps}


def _by_round(rows: pa.Table, rounds: pa.Table) -> Iterator[pa.Table]:
    """Groups that a refill added later passed through the operators later."""
    round_of = dict(zip(rounds["group_id"].to_pylist(), rounds["round"].to_pylist(), strict=True))
    numbers = np.array([round_of[group] for group in rows["group_id"].to_pylist()])
    for number in np.unique(numbers):
        yield rows.filter(pa.array(numbers == number))


def _to_bytes(table: pa.Table) -> bytes:
    """The table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
