"""Steps of rollouts in a store, with their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from trinity_data.config import ContractConfig
from trinity_data.schema import experience_id, group_id, rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_operators.contracts.step_contracts import ContractChecker, Finding

Put = Callable[..., list[str]]
Check = Callable[..., Finding]


@pytest.fixture
def put(store: Store) -> Put:
    """`put(step, rows, dropped)`: rows of a step by what differs in them, two a group; returns their ids."""

    def write(step: int, rows: Sequence[dict[str, Any]], *, dropped: Sequence[int] = ()) -> list[str]:
        experiences: list[dict[str, object]] = []
        for number, row in enumerate(rows):
            position, rollout = divmod(number, 2)
            group = group_id("explorer", "rl", step, position)
            where = {"experience_id": experience_id(group, rollout), "group_id": group, "stage": "rl"}
            experiences.append(
                where
                | {"task_id": f"t{position}", "step": step, "position": position, "rollout": rollout,
                   "turn": 0, "explorer": "explorer", "response_text": f"answer {number}", "reward": 1.0,
                   "response_length": 2, "token_ids": [1, 2, 3], "prompt_length": 1,
                   "logprobs": [-1.0, -2.0], "error": ""}
                | row
            )  # fmt: skip
        finished = [row for row in experiences if not row["error"]]
        outcomes = [
            {name: row[name] for name in ("experience_id", "group_id", "stage", "step", "reward")}
            | {"advantage": 0.5, "scores": {"quality": 0.25}, "kept": number not in dropped,
               "dropped_by": "reward_filter" if number in dropped else ""}
            for number, row in enumerate(finished)
        ]  # fmt: skip
        store.commit(
            Commit(
                tables={
                    "experiences": rows_to_table("experiences", experiences),
                    "outcomes": rows_to_table("outcomes", outcomes),
                }
            )
        )
        return [str(row["experience_id"]) for row in experiences]

    return write


@pytest.fixture
def check(store: Store) -> Check:
    """`check(step, **keys)`: what a contract with these keys finds in a step."""

    def measure(step: int = 1, **keys: Any) -> Finding:
        contract = ContractConfig.model_validate({"name": "c", **keys})
        checker = ContractChecker([contract], store, stage="rl", explorer="explorer")
        return checker.check(contract, checker.rows(step))

    return measure
