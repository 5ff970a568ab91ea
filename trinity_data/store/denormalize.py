"""What finally became of experiences, kept beside their rows in sealed files, so that a query need not join.

It follows from `outcomes` and `state_changes`, and is of the present: a past version, or a branch,
looks at those instead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.errors import StoreError
from trinity_data.schema import FINAL, conform
from trinity_data.store.snapshot import take_snapshot
from trinity_data.store.sql import SqlSession

_log = logging.getLogger(__name__)

# the columns of an experience from which the view `experiences` tells what became of it
KEYS = ("experience_id", "reward", "error")

# a failed rollout is processed too, so that it may still get an outcome; the other three states are ends
_ENDED = """
SELECT experience_id, state AS final_state, reward AS final_reward, advantage AS final_advantage,
    token_rewards AS final_token_rewards, token_advantages AS final_token_advantages, scores AS final_scores,
    kept AS final_kept, dropped_by AS final_dropped_by, trained_step AS final_trained_step
FROM experiences WHERE state IN ('trained', 'dropped', 'stale') OR (state = 'failed' AND kept IS NOT NULL)
"""


def final_columns(root: Path, rows: pa.Table) -> pa.Table:
    """The columns `FINAL` of experiences of which `rows` has KEYS, in their order.

    Null where more may come, and everywhere when damage hides what came.
    """
    try:
        snapshot = take_snapshot(root)
        if snapshot.damaged:
            raise StoreError("; ".join(snapshot.damaged))
        hot = snapshot.hot | {"experiences": conform("experiences", rows.select(KEYS))}
        these = replace(snapshot, sealed={**snapshot.sealed, "experiences": []}, hot=hot, final={})
        with SqlSession({"run": these}, None, "2GB", 1) as session:
            ended = session.query(_ENDED)
    except StoreError as error:
        _log.warning("what became of %d experiences is not written beside them: %s", rows.num_rows, error)
        return nothing_final(rows.num_rows)
    places = pc.index_in(rows["experience_id"], value_set=ended["experience_id"])
    return ended.select(FINAL.names).take(places).cast(FINAL)


def num_final(columns: pa.Table) -> int:
    """How many rows have come to their end."""
    return int(columns.num_rows - columns["final_state"].null_count)


def nothing_final(num_rows: int) -> pa.Table:
    """The columns where nobody looked."""
    return pa.table([pa.nulls(num_rows, field.type) for field in FINAL], schema=FINAL)


def with_final_columns(parts: Iterable[pa.Table], columns: pa.Table) -> Iterator[pa.Table]:
    """The rows of `parts`, which are experiences, with the columns of all of them."""
    start = 0
    for part in parts:
        final = columns.slice(start, part.num_rows)
        start += part.num_rows
        yield pa.Table.from_arrays([*part.columns, *final.columns], schema=with_final(part.schema))


def with_final(schema: pa.Schema) -> pa.Schema:
    """The columns of sealed experiences that were stored in those of `schema`."""
    return pa.schema([*schema, *FINAL]).with_metadata(schema.metadata)
