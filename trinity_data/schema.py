"""The rows of a run as Arrow schemas, and the ids that join them.

Rows are written once. What is learnt about a row later is a row of another table with the same id. A table is
stored only in the exact columns and types named here, so that every file of a table reads alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import pyarrow as pa

from trinity_data.errors import StoreError, did_you_mean, unknown_name

# for annotations: pyarrow's classes take type arguments in its stubs alone
Column: TypeAlias = "pa.ChunkedArray[Any]"
"""Of a table."""
Values: TypeAlias = "pa.Array[Any] | pa.ChunkedArray[Any]"

SCHEMA_VERSION = "6"

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str)
_TEXT = pa.string()
_SCORES = pa.map_(pa.string(), pa.float64())
_PER_TOKEN = pa.list_(pa.float32())
_MESSAGES = pa.list_(
    pa.struct(
        [
            ("role", _TEXT),
            ("content", _TEXT),  # null where a message has only tool calls
            ("tool_calls", _TEXT),  # JSON: a list of calls; null where there is none
            ("tool_call_id", _TEXT),  # of a tool's result: the call it answers
            ("name", _TEXT),
        ]
    )
)
_IMAGES = pa.list_(
    pa.struct(
        [
            ("path", _TEXT),  # relative to the folder of the task set
            ("sha256", _TEXT),  # of the file, in hexadecimal
            ("media_type", _TEXT),  # such as image/png
            ("width", pa.int32()),  # in pixels
            ("height", pa.int32()),
            ("message", pa.int32()),  # the position in `messages` of the one that shows it
        ]
    )
)
_TIME = pa.timestamp("us", tz="UTC")


def _schema(columns: Sequence[tuple[str, pa.DataType]]) -> pa.Schema:
    return pa.schema(columns)


TASKS = _schema(
    [
        ("task_id", _TEXT),
        ("stage", _TEXT),
        ("taskset", _TEXT),
        ("split", _TEXT),
        ("source", _TEXT),  # the file or hub id it was read from
        ("source_row", pa.int64()),
        ("position", pa.int64()),  # in the order the stream delivered
        ("prompt", _TEXT),
        ("messages", _MESSAGES),
        ("images", _IMAGES),
        ("answer", _TEXT),
        ("workflow", _TEXT),
        ("reward_fn", _TEXT),
        ("columns", _TEXT),  # JSON: every column of the task set's row
        ("scores", _SCORES),  # outputs of task operators: difficulty, quality, …
        ("kept", pa.bool_()),
        ("dropped_by", _TEXT),
        ("parent", _TEXT),  # the task that an operator made it of; null where it was read
    ]
)

GROUPS = _schema(
    [
        ("group_id", _TEXT),
        ("stage", _TEXT),
        ("step", pa.int64()),
        ("position", pa.int64()),  # of the group in its step
        ("task_id", _TEXT),
        ("epoch", pa.int64()),
        ("repeat_times", pa.int32()),
        ("round", pa.int32()),  # 0, or the refill that asked for it
    ]
)

EXPERIENCES = _schema(
    [
        ("experience_id", _TEXT),
        ("task_id", _TEXT),
        ("group_id", _TEXT),
        ("stage", _TEXT),
        ("step", pa.int64()),
        ("position", pa.int64()),  # of its group in the step
        ("rollout", pa.int32()),
        ("turn", pa.int32()),
        ("attempt", pa.int32()),
        ("explorer", _TEXT),
        ("engine", _TEXT),
        ("seed", pa.int64()),
        ("temperature", pa.float32()),
        ("top_p", pa.float32()),
        ("top_k", pa.int32()),
        ("max_tokens", pa.int32()),
        ("model_version", pa.int64()),
        ("version_spans", pa.list_(pa.struct([("start", pa.int32()), ("version", pa.int64())]))),
        ("prompt_length", pa.int32()),
        ("response_length", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),  # prompt and response
        ("logprobs", _PER_TOKEN),  # of the response, as sampled
        ("action_mask", pa.list_(pa.bool_())),  # of the response: trained or not
        # of the response, where top-p or top-k cut the distribution: what it was sampled from;
        # null where nothing was cut
        ("kept_tokens", pa.list_(pa.list_(pa.int32()))),
        # of the response: tokens that could not come, though nothing else was cut:
        # the end, before the fewest tokens
        ("banned_tokens", pa.list_(pa.list_(pa.int32()))),
        ("messages", _MESSAGES),
        ("images", _IMAGES),
        ("response_text", _TEXT),
        ("reward", pa.float64()),  # raw, of the rollout; shaping writes `outcomes`
        ("turn_reward", pa.float64()),  # raw, of this turn alone
        ("token_rewards", _PER_TOKEN),  # raw, of the response
        ("reward_parts", _SCORES),
        ("metrics", _SCORES),
        ("info", _TEXT),  # JSON
        ("truncated", _TEXT),  # "", "response" or "prompt"
        ("error", _TEXT),
        ("started_at", _TIME),
        ("seconds", pa.float64()),
        ("preference", _TEXT),  # "", "chosen" or "rejected"
        ("tools", _TEXT),  # JSON
    ]
)

FAILED_TOKENS = "failed_tokens"
"""In the JSON of the `info` of a rollout's last row: tokens of its attempts that failed, in no other row."""

IDENTITY = ("experience_id", "group_id", "stage", "step", "position", "rollout", "turn", "attempt")
"""Columns of an experience that belong to the run it is in; a copy of the row gets its own."""

OUTCOMES = _schema(
    [
        ("experience_id", _TEXT),
        ("group_id", _TEXT),
        ("stage", _TEXT),
        ("step", pa.int64()),
        ("reward", pa.float64()),  # after shaping
        ("advantage", pa.float64()),
        ("token_rewards", _PER_TOKEN),  # of the response, after shaping
        ("token_advantages", _PER_TOKEN),  # of the response
        ("scores", _SCORES),  # quality and whatever operators add
        ("kept", pa.bool_()),
        ("dropped_by", _TEXT),
    ]
)

DECISIONS = _schema(
    [
        ("row_kind", _TEXT),  # "task" or "experience"
        ("row_id", _TEXT),
        ("stage", _TEXT),
        ("step", pa.int64()),
        ("operator", _TEXT),
        ("position", pa.int32()),  # of the operator in its pipeline
        ("version", _TEXT),
        ("kept", pa.bool_()),
        ("reason", _TEXT),
        ("value_before", pa.float64()),
        ("value_after", pa.float64()),
        ("reward_before", pa.float64()),  # of an operator of experiences that writes the reward; else null
        ("reward_after", pa.float64()),
        ("microseconds", pa.float64()),
    ]
)

BATCHES = _schema(
    [
        ("stage", _TEXT),
        ("step", pa.int64()),
        ("position", pa.int32()),
        ("experience_id", _TEXT),
        ("advantage", pa.float64()),
        ("importance_weight", pa.float64()),  # mean over the row's tokens
        ("clipped", pa.float64()),  # share of the row's tokens
        ("loss_share", pa.float64()),
        ("logprobs", _PER_TOKEN),  # recomputed by the trainer before its update
        ("ref_logprobs", _PER_TOKEN),  # of the response, by the reference model
        ("teacher_logprobs", _PER_TOKEN),  # of the response, by a teacher
    ]
)

STEPS = _schema(
    [
        ("step", pa.int64()),
        ("stage", _TEXT),
        ("stage_step", pa.int64()),
        ("model_version", pa.int64()),  # made by this step
        ("num_experiences", pa.int64()),
        ("num_rollouts", pa.int64()),
        ("num_tokens", pa.int64()),
        ("reward", pa.float64()),
        ("loss", pa.float64()),
        ("grad_norm", pa.float64()),
        ("learning_rate", pa.float64()),
        ("metrics", _SCORES),
        ("started_at", _TIME),
        ("seconds", pa.float64()),
        ("configuration", _TEXT),  # that it was trained under
    ]
)

EVALS = _schema(
    [
        ("stage", _TEXT),
        ("step", pa.int64()),
        ("model_version", pa.int64()),
        ("taskset", _TEXT),
        ("task_id", _TEXT),
        ("rollout", pa.int32()),
        ("prompt", _TEXT),
        ("answer", _TEXT),
        ("response_text", _TEXT),
        ("response_length", pa.int32()),
        ("reward", pa.float64()),
        ("accuracy", pa.float64()),
        ("truncated", _TEXT),
        ("error", _TEXT),
        ("seconds", pa.float64()),
    ]
)

TASK_PROBES = _schema(
    [
        ("probe", _TEXT),  # an id: of the model, of how it was asked, and of the task
        ("at", _TIME),
        ("stage", _TEXT),
        ("taskset", _TEXT),
        ("task_id", _TEXT),
        ("prompt", _TEXT),
        ("answer", _TEXT),
        ("model", _TEXT),  # digest of its files
        ("model_version", pa.int64()),
        ("settings", _TEXT),  # JSON: sampling, template, workflow and reward
        ("rollouts", pa.int32()),
        ("failed", pa.int32()),
        ("passes", pa.int32()),
        ("rewards", pa.list_(pa.float64())),  # raw, of the rollouts that did not fail
        ("requests", pa.int64()),
        ("tokens", pa.int64()),  # of prompts and responses
        ("seconds", pa.float64()),
        ("error", _TEXT),  # of the first rollout that failed
    ]
)

MODEL_VERSIONS = _schema(
    [
        ("version", pa.int64()),
        ("stage", _TEXT),
        ("path", _TEXT),
        ("method", _TEXT),
        ("num_bytes", pa.int64()),
        ("published_at", _TIME),
        ("seconds", pa.float64()),
    ]
)

OPERATORS = _schema(
    [
        ("stage", _TEXT),
        ("step", pa.int64()),
        ("pipeline", _TEXT),  # "task" or "experience"
        ("operator", _TEXT),
        ("position", pa.int32()),
        ("version", _TEXT),
        ("rows_in", pa.int64()),
        ("rows_out", pa.int64()),
        ("microseconds", pa.float64()),
        ("metrics", _SCORES),  # what the operator itself reports
    ]
)

EVENTS = _schema([("at", _TIME), ("stage", _TEXT), ("step", pa.int64()), ("kind", _TEXT), ("message", _TEXT)])

CONTRACTS = _schema(
    [
        ("stage", _TEXT),
        ("step", pa.int64()),
        ("contract", _TEXT),  # its name
        ("kind", _TEXT),  # the check
        ("action", _TEXT),  # "warn", "quarantine" or "stop"
        ("value", pa.float64()),  # null where there was nothing to measure
        ("lower", pa.float64()),
        ("upper", pa.float64()),
        ("held", pa.bool_()),
        ("message", _TEXT),
        ("row_ids", pa.list_(_TEXT)),  # of the rows behind a breach
        ("dropped_ids", pa.list_(_TEXT)),  # of those that it dropped
    ]
)

CONFIGURATIONS = _schema(
    [
        ("configuration", _TEXT),  # an id: equal ones are equal
        ("at", _TIME),
        ("run_name", _TEXT),  # project/name
        ("first_step", pa.int64()),  # that was not trained yet when it came into force
        ("config", _TEXT),  # JSON: the pipeline file, resolved
        ("inputs", _TEXT),  # JSON: by stage and key, a digest of the file or folder it names
        ("packages", _TEXT),  # JSON: versions
    ]
)

VOCABULARY = _schema([("token_id", pa.int32()), ("text", _TEXT)])

# state changes that no other table tells: `states` of a commit, and the batches. With them the ledger's index
# can be derived from the segments alone. a batch that takes a row again moves it from `trained` to `trained`:
# the move is named apart, so that each row has at most one move to `trained`
REPLAYED = "replayed"
STATE_CHANGES = _schema(
    [
        ("sequence", pa.int64()),  # of the commit; the latest one of a row counts
        ("experience_id", _TEXT),
        ("state", _TEXT),
        ("step", pa.int64()),  # of the batch, when the state is `trained` or `replayed`
        ("position", pa.int32()),  # in the batch
    ]
)

# columns that sealed files of `experiences` have besides; null as long as more may become of a row
FINAL = _schema(
    [
        ("final_state", _TEXT),
        ("final_reward", pa.float64()),
        ("final_advantage", pa.float64()),
        # null too where no operator gave any: a raw reward is not written twice
        ("final_token_rewards", _PER_TOKEN),
        ("final_token_advantages", _PER_TOKEN),
        ("final_scores", _SCORES),
        ("final_kept", pa.bool_()),
        ("final_dropped_by", _TEXT),
        ("final_trained_step", pa.int64()),
    ]
)


def _named(name: str, schema: pa.Schema) -> pa.Schema:
    return schema.with_metadata({"trinity_table": name, "trinity_schema_version": SCHEMA_VERSION})


TABLES: dict[str, pa.Schema] = {
    name: _named(name, schema)
    for name, schema in {
        "tasks": TASKS,
        "groups": GROUPS,
        "experiences": EXPERIENCES,
        "outcomes": OUTCOMES,
        "decisions": DECISIONS,
        "batches": BATCHES,
        "steps": STEPS,
        "evals": EVALS,
        "task_probes": TASK_PROBES,
        "model_versions": MODEL_VERSIONS,
        "operators": OPERATORS,
        "events": EVENTS,
        "contracts": CONTRACTS,
        "configurations": CONFIGURATIONS,
        "vocabulary": VOCABULARY,
    }.items()
}
"""The tables of a run."""

STORED: dict[str, pa.Schema] = {**TABLES, "state_changes": _named("state_changes", STATE_CHANGES)}
"""Those that rest in the store, which keeps one for itself."""


def rows_to_table(name: str, rows: list[dict[str, object]]) -> pa.Table:
    """Rows as the table `name`; a missing field is null, an unknown one is our mistake."""
    schema = TABLES[name]
    for row in rows[:1]:
        unknown = row.keys() - set(schema.names)
        assert not unknown, f"{name} has no column {sorted(unknown)}"
    # reading a field's name makes a new string, so once a column and not once a row
    columns = [
        pa.array([row.get(name) for row in rows], type=kind)
        for name, kind in zip(schema.names, schema.types, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def conform(name: str, table: pa.Table) -> pa.Table:
    """`table` in the stored columns of `name`: missing ones null, other types cast.

    An unknown column is refused.
    """
    if name not in STORED:
        raise StoreError(unknown_name("table", name, STORED))
    target = STORED[name]
    if table.schema.equals(target, check_metadata=False):
        return table.replace_schema_metadata(target.metadata)
    if unknown := [column for column in table.column_names if column not in target.names]:
        near = did_you_mean(unknown[0], target.names)
        raise StoreError(f"table {name!r} has no column {unknown[0]!r}{near}")
    columns: list[Values] = []
    for field in target:
        is_there = field.name in table.column_names
        values = table[field.name] if is_there else pa.nulls(table.num_rows, field.type)
        try:
            columns.append(values.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise StoreError(f"{name}.{field.name} cannot be stored as {field.type}: {error}") from error
    return pa.Table.from_arrays(columns, schema=target)


def values_of(column: Values) -> list[Any]:
    """A column as Python values. Where nulls may be, the caller knows; the type does not."""
    values: list[Any] = column.to_pylist()
    return values


def lists_of(column: Column) -> pa.ListArray[Any]:
    """A column of lists in one piece, which the parts of a list are read from."""
    return cast("pa.ListArray[Any]", column.combine_chunks())


def filled(column: Column, value: Any) -> Column:
    """The column with `value` in the place of nulls."""
    return column.fill_null(value)


MESSAGE_FIELDS = tuple(field.name for field in _MESSAGES.value_type)


def message_row(message: Mapping[str, Any]) -> dict[str, str | None]:
    """A chat message as the column `messages` has it: tool calls, and content that is no text, as JSON."""
    content, calls = message.get("content"), message.get("tool_calls")
    return {
        "role": message["role"],
        "content": content if content is None or isinstance(content, str) else json.dumps(content),
        "tool_calls": json.dumps(calls, ensure_ascii=False) if calls else None,
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
    }


def is_whole_in_row(message: Mapping[str, Any]) -> bool:
    """Whether `message_from_row(message_row(message))` is all of the message."""
    return message.keys() <= {*MESSAGE_FIELDS} and isinstance(message.get("content"), str | None)


def message_from_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The chat message of a row: tool calls as a list, and without what is null, but for the content."""
    message = {name: value for name, value in row.items() if value is not None or name == "content"}
    return message | ({"tool_calls": json.loads(row["tool_calls"])} if row.get("tool_calls") else {})


def content_id(*parts: object) -> str:
    """32 hex digits that only equal content shares."""
    return hashlib.blake2b(_ENCODER.encode(parts).encode(), digest_size=16).hexdigest()


def group_id(explorer: str, stage: str, step: int, position: int) -> str:
    """Readable, sortable, and unique in a run as long as explorers' names are."""
    return f"{explorer}/{stage}/{step:07d}/{position:05d}"


def experience_id(group: str, rollout: int, turn: int = 0) -> str:
    """The id of one row of a group."""
    return f"{group}/{rollout:03d}/{turn:02d}"


def group_of(experience: str) -> str:
    """The group that an id of `experience_id` belongs to."""
    return experience.rsplit("/", 2)[0]


def rollout_of(experience: str) -> str:
    """The rollout that an id of `experience_id` belongs to: its turns share it."""
    return experience.rsplit("/", 1)[0]
