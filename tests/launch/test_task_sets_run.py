"""Task sets in whole runs that are killed: pass rates before training, and a set that changes on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trinity_data
from trinity_data.errors import TrinityError
from trinity_data.schema import values_of

NUM_TASKS = 300
FILE = """
project: tests
name: ${oc.env:TRINITY_RUN_NAME}
checkpoint_root_dir: ${oc.env:TRINITY_CHECKPOINT_ROOT_DIR}
algorithm: {algorithm_type: grpo, repeat_times: 4, kl_loss_fn: none}
model: {model_path: "${oc.env:TRINITY_MODEL_PATH}", max_prompt_tokens: 64, max_response_tokens: 32}
buffer:
  batch_size: 4
  total_steps: 1
  default_workflow_type: math_workflow
  explorer_input:
    taskset: {name: sums, path: ./sums.jsonl, format: {prompt_key: question, response_key: answer}}
explorer: {eval_on_startup: false, eval_at_end: false, rollout_model: {engine_type: fake}}
monitor: {monitor_type: none}
"""
PROBE = """
data_processor:
  task_pipeline:
    operators:
      - {name: prompt_length_filter, args: {max_length: 40}}
      - {name: pass_rate_probe, args: {rollouts: 8, min_rate: 0.2, max_rate: 0.8}}
"""


def write_sums(folder: Path, count: int) -> None:
    rows = [{"question": f"What is {n} + {n + 1}?", "answer": f"#### {2 * n + 1}"} for n in range(1, count)]
    rows.append({"question": "What is 1 + 1? Take your time, please, and think.", "answer": "#### 2"})
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sums(tmp_path, NUM_TASKS)
    (tmp_path / "sums.yaml").write_text(FILE + PROBE)
    return tmp_path


def start(folder: Path, environment: dict[str, str], name: str, *more: str) -> subprocess.Popen[str]:
    own = {"TRINITY_CHECKPOINT_ROOT_DIR": str(folder / "checkpoints"), "TRINITY_RUN_NAME": name}
    return subprocess.Popen(
        [sys.executable, "-m", "trinity_data.cli.main", "run", "sums.yaml", *more],
        cwd=folder, env=environment | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def kill_when(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)


def to_the_end(folder: Path, environment: dict[str, str], name: str, *more: str) -> Path:
    process = start(folder, environment, name, *more)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    return folder / "checkpoints" / "tests" / name


def rows_of(run: Path, query: str) -> list[dict[str, Any]]:
    return values_of(trinity_data.open(run).sql(query).arrow())


def num_rows(run: Path, table: str) -> int:
    try:
        return int(rows_of(run, f"select count(*) as n from {table}")[0]["n"])
    except TrinityError:  # it has not begun
        return 0


def check_rates(run: Path) -> list[dict[str, Any]]:
    """Every task but the one that is too long was asked about once; those in between the rates were kept."""
    probes = rows_of(run, "select * from task_probes order by task_id")
    assert len({row["probe"] for row in probes}) == len(probes) == NUM_TASKS - 1
    tasks = rows_of(run, "select task_id, kept, dropped_by, scores from tasks order by task_id")
    rates = {row["task_id"]: row["passes"] / row["rollouts"] for row in probes}
    for row in tasks:
        if row["dropped_by"] != "prompt_length_filter":
            rate = rates[row["task_id"]]
            assert dict(row["scores"]) == {"pass_rate": rate, "difficulty": 1 - rate}
            assert row["kept"] == (0.2 <= rate <= 0.8)
    first_step = rows_of(run, "select distinct task_id from rollouts where step = 1")
    assert {row["task_id"] for row in first_step} <= {row["task_id"] for row in tasks if row["kept"]}
    return tasks


def test_tasks_are_tried_before_the_first_step_and_kept_by_their_rates(
    folder: Path, run_environment: dict[str, str]
) -> None:
    run = to_the_end(folder, run_environment, "first")
    check_rates(run)
    (spent,) = rows_of(run, "select * from operator_yield where operator = 'pass_rate_probe'")
    assert spent["requests_spent"] == 8 * (NUM_TASKS - 1) and spent["tokens_spent"] > 0


@pytest.mark.slow
def test_tasks_that_were_tried_are_written_and_a_later_run_takes_the_file(
    folder: Path, run_environment: dict[str, str]
) -> None:
    output = "data_processor.task_pipeline.output={path: chosen}"
    first = to_the_end(folder, run_environment, "first", output)
    probes = rows_of(first, "select * from task_probes order by prompt")
    assert len(probes) == NUM_TASKS - 1
    between = {row["prompt"] for row in probes if 0.2 <= row["passes"] / row["rollouts"] <= 0.8}
    lines = [json.loads(line) for line in (folder / "chosen" / "tasks.jsonl").read_text().splitlines()]
    assert {line["messages"][-1]["content"] for line in lines} == between
    shutil.rmtree(first)
    later = to_the_end(folder, run_environment, "later", output)
    assert num_rows(later, "task_probes") == 0
    # a run of a few steps reads a part of them
    read = {row["prompt"] for row in rows_of(later, "select prompt from tasks")}
    assert read and read <= between


@pytest.mark.slow
def test_a_killed_run_and_a_later_one_ask_about_no_task_again(
    folder: Path, run_environment: dict[str, str]
) -> None:
    run = folder / "checkpoints" / "tests" / "first"
    kill_when(start(folder, run_environment, "first"), lambda: num_rows(run, "task_probes") > 0)
    before = num_rows(run, "task_probes")
    assert 0 < before < NUM_TASKS - 1
    assert to_the_end(folder, run_environment, "first") == run
    tasks = check_rates(run)

    later = to_the_end(folder, run_environment, "later")
    assert num_rows(later, "task_probes") == 0
    (event,) = rows_of(later, "select message from events where kind = 'tasks_probed'")
    assert event["message"].startswith("0 tasks") and f"{NUM_TASKS - 1} tasks were on" in event["message"]
    assert rows_of(later, "select task_id, kept, dropped_by, scores from tasks order by task_id") == tasks
    (spent,) = rows_of(later, "select tokens_spent from operator_yield where operator = 'pass_rate_probe'")
    assert spent["tokens_spent"] == 0


@pytest.mark.slow
def test_a_killed_run_goes_on_with_a_set_that_has_changed_where_it_is_meant(
    folder: Path, run_environment: dict[str, str]
) -> None:
    (folder / "sums.yaml").write_text(FILE)
    run, steps = folder / "checkpoints" / "tests" / "changed", "buffer.total_steps=110"
    process = start(folder, run_environment, "changed", steps)
    kill_when(process, lambda: num_rows(run, "steps") > 0)
    before = rows_of(run, "select * from tasks order by position")
    assert 0 < len(before) < NUM_TASKS
    write_sums(folder, NUM_TASKS + 100)
    refused = start(folder, run_environment, "changed", steps)
    output = refused.communicate(timeout=300)[0]
    assert refused.returncode == 2 and "taskset.path: was content " in output and "--accept-changes" in output
    assert num_rows(run, "configurations") == 1
    to_the_end(folder, run_environment, "changed", steps, "--accept-changes")
    (event,) = rows_of(run, "select message from events where kind = 'configuration_changed'")
    assert "rows that were not are read as they are now" in event["message"]
    tasks = rows_of(run, "select * from tasks order by position")
    assert tasks[: len(before)] == before
    assert [row["position"] for row in tasks] == list(range(NUM_TASKS + 100))
    assert sorted(row["source_row"] for row in tasks) == list(range(NUM_TASKS + 100))
    groups = rows_of(run, "select task_id, count(*) as n from groups group by task_id")
    # 110 steps of 4 are one epoch and ten steps of the next
    assert len(groups) == NUM_TASKS + 100 and sum(row["n"] for row in groups) == 440
