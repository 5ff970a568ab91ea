"""A preview shows what the next step gets, of a run or of rows read here, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.explorer.conftest import SUMS, Bench, half_right, put_tasks, template, tokenizer
from tests.small_pipelines import EXPLORING
from trinity_data.cli.main import cli
from trinity_data.config import CurriculumConfig, RunConfig, SynchronizerConfig
from trinity_data.errors import ConfigError
from trinity_data.launch.preview import Bin, histogram, preview
from trinity_data.schema import rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_data.synchronizer import Synchronizer

__all__ = ["template", "tokenizer"]

SQL = "select task_id, 1.5 - coalesce(pass_rate, 0.5) as weight from task_stats"


def test_bins_go_from_the_least_to_the_greatest_value_of_tasks_that_have_one() -> None:
    values = np.array([0.0, 0.5, 1.0, 10.0, np.nan, 9.5])
    bins = histogram(values, np.array([0, 3, 4]))
    assert [(each.tasks, each.chosen) for each in bins] == [(2, 1), (1, 0), *[(0, 0)] * 7, (2, 1)]
    assert (bins[0].lower, bins[0].upper, bins[-1].upper) == (0.0, 1.0, 10.0)
    assert histogram(np.array([3.0, 3.0]), np.array([1])) == [Bin(3.0, 3.0, 2, 1)]
    assert histogram(np.array([np.nan]), np.array([0])) == []


def test_of_a_run_the_preview_is_what_its_next_step_gets(
    tmp_path: Path, tokenizer: Any, template: Any
) -> None:
    store = Store.create_or_open(tmp_path / "tests" / "run" / "store")
    curriculum = CurriculumConfig(sql=SQL, every=2)
    bench = Bench(
        store,
        tokenizer,
        template,
        operators=[],
        tasksets=[SUMS.model_copy(update={"curriculum": curriculum})],
    )
    tasks = put_tasks(store, 20)

    def explore(last_step: int) -> None:
        far_ahead = SynchronizerConfig(sync_offset=99)
        synchronizer = Synchronizer(far_ahead, explored=store.progress("explored/rl"))
        explorer = bench.explorer(tasks, half_right, synchronizer=synchronizer)
        asyncio.run(explorer.explore(synchronizer.explored + 1, last_step))

    explore(2)
    stage = bench.stage("explorer").model_copy(update={"synchronizer": SynchronizerConfig(sync_offset=99)})
    config = RunConfig(project="tests", name="run", checkpoint_root_dir=tmp_path, stages=(stage,))
    found = preview(config)
    assert (found.stage, found.step, found.from_run, found.has_ended) == ("rl", 3, True, False)
    (shown,) = found.tasksets
    assert (shown.taskset, shown.num_tasks) == ("sums", 20)
    assert set(shown.histograms) == {"weak", "strong", "pass_rate", "weight"}
    tried = {row["task_id"] for row in bench.table("groups")}
    assert sum(each.tasks for each in shown.histograms["pass_rate"]) == len(tried)
    assert sum(each.chosen for each in shown.histograms["weight"]) == 3
    explore(3)
    assert shown.chosen == [row["task_id"] for row in bench.table("groups") if row["step"] == 3]
    store.close()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.yaml"
    path.write_text(EXPLORING)
    return path


def test_without_a_run_rows_are_read_here_and_nothing_is_written(file: Path) -> None:
    before = sorted(file.parent.rglob("*"))
    overrides = [
        "buffer.explorer_input.taskset.task_selector.selector_type=random",
        "data_processor.task_pipeline.operators=[{name: difficulty_filter}]",
    ]
    command = ["curriculum", "preview", str(file), "--rows", "100", "--json", *overrides]
    ran = CliRunner().invoke(cli, command)
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert (found["stage"], found["step"], found["from_run"]) == ("grpo", 1, False)
    (taskset,) = found["tasksets"]
    assert taskset["num_tasks"] <= 100 and len(set(taskset["chosen"])) == 4
    assert sum(each["chosen"] for each in taskset["histograms"]["difficulty"]) == 4
    assert sorted(file.parent.rglob("*")) == before


def test_the_terminal_gets_a_line_and_a_histogram_for_each_set(file: Path) -> None:
    query = json.dumps("select task_id, 1 as weight from task_stats")
    ran = CliRunner().invoke(
        cli, ["curriculum", "preview", str(file), f"buffer.explorer_input.taskset.curriculum.sql={query}"]
    )
    assert "stage grpo, step 1: 4 tasks of taskset, chosen from 2,000 of the first rows" in ran.stdout
    assert ran.stdout.splitlines()[2].split() == ["1", "1", "2000", "4", "█" * 30]


@pytest.mark.parametrize("progress", [{"explored/grpo": 2}, {"explored/grpo": 1, "stage_done/grpo": 1}])
def test_a_stage_that_has_explored_its_last_step_is_said_to_have_ended(
    file: Path, progress: dict[str, int]
) -> None:
    store = Store.create_or_open(file.parent / "runs" / "tests" / "small" / "store")
    kept = {"task_id": "t", "taskset": "taskset", "stage": "grpo", "position": 0, "kept": True}
    store.commit(Commit(tables={"tasks": rows_to_table("tasks", [kept])}, progress=progress))
    store.close()
    last = progress["explored/grpo"]
    ran = CliRunner().invoke(cli, ["curriculum", "preview", str(file)])
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.splitlines()[0] == (
        f"stage grpo has explored its last step, {last}; step {last + 1} comes only where "
        "buffer.total_steps or total_epochs is raised"
    )
    found = json.loads(CliRunner().invoke(cli, ["curriculum", "preview", str(file), "--json"]).stdout)
    assert (found["has_ended"], found["step"]) == (True, last + 1)


def test_an_unknown_stage_is_named_with_the_known_ones(file: Path) -> None:
    ran = CliRunner().invoke(cli, ["curriculum", "preview", str(file), "--stage", "gpro"])
    assert isinstance(ran.exception, ConfigError)
    assert str(ran.exception) == "unknown exploring stage 'gpro'; known: grpo (did you mean 'grpo'?)"
