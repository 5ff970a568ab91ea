"""What another experience pipeline would have made of the rollouts a run has stored.

The operators are those of a live run, over the same rows in the same groups:
the pipeline that ran gives what happened.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.branching import Branch, branch_run
from trinity_data.config import RunConfig, StageConfig
from trinity_data.errors import ConfigError, OperatorError, StoreError, unknown_name
from trinity_data.launch.pipelines import experience_operators
from trinity_data.progress import explored_key
from trinity_data.schema import EXPERIENCES
from trinity_data.store.commit import Commit
from trinity_data.store.reader import StoreReader
from trinity_data.store.snapshot import store_folder
from trinity_data.store.sql import open_sql
from trinity_data.store.store import Store
from trinity_data.store.version import before_operators
from trinity_operators.base import Operator
from trinity_operators.compare import Comparison, compare
from trinity_operators.runner import (
    OperatorCount,
    check_columns,
    counts_table,
    outcomes_table,
    run_operators,
)


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
    stored = _stored_stages(run)
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
        reason = _impure(operator)
        if reason and operator.label not in allowed:
            raise OperatorError(
                f"{operator.label!r} {reason}, so its answer now says little about then; "
                f"run it all the same with --allow {operator.label}"
            )
    for name in allowed:
        labels = [operator.label for operator in operators]
        if name not in labels:
            raise ConfigError(f"--allow: {unknown_name('operator', name, labels)}")
    return operators


def rerun_operators(
    run: Path, operators: Sequence[Operator], stage: str, steps: tuple[int | None, int | None] = (None, None)
) -> Iterator[RerunStep]:
    """Runs the operators over the stored rollouts, one step after the other.

    Failed ones are left out as they were.
    """
    reader = StoreReader(store_folder(run))
    try:
        rounds = reader.table("groups", columns=["group_id", "round", "stage", "step"], stage=stage)
        for step in _chosen(reader, stage, steps):
            ids = [row_id for row_id, _ in reader.group_progress(stage, step)]
            rows = reader.read(ids).select(EXPERIENCES.names)
            rows = rows.filter(pc.equal(pc.fill_null(rows["error"], ""), ""))
            # rows that a batch took from an auxiliary buffer were judged by nobody
            rows = rows.filter(pc.is_in(rows["group_id"], rounds["group_id"]))
            if rows.num_rows:
                yield _run_on_step(operators, rows, rounds, stage, step)
    finally:
        reader.close()


def against_what_happened(run: Path, stage: str, judged: Sequence[RerunStep]) -> Comparison:
    """Holds the other pipeline's outcomes against the stored ones."""
    reader = StoreReader(store_folder(run))
    try:
        before = reader.table("outcomes", stage=stage)
    finally:
        reader.close()
    return compare(before, pa.concat_tables([one.outcomes for one in judged]))


def save(run: Path, name: str, stage: str, judged: Sequence[RerunStep]) -> Branch:
    """A branch as of the step before, whose rollouts of the judged steps wait for training
    with their new outcomes.
    """
    root, steps = store_folder(run), [one.step for one in judged]
    branch = branch_run(run, name, before_operators(root, steps[0], steps[-1]))
    store = Store.create_or_open(branch.folder / "store")
    try:
        for one in judged:
            tables = {"outcomes": one.outcomes, "decisions": one.decisions, "operators": one.operators}
            store.commit(Commit(tables=tables, progress={explored_key(stage): one.step}))
        store.seal()
    finally:
        store.close()
    return branch


def _impure(operator: Operator) -> str:
    """Why an operator's answer depends on more than its rows; empty when it does not."""
    if operator.calls_model:
        return "calls a model"
    if operator.keeps_state:
        return "keeps state"
    return "" if operator.pure else "is not pure"


def _stored_stages(run: Path) -> list[str]:
    with open_sql([run]) as session:
        return list(session.query("SELECT DISTINCT stage FROM groups ORDER BY stage")["stage"].to_pylist())


def stored_steps(run: Path, stage: str, bounds: tuple[int | None, int | None]) -> tuple[list[int], int]:
    """The steps with rollouts that lie within the bounds, and how many rollouts the stage has."""
    reader = StoreReader(store_folder(run))
    try:
        return _chosen(reader, stage, bounds), sum(reader.counts(stage=stage).values())
    finally:
        reader.close()


def _chosen(reader: StoreReader, stage: str, bounds: tuple[int | None, int | None]) -> list[int]:
    stored = sorted(set(reader.table("experiences", columns=["step"], stage=stage)["step"].to_pylist()))
    first, last = bounds
    chosen = [s for s in stored if (first is None or s >= first) and (last is None or s <= last)]
    if not chosen:
        known = f"{stored[0]} to {stored[-1]}" if stored else "none"
        raise StoreError(f"stage {stage!r} has no rollouts in those steps; steps with some: {known}")
    return chosen


def _run_on_step(
    operators: Sequence[Operator], rows: pa.Table, rounds: pa.Table, stage: str, step: int
) -> RerunStep:
    """Whole groups at once; with an operator that wants whole steps, what a live run judged together."""
    parts = [rows]
    if any(operator.whole_steps for operator in operators):
        parts = list(_by_round(rows, rounds))
    results = [
        run_operators(
            operators, part, row_kind="experience", id_column="experience_id", stage=stage, step=step
        )
        for part in parts
    ]
    outcomes = [
        outcomes_table(result, part, stage=stage, step=step)
        for result, part in zip(results, parts, strict=True)
    ]
    counts = [_sum(same) for same in zip(*(result.counts for result in results), strict=True)]
    return RerunStep(
        step,
        pa.concat_tables(outcomes),
        pa.concat_tables([result.decisions for result in results]),
        counts_table(counts, pipeline="experience", stage=stage, step=step),
    )


def _by_round(rows: pa.Table, rounds: pa.Table) -> Iterator[pa.Table]:
    """Groups that refills asked for later were judged later."""
    known = dict(zip(rounds["group_id"].to_pylist(), rounds["round"].to_pylist(), strict=True))
    found = np.array([known[group] for group in rows["group_id"].to_pylist()])
    for number in np.unique(found):
        yield rows.filter(pa.array(found == number))


def _sum(counts: Sequence[OperatorCount]) -> OperatorCount:
    return replace(
        counts[0],
        rows_in=sum(count.rows_in for count in counts),
        rows_out=sum(count.rows_out for count in counts),
        microseconds=sum(count.microseconds for count in counts),
    )
