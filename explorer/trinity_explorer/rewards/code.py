"""Rewards for answers that are programs: the response's code runs against the task's tests,
in a process of its own.
"""

from __future__ import annotations

import random
import re

from trinity_data.dataset.task import Task
from trinity_data.errors import RolloutError, did_you_mean
from trinity_explorer.rewards.reward import Reward
from trinity_explorer.rewards.run_code import run_code

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

# above those of shells and errors, below those of signals
_EXIT_CODES = (3, 125)


def extract_code(text: str) -> str:
    """The last fenced block, or the whole text where there is none."""
    blocks = _FENCED.findall(text)
    return str(blocks[-1]) if blocks else text


def code_reward(
    response: str,
    answer: str,
    *,
    task: Task,
    tests_column: str = "test",
    entry_point_column: str = "entry_point",
    timeout_seconds: float = 10.0,
    memory_bytes: int = 2**30,
) -> Reward:
    """1 when the response's code and then the tests run without an error, else 0.

    The tests are the task's column `tests_column`: a program, or a list of statements. Where they define
    `check` and the task has an `entry_point_column`, `check(<that function>)` is called, as in HumanEval.
    """
    if tests_column not in task.columns:
        known_columns = ", ".join(sorted(task.columns))
        raise RolloutError(
            f"code_reward: the task has no column {tests_column!r}; it has {known_columns}"
            f"{did_you_mean(tests_column, task.columns)}; set reward_fn_args.tests_column"
        )
    tests, entry_point = task.columns[tests_column], task.columns.get(entry_point_column)
    program = [extract_code(response), "\n".join(tests) if isinstance(tests, list) else str(tests)]
    if entry_point and re.search(r"^def check\(", program[1], re.MULTILINE):
        program.append(f"check({entry_point})")
    # a program that ends early with 0 has passed no test: only the last statement knows this exit code
    code = random.SystemRandom().randint(*_EXIT_CODES)
    program.append(f"__import__('os')._exit({code})")
    result = run_code("\n\n".join(program), timeout_seconds=timeout_seconds, memory_bytes=memory_bytes)
    passed = float(result.returncode == code)
    metrics = {
        "accuracy": passed,
        "timed_out": float(result.returncode is None),
        "isolated": float(not result.unprotected),
    }
    return Reward(passed, {"tests": passed}, metrics)
