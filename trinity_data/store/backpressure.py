"""How many rollouts, and bytes of their rows, may wait for the trainer before the explorer waits too."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.schema import Column, filled
from trinity_data.store.protocol import ReadableStore

# the columns that grow with a row's length; the others are a few hundred bytes
SIZED = (
    "token_ids", "logprobs", "action_mask", "kept_tokens", "banned_tokens", "token_rewards", "response_text",
)  # fmt: skip


class Backpressure:
    """Of one stage. A limit is reached, not exceeded: with 100 rollouts allowed, 100 that wait are enough."""

    def __init__(self, store: ReadableStore, stage: str, *, max_rollouts: int, max_bytes: int | None) -> None:
        self.store, self.stage, self.max_rollouts, self.max_bytes = store, stage, max_rollouts, max_bytes
        self._bytes: dict[str, int] = {}

    def excess(self, through_step: int) -> str:
        """What is too much of the steps up to `through_step`, in words; nothing while there is room."""
        num_rows = self.store.num_pending(self.stage, through_step=through_step)
        # the tallies have the rows; rollouts are counted one by one, and are never more
        if num_rows >= self.max_rollouts:
            number = self.store.num_pending_rollouts(self.stage, through_step=through_step)
            if number >= self.max_rollouts:
                return f"{number:,} rollouts wait for the trainer; capacity is {self.max_rollouts:,}"
        if self.max_bytes is None or not num_rows:
            return ""
        num_bytes = self.pending_bytes(through_step)
        if num_bytes >= self.max_bytes:
            return f"{num_bytes:,} bytes of rows wait for the trainer; capacity_bytes is {self.max_bytes:,}"
        return ""

    def pending_bytes(self, through_step: int) -> int:
        """Tokens, log-probs, masks, kept tokens and text of the rows that wait; each row is measured once."""
        waiting = self.store.pending(self.stage, through_step=through_step)
        new = [row for row in waiting if row not in self._bytes]
        measured = dict(zip(new, row_bytes(self.store.read(new, columns=SIZED)).tolist(), strict=True))
        self._bytes = {row: measured[row] if row in measured else self._bytes[row] for row in waiting}
        return sum(self._bytes.values())


def row_bytes(rows: pa.Table) -> npt.NDArray[np.int64]:
    """The size of each row's long columns, as Arrow holds them; a bool is counted as a byte."""
    total = np.zeros(rows.num_rows, np.int64)
    for name in SIZED:
        column = rows[name]
        if pa.types.is_string(column.type):
            total += _lengths(pc.binary_length(column))
        elif pa.types.is_list(column.type.value_type):
            inner = _lengths(pc.list_value_length(pc.list_flatten(column)))
            of_row = pc.list_parent_indices(column).to_numpy()
            sums = np.bincount(of_row, weights=inner, minlength=rows.num_rows).astype(np.int64)
            total += sums * _width(column.type.value_type)
        else:
            total += _lengths(pc.list_value_length(column)) * _width(column.type)
    return total


def _lengths(lengths: Column) -> npt.NDArray[np.int64]:
    return np.asarray(filled(lengths, 0).to_numpy(), dtype=np.int64)


def _width(lists: pa.ListType[Any]) -> int:
    return max(1, int(lists.value_type.bit_width) // 8)
