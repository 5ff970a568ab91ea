"""Small rows for the store's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from trinity_data.schema import experience_id, group_id, rows_to_table
from trinity_data.store.store import Store

Rows = Callable[..., pa.Table]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.create_or_open(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
def group() -> Rows:
    """`group(step, position, size)`: rewards 0, 1, 0, 1, …; rows named in `failed` carry an error."""

    def make(
        step: int = 1, position: int = 0, size: int = 4, *, stage: str = "rl", failed: tuple[int, ...] = ()
    ) -> pa.Table:
        name = group_id("explorer", stage, step, position)
        rows: list[dict[str, object]] = [
            {
                "experience_id": experience_id(name, rollout),
                "task_id": f"task-{position}",
                "group_id": name,
                "stage": stage,
                "step": step,
                "position": position,
                "rollout": rollout,
                "turn": 0,
                "model_version": step - 1,
                "version_spans": [{"start": 0, "version": step - 1}],
                "prompt_length": 2,
                "response_length": 3,
                "token_ids": [10, 11, 20 + rollout, 30 + rollout, 40 + rollout],
                "logprobs": [-0.5, -0.25, -0.125],
                "action_mask": [True, True, False],
                "messages": [{"role": "user", "content": f"question {position}"}],
                "response_text": f"answer {rollout}",
                "reward": float(rollout % 2),
                "reward_parts": {"accuracy": float(rollout % 2)},
                "error": "deadline passed" if rollout in failed else "",
            }
            for rollout in range(size)
        ]
        return rows_to_table("experiences", rows)

    return make


@pytest.fixture
def outcomes() -> Rows:
    """Outcomes of experiences: reward + 10, advantage reward - 0.5; rows named in `dropped` were not kept."""

    def make(rows: pa.Table, *, dropped: tuple[int, ...] = ()) -> pa.Table:
        return rows_to_table(
            "outcomes",
            [
                {
                    "experience_id": row["experience_id"],
                    "group_id": row["group_id"],
                    "stage": row["stage"],
                    "step": row["step"],
                    "reward": row["reward"] + 10,
                    "advantage": row["reward"] - 0.5,
                    "scores": {"quality": 0.5},
                    "kept": number not in dropped,
                    "dropped_by": "reward_filter" if number in dropped else "",
                }
                for number, row in enumerate(rows.to_pylist())
            ],
        )

    return make
