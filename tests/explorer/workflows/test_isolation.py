"""Whatever a workflow or reward does becomes an error on its own row."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trinity_data.config import ExplorerConfig
from trinity_data.dataset.task import Task
from trinity_data.errors import ConfigError
from trinity_data.tokenizer import ChatTemplate
from trinity_explorer.chat import RequestBatcher
from trinity_explorer.engines.engine import Sampling
from trinity_explorer.engines.fake import FakeEngine
from trinity_explorer.engines.pool import EnginePool
from trinity_explorer.rollout import Group, RolloutRunner, Row
from trinity_explorer.workflows.pool import PooledWorkflow, WorkflowPool
from trinity_explorer.workflows.process import ProcessSettings
from trinity_explorer.workflows.registry import WorkflowSpec
from trinity_explorer.workflows.workflow import Workflow

HERE = Path(__file__).parent
QUESTION = ({"role": "user", "content": "What is 3 + 4?"},)
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_tokens=0, max_tokens=32, seed=0)

Try = Callable[..., "list[Result]"]
SPEC = WorkflowSpec("./bad.py:Does", "accuracy_reward", base_dir=str(HERE))

Result = dict[str, list[Row]]


@pytest.fixture(scope="module")
def rollouts(tokenizer: Any) -> Try:
    """The rows of one rollout of each of the named tasks, all at once,
    with the fake engine that answers with its seed.
    """
    template = ChatTemplate(tokenizer, None, max_prompt_tokens=128, truncate=False)
    task = Task("t", "sums", QUESTION[0]["content"], QUESTION, "#### 7", "", "")

    async def go(
        names: Sequence[str], spec: WorkflowSpec, timeout: float, settings: ProcessSettings, times: int
    ) -> list[Result]:
        engines = EnginePool([FakeEngine(tokenizer, script=lambda prompt, seed: f"{seed}")])
        config, batcher = ExplorerConfig(max_timeout=timeout, max_retry_times=0), RequestBatcher(engines)

        async def one(workflow: Workflow, name: str) -> list[Row]:
            return await RolloutRunner(config, engines, template, lambda task: workflow, seed=11).run(
                Group(f"g/{name}", "rl", 1, 0, replace(task, task_id=name), 0, 0, 1),
                0,
                batcher=batcher,
                sampling=SAMPLING,
                source={},
            )

        async with WorkflowPool(settings) as workflows:
            workflow = workflows.get(spec)
            assert isinstance(workflow, PooledWorkflow)
            workflow.num_processes = 1
            rounds = [await asyncio.gather(*(one(workflow, name) for name in names)) for _ in range(times)]
            return [dict(zip(names, rows, strict=True)) for rows in rounds]

    def rollouts(
        names: Sequence[str],
        *,
        spec: WorkflowSpec = SPEC,
        timeout: float = 60.0,
        settings: ProcessSettings | None = None,
        times: int = 1,
    ) -> list[Result]:
        return asyncio.run(go(names, spec, timeout, settings or ProcessSettings(), times))

    return rollouts


@pytest.fixture(scope="module")
def beside_each_other(rollouts: Try) -> Result:
    """All that does not end the process, in one process at the same time."""
    harmless = ["raise", "exit", "interrupt", "recurse", "none", "list", "text", "nan", "fork", "mutate",
     "env",
                "sibling", "works", "again"]  # fmt: skip
    settings = ProcessSettings(env={"OF_WORKFLOWS": "5"})
    return rollouts(harmless, settings=settings)[0]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("raise", "IndexError: list index out of range"),
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt: "),
        ("recurse", "RecursionError: maximum recursion depth exceeded"),
        ("none", "the workflow './bad.py:Does' returned None (NoneType); allowed are a finite number"),
        ("list", "the workflow './bad.py:Does' returned [1.0] (list)"),
        ("text", "the workflow './bad.py:Does' returned 'good' (str)"),
        ("nan", "the workflow './bad.py:Does' returned nan (float)"),
    ],
)
def test_what_is_raised_or_returned_is_the_error_of_the_row(
    beside_each_other: Result, name: str, error: str
) -> None:
    (row,) = beside_each_other[name]
    assert str(row["error"]).startswith(error)
    assert row.get("reward") is None and row["token_ids"] == []
    # what the model said is kept
    assert len(json.loads(str(row["info"]))["replies"]) == 1


@pytest.mark.parametrize(
    ("name", "reward"), [("works", 1.0), ("again", 1.0), ("fork", 1.0), ("env", 5.0), ("sibling", 7.0)]
)
def test_beside_them_others_are_rewarded(beside_each_other: Result, name: str, reward: float) -> None:
    """A copy that is forked off says nothing; `env_vars` and files beside the workflow's are there."""
    (row,) = beside_each_other[name]
    assert (row["error"], row["reward"]) == ("", reward)


def test_each_try_has_a_task_of_its_own_to_change(beside_each_other: Result) -> None:
    (row,) = beside_each_other["mutate"]
    assert (row["reward"], row["messages"]) == (1.0, [dict(QUESTION[0])])
    assert "THINK" not in QUESTION[0]["content"]


def test_a_workflow_of_a_file_runs_in_another_process_and_gets_the_replies(rollouts: Try) -> None:
    spec = WorkflowSpec("./bad.py:Works", base_dir=str(HERE))
    ((row,),) = rollouts(["t"], spec=spec)[0].values()
    metrics = dict(row["metrics"])  # type: ignore[call-overload]
    assert (row["reward"], row["reward_parts"], row["error"]) == (1.0, [("one", 1.0)], "")
    assert metrics["pid"] != os.getpid()
    assert metrics["text"] == float(str(row["seed"]))


def test_only_the_rollouts_that_end_or_spoil_their_process_fail(rollouts: Try) -> None:
    (rows,) = rollouts(["a", "os_exit", "segfault", "json", "chdir", "b"])
    errors = {name: str(row["error"]) for name, (row,) in rows.items()}
    assert errors["os_exit"] == "the process of ./bad.py:Does: it ended with exit code 7"
    assert errors["segfault"] == "the process of ./bad.py:Does: it was ended by SIGSEGV"
    shared = "was changed, which all rollouts of a process share"
    assert errors["json"] == f"the process of ./bad.py:Does: json.dumps {shared}"
    assert errors["chdir"] == f"the process of ./bad.py:Does: the working directory {shared}"
    assert [(rows[name][0]["error"], rows[name][0]["reward"]) for name in ("a", "b")] == [("", 1.0)] * 2


def test_a_plain_function_that_blocks_meets_the_deadline_and_the_others_do_not_wait(rollouts: Try) -> None:
    """So does one that awaits. The second time, the process of the first has made place for a new one."""
    started = time.monotonic()
    for rows in rollouts(["a", "block", "sleep", "b"], timeout=3.0, times=2):
        errors = {name: row["error"] for name, (row,) in rows.items()}
        late = "no end after 3 s; 1 replies came"
        assert errors == {"a": "", "block": late, "sleep": late, "b": ""}
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_who_holds_the_interpreter_is_found_by_trying_each_alone(rollouts: Try) -> None:
    (rows,) = rollouts(["a", "hold", "b"], timeout=4.0, settings=ProcessSettings(silent_seconds=1.5))
    errors = {name: row["error"] for name, (row,) in rows.items()}
    assert errors == {"a": "", "hold": "no end after 4 s; 1 replies came", "b": ""}


def test_memory_and_output_are_bounded(rollouts: Try, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trinity_explorer.workflows.output"):
        (rows,) = rollouts(["memory", "flood"], settings=ProcessSettings(memory_bytes=2**30))
    assert str(rows["memory"][0]["error"]).startswith("MemoryError")
    assert rows["flood"][0]["reward"] == 1.0
    said = [record.message for record in caplog.records]
    assert f"./bad.py:Does: {'x' * 500}" in said
    assert sum(map(len, said)) < 40_000
    assert said[-1].endswith("more bytes were printed and are not shown")


def test_a_workflow_that_cannot_be_built_ends_the_run_with_its_name(rollouts: Try) -> None:
    with pytest.raises(ConfigError, match=r"workflow '\./bad\.py:Does': .*'faktor'.*did you mean 'factor'"):
        rollouts(["t"], spec=replace(SPEC, workflow_args={"faktor": 2.0}))


def test_a_file_that_ends_the_process_while_it_is_loaded_is_reported(rollouts: Try, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(9)\n")
    with pytest.raises(
        ConfigError, match=r"\./ends\.py:X: its process ended with exit code 9 while it was loaded"
    ):
        rollouts(["t"], spec=WorkflowSpec("./ends.py:X", base_dir=str(tmp_path)))


def test_processes_end_with_the_run(tmp_path: Path) -> None:
    """A killed run leaves none behind, not even one whose interpreter is held."""
    script = f"""
import asyncio, os
from types import SimpleNamespace
from trinity_data.dataset.task import Task
from trinity_explorer.workflows.process import ProcessSettings
from trinity_explorer.workflows.pool import PooledWorkflow
from trinity_explorer.workflows.registry import WorkflowSpec
from trinity_explorer.workflows.workflow import Workflow

async def main():
    workflow = PooledWorkflow(WorkflowSpec("./holds.py:W", base_dir={str(tmp_path)!r}), ProcessSettings())
    await workflow.ready()
    task = Task("t", "s", "", (), "", "", "")
    asyncio.create_task(workflow.run(task, SimpleNamespace(auxiliary_models={{}})))
    await asyncio.sleep(60)

asyncio.run(main())
"""
    (tmp_path / "holds.py").write_text(
        "import os, re\n"
        "class W:\n"
        "    async def run(self, task, model):\n"
        f"        open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "        re.match(r'(a+)+$', 'a' * 60 + 'b')\n"
    )
    run = subprocess.Popen([sys.executable, "-c", script])
    pid = wait_for(lambda: (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else "")
    run.kill()
    run.wait()
    wait_for(
        lambda: not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    )


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value
