"""Code that a model wrote runs in a process of its own and can hurt nobody."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from trinity_data.dataset.row import Columns
from trinity_data.dataset.task import Task
from trinity_data.errors import RolloutError
from trinity_explorer.rewards.code import code_reward, extract_code
from trinity_explorer.rewards.run_code import run_code

TESTS = "def check(candidate):\n    assert candidate(2, 3) == 5\n"


def task_with(**columns: object) -> Task:
    return Task("t", "code", "", (), "", "", "", Columns(json.dumps(columns)))


def test_code_gets_its_input_and_its_output_is_read() -> None:
    result = run_code("print(int(input()) + 1)", stdin="41")
    assert (result.returncode, result.output, result.ok) == (0, "42\n", True)


def test_an_error_is_an_exit_code_with_its_text() -> None:
    result = run_code("raise ValueError('no')")
    assert result.returncode == 1 and result.output.endswith("ValueError: no\n")


def test_code_that_does_not_end_is_stopped_with_what_it_started() -> None:
    started = time.monotonic()
    assert run_code("import os\nos.fork()\nwhile True: pass", timeout_seconds=1.0).returncode is None
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("held = bytearray(2 << 30)", "MemoryError"),
        ("open('file', 'wb').write(bytes(1 << 25))", "File too large"),
        ("import os; print(os.environ.get('SECRET'))", "None"),
    ],
)
def test_memory_files_and_environment_are_bounded(
    code: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    assert said in run_code(code).output


def test_output_is_cut() -> None:
    assert len(run_code("print('x' * 10_000_000)", max_output=100).output) == 100


def test_there_is_no_network_where_namespaces_are_allowed() -> None:
    code = "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)"
    result = run_code(code)
    assert ("Network is unreachable" in result.output) == result.network_cut


def test_the_folder_of_the_code_is_gone_afterwards() -> None:
    folder = run_code("import os; print(os.getcwd())").output.strip()
    assert folder and not Path(folder).exists()


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", 1.0),
        ("def add(a, b):\n    return a + b", 1.0),
        ("```python\ndef add(a, b):\n    return a - b\n```", 0.0),
        ("I do not know", 0.0),
        # ends well before any test has run
        ("```python\nimport sys\nsys.exit(0)\n```", 0.0),
        ("```python\nimport os\nos._exit(0)\n```", 0.0),
    ],
)
def test_a_program_is_rewarded_when_it_passes_all_tests(response: str, reward: float) -> None:
    result = code_reward(response, "", task=task_with(test=TESTS, entry_point="add"))
    assert (result.total, result.parts, result.metrics["accuracy"]) == (reward, {"tests": reward}, reward)


def test_tests_may_be_a_list_of_statements_in_another_column() -> None:
    task = task_with(cases=["assert f(1) == 2", "assert f(2) == 3"])
    assert code_reward("f = lambda n: n + 1", "", task=task, tests_column="cases").total == 1.0
    assert code_reward("f = lambda n: 2", "", task=task, tests_column="cases").total == 0.0


def test_a_column_that_is_not_there_is_reported() -> None:
    with pytest.raises(RolloutError, match=r"no column 'test'; it has tests \(did you mean 'tests'\?\)"):
        code_reward("x", "", task=task_with(tests=""))


def test_the_last_block_is_the_answer() -> None:
    assert extract_code("```py\none\n```\n```\ntwo\n```") == "two\n"
