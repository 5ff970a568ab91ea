"""Batches of rows that lay there before the stage began.

Every row that is trained is a row of this run's store first; rows from elsewhere are copied in, step by step, with
where they came from in `info`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from trinity_data.pipeline.source import row_order
from trinity_data.schema import content_id, experience_id, rows_to_table
from trinity_data.store.commit import Commit
from trinity_data.store.state import State
from trinity_data.store.store import Store


class OfflineRows(Protocol):
    """Training data that lies ready: one row a unit, or chosen and rejected for a preference pair."""

    num_units: int

    def rows(self, units: Sequence[int]) -> list[dict[str, Any]]:
        """Columns of `experiences` for these units, without ids and positions."""
        ...


class OfflineBatches:
    """`batch_size` units a step, in an order that the seed shuffles anew in every epoch."""

    def __init__(
        self,
        store: Store,
        data: OfflineRows,
        *,
        stage: str,
        first_step: int,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        self.store, self.data, self.stage, self.first_step = store, data, stage, first_step
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle

    async def next(self, step: int) -> list[str] | None:
        """Ids for `step`; rows that a killed run had copied for it are used as they are."""
        pending = self.store.pending(self.stage, through_step=step)
        if pending:
            return pending
        rows = self._numbered(step, self.data.rows(self.units(step)))
        ids = [str(row["experience_id"]) for row in rows]
        table = rows_to_table("experiences", rows)
        commit = Commit(tables={"experiences": table}, states=[(row_id, State.PENDING) for row_id in ids])
        await asyncio.wrap_future(self.store.submit(commit))
        return ids

    def units(self, step: int) -> list[int]:
        """The units of a step: consecutive in the endless sequence of shuffled epochs."""
        start = (step - self.first_step) * self.batch_size
        return [self._unit(number) for number in range(start, start + self.batch_size)]

    def _unit(self, number: int) -> int:
        epoch, position = divmod(number, self.data.num_units)
        return int(self._order(epoch)[position])

    def _order(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if getattr(self, "_cached_epoch", None) != epoch:
            self._cached_epoch = epoch
            self._cached_order = row_order(self.data.num_units, shuffle=self.shuffle, seed=self.seed + epoch)
        return self._cached_order

    def _numbered(self, step: int, rows: list[dict[str, Any]]) -> list[dict[str, object]]:
        numbered: list[dict[str, object]] = []
        for position, row in enumerate(rows):
            group = f"data/{self.stage}/{step:07d}/{position:05d}"
            names = {
                "experience_id": experience_id(group, 0),
                "group_id": group,
                "stage": self.stage,
                "step": step,
            }
            numbered.append(row | names | {"position": position, "rollout": 0, "turn": 0, "attempt": 0})
        return numbered


def dataset_row(
    *,
    prompt_ids: list[int],
    response_ids: list[int],
    messages: list[dict[str, str]],
    response: str,
    origin: dict[str, object],
    preference: str = "",
) -> dict[str, Any]:
    """Columns of an experience that nobody sampled: no log-probs, every response token trained."""
    return {
        "task_id": content_id(messages, response),
        "explorer": "",
        "engine": "dataset",
        "temperature": 1.0,
        "prompt_length": len(prompt_ids),
        "response_length": len(response_ids),
        "token_ids": prompt_ids + response_ids,
        "logprobs": [],
        "action_mask": [True] * len(response_ids),
        "messages": messages,
        "response_text": response,
        "info": json.dumps(origin),
        "truncated": "",
        "error": "",
        "preference": preference,
        "tools": "",
    }  # fmt: skip
