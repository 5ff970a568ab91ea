"""Where an experience came from and what it did; what a step and a checkpoint were made of.

Everything is read from the rows of the run as they stand. What no row tells is left out, never guessed.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import pyarrow as pa

from trinity_data.errors import StoreError
from trinity_data.progress import SERVED, stage_done_key
from trinity_data.schema import rollout_of
from trinity_data.store.retention import expired_range_of
from trinity_data.store.snapshot import snapshot_with, store_folder
from trinity_data.store.sql import SqlSession

_T = TypeVar("_T")

# the rows of a task set as tasks; one read twice by a stage counts once, and what no stream has read comes
# last
ORIGINS = """
SELECT stage, task_id, arg_min(taskset, place) AS taskset, arg_min(split, place) AS split,
    arg_min(source, place) AS source, arg_min(source_row, place) AS source_row, min(position) AS position,
    arg_min(prompt, place) AS prompt, arg_min(answer, place) AS answer
FROM (SELECT *, coalesce(position, 2 ** 62) AS place FROM tasks) GROUP BY stage, task_id
"""
# a row of training data names its source itself
_EXPERIENCES = f"""
SELECT e.*, t.taskset, t.split, t.position AS task_position, t.prompt, t.answer,
    coalesce(t.source, j ->> '$.source', j ->> '$.run', j ->> '$.origin.source', j ->> '$.origin.run',
    '') AS source,
    coalesce(t.source_row, (j ->> '$.row')::BIGINT) AS source_row, coalesce(j ->> '$.experience_id',
    j ->> '$.origin.experience_id') AS copied_from
FROM (SELECT *, CASE WHEN json_valid(info) THEN info::JSON END AS j FROM experiences) e
LEFT JOIN ({ORIGINS}) t ON t.stage = e.stage AND t.task_id = e.task_id
"""
# columns of `experiences` with a value for each token
_LONG = (
    "token_ids, logprobs, action_mask, kept_tokens, banned_tokens, token_rewards, raw_token_rewards, "
    "token_advantages"
)
_DECISIONS = """
SELECT d.operator, d.position, d.version, d.kept, d.reason, d.value_before AS before, d.value_after AS after
FROM decisions d JOIN asked a ON d.row_id = a.id AND d.row_kind = a.kind AND d.stage = a.stage
ORDER BY d.position
"""
_MEMBERS = """
SELECT experience_id, raw_reward, reward, advantage, state FROM experiences JOIN asked ON group_id = asked.id
ORDER BY rollout, turn
"""
_USES = """
SELECT m.step, m.position, b.advantage, b.importance_weight, b.clipped, b.loss_share, s.loss, s.learning_rate,
    s.grad_norm, s.model_version, b.experience_id IS NOT NULL AS finished, s.configuration,
    (SELECT min(c.first_step) FROM configurations c WHERE c.configuration = s.configuration) AS in_force_from
FROM state_changes m JOIN asked ON m.experience_id = asked.id AND m.state IN ('trained', 'replayed')
LEFT JOIN batches b ON b.experience_id = m.experience_id AND b.step = m.step
LEFT JOIN steps s ON s.step = m.step
ORDER BY m.step
"""
_TRAINED_STEPS = (
    "SELECT 'there are steps ' || min(trained_step) || ' to ' || max(trained_step) AS steps FROM experiences"
)
# the rows of batches; a rollout's reward, which each turn has, counts once
_TRAINED = f"""
SELECT e.* EXCLUDE ({_LONG}, j, messages) REPLACE (m.step AS trained_step),
    row_number() OVER (PARTITION BY m.step, e.group_id, e.rollout ORDER BY e.turn) = 1 AS first_turn
FROM ({_EXPERIENCES}) e JOIN state_changes m USING (experience_id) WHERE m.state IN ('trained', 'replayed')
"""
# `trained_rows` are those of the batches that were asked for
_STEPS = """
SELECT b.trained_step AS step, any_value(b.stage) AS stage, count(*) AS experiences, avg(b.raw_reward)
    FILTER (first_turn) AS raw_reward,
    avg(b.reward) FILTER (first_turn) AS reward, any_value(s.loss) AS loss,
    any_value(s.learning_rate) AS learning_rate,
    any_value(s.model_version) AS model_version, min(b.step) AS first_made_for, max(b.step) AS last_made_for,
    any_value(s.configuration)[:8] AS configuration
FROM trained_rows b LEFT JOIN steps s ON s.step = b.trained_step GROUP BY b.trained_step
    ORDER BY b.trained_step
"""
_SOURCES = """
SELECT stage, coalesce(taskset, 'training data') AS taskset, source, count(DISTINCT task_id) AS tasks,
    count(*) AS experiences, min(source_row) AS first_row, max(source_row) AS last_row
FROM trained_rows GROUP BY ALL ORDER BY ALL
"""
_ROLLOUTS = """
SELECT stage, engine, temperature, top_p, top_k, max_tokens, min(model_version) AS first_version,
    max(model_version) AS last_version, count(*) AS experiences, count(DISTINCT seed) AS seeds
FROM trained_rows GROUP BY ALL ORDER BY ALL
"""
_GROUPS = """
SELECT group_id, any_value(task_id) AS task_id, any_value(source_row) AS source_row, count(*) AS experiences,
    avg(b.raw_reward) FILTER (first_turn) AS raw_reward, avg(b.reward) FILTER (first_turn) AS reward,
    min(b.advantage) AS lowest, max(b.advantage) AS highest,
    avg(u.importance_weight) AS importance_weight, avg(u.clipped) AS clipped, sum(u.loss_share) AS loss_share
FROM trained_rows b LEFT JOIN batches u ON u.experience_id = b.experience_id AND u.step = b.trained_step
GROUP BY group_id ORDER BY group_id
"""
_TASK_OPERATORS = """
SELECT d.stage, d.position, d.operator, d.version, count(*) AS seen, count(*) FILTER (NOT d.kept) AS dropped,
    min(d.value_after) AS lowest, max(d.value_after) AS highest
FROM decisions d SEMI JOIN trained_rows b ON b.stage = d.stage AND b.task_id = d.row_id
WHERE d.row_kind = 'task' GROUP BY ALL ORDER BY ALL
"""
# of everything that was generated beside the batch, so that what was dropped shows
_OPERATORS = """
SELECT d.stage, d.position, d.operator, d.version, count(*) AS seen, count(*) FILTER (NOT d.kept) AS dropped,
    min(d.value_after) AS lowest, max(d.value_after) AS highest
FROM decisions d SEMI JOIN trained_rows b ON b.stage = d.stage AND b.step = d.step
WHERE d.row_kind = 'experience' GROUP BY ALL ORDER BY ALL
"""


@dataclass(frozen=True)
class Origin:
    """The row of a file, of the hub or of another run that it began with."""

    stage: str
    task_id: str
    taskset: str | None
    split: str | None
    source: str
    source_row: int | None
    task_position: int | None
    """In the order in which the stream delivered."""
    prompt: str | None
    answer: str | None
    copied_from: str | None = None
    """The experience of another run."""


@dataclass(frozen=True)
class Decision:
    """What one operator said of one row."""

    operator: str
    position: int
    version: str
    kept: bool
    reason: str
    before: float | None
    after: float | None
    settings: Mapping[str, Any] | None
    """As in the pipeline file; None for one that is not in it, such as an algorithm's own."""
    reward_before: float | None = None
    reward_after: float | None = None


@dataclass(frozen=True)
class Member:
    """One row of a group."""

    experience_id: str
    raw_reward: float | None
    reward: float | None
    advantage: float | None
    state: str


@dataclass(frozen=True)
class Use:
    """An optimizer step that an experience was part of."""

    step: int
    position: int
    advantage: float | None
    importance_weight: float | None
    clipped: float | None
    loss_share: float | None
    loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    model_version: int | None
    finished: bool
    """False while the batch is formed and not yet trained."""
    checkpoint: str | None
    """The first one that holds the step."""
    configuration: str | None = None
    """That the step was trained under, by its id in `configurations`."""
    in_force_from: int | None = None
    """The first step under it."""


@dataclass(frozen=True)
class ExperienceLineage:
    """The whole chain of one experience."""

    row: Mapping[str, Any]
    """Its columns of the view `experiences`, without the tokens."""
    origin: Origin
    task_decisions: list[Decision]
    decisions: list[Decision]
    reward_explained: bool
    """Whether the decisions lead from the raw reward to the final one."""
    members: list[Member]
    uses: list[Use]
    expired_at: str | None
    """When its tokens, log-probs and texts were taken off the disk, in UTC; None while it has them."""
    stage_ended_at: int | None = None
    """The last step of its stage, once that has ended."""

    @property
    def num_rollouts(self) -> int:
        """Of its group."""
        return len({rollout_of(member.experience_id) for member in self.members})

    def rollout_rewards(self) -> list[float]:
        """One of each rollout of its group that has one: every turn has the reward of its rollout."""
        rewards = {rollout_of(m.experience_id): m.reward for m in self.members if m.reward is not None}
        return list(rewards.values())


@dataclass(frozen=True)
class StepsLineage:
    """What the batches of one step or several were made of; each list holds rows of one summary."""

    first: int
    last: int
    checkpoint: str | None
    steps: list[dict[str, Any]]
    sources: list[dict[str, Any]]
    task_operators: list[dict[str, Any]]
    rollouts: list[dict[str, Any]]
    operators: list[dict[str, Any]]
    groups: list[dict[str, Any]]


class Lineage:
    """Answers about one version of a run."""

    def __init__(self, run: Path) -> None:
        self.run = run
        snapshot, (self.checkpoints, self.progress) = snapshot_with(store_folder(run), _read_ledger)
        self.settings = operator_settings(run)
        self.session = SqlSession({run.name: snapshot}, 60.0, "2GB", None)

    def __enter__(self) -> Lineage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session.close()

    def experience(self, experience_id: str) -> ExperienceLineage:
        """The chain of one experience. Raises StoreError when the run has none of that name."""
        chosen = f"SELECT e.* EXCLUDE ({_LONG}, j) FROM ({_EXPERIENCES}) e"
        rows = self.rows(f"{chosen} JOIN asked ON e.experience_id = asked.id", id=experience_id)
        if not rows:
            all_rows = self.rows("SELECT count(*) AS n, min(experience_id) AS first FROM rollouts")[0]
            example = f", such as {all_rows['first']!r}" if all_rows["n"] else ""
            raise StoreError(
                f"{experience_id!r} is no experience of {self.run}; it has {all_rows['n']:,}{example}. "
                "A step is named by its number, a checkpoint by its folder, global_step_N"
            )
        row = rows[0]
        root = store_folder(self.run)
        _, lost = snapshot_with(root, lambda ledger: expired_range_of(ledger, experience_id))
        decisions = self.decisions("experience", experience_id, row["stage"])
        traced = trace_reward(decisions, row["raw_reward"], row["reward"])
        return ExperienceLineage(
            row=row,
            origin=_build(Origin, row),
            task_decisions=self.decisions("task", row["task_id"], row["stage"]),
            decisions=traced or decisions,
            reward_explained=traced is not None,
            members=[_build(Member, member) for member in self.rows(_MEMBERS, id=row["group_id"])],
            uses=[
                _build(Use, use | {"checkpoint": self.checkpoint_of(use["step"])})
                for use in self.rows(_USES, id=experience_id)
            ],
            expired_at=None if lost is None else lost.at,
            stage_ended_at=self.progress.get(stage_done_key(row["stage"])),
        )

    def steps(self, first: int, last: int) -> StepsLineage:
        """What the batches of these steps were made of."""
        batch_rows = self.session.query(f"{_TRAINED} AND m.step BETWEEN {int(first)} AND {int(last)}")
        if not batch_rows.num_rows:
            (trained,) = self.rows(_TRAINED_STEPS)
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            there = trained["steps"] or "no batch was formed yet"
            raise StoreError(f"{steps}: no batch holds a row; {there}")
        self.session.register("trained_rows", batch_rows)
        return StepsLineage(
            first=first,
            last=last,
            checkpoint=self.checkpoint_of(last),
            steps=self.rows(_STEPS),
            sources=self.rows(_SOURCES),
            task_operators=self._with_settings("task", self.rows(_TASK_OPERATORS)),
            rollouts=self.rows(_ROLLOUTS),
            operators=self._with_settings("experience", self.rows(_OPERATORS)),
            groups=self.rows(_GROUPS),
        )

    def checkpoint(self, name: str) -> StepsLineage:
        """The steps that a checkpoint holds and the one before it does not.

        `name` may be a path into its folder.
        """
        folder = re.search(r"global_step_(\d+)", name)
        step = None if folder is None else int(folder[1])
        if step not in self.checkpoints:
            names = ", ".join(self.checkpoints.values()) or "none"
            raise StoreError(f"{name!r} is no checkpoint that the run has; there are: {names}")
        before = max((other for other in self.checkpoints if other < step), default=0)
        return self.steps(before + 1, step)

    def decisions(self, kind: str, row_id: str, stage: str) -> list[Decision]:
        """What each operator said of a task or an experience, in order."""
        rows = self.rows(_DECISIONS, id=row_id, kind=kind, stage=stage)
        return [_build(Decision, row) for row in self._with_settings(kind, rows, stage)]

    def checkpoint_of(self, step: int) -> str | None:
        """The first checkpoint that holds a step."""
        return next((path for at, path in sorted(self.checkpoints.items()) if at >= step), None)

    def rows(self, sql: str, **columns: Any) -> list[dict[str, Any]]:
        """The rows of a query that may join the one row `asked`, of these columns."""
        if columns:
            self.session.register("asked", pa.table({name: [value] for name, value in columns.items()}))
        return list(self.session.query(sql).to_pylist(maps_as_pydicts="lossy"))

    def _with_settings(
        self, kind: str, rows: list[dict[str, Any]], stage: str | None = None
    ) -> list[dict[str, Any]]:
        """A class of the user's is named `file.py:Class` in the pipeline file and `Class` in decisions."""
        with_settings = []
        for row in rows:
            arguments = [
                arguments
                for name, arguments in self.settings.get((stage or row["stage"], kind), [])
                if name == row["operator"] or name.endswith(f":{row['operator']}")
            ]
            with_settings.append(row | {"settings": arguments[0] if len(arguments) == 1 else None})
        return with_settings


def trace_reward(
    decisions: Sequence[Decision], raw: float | None, final: float | None
) -> list[Decision] | None:
    """The decisions with the reward before and after each,
    or None where they do not lead from `raw` to `final`.

    A decision does not say which column its numbers are about, so one whose `before` equals the reward may be
    about another column: both readings are tried, and the one that ends at `final` is right.
    """
    if not decisions:
        return [] if raw == final else None
    first, rest = decisions[0], decisions[1:]
    readings = [raw]
    if first.before is not None and first.before == raw and first.after is not None and first.after != raw:
        readings.insert(0, first.after)
    for after in readings:
        traced = trace_reward(rest, after, final)
        if traced is not None:
            return [replace(first, reward_before=raw, reward_after=after), *traced]
    return None


def operator_settings(run: Path) -> dict[tuple[str, str], list[tuple[str, Mapping[str, Any]]]]:
    """Names and arguments of operators, by stage and pipeline, as the run was last started with."""
    try:
        stages = json.loads((run / "config.json").read_text())["stages"]
        return {
            (stage["stage_name"], kind): [
                (operator["name"], operator["args"])
                for operator in stage["data_processor"][f"{kind}_pipeline"]["operators"]
            ]
            for stage in stages
            for kind in ("task", "experience")
        }
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # a store without a configuration, or of another version
        return {}


def _build(kind: type[_T], row: Mapping[str, Any]) -> _T:
    """A dataclass of the columns that it names."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in row.items() if name in names})


def _read_ledger(ledger: sqlite3.Connection) -> tuple[dict[int, str], dict[str, Any]]:
    checkpoints = dict(ledger.execute("SELECT step, path FROM checkpoints ORDER BY step").fetchall())
    # sessions of agents outside may be many, with all their replies
    progress = ledger.execute(
        "SELECT key, value FROM progress WHERE substr(key, 1, ?) <> ?", (len(SERVED), SERVED)
    ).fetchall()
    return checkpoints, {key: json.loads(value) for key, value in progress}
