"""Code that a model wrote runs in a process of its own and can hurt nobody."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from trinity_data.dataset.row import Columns
from trinity_data.dataset.task import Task
from trinity_data.errors import RolloutError
from trinity_explorer.rewards import code_main
from trinity_explorer.rewards.code import code_reward, extract_code
from trinity_explorer.rewards.run_code import PROTECTIONS, run_code

SPAWN_AND_LEAVE = """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
    os._exit(0)
print("left")
"""
FORK = """
import os, time
while True:
    try:
        if os.fork() == 0:
            time.sleep(60)
    except OSError:
        pass
"""
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


@pytest.fixture(scope="module")
def isolated() -> None:
    if run_code("").unprotected:
        pytest.skip("this machine does not allow namespaces")


@pytest.mark.usefixtures("isolated")
def test_files_outside_of_its_folder_cannot_be_written(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    result = run_code(
        f"import os\nopen('own', 'w').write('x')\nprint(open({str(kept)!r}).read())\n"
        f"try:\n    os.remove({str(kept)!r})\nexcept OSError as error:\n    print(error.strerror)\n"
    )
    assert result.output == "mine\nRead-only file system\n"
    assert kept.read_text() == "mine"


@pytest.mark.usefixtures("isolated")
def test_a_read_only_machine_cannot_be_made_writable_again() -> None:
    code = "import ctypes\nprint(ctypes.CDLL(None).mount(b'none', b'/', None, 4096 | 32, None))"
    assert run_code(code).output == "-1\n"


@pytest.mark.usefixtures("isolated")
def test_the_folder_holds_only_so_many_bytes_in_all_its_files() -> None:
    code = "for n in range(9):\n    open(f'{n}', 'wb').write(bytes(1 << 20))"
    assert "No space left on device" in run_code(code, max_folder_bytes=1 << 22).output


@pytest.mark.usefixtures("isolated")
def test_the_processes_of_the_run_and_their_environment_cannot_be_seen() -> None:
    code = "import os; print(sorted(int(name) for name in os.listdir('/proc') if name.isdigit()))"
    assert run_code(code).output == "[1, 2]\n"


@pytest.mark.usefixtures("isolated")
def test_what_it_started_in_a_session_of_its_own_ends_with_it() -> None:
    started = time.monotonic()
    # its output would stay open for a minute
    assert run_code(SPAWN_AND_LEAVE).output == "left\n"
    assert time.monotonic() - started < 30


@pytest.mark.usefixtures("isolated")
def test_more_processes_than_allowed_end_all_of_them() -> None:
    assert run_code(FORK, timeout_seconds=60.0, max_processes=8).returncode == -9


@pytest.mark.usefixtures("isolated")
def test_processes_share_the_limit_on_memory() -> None:
    code = "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        break\n"
    code += "held = bytearray(b'x' * (60 << 20))\ntime.sleep(60)"
    assert run_code(code, memory_bytes=150 << 20, timeout_seconds=60.0).returncode == -9


def test_the_signal_that_ended_code_is_its_exit_code() -> None:
    assert run_code("import os; os.kill(os.getpid(), 11)").returncode == -11
    assert run_code("import sys; sys.exit(7)").returncode == 7


def test_a_machine_without_namespaces_runs_code_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without = tmp_path / "code_main.py"
    source = Path(code_main.__file__).read_text()
    without.write_text(source.replace("WAYS = (\n", "WAYS = ()\nALL = (\n"))
    monkeypatch.setattr(code_main, "__file__", str(without))
    result = run_code("print('runs')")
    assert (result.output, result.unprotected) == ("runs\n", tuple(PROTECTIONS))
    reward = code_reward("f = 1", "", task=task_with(test="assert f == 1"))
    assert (reward.total, reward.metrics["isolated"]) == (1.0, 0.0)


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
