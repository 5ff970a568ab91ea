"""What another experience pipeline would have made of the rollouts a run has stored.

The pipeline is that of a live run, over the same rows in the same groups: the operators that ran give what
happened. One step is in memory at a time; `whatif_workers.py` spreads steps over processes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.config import RunConfig, StageConfig
from trinity_data.config.run import recorded_run
from trinity_data.errors import ConfigError, OperatorError, StoreError, TrinityError, unknown_name
from trinity_data.launch.pipelines import configured_and_chain
from trinity_data.progress import explored_key
from trinity_data.schema import EXPERIENCES
from trinity_data.store.branch import Branch, branch_run
from trinity_data.store.reader import StoreReader
from trinity_data.store.snapshot import before_operators, store_folder
from trinity_data.store.sql import open_sql
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_operators.base import Operator
from trinity_operators.calls import Watch
from trinity_operators.checks import check_columns
from trinity_operators.compare import COMPARED, Comparison, compare
from trinity_operators.experience_pipeline import ExperiencePipeline
from trinity_operators.registry import is_built_in
from trinity_operators.stored_answers import StoredAnswers, can_be_stored
from trinity_operators.task_execution import operator_parts_of

Bounds: TypeAlias = tuple[int | None, int | None]
"""First and last step, both included; None is no bound."""

STEPS_READ_AHEAD = 16
"""Whose groups and outcomes are read at once."""
TABLES = ("outcomes", "decisions", "operators")
"""What a live run would have written of a step."""
_DECIDED = ("row_kind", "row_id", "operator", "version", "kept", "reason", "step")
"""What stored answers are read from."""
_LARGE = (
    "token_ids", "logprobs", "action_mask", "kept_tokens", "banned_tokens", "token_rewards", "messages",
    "images", "response_text", "tools", "version_spans",
)  # fmt: skip
"""Columns that are left out where no operator reads them."""


@dataclass(frozen=True)
class RerunStep:
    """One step under the other pipeline, in the tables a live run would have written."""

    step: int
    comparison: Comparison
    """With the stored outcomes."""
    outcomes: pa.Table
    decisions: pa.Table
    operators: pa.Table


def stage_to_rerun(config: RunConfig, run: Path, name: str | None) -> StageConfig:
    """The stage of the pipeline file whose rows are in the run.

    It must be said which, where there are several.
    """
    stages = {stage.stage_name: stage for stage in config.stages if stage.explores}
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


def operators_of(
    run: Path, stage: StageConfig, base_dir: Path, *, allowed: Collection[str] = ()
) -> list[Operator]:
    """The stage's experience operators and its advantage, for the rows of a run.

    Refuses those whose answer may differ from one run to the next.
    """
    _, chain = configured_and_stored(run, stage, base_dir, allowed=allowed)
    return checked_operators(stage, chain, allowed=allowed)


def configured_and_stored(
    run: Path, stage: StageConfig, base_dir: Path, *, allowed: Collection[str] = ()
) -> tuple[list[Operator], list[Operator]]:
    """The operators as the file lists them, and the chain that they are part of, in which those that asked a
    model in the run with the same arguments give the answers of then; not those in `allowed`.
    """
    configured, chain = configured_and_chain(stage, base_dir)
    ran = _parts_of_run(run, stage.stage_name, base_dir)
    parts = _parts(stage, base_dir)
    labels = [operator.label for operator in configured]
    for operator, part in zip(configured, parts, strict=True):
        asks = operator.calls_model or bool(operator.model)
        is_one = labels.count(operator.label) == 1 and ran.count(part) == 1
        if asks and is_one and operator.label not in allowed and can_be_stored(operator):
            chain[chain.index(operator)] = StoredAnswers(operator)
    return configured, chain


def stored_labels(operators: Sequence[Operator]) -> list[str]:
    """The names of those that give the answers of the run."""
    return [operator.label for operator in operators if isinstance(operator, StoredAnswers)]


def _parts_of_run(run: Path, stage: str, base_dir: Path) -> list[str]:
    """Of the operators that the run's stage was last started with; none where they are not known."""
    try:
        stages = recorded_run(run).stages
        return [part for each in stages if each.stage_name == stage for part in _parts(each, base_dir)]
    except TrinityError:
        return []


def _parts(stage: StageConfig, base_dir: Path) -> list[str]:
    """Name and arguments of each experience operator, to be compared."""
    configs = stage.data_processor.experience_pipeline.operators
    parts = operator_parts_of(configs, base_dir)
    return [json.dumps([name, args], sort_keys=True, default=str) for _, name, args in parts]


def checked_operators(
    stage: StageConfig, operators: list[Operator], *, allowed: Collection[str] = ()
) -> list[Operator]:
    """The same of a chain that is built."""
    if not operators:
        raise ConfigError(f"stage {stage.stage_name!r} has neither experience operators nor an advantage")
    labels = [operator.label for operator in operators]
    if unknown := [name for name in allowed if name not in labels]:
        raise ConfigError(f"--allow: {unknown_name('operator', unknown[0], labels)}")
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
    return operators


class Rerun:
    """Operators over the stored rollouts of a run, in this process."""

    def __init__(
        self, run: Path, operators: Sequence[Operator], stage: str, watch: Watch | None = None
    ) -> None:
        self.stage, self.watch = stage, watch
        self.pipeline, self.reader = ExperiencePipeline(operators, stage), StoreReader(store_folder(run))
        self.columns = _columns_for(operators)
        self.stored = [operator for operator in operators if isinstance(operator, StoredAnswers)]

    def steps(self, steps: Sequence[int]) -> Iterator[RerunStep]:
        """One after the other; one without rollouts that finished is left out.

        Groups stay whole; with an operator that needs whole steps, groups go together that went together in
        the run. Failed rollouts are left out as they were.
        """
        for start in range(0, len(steps), STEPS_READ_AHEAD):
            part = steps[start : start + STEPS_READ_AHEAD]
            bounds = (self.stage, part[0], part[-1])
            rounds = self.reader.of_steps("groups", *bounds, columns=["group_id", "round", "step"])
            before = self.reader.of_steps("outcomes", *bounds, columns=[*COMPARED, *self._of_then(), "step"])
            decided = pa.table({})
            if self.stored:
                decided = self.reader.of_steps("decisions", *bounds, columns=_DECIDED)
            for step in part:
                is_step = pc.field("step") == step
                for operator in self.stored:
                    operator.show(before.filter(is_step), decided.filter(is_step))
                rerun = self._step(step, rounds.filter(is_step), before.filter(is_step))
                if rerun is not None:
                    yield rerun

    def close(self) -> None:
        self.pipeline.close()
        self.reader.close()

    def _of_then(self) -> list[str]:
        """Columns of outcomes that stored answers are in."""
        return ["scores"] if self.stored else []

    def _step(self, step: int, rounds: pa.Table, before: pa.Table) -> RerunStep | None:
        ids = [row_id for row_id, _ in self.reader.group_progress(self.stage, step)]
        rows = self.reader.read(ids, self.columns).select(self.columns)
        # rows that a batch took from an auxiliary buffer passed through no pipeline
        rows = rows.filter(pc.is_in(rows["group_id"], rounds["group_id"]))
        parts = _by_round(rows, rounds) if self.pipeline.whole_steps else [rows]
        results = [tables for part in parts if (tables := self.pipeline.apply(part, self.watch))]
        if not results:
            return None
        outcomes = pa.concat_tables([tables["outcomes"] for tables in results])
        decisions = pa.concat_tables([tables["decisions"] for tables in results])
        return RerunStep(
            step, compare(before, outcomes), outcomes, decisions, self.pipeline.counts_table(step)
        )


def _columns_for(operators: Sequence[Operator]) -> list[str]:
    """Those that are read of stored rollouts: what others' operators use besides `reads` is not known."""
    if not all(map(is_built_in, operators)):
        return list(EXPERIENCES.names)
    read = {name for operator in operators for name in operator.reads}
    return [name for name in EXPERIENCES.names if name in read or name not in _LARGE]


def rerun_operators(
    run: Path, operators: Sequence[Operator], stage: str, steps: Iterable[int]
) -> Iterator[RerunStep]:
    """Runs the operators over the stored rollouts of these steps, in this process."""
    with closing(Rerun(run, operators, stage)) as rerun:
        yield from rerun.steps(list(steps))


@dataclass
class Total:
    """Of the steps that passed."""

    comparison: Comparison = field(default_factory=Comparison)
    steps: list[int] = field(default_factory=list)

    def adding(self, steps: Iterable[RerunStep]) -> Iterator[RerunStep]:
        """The same steps."""
        for step in steps:
            self.comparison += step.comparison
            self.steps.append(step.step)
            yield step


def save(run: Path, name: str, stage: str, steps: Iterable[RerunStep], *, last_step: int) -> Branch:
    """A branch as of the step before, whose rollouts of these steps, up to `last_step`, wait for training
    with their new outcomes.
    """
    coming = iter(steps)
    first = next(coming)
    branch = branch_run(run, name, before_operators(store_folder(run), first.step, last_step))
    with closing(Store.create_or_open(branch.folder / "store")) as store:
        for step in chain([first], coming):
            # what a contract of the run dropped stays dropped
            waiting = pa.array(store.raw(stage), pa.string())
            tables = {table: getattr(step, table) for table in TABLES}
            for table, column in (("outcomes", "experience_id"), ("decisions", "row_id")):
                tables[table] = tables[table].filter(pc.is_in(tables[table][column], waiting))
            store.commit(Commit(tables=tables, progress={explored_key(stage): step.step}))
        store.seal()
    return branch


def stored_steps(run: Path, stage: str, bounds: Bounds = (None, None)) -> dict[int, int]:
    """The steps within the bounds with rollouts that finished, each with the number of its rows."""
    with closing(StoreReader(store_folder(run))) as reader:
        num_rows = reader.num_rows_by_step(stage)
    first, last = bounds
    steps = {
        step: rows
        for step, (rows, finished) in num_rows.items()
        if finished and (first is None or step >= first) and (last is None or step <= last)
    }
    if not steps:
        stored = list(num_rows)
        listed = f"{stored[0]} to {stored[-1]}" if stored else "none"
        raise StoreError(f"stage {stage!r} has no rollouts in those steps; steps with some: {listed}")
    return steps


def _by_round(rows: pa.Table, rounds: pa.Table) -> Iterator[pa.Table]:
    """Groups that a refill added later passed through the operators later."""
    round_of = dict(zip(rounds["group_id"].to_pylist(), rounds["round"].to_pylist(), strict=True))
    numbers = np.array([round_of[group] for group in rows["group_id"].to_pylist()])
    for number in np.unique(numbers):
        yield rows.filter(pa.array(numbers == number))
