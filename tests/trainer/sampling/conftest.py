"""A store with groups that wait to be trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from trinity_data.schema import experience_id, group_id, rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit

START = datetime(2026, 1, 1, tzinfo=UTC)
Put = Callable[..., list[str]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.create_or_open(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
def put(store: Store) -> Put:
    """`put(step, sizes, version=…, turns=…)`: groups of kept rollouts made for a step.

    Returns the ids of their rows. `version` and `turns` go round the rollouts of a group.
    """

    def make(
        step: int,
        sizes: Sequence[int] = (2,),
        *,
        version: int | Sequence[int] | None = None,
        turns: Sequence[int] = (1,),
        explorer: str = "explorer",
    ) -> list[str]:
        versions = [version] if isinstance(version, int) else version or [step - 1]
        rows: list[dict[str, object]] = [
            {
                "experience_id": experience_id(group_id(explorer, "rl", step, position), rollout, turn),
                "group_id": group_id(explorer, "rl", step, position), "stage": "rl", "step": step,
                "position": position, "rollout": rollout, "turn": turn,
                "model_version": versions[rollout % len(versions)], "token_ids": [1, 2, 3],
                "prompt_length": 1, "response_length": 2, "logprobs": [-0.5, -0.5],
                "action_mask": [True, True], "reward": 1.0, "error": "",
            }
            for position, size in enumerate(sizes)
            for rollout in range(size)
            for turn in range(turns[rollout % len(turns)])
        ]  # fmt: skip
        keys = ("experience_id", "group_id", "stage", "step")
        outcomes = [{key: row[key] for key in keys} | {"kept": True, "advantage": 1.0} for row in rows]
        tables = {
            "experiences": rows_to_table("experiences", rows),
            "outcomes": rows_to_table("outcomes", outcomes),
        }
        store.commit(Commit(tables=tables))
        return [str(row["experience_id"]) for row in rows]

    return make


@pytest.fixture
def train(store: Store) -> Callable[[int, list[str]], None]:
    """Forms the batch of a step and records that it was trained, step n being read n seconds after START."""

    def record(step: int, ids: list[str]) -> None:
        store.form_batch("rl", step, ids, replay=True)
        row: dict[str, object] = {
            "step": step,
            "stage": "rl",
            "started_at": START + timedelta(seconds=step),
        }
        store.commit(Commit(tables={"steps": rows_to_table("steps", [row])}))

    return record
