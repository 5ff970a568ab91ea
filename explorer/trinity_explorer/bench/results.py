"""What the rows of `evals` say: pass@k, maj@k and means of each evaluation and task set.

A rollout is right where its accuracy, or its reward in a set whose reward measures none, is above 0.5. One
that failed is wrong.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from trinity_data.store.task_stats import PASS_REWARD
from trinity_explorer.bench.estimates import (
    Estimate,
    Votes,
    majority_at,
    mean_over_tasks,
    pass_at_k,
    powers_up_to,
)
from trinity_explorer.rewards.math import voted_answer

COLUMNS = (
    "step", "taskset", "task_id", "answer", "response_text", "response_length", "reward", "accuracy", "error"
)  # fmt: skip
MOST_VOTES = 1000
"""Rollouts of a task; the ways to draw from more are beyond float64."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class SetResult:
    """One evaluation of one task set."""

    step: int
    taskset: str
    num_tasks: int
    num_rollouts: int
    """Of each task."""
    num_failed: int
    """Of all rollouts."""
    mean: Estimate
    """Accuracy of all rollouts, or the share that is right where the reward measures none."""
    pass_at: Mapping[int, Estimate]
    """By k."""
    maj_at: Mapping[int, Estimate]
    """By k; empty where no response has an answer that could be compared."""
    mean_reward: float | None
    """Of the rollouts that did not fail."""
    mean_response_length: float | None

    def metrics(self) -> dict[str, float]:
        """For a monitor."""
        named = {"pass": self.pass_at, "maj": self.maj_at}
        return {f"eval/{self.taskset}/mean@{self.num_rollouts}": self.mean.value} | {
            f"eval/{self.taskset}/{name}@{k}": estimate.value
            for name, estimates in named.items()
            for k, estimate in estimates.items()
        }

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def results_of(evals: pa.Table) -> list[SetResult]:
    """Of the rows of one stage, by step and in the order of the task sets."""
    by_set: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in evals.select(COLUMNS).to_pylist():
        by_set[row["step"], row["taskset"]].append(row)
    steps = sorted({step for step, _ in by_set})
    tasksets = list(dict.fromkeys(taskset for _, taskset in by_set))
    places = [(step, taskset) for step in steps for taskset in tasksets if (step, taskset) in by_set]
    return [_result(*place, by_set[place]) for place in places]


def _result(step: int, taskset: str, rows: Sequence[Row]) -> SetResult:
    by_task: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_task[row["task_id"]].append(row)
    tasks, finished = list(by_task.values()), [row for row in rows if not row["error"]]
    num_rollouts = min(map(len, tasks))
    ks = powers_up_to(num_rollouts)
    rewards = [row["reward"] for row in finished if row["reward"] is not None]
    lengths = [row["response_length"] for row in finished]
    return SetResult(
        step=step,
        taskset=taskset,
        num_tasks=len(tasks),
        num_rollouts=num_rollouts,
        num_failed=len(rows) - len(finished),
        mean=_over_tasks([sum(map(_accuracy, task)) / len(task) for task in tasks], num_rollouts),
        pass_at={
            k: _over_tasks(
                [pass_at_k(len(task), sum(map(_is_right, task)), k) for task in tasks], num_rollouts
            )
            for k in ks
        },
        maj_at=dict(_majorities(tasks, num_rollouts, ks)),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        mean_response_length=sum(lengths) / len(lengths) if lengths else None,
    )


def _over_tasks(values: Sequence[float], num_rollouts: int) -> Estimate:
    return mean_over_tasks(values, num_rollouts=num_rollouts)


def _accuracy(row: Row) -> float:
    if row["error"]:
        return 0.0
    if row["accuracy"] is not None:
        return float(row["accuracy"])
    return float((row["reward"] or 0.0) > PASS_REWARD)


def _is_right(row: Row) -> bool:
    return _accuracy(row) > PASS_REWARD


def _majorities(
    tasks: Sequence[Sequence[Row]], num_rollouts: int, ks: tuple[int, ...]
) -> Iterator[tuple[int, Estimate]]:
    if num_rollouts > MOST_VOTES:
        return
    ballots = [_votes(task) for task in tasks]
    if any(ballots):
        chances = [
            majority_at(votes, len(task) - sum(each.number for each in votes), ks)
            for votes, task in zip(ballots, tasks, strict=True)
        ]
        for k, of_tasks in zip(ks, zip(*chances, strict=True), strict=True):
            yield k, _over_tasks(of_tasks, num_rollouts)


def _votes(task: Sequence[Row]) -> tuple[Votes, ...]:
    """Of the rollouts that gave an answer."""
    given, right = Counter[Hashable](), Counter[Hashable]()
    for row in task:
        answer = None if row["error"] else voted_answer(row["response_text"], row["answer"])
        if answer is not None:
            given[answer] += 1
            right[answer] += _is_right(row)
    # in one order, as equal counts are looked up
    return tuple(sorted(Votes(number, right[answer] / number) for answer, number in given.items()))
