"""Batches of rows that lay there before the stage began.

Every row that is trained is a row of this run's store first; rows from elsewhere are copied in, step by step,
with where they came from in `info`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from trinity_data.dataset.reader import row_order
from trinity_data.schema import content_id, experience_id, rows_to_table
from trinity_data.store.protocol import WritableStore
from trinity_data.store.types import Commit, State
from trinity_operators import trainable

UNTRAINABLE = "untrainable"
"""Key of a row that is kept and never trained: the reason; empty or not there for others."""

OUTCOME_COLUMNS = {
    "shaped_reward": "reward",
    "advantage": "advantage",
    "shaped_token_rewards": "token_rewards",
    "token_advantages": "token_advantages",
}
"""What a row may have beside the columns of `experiences`, as the operators of another run left it:
the column of `outcomes` for each.
"""
NOT_COLUMNS = (*OUTCOME_COLUMNS, UNTRAINABLE)


class OfflineDataset(Protocol):
    """Training data that lies ready: one row a unit, or chosen and rejected for a preference pair."""

    num_units: int

    def rows(self, units: Sequence[int]) -> list[dict[str, Any]]:
        """Columns of `experiences` for these units, without ids and positions;
        and NOT_COLUMNS where there are any.
        """
        ...


class EpochSampler:
    """Which units a step takes: consecutive ones of the endless sequence of epochs,
    each in an order of its own.
    """

    def __init__(self, num_units: int, *, first_step: int, per_step: int, seed: int, shuffle: bool) -> None:
        self.num_units, self.first_step, self.per_step = num_units, first_step, per_step
        self.seed, self.shuffle = seed, shuffle

    def units(self, step: int) -> list[int]:
        """Those of a step."""
        start = (step - self.first_step) * self.per_step
        places = (divmod(number, self.num_units) for number in range(start, start + self.per_step))
        return [int(self._order(epoch)[position]) for epoch, position in places]

    def _order(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if getattr(self, "_cached_epoch", None) != epoch:
            self._cached_epoch = epoch
            self._cached_order = row_order(self.num_units, shuffle=self.shuffle, seed=self.seed + epoch)
        return self._cached_order


class OfflineSampler:
    """`batch_size` units a step, in an order that the seed shuffles anew in every epoch."""

    def __init__(
        self,
        store: WritableStore,
        data: OfflineDataset,
        *,
        stage: str,
        first_step: int,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        self.store, self.data, self.stage, self.batch_size = store, data, stage, batch_size
        self.order = EpochSampler(
            data.num_units, first_step=first_step, per_step=batch_size, seed=seed, shuffle=shuffle
        )

    async def next(self, step: int) -> list[str] | None:
        """Ids for `step`; rows that a killed run had copied for it are used as they are."""
        # they may all be such as are not trained, so that none waits
        if self.store.group_progress(self.stage, step):
            return self.store.pending(self.stage, through_step=step)
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
    """Rows from elsewhere as rows of this run, and the ids of those to train; all ids begin with `source`.

    An advantage becomes an outcome. A row that is not trained is dropped with the decision that says why.
    """
    experiences, outcomes = list[dict[str, object]](), list[dict[str, object]]()
    reasons = dict[str, str]()
    for position, row in enumerate(rows):
        group = f"{source}/{stage}/{step:07d}/{position:05d}"
        names = {"experience_id": experience_id(group, 0), "group_id": group, "stage": stage, "step": step}
        columns = {name: value for name, value in row.items() if name not in NOT_COLUMNS}
        place = {"position": position, "rollout": 0, "turn": 0, "attempt": 0}
        experiences.append(columns | names | place)
        outcome = names | {column: row.get(name) for name, column in OUTCOME_COLUMNS.items()}
        outcome |= {"reward": row.get("shaped_reward", row.get("reward")), "scores": {}}
        if row.get(UNTRAINABLE):
            reasons[str(names["experience_id"])] = row[UNTRAINABLE]
            outcomes.append(outcome | {"kept": False, "dropped_by": trainable.OPERATOR})
        elif row.get("advantage") is not None:
            outcomes.append(outcome | {"kept": True, "dropped_by": ""})
    tables = {"experiences": rows_to_table("experiences", experiences)}
    if outcomes:
        tables["outcomes"] = rows_to_table("outcomes", outcomes)
    if reasons:
        tables["decisions"] = trainable.decisions(reasons, row_kind="experience", stage=stage, step=step)
    ids = [str(row["experience_id"]) for row in experiences]
    return [row_id for row_id in ids if row_id not in reasons], tables


def checked(rows: Sequence[dict[str, Any]], max_model_len: int | None) -> list[dict[str, Any]]:
    """Rows that are trained together, or left out together where one of them cannot be trained."""
    reasons = [trainable.why_untrainable(row, max_model_len) for row in rows]
    bad = next((reason for reason in reasons if reason), "")
    if not bad:
        return list(rows)
    return [left_out(row, reason or f"of its pair: {bad}") for row, reason in zip(rows, reasons, strict=True)]


def left_out(row: dict[str, Any], reason: str) -> dict[str, Any]:
    """The row as one of which no token is trained."""
    return row | {UNTRAINABLE: reason, "action_mask": [False] * len(row["action_mask"] or ())}


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
