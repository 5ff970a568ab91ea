"""Rows of `evals` to pass@k, maj@k and means: worked out by hand, and of published solutions."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from trinity_data.schema import rows_to_table
from trinity_explorer.bench.results import SetResult, results_of
from trinity_explorer.rewards.math import is_correct

SOLUTIONS = Path(__file__).parents[4] / "shared" / "gsm8k_solutions" / "example_model_solutions.jsonl"


def rows(
    task: str, answers: list[str], *, step: int = 0, taskset: str = "sums", **more: Any
) -> list[dict[str, Any]]:
    """Rollouts that answer these numbers, where 7 is right and an empty text has failed."""
    return [
        {"stage": "bench", "step": step, "taskset": taskset, "task_id": task, "rollout": number,
         "answer": "#### 7", "response_text": f"#### {text}" if text else "",
         "response_length": 0 if not text else 4,
         "reward": None if not text else float(text == "7"), "accuracy": float(text == "7"),
         "error": "" if text else "deadline passed"} | more
        for number, text in enumerate(answers)
    ]  # fmt: skip


def result(*groups: list[dict[str, Any]]) -> SetResult:
    (found,) = results_of(rows_to_table("evals", [row for group in groups for row in group]))
    return found


def test_every_number_of_two_tasks_is_the_mean_of_theirs() -> None:
    found = result(rows("a", ["7", "7", "5", ""]), rows("b", ["7", "5", "5", "5"]))
    assert (found.num_tasks, found.num_rollouts, found.num_failed) == (2, 4, 1)
    assert found.mean.value == (2 / 4 + 1 / 4) / 2
    # of six pairs: one without a right one of a, three of b
    assert {k: each.value for k, each in found.pass_at.items()} == pytest.approx(
        {1: 3 / 8, 2: (5 / 6 + 3 / 6) / 2, 4: 1.0}
    )
    # of six pairs of a, three have votes for 7 alone and two are even; three of b are even
    assert {k: each.value for k, each in found.maj_at.items()} == pytest.approx(
        {1: 3 / 8, 2: ((3 + 2 / 2) / 6 + 3 / 2 / 6) / 2, 4: 1 / 2}
    )
    assert (found.mean_reward, found.mean_response_length) == (3 / 7, 4.0)


def test_steps_and_sets_are_apart() -> None:
    groups = [
        rows("a", ["7"], step=step, taskset=taskset) for step in (10, 2) for taskset in ("sums", "products")
    ]
    found = results_of(rows_to_table("evals", [row for group in groups for row in group]))
    assert [(each.step, each.taskset) for each in found] == [
        (2, "sums"), (2, "products"), (10, "sums"), (10, "products")
    ]  # fmt: skip


def test_without_accuracy_a_reward_above_one_half_is_right() -> None:
    groups = rows("a", ["7"], accuracy=None, reward=0.6), rows("b", ["7"], accuracy=None, reward=0.5)
    assert result(*groups).mean.value == 0.5


def test_where_no_answer_can_be_compared_there_is_no_majority() -> None:
    assert result(rows("a", ["7", "5"], answer="assert f() == 7", response_text="return 7")).maj_at == {}


def test_a_monitor_gets_each_number_by_its_name() -> None:
    assert result(rows("a", ["7", "5"])).metrics() == pytest.approx(
        {
            "eval/sums/mean@2": 0.5, "eval/sums/pass@1": 0.5, "eval/sums/pass@2": 1.0,
            "eval/sums/maj@1": 0.5, "eval/sums/maj@2": 0.5,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def solutions() -> list[dict[str, Any]]:
    if not SOLUTIONS.exists():
        pytest.skip("../shared/gsm8k_solutions is not there")
    return [json.loads(line) for line in SOLUTIONS.read_text().splitlines()]


def test_published_solutions_of_gsm8k_come_to_what_their_labels_and_last_lines_say(
    solutions: list[dict[str, Any]],
) -> None:
    """Four models' solutions as four rollouts. Beside ours: every choice of k of them is looked at, right is
    what the publishers say, and the answer is the text behind `A:`.
    """
    stored = []
    passes, majorities = Counter[int](), Counter[int]()
    for number, row in enumerate(solutions):
        tries = [each for each in row.values() if isinstance(each, dict)]
        texts = [each["solution"] for each in tries]
        labels = [bool(each["is_correct"]) for each in tries]
        given = [(re.findall(r"A: ?(.+)", text) or [""])[-1].replace(",", "").strip("$. ") for text in texts]
        for k in (1, 2, 4):
            choices = list(combinations(range(4), k))
            passes[k] += sum(any(labels[each] for each in choice) for choice in choices) / len(choices)
            for choice in choices:
                votes = Counter(given[each] for each in choice if given[each])
                winners = [text for text, count in votes.items() if count == max(votes.values())]
                right = [labels[given.index(text)] for text in winners]
                majorities[k] += sum(right) / max(len(right), 1) / len(choices)
        stored += [
            {"stage": "bench", "step": 0, "taskset": "gsm8k", "task_id": f"{number}", "rollout": rollout,
             "answer": row["ground_truth"], "response_text": text, "response_length": 1, "error": "",
             "accuracy": float(is_correct(text, row["ground_truth"]))}
            for rollout, text in enumerate(texts)
        ]  # fmt: skip
    (found,) = results_of(rows_to_table("evals", stored))
    assert (found.num_tasks, found.num_rollouts) == (1319, 4)
    total = len(solutions)
    assert {k: each.value for k, each in found.pass_at.items()} == pytest.approx(
        {k: passes[k] / total for k in passes}, abs=1e-12
    )
    assert {k: each.value for k, each in found.maj_at.items()} == pytest.approx(
        {k: majorities[k] / total for k in majorities}, abs=0.002
    )
