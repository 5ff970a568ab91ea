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
import pyarrow as pa

from trinity_data.pipeline.source import row_order
from trinity_data.schema import content_id, experience_id, rows_to_table
from trinity_data.store.commit import Commit
from trinity_data.store.state import State
from trinity_data.store.store import Store

OUTCOME_KEYS = ("advantage", "shaped_reward")


class OfflineRows(Protocol):
    """Training data that lies ready: one row a unit, or chosen and rejected for a preference pair."""

    num_units: int

    def rows(self, units: Sequence[int]) -> list[dict[str, Any]]:
        """Columns of `experiences` for these units, without ids and positions; and OUTCOME_KEYS where a run judged them."""
        ...


class UnitOrder:
    """Which units a step takes: consecutive ones of the endless sequence of epochs, each in an order of its own."""

    def __init__(self, num_units: int, *, first_step: int, per_step: int, seed: int, shuffle: bool) -> None:
        self.num_units, self.first_step, self.per_step = num_units, first_step, per_step
        self.seed, self.shuffle = seed, shuffle

    def units(self, step: int) -> list[int]:
        """Those of a step."""
        start = (step - self.first_step) * self.per_step
        return [self._unit(number) for number in range(start, start + self.per_step)]

    def _unit(self, number: int) -> int:
        epoch, position = divmod(number, self.num_units)
        return int(self._order(epoch)[position])

    def _order(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if getattr(self, "_cached_epoch", None) != epoch:
            self._cached_epoch = epoch
            self._cached_order = row_order(self.num_units, shuffle=self.shuffle, seed=self.seed + epoch)
        return self._cached_order


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
        self.store, self.data, self.stage, self.batch_size = store, data, stage, batch_size
        self.order = UnitOrder(
            data.num_units, first_step=first_step, per_step=batch_size, seed=seed, shuffle=shuffle
        )

    async def next(self, step: int) -> list[str] | None:
        """Ids for `step`; rows that a killed run had copied for it are used as they are."""
        pending = self.store.pending(self.stage, through_step=step)
        if pending:
            return pending
        ids, tables = copied_rows(self.data.rows(self.units(step)), "data", self.stage, step)
        commit = Commit(tables=tables, states=[(row_id, State.PENDING) for row_id in ids])
        await asyncio.wrap_future(self.store.submit(commit))
        return ids

    def units(self, step: int) -> list[int]:
        """The units of a step."""
        return self.order.units(step)


def copied_rows(
    rows: Sequence[dict[str, Any]], source: str, stage: str, step: int
) -> tuple[list[str], dict[str, pa.Table]]:
    """Rows from elsewhere as rows of this run, with ids that begin with `source`; an advantage becomes an outcome."""
    experiences, outcomes = list[dict[str, object]](), list[dict[str, object]]()
    for position, row in enumerate(rows):
        group = f"{source}/{stage}/{step:07d}/{position:05d}"
        names = {"experience_id": experience_id(group, 0), "group_id": group, "stage": stage, "step": step}
        found = {name: value for name, value in row.items() if name not in OUTCOME_KEYS}
        place = {"position": position, "rollout": 0, "turn": 0, "attempt": 0}
        experiences.append(found | names | place)
        if row.get("advantage") is not None:
            judged = {"reward": row.get("shaped_reward", row.get("reward")), "advantage": row["advantage"]}
            outcomes.append(names | judged | {"scores": {}, "kept": True, "dropped_by": ""})
    tables = {"experiences": rows_to_table("experiences", experiences)}
    if outcomes:
        tables["outcomes"] = rows_to_table("outcomes", outcomes)
    return [str(row["experience_id"]) for row in experiences], tables


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
