"""The tables that rest in the store: those of a run, and `state_changes`, which the store keeps for itself.

A table is written only in the exact columns and types named here, so that every file of a table reads alike.
"""

from __future__ import annotations

import pyarrow as pa

from trinity_data import schema
from trinity_data.errors import StoreError, did_you_mean, unknown_name

# State changes that no other table tells: `states` of a commit, and the batches. With them the ledger's index
# can be derived from the segments alone. a batch that takes a row again moves it from `trained` to `trained`:
# the move is named apart, so that each row has at most one move to `trained`
REPLAYED = "replayed"
STATE_CHANGES = pa.schema(
    [
        ("sequence", pa.int64()),  # of the commit; the latest one of a row counts
        ("experience_id", pa.string()),
        ("state", pa.string()),
        ("step", pa.int64()),  # of the batch, when the state is `trained` or `replayed`
        ("position", pa.int32()),  # in the batch
    ]
)

STORED: dict[str, pa.Schema] = {
    **schema.TABLES,
    "state_changes": STATE_CHANGES.with_metadata(
        {"trinity_table": "state_changes", "trinity_schema_version": schema.SCHEMA_VERSION}
    ),
}


# columns that sealed files of `experiences` have besides; null as long as more may become of a row
FINAL = pa.schema(
    [
        ("final_state", pa.string()),
        ("final_reward", pa.float64()),
        ("final_advantage", pa.float64()),
        # null too where no operator gave any: a raw reward is not written twice
        ("final_token_rewards", schema.OUTCOMES.field("token_rewards").type),
        ("final_token_advantages", schema.OUTCOMES.field("token_advantages").type),
        ("final_scores", schema.OUTCOMES.field("scores").type),
        ("final_kept", pa.bool_()),
        ("final_dropped_by", pa.string()),
        ("final_trained_step", pa.int64()),
    ]
)


def conform(name: str, table: pa.Table) -> pa.Table:
    """`table` in the stored columns of `name`: missing ones null, other types cast.

    An unknown column is refused.
    """
    if name not in STORED:
        raise StoreError(unknown_name("table", name, STORED))
    target = STORED[name]
    if table.schema.equals(target, check_metadata=False):
        return table.replace_schema_metadata(target.metadata)
    for column in table.column_names:
        if column not in target.names:
            raise StoreError(f"table {name!r} has no column {column!r}{did_you_mean(column, target.names)}")
    columns = [_column(name, table, field) for field in target]
    return pa.Table.from_arrays(columns, schema=target)


def _column(name: str, table: pa.Table, field: pa.Field) -> pa.ChunkedArray:
    if field.name not in table.column_names:
        return pa.chunked_array([pa.nulls(table.num_rows, field.type)])
    try:
        return table[field.name].cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise StoreError(f"{name}.{field.name} cannot be stored as {field.type}: {error}") from error
